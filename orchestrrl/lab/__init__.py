"""Simulators, demos, benchmarks and the simulated engine. Production processes do not import this package."""
