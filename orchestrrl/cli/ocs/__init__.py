"""The commands of `orchestrrl ocs`."""
