"""The command `orchestrrl demo`."""
