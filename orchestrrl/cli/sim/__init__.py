"""The commands of `orchestrrl sim`."""
