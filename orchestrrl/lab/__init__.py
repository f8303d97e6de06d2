"""Simulators, demos, benchmarks and the simulated engine. No production process imports them."""
