"""Pure decisions of the slow loop. No module here uses a socket, a clock or a file."""
