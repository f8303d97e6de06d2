"""Conversions between protobuf messages and the values of the model."""
