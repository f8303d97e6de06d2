"""Real vLLM under the contract of an engine."""

from collections.abc import AsyncIterator

import pytest

from orchestrrl.deployers.attended import LocalEngine
from orchestrrl.engines.base import Engine
from orchestrrl.engines.conformance import EngineConformance
from orchestrrl.engines.vllm import VllmEngine


@pytest.mark.vllm
class TestVllm(EngineConformance):
    @pytest.fixture
    async def engine(self, vllm_servers: tuple[LocalEngine, ...]) -> AsyncIterator[Engine]:
        engine = VllmEngine(vllm_servers[0].url, timeout_s=100)
        yield engine
        await engine.close()
