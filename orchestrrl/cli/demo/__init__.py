"""`orchestrrl demo`."""
