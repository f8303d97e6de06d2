"""The sidecar beside an engine: scrapes it and streams its load to the daemon."""
