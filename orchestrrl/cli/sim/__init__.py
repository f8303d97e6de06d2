"""`orchestrrl sim`."""
