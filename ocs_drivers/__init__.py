"""Drivers for optical circuit switches. The package contains the contract (`base`), a module for each device family,
and the conformance suite.

The package imports nothing from the rest of the project, so that a driver can be written, tested and shipped alone.
"""
