"""What a trainer imports to publish its weights."""
