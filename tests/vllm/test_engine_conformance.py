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

NO_OUTPUT_MODE = "generate has no output_mode"
NO_STOP_REASON = "generate returns no stop_reason"
NO_VERSIONS = "generate returns no weight_versions"
TOKEN_NAMES = "generate's log-probabilities have names of tokens instead of ids and ranks"
RENDERED = "rendered requests lack output_mode and the fields for reasoning"
# Tests that vLLM 0.31 would fail, each with the reason.
NEW_IN_0_32 = {
    "test_abort_of_generate_requests": NO_VERSIONS,
    "test_derender_equals_the_completion": "derender decodes an answer without its prompt, which yields other text",
    "test_generate_answers_with_text": NO_OUTPUT_MODE,
    "test_generate_answers_with_tokens": NO_VERSIONS,
    "test_generate_has_choices_with_consecutive_seeds": "a stream of several generate choices fails",
    "test_generate_reports_the_stop_string": NO_STOP_REASON,
    "test_generate_returns_logprobs": TOKEN_NAMES,
    "test_generate_streams": NO_VERSIONS,
    "test_invalid_generate_requests_are_refused": NO_OUTPUT_MODE,
    "test_max_tokens_is_capped_by_the_context_length": "a larger max_tokens is refused",
    "test_openapi_page_lists_the_endpoints": "there is no /inference/v1/abort_requests",
    "test_rank_of_a_sampled_token": TOKEN_NAMES,
    "test_render_and_generate_equal_the_completion": RENDERED,
    "test_render_of_chats": RENDERED,
    "test_render_of_several_prompts": "ids of rendered prompts have no index",
    "test_responses_stream": "the last event of an output item has a field more",
    "test_stop_token_ends_a_generate_request": NO_STOP_REASON,
    "test_weight_versions_follow_the_name_of_the_weights": NO_VERSIONS,
}


class TestVllm(EngineConformance, SamplingConformance, TokenEndpointsConformance, ResponsesConformance):
    @pytest.fixture
    async def engine(self, vllm_servers: tuple[LocalEngine, ...]) -> AsyncIterator[Engine]:
        engine = VllmEngine(vllm_servers[0].url, timeout_s=100)
        yield engine
        await engine.close()

    @pytest.fixture(autouse=True)
    async def offered(self, request: pytest.FixtureRequest, engine: Engine) -> None:
        """Skip a test of something that vLLM 0.31 lacks. The path shows the server's version."""
        reason = NEW_IN_0_32.get(request.function.__name__)
        if reason and "/inference/v1/abort_requests" not in (await engine.capabilities()).paths:
            pytest.skip(f"vLLM 0.31: {reason}")


def test_skipped_tests_exist() -> None:
    assert all(hasattr(TestVllm, name) for name in NEW_IN_0_32)


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
