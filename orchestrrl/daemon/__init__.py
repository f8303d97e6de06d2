"""The daemon: its construction, control plane, loops and metrics."""
