"""The commands of `orchestrrl plan`."""
