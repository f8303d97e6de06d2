"""Commands for engines, requests, moves and redeployments."""
