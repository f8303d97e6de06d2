"""The simulator of a whole RL cluster: training, generation, weight sync and the RL loop on one fabric."""
