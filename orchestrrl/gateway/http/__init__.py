"""The gateway's HTTP server: connections, request bodies, OpenAI's objects and the operator API."""
