"""Adapters that run a trainer's generation on OrchestrRL: one thin file per framework, for the trainer's
environment."""
