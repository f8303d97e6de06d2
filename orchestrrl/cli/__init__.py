"""The command line interface. No other package imports this package."""
