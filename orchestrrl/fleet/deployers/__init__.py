"""Deployers: how engines come to be started and stopped."""
