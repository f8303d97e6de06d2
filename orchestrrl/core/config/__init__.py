"""The daemon's configuration: its schema, and how a file becomes one."""
