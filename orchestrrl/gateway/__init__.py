"""The gateway: an OpenAI-compatible router in front of the engines, which stores every token of every request."""
