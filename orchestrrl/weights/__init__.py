"""Weight sync: store, send, receive and install versions of the weights. Decisions are made in
weights/controller/controller.py."""
