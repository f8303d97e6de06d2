"""Pure decisions of the slow loop. Nothing here touches a socket, a clock or a file."""
