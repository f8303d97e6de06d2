"""The decisions of the fast loop. The modules have no side effects: they use no sockets, clocks or files."""
