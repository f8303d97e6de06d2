"""The simulated engine passes the conformance suite that vLLM passes in tests/vllm/test_engine_conformance.py."""

from collections.abc import AsyncIterator

import pytest

from orchestrrl.engines.base import Engine
from orchestrrl.engines.conformance import EngineConformance
from orchestrrl.engines.responses_conformance import ResponsesConformance
from orchestrrl.engines.sampling_conformance import SamplingConformance
from orchestrrl.engines.token_endpoints_conformance import TokenEndpointsConformance
from orchestrrl.lab.simulated_engine.client import SimulatedEngine
from orchestrrl.lab.simulated_engine.server import SimulatedOptions, SimulatedServer

# As for the vLLM servers of tests/vllm: KV for one sequence of the maximum context length.
OPTIONS = SimulatedOptions(
    max_num_seqs=4,
    kv_capacity_tokens=16640,
    block_tokens=128,
    max_model_len_tokens=16384,
    speed=40,
    tick_s=0.01,
)


class TestSimulatedEngine(EngineConformance, SamplingConformance, TokenEndpointsConformance, ResponsesConformance):
    @pytest.fixture
    async def engine(self) -> AsyncIterator[Engine]:
        async with SimulatedServer(OPTIONS) as server:
            engine = SimulatedEngine(server.url)
            yield engine
            await engine.close()
