"""Adapters that run a trainer's generation on OrchestrRL. Each framework has one module, which runs in the trainer's
environment."""
