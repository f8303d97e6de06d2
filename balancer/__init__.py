"""Pure decisions of the fast loop. Nothing here touches a socket, a clock or a file."""
