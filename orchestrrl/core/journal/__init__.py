"""The journal: an append-only record of inputs, decisions and outcomes, in SQLite."""
