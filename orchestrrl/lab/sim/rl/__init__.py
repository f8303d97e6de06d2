"""A whole RL cluster: training, generation, weight sync and the loop that joins them, on one fabric."""
