"""The sidecar beside an engine: scrapes it, streams its load to the daemon, runs the daemon's operations on it."""
