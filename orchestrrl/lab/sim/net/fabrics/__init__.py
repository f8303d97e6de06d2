"""Fabrics that join servers: packet switched, of circuits, and both."""
