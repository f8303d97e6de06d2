"""Benchmarks of OrchestrRL's decisions and its gateway. Each result is compared with a baseline from the same run or
with a target."""
