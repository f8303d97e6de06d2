"""Deployers for simulations and tests."""
