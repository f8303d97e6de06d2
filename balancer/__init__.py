"""Modules that make the decisions of the fast loop. They have no side effects: they use no sockets, clocks or files."""
