"""Answers of vLLM directly and through the gateway: they are equal, or the gateway refuses a field by its name."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from orchestrrl.gateway.moves.movable import KNOWN_FIELDS
from orchestrrl.lab.testbed.engines import LocalEngine
from tests.vllm.test_gateway_vllm import Harness

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 8}
MESSAGES = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}

# Fields of completions and chats, with values that vLLM accepts or refuses.
COMPLETION_FIELDS: tuple[dict[str, Any], ...] = (
    {},
    {"echo": True},
    {"echo": True, "logprobs": 1},
    {"echo": True, "logprobs": 1, "max_tokens": 0},
    {"echo": True, "logprobs": 0, "max_tokens": 0, "prompt": [40, 41, 42]},
    {"echo": True, "logprobs": 1, "max_tokens": 0, "prompt": ["Hello", "abc"], "return_token_ids": True},
    {"echo": True, "return_token_ids": True},
    {"max_tokens": 0},
    {"max_tokens": -1},
    {"max_tokens": 8.0},
    {"max_tokens": 10**9, "stop_token_ids": [5, 200, 300]},
    {"logprobs": 0},
    {"logprobs": 5, "return_token_ids": True},
    {"logprobs": 21},
    {"logprobs": 2, "return_tokens_as_token_ids": True},
    {"logprobs": 1, "logprob_token_ids": [3, 4]},
    {"prompt_logprobs": 0},
    {"prompt_logprobs": 3},
    {"prompt_logprobs": 1, "prompt": ["Hello", "abc"]},
    {"prompt_logprobs": -2},
    {"n": 2, "temperature": 1, "seed": 3},
    {"n": 2, "temperature": 1, "seed": 3, "prompt": ["a", "b"], "logprobs": 1},
    {"best_of": 2},
    {"use_beam_search": True},
    {"stop": [" t", "zzz"], "max_tokens": 40},
    {"stop": " t", "include_stop_str_in_output": True, "max_tokens": 40},
    {"stop": " t", "logprobs": 1, "max_tokens": 40},
    {"stop_token_ids": [5, 200, 300], "min_tokens": 4, "max_tokens": 60},
    {"min_tokens": 40},
    {"suffix": "abc"},
    {"logit_bias": {"70": 5.0}},
    {"logit_bias": {"99999": 5.0}},
    {"return_token_ids": True, "skip_special_tokens": False, "spaces_between_special_tokens": False},
    {"truncate_prompt_tokens": 2, "return_token_ids": True},
    {"truncate_prompt_tokens": 2, "prompt": [40, 41, 42, 43], "return_token_ids": True},
    {"truncate_prompt_tokens": -5},
    {"add_special_tokens": False, "return_token_ids": True},
    {"response_format": {"type": "text"}},
    {"response_format": {"type": "json_schema"}},
    {"structured_outputs": {"choice": ["ab", "cd"]}},
    {"allowed_token_ids": [70, 71, 72]},
    {"bad_words": [" t"], "repetition_penalty": 1.5},
    {"presence_penalty": 1.0, "frequency_penalty": 1.0},
    {"temperature": 3},
    {"routed_experts_prompt_start": 0},
    {"kv_transfer_params": {"a": 1}},
    {"user": "u", "priority": 0, "session_id": "s", "cache_salt": "c", "not_known": 1},
    {"model": "no-such-model"},
    {"prompt": ""},
    {"prompt": [[40, 41], [42]]},
)
CHAT_FIELDS: tuple[dict[str, Any], ...] = (
    {},
    {"echo": True},
    {"logprobs": True, "top_logprobs": 3, "return_token_ids": True},
    {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True},
    {"logprobs": True, "logprob_token_ids": [3, 4]},
    {"top_logprobs": 3},
    {"prompt_logprobs": 1, "return_token_ids": True},
    {"n": 2, "temperature": 1, "seed": 5, "return_prompt_text": True},
    {"tools": [TOOL], "tool_choice": "none"},
    {"tools": [TOOL], "tool_choice": "auto"},
    {"response_format": {"type": "nonsense"}},
    {"max_completion_tokens": 3, "stop": "zzz"},
    {"chat_template": "{{ messages[0].content }}", "return_token_ids": True},
    {"messages": []},
)
# By the field in the gateway's refusal: values that vLLM refuses without naming the field, and one that it accepts.
REFUSED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("n", COMPLETIONS, {"prompt": "Hello", "n": 2}),
    ("n", CHAT, {"messages": MESSAGES, "n": 2}),
    ("n", COMPLETIONS, {"prompt": "Hello", "n": 0}),
    ("n", COMPLETIONS, {"prompt": "Hello", "n": 2, "use_beam_search": True}),  # not supported by the gateway
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


async def answered(harness: Harness, url: str, path: str, body: dict[str, Any], *, stream: bool) -> tuple[int, Any]:
    """Return status and answer. If vLLM sends a refusal as an event of its stream, the status is in that event."""
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}} if stream else body
    async with harness.http.post(url + path, json=asked) as response:
        text = await response.text()
        if not response.headers["Content-Type"].startswith("text/event-stream"):
            answer = json.loads(text)
            return response.status, answer if response.status != 200 else rounded(answer)
        events = [json.loads(line[len("data: ") :]) for line in text.splitlines() if line.startswith("data: {")]
        for event in events:
            if "error" in event:
                return event["error"]["code"], event
        return response.status, rounded(joined(events))


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the content of a stream, independently of its division into events."""
    whole: dict[str, Any] = {}
    for event in events:
        whole |= {name: value for name, value in event.items() if value is not None and name != "choices"}
        for choice in event["choices"]:
            mine = whole.setdefault(f"choice {choice['index']}", {})
            logprobs = {f"logprobs.{name}": value for name, value in (choice.get("logprobs") or {}).items()}
            for name, value in {**choice, **choice.get("delta", {}), **logprobs}.items():
                if value is None or name in ("delta", "logprobs"):
                    continue
                grows = isinstance(value, list) or name in ("text", "content")
                mine[name] = mine[name] + value if grows and name in mine else value
    return whole


def rounded(value: Any) -> Any:
    """Remove ids and empty fields of an answer, and round numbers, which depend on the batch in their last bits."""
    if isinstance(value, dict):
        kept = {name: rounded(item) for name, item in value.items() if name not in ("id", "created")}
        return {name: item for name, item in kept.items() if item is not None and item != [] and item != {}}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return round(value, 2) if isinstance(value, float) else value


def near(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) < 0.02
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(near(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(near, one, other))
    return bool(one == other)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_gateway_returns_vllms_own_answers(harness: Harness, stream: bool) -> None:
    asks = [(COMPLETIONS, {**GREEDY, "prompt": "Hello world", **fields}) for fields in COMPLETION_FIELDS]
    asks += [(CHAT, {**GREEDY, "messages": MESSAGES, **fields}) for fields in CHAT_FIELDS]
    differ = []
    for path, body in asks:
        direct = await answered(harness, harness.engines[0].url, path, body, stream=stream)
        through = await answered(harness, harness.url, path, body, stream=stream)
        if not near(direct[1], through[1]) or direct[0] != through[0]:
            differ.append((path, body, direct, through))
    assert not differ


@pytest.mark.parametrize(("name", "path", "body"), REFUSED)
async def test_refusal_names_the_field(harness: Harness, name: str, path: str, body: dict[str, Any]) -> None:
    status, answer = await answered(harness, harness.url, path, {**GREEDY, **body}, stream=False)
    assert (status, answer["error"]["param"]) == (400, name)
    direct, _ = await answered(harness, harness.engines[0].url, path, {**GREEDY, **body}, stream=False)
    assert direct == (200 if "use_beam_search" in body else 400)


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
