"""The gateway's HTTP: connections, bodies, OpenAI's objects, the operator API."""
