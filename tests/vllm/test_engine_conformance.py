"""The engine conformance suite on real vLLM."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from orchestrrl.engines.base import Engine, ReportedLayout
from orchestrrl.engines.conformance import EngineConformance
from orchestrrl.engines.managed_conformance import ManagedConformance
from orchestrrl.engines.responses_conformance import ResponsesConformance
from orchestrrl.engines.sampling_conformance import SamplingConformance
from orchestrrl.engines.token_endpoints_conformance import TokenEndpointsConformance
from orchestrrl.engines.vllm import VllmEngine
from orchestrrl.lab.testbed.engines import LocalEngine


class TestVllm(EngineConformance, SamplingConformance, TokenEndpointsConformance, ResponsesConformance):
    @pytest.fixture
    async def engine(self, vllm_servers: tuple[LocalEngine, ...]) -> AsyncIterator[Engine]:
        engine = VllmEngine(vllm_servers[0].url, timeout_s=100)
        yield engine
        await engine.close()


class TestVllmManaged(ManagedConformance):
    layout = ReportedLayout(tp=1, pp=1, dp=1, ep=False)

    @pytest.fixture
    async def engine(self, vllm_servers: tuple[LocalEngine, ...]) -> AsyncIterator[VllmEngine]:
        engine = VllmEngine(vllm_servers[0].url, timeout_s=100)
        yield engine
        await engine.close()

    @pytest.fixture
    def weights(self, tiny_model: Path, other_weights: Path) -> tuple[Path, Path]:
        return tiny_model, other_weights
