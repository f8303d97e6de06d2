"""Choose the circuits of each communication period, and when they may change. Pure; see docs/fabric.md."""
