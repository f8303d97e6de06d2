"""Weight sync, which stores, sends, receives and installs versions of the weights."""
