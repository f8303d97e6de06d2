"""The command `orchestrrl up`."""
