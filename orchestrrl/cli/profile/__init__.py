"""`orchestrrl profile`."""
