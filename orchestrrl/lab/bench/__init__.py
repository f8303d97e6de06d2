"""The benchmarks: what OrchestrRL's decisions and its gateway cost, always beside something else in the same run."""
