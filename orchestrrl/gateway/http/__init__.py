"""The gateway's HTTP: connections, request bodies, OpenAI's objects and the operator API."""
