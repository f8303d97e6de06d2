"""Choose the circuits of each communication period, and the times at which circuits may change. Has no side effects.

See docs/fabric.md.
"""
