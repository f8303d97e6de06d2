"""The client with which a trainer publishes its weights."""
