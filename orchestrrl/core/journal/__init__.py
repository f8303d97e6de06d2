"""The append-only record of inputs, decisions and outcomes, in SQLite."""
