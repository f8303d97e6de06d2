"""The commands of `orchestrrl fabric`."""
