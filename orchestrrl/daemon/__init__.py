"""The daemon: its parts constructed, its control plane, its loops, and what it publishes of itself."""
