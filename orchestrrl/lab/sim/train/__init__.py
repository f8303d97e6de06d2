"""The training simulator: iteration time from model, layout and network, and the windows without collectives."""
