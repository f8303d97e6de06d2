"""Pure decisions of the fast loop. No module here uses a socket, a clock or a file."""
