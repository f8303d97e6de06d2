"""Continue a running request on another engine."""
