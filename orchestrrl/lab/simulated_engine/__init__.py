"""A server with vLLM's HTTP surface whose time and tokens are computed."""
