"""The endpoint /inference/v1/generate of vLLM, directly and through the gateway: answers are equal, including those of
moved requests, or the gateway refuses a field by its path."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from orchestrrl.engines.base import CompletionEndpoint
from orchestrrl.engines.vllm import VllmEngine
from orchestrrl.gateway.moves.movable import immovable_because
from orchestrrl.lab.testbed.engines import LocalEngine
from tests.vllm.comparison import answered, fault_of_0_31, near
from tests.vllm.test_gateway_parity_vllm import has_text_mode
from tests.vllm.test_gateway_vllm import Harness, moved_at

GENERATE = "/inference/v1/generate"
PROMPT = [40, 41, 42, 43]
TOKENS = 200
VERSION = 7


def body_of(*, max_tokens: int = 8, **more: Any) -> dict[str, Any]:
    """Return a greedy request. Names in `more` that start with `sampling_` are sampling parameters."""
    sampling = {name.removeprefix("sampling_"): more.pop(name) for name in list(more) if name.startswith("sampling_")}
    return {
        "model": "tiny",
        "token_ids": PROMPT,
        **more,
        "sampling_params": {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **sampling},
    }


SAMPLES = {"sampling_n": 2, "sampling_temperature": 1, "sampling_seed": 3}
BODIES: tuple[dict[str, Any], ...] = (
    body_of(),
    body_of(output_mode="text", sampling_logprobs=1),
    body_of(sampling_logprobs=0),
    body_of(sampling_logprobs=3, return_token_ids=True, sampling_output_kind=2, request_id="own"),
    body_of(**SAMPLES, sampling_logprobs=2, return_token_ids=True),
    body_of(**SAMPLES, output_mode="text"),
    body_of(**SAMPLES, sampling_prompt_logprobs=1),
    body_of(sampling_prompt_logprobs=0),
    body_of(sampling_stop=" t", output_mode="text", max_tokens=40),
    body_of(sampling_stop=" t", max_tokens=40),
    body_of(sampling_stop_token_ids=[215, 307], sampling_min_tokens=2),
    body_of(sampling_detokenize=False, cache_salt="s", features=None, not_known=1, sampling_not_known=1),
    body_of(sampling_structured_outputs={"choice": ["ab", "cd"]}, output_mode="text"),
    body_of(kv_transfer_params={"a": 1}),
    body_of(model="no-such-model"),
    body_of(max_tokens=0),
)
REFUSED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("sampling_params", {"token_ids": PROMPT}),
    ("token_ids", {**body_of(), "token_ids": []}),
    ("sampling_params.max_tokens", body_of(max_tokens="a")),  # type: ignore[arg-type]
    ("sampling_params.n", body_of(sampling_n=2)),
    ("output_mode", body_of(output_mode="ids")),
)


@pytest.fixture
async def harness(vllm_servers: tuple[LocalEngine, ...]) -> AsyncIterator[Harness]:
    async with aiohttp.ClientSession() as http:
        harness = Harness(vllm_servers, http)
        harness.url = await harness.server.start("127.0.0.1", 0)
        yield harness
        await harness.server.close()
        await harness.fleet.close()


async def generated(harness: Harness, url: str, body: dict[str, Any], *, stream: bool) -> tuple[int, Any]:
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}} if stream else body
    return await answered(harness.http, url + GENERATE, asked)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_gateway_returns_vllms_own_answers(harness: Harness, stream: bool) -> None:
    differ, text_mode = [], await has_text_mode(harness)
    for body in BODIES:
        if not text_mode:
            body = {name: value for name, value in body.items() if name != "output_mode"}
        direct = await generated(harness, harness.engines[0].url, body, stream=stream)
        through = await generated(harness, harness.url, body, stream=stream)
        same = near(direct[1], through[1]) and direct[0] == through[0]
        if not same and (text_mode or not fault_of_0_31(direct, through)):
            differ.append((body, direct, through))
    assert not differ


async def test_refusals_name_the_field(harness: Harness) -> None:
    for name, body in REFUSED:
        status, answer = await generated(harness, harness.url, body, stream=False)
        assert (status, answer["error"]["param"]) == (400, name)
        if name != "output_mode" or await has_text_mode(harness):
            assert (await generated(harness, harness.engines[0].url, body, stream=False))[0] == 400


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_text_is_refused_if_the_engines_return_tokens_only(harness: Harness, stream: bool) -> None:
    if await has_text_mode(harness):
        pytest.skip("the engines return text")
    status, answer = await generated(harness, harness.url, body_of(output_mode="text"), stream=stream)
    assert (status, answer["error"]["param"]) == (400, "output_mode")


@pytest.fixture
async def labelled(vllm_servers: tuple[LocalEngine, ...]) -> AsyncIterator[None]:
    """Label the weights of both servers with a policy version."""
    engines = [VllmEngine(server.url) for server in vllm_servers]
    for engine in engines:
        await engine.name_weights(VERSION)
    yield
    for engine in engines:
        await engine.name_weights(None)
        await engine.close()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("mode", ["tokens", "text"])
async def test_moved_answer_equals_the_undisturbed_one(
    harness: Harness, labelled: None, stream: bool, mode: str
) -> None:
    text_mode = await has_text_mode(harness)
    if mode == "text" and not text_mode:
        pytest.skip("vLLM 0.31 has no output modes")
    for backend in harness.fleet:
        backend.has(VERSION)
    body = body_of(max_tokens=TOKENS, output_mode=mode, sampling_logprobs=2, return_token_ids=True)
    direct = await generated(harness, harness.engines[0].url, body, stream=stream)
    harness.pause_registry.extend((20, 70))
    asking = asyncio.create_task(generated(harness, harness.url, body, stream=stream))
    while not len(harness.gateway.ledger):
        await asyncio.sleep(0.002)
    (record,) = harness.gateway.ledger
    results = await moved_at(harness, record.id, asking, 20, 90)  # type: ignore[arg-type]
    assert results
    assert all(result.done for result in results), results
    through = await asking
    spans = [{"version": str(VERSION), "start": 0, "end": TOKENS}]
    choice = through[1]["choice 0"] if stream else through[1]["choices"][0]
    assert choice["weight_versions"] == spans
    if text_mode:
        assert near(direct[1], through[1])
    else:
        del choice["weight_versions"]  # vLLM 0.31 reports none, and the gateway takes them from its ledger
        assert fault_of_0_31(direct, through)
    assert record.versions.spans(TOKENS) == ((VERSION, 0, TOKENS),)


async def test_gateway_knows_every_field_of_vllm(harness: Harness) -> None:
    """An unknown field pins its request to the engine on which it began."""
    async with harness.http.get(harness.engines[0].url + "/openapi.json") as response:
        fields = (await response.json())["components"]["schemas"]["GenerateRequest"]["properties"]
    outer, sampling = dict.fromkeys(fields, 1), dict.fromkeys(fields["sampling_params"]["properties"], 1)
    for body in ({**outer, "sampling_params": {name: 1}} for name in sampling):
        for name in ("stream", "stream_options", "request_id", "kv_transfer_params", "ec_transfer_params", "features"):
            del body[name]  # read by the gateway, or immovable for another reason
        del body["content_parts"]
        assert "is unknown" not in immovable_because(CompletionEndpoint.GENERATE, body)
