"""The client of a simulated engine. It stands apart from the server, which agents and gateways need not load."""

from orchestrrl.engines.vllm import VllmEngine


class SimulatedEngine(VllmEngine):
    """A client of a simulated engine: vLLM's, by another name."""

    name = "simulated"
