"""Commands on engines, requests, moves and redeployments."""
