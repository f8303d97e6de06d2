"""Weight sync: store, send, receive and install versions of the weights."""
