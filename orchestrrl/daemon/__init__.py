"""The daemon: the construction of its parts, its control plane, its loops, and its metrics."""
