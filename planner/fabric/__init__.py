"""Choose the circuits of each communication period, and the times at which they may change, without side effects.

See docs/fabric.md.
"""
