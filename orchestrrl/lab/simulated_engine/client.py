"""The client of a simulated engine. It has its own module so that agents and gateways do not import the server."""

from orchestrrl.engines.vllm import VllmEngine


class SimulatedEngine(VllmEngine):
    """The client of a simulated engine. It is the client of vLLM under another name."""

    name = "simulated"
