"""Choose the circuits of each communication period, and when they may change, without side effects.

See docs/fabric.md.
"""
