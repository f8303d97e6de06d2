"""Simulated fabrics: packet switched, circuit switched, and hybrid."""
