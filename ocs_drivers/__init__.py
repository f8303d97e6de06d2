"""Optical circuit switches: the contract (`base`), one module per device family, the suite that all of them pass.

Nothing here imports the rest of the project: a driver can be written, tested and shipped on its own.
"""
