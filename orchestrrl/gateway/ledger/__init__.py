"""The ledger: the generated tokens of every request, in memory and on disk."""
