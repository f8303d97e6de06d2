"""The scoreboard: the figures of the OrchestrRL paper, compared with their reproduction from first principles."""
