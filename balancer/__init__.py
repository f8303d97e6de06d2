"""The decisions of the fast loop, without side effects: no module here uses a socket, a clock or a file."""
