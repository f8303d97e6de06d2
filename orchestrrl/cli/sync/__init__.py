"""`orchestrrl sync`."""
