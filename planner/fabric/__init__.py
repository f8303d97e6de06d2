"""Which circuits each communication period gets, and when they may be changed. Pure; see docs/fabric.md."""
