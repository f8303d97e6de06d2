"""The commands of `orchestrrl sync`."""
