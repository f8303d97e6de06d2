"""One file for each way to choose an engine, with one function of a snapshot. Pure."""
