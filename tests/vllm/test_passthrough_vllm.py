"""vLLM's endpoints outside the ledger: the gateway names each one, and passes the answers of real servers through."""

import ast
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from orchestrrl.gateway.http.vllm_endpoints import ENDPOINTS
from orchestrrl.lab.testbed.engines import LocalEngine
from tests.vllm.conftest import VLLM_PYTHON
from tests.vllm.test_gateway_vllm import Harness

MESSAGES = [{"role": "user", "content": "Hello"}]
ASK = {"model": "tiny", "input": "Hello", "temperature": 0, "max_output_tokens": 5}
# Calls whose answers are equal at the gateway and at a server.
CALLS: tuple[tuple[str, str, dict[str, Any] | None], ...] = (
    ("POST", "/tokenize", {"model": "tiny", "prompt": "Hello"}),
    ("POST", "/tokenize", {"model": "tiny", "messages": MESSAGES, "return_token_strs": True}),
    ("POST", "/tokenize", {"model": "tiny"}),
    ("POST", "/tokenize", {"model": "no-such-model", "prompt": "Hello"}),
    ("POST", "/detokenize", {"model": "tiny", "tokens": [40, 41, 42]}),
    ("POST", "/v1/completions/render", {"model": "tiny", "prompt": "Hello"}),
    ("POST", "/v1/chat/completions/render", {"model": "tiny", "messages": MESSAGES}),
    ("POST", "/v1/embeddings", {"model": "tiny", "input": "Hello"}),
    ("POST", "/v1/responses", ASK),
    ("POST", "/v1/responses", {**ASK, "stream": True}),
    ("POST", "/v1/responses", {**ASK, "model": "no-such-model"}),
    ("POST", "/v1/responses", {**ASK, "previous_response_id": "resp_unknown"}),
    ("POST", "/v1/responses", {"input": 5}),
    ("GET", "/v1/responses/resp_unknown", None),
    ("POST", "/v1/responses/resp_unknown/cancel", None),
    ("POST", "/v1/messages", {"model": "tiny", "max_tokens": 5, "temperature": 0, "messages": MESSAGES}),
    ("POST", "/v1/messages/count_tokens", {"model": "tiny", "messages": MESSAGES}),
)
# Parts of answers that differ between two calls of one server.
_VARYING = re.compile(
    r'\b(?:resp|msg|rs|chatcmpl|cmpl|generate-tokens|render)[_-][-0-9a-f]+\b|"created[a-z_]*": ?[0-9.]+'
)


@pytest.fixture
async def harness(vllm_servers: tuple[LocalEngine, ...]) -> AsyncIterator[Harness]:
    async with aiohttp.ClientSession() as http:
        harness = Harness(vllm_servers, http)
        harness.url = await harness.server.start("127.0.0.1", 0)
        yield harness
        await harness.server.close()
        await harness.fleet.close()


async def answered(harness: Harness, url: str, method: str, path: str, body: Any) -> tuple[int, str, str]:
    async with harness.http.request(method, url + path, json=body) as answer:
        text, content_type = await answer.text(), answer.headers["Content-Type"]
        if content_type.startswith("text/event-stream"):
            text = joined(text)
        return answer.status, content_type, _VARYING.sub("*", text)


def joined(stream: str) -> str:
    """Return the content of a stream of /v1/responses, independently of its division into events."""
    events = [json.loads(line.removeprefix("data: ")) for line in stream.splitlines() if line.startswith("data: ")]
    kinds = list(dict.fromkeys(event["type"] for event in events))
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    return json.dumps([kinds, text, events[-1]["response"]])


async def test_answers_of_passed_endpoints_are_the_servers_own(harness: Harness) -> None:
    for backend in harness.fleet:
        await harness.fleet.learn(backend)
    different = []
    for call in CALLS:
        direct = await answered(harness, harness.engines[0].url, *call)
        passed = await answered(harness, harness.url, *call)
        if direct != passed:
            different.append((call, direct, passed))
    assert not different
    status, answer = await called(harness, "POST", "/v1/responses", ASK)
    assert (status, answer["status"], answer["usage"]["output_tokens"]) == (200, "incomplete", 5)
    assert (await called(harness, "POST", "/tokenize", {"prompt": "Hello"}))[1]["count"] > 0
    assert await called(harness, "GET", "/get_world_size", None) == (200, {"world_size": len(harness.engines)})
    assert "vllm_config" in (await called(harness, "GET", "/server_info?config_format=json", None))[1]
    for path in ("/pause", "/update_weights", "/reset_prefix_cache"):
        status, answer = await called(harness, "POST", path, {})
        assert status == 404
        assert "the fleet does not offer this endpoint" in answer["error"]["message"]
    assert not await harness.fleet.get(next(iter(harness.fleet)).id).engine.is_paused()  # type: ignore[union-attr]


async def called(harness: Harness, method: str, path: str, body: Any) -> tuple[int, Any]:
    async with harness.http.request(method, harness.url + path, json=body) as answer:
        return answer.status, json.loads(await answer.text())


def test_table_names_every_endpoint_of_vllm() -> None:
    """The routes are read from the source, because a server registers only those of its model and its options."""
    (entrypoints,) = (VLLM_PYTHON.parents[1] / "lib").glob("python*/site-packages/vllm/entrypoints")
    others = {"launchers", "cli"}  # programs other than the API server
    files = [file for file in entrypoints.rglob("*.py") if file.relative_to(entrypoints).parts[0] not in others]
    found = {route for file in files for route in routes_of(file)}
    assert len(found) > 50
    known = {(method.lower(), path) for path, endpoint in ENDPOINTS.items() for method in endpoint.methods}
    assert found <= known | {("mount", "/static"), ("websocket", "/v1/realtime")}


def routes_of(file: Path) -> Iterator[tuple[str, str]]:
    kinds = {"get", "post", "put", "delete", "patch", "websocket", "mount", "add_api_route"}
    for node in ast.walk(ast.parse(file.read_text())):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in kinds):
            continue
        first = node.args[0] if node.args else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str) and first.value.startswith("/"):
            yield "post" if node.func.attr == "add_api_route" else node.func.attr, first.value
