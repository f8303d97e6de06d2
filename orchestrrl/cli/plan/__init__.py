"""`orchestrrl plan`."""
