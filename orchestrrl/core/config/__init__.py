"""The daemon's configuration: its schema, and sections of it."""
