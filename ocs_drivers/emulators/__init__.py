"""Emulators of real switches: servers of their protocols on real sockets, quirks included, for development and
tests."""
