"""A server with vLLM's HTTP API whose step times and tokens are computed."""
