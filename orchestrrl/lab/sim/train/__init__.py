"""The training simulator: the iteration time for a model, layout and network, and the time windows without
collectives."""
