"""Inference engines: the engine protocol (`base`), the vLLM client (`vllm`), engine profiles and conformance suites."""
