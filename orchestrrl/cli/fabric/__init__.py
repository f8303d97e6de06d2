"""`orchestrrl fabric`."""
