"""Adapters that run a trainer's generation on OrchestrRL, one thin file per framework, in the trainer's environment."""
