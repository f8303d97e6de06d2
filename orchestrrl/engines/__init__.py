"""Inference engines: the protocol (`base`), vLLM over HTTP (`vllm`), a server that behaves like it (`simulated`)."""
