"""Emulators of real switches, for development and tests: servers that implement the switches' protocols and their
quirks on real sockets."""
