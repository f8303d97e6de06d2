"""The gateway: an OpenAI-compatible, token-in/token-out router in front of the engines that holds every token."""
