"""Weight backends: implementations that bring a version's bytes into engines."""
