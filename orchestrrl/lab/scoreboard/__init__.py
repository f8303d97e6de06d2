"""The scoreboard: every figure that the OrchestrRL paper reports, compared with its reproduction from first
principles."""
