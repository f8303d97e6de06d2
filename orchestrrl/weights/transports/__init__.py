"""Transports, which move bytes from one peer to another: a plug point with one module per transport."""
