"""The client of a simulated engine, in its own module because agents and gateways need not import the server."""

from orchestrrl.engines.vllm import VllmEngine


class SimulatedEngine(VllmEngine):
    """The client of a simulated engine. It is vLLM's client under another name."""

    name = "simulated"
