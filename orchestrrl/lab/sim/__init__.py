"""Simulators on a virtual clock, in one process."""
