"""The daemon's configuration: its schema, and sections that are defined in separate modules."""
