"""Servers that speak the protocols of real switches on real sockets, quirks included: to develop and test against."""
