"""Ways by which a version's bytes get into engines."""
