"""The commands of `orchestrrl profile`."""
