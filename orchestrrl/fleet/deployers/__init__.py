"""Deployers, which start and stop engines."""
