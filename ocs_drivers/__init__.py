"""Drivers for optical circuit switches: the contract (`base`), one module per device family, and the conformance suite.

The package imports nothing from the rest of the project, so that a driver can be written, tested and shipped alone.
"""
