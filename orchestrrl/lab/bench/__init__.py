"""Benchmarks of OrchestrRL's decisions and its gateway, each against a baseline in the same run."""
