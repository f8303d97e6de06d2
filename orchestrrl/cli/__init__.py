"""The command line. Nothing imports this package."""
