"""Conversions between protobuf messages and OrchestrRL's dataclasses."""
