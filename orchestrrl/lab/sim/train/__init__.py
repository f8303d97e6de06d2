"""Training: what an iteration takes, from model, layout and network, and the windows that it leaves."""
