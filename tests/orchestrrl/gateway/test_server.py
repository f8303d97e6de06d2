"""The gateway over real sockets with simulated engines: clients receive what the engine itself would return."""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from orchestrrl.core.clock import WallClock
from orchestrrl.core.operations import EngineRoute
from orchestrrl.gateway.core import Gateway
from orchestrrl.gateway.http.connections import MOST_BODY_BYTES
from orchestrrl.gateway.http.server import GatewayServer
from orchestrrl.gateway.relay import RelayLimits
from orchestrrl.gateway.routing.backends import EngineBackends
from orchestrrl.lab.simulated_engine.client import SimulatedEngine
from orchestrrl.lab.simulated_engine.server import SimulatedOptions, SimulatedServer
from planner.model import EngineId, NodeId
from tests.orchestrrl.gateway.interruptible_engine import InterruptibleEngine

PROMPT = list(b"Once upon a time")
MESSAGES = [{"role": "user", "content": "Tell me a story"}]
DEADLINE_S = 120.0


@dataclass
class Harness:
    url: str
    engine_urls: list[str]
    gateway: Gateway
    http: aiohttp.ClientSession
    pause_registry: deque[int]
    released: asyncio.Event
    operator_url: str

    def at(self, path: str) -> str:
        """Return the URL of the path at the listener that serves it."""
        return (self.operator_url if path.startswith("/orchestrrl/") else self.url) + path

    async def post(self, path: str, body: Any, url: str | None = None, **headers: str) -> tuple[int, Any]:
        async with self.http.post(url + path if url else self.at(path), json=body, headers=headers) as answer:
            return answer.status, await answer.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(self.at(path)) as answer:
            return answer.status, await answer.json()

    async def stream(self, path: str, body: Any, url: str | None = None, **headers: str) -> list[dict[str, Any]]:
        events = []
        async with self.http.post((url or self.url) + path, json={**body, "stream": True}, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if line.startswith(b"data: ") and line != b"data: [DONE]\n":
                    events.append(json.loads(line[len(b"data: ") :]))
        assert line == b"\n"
        return events

    async def until_running(self, request_id: str) -> str:
        """Wait until a request generates tokens, and return its engine."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                status, shown = await self.get(f"/orchestrrl/requests?id={request_id}")
                if status == 200 and shown["state"] == "running":
                    return str(shown["engine"])
                await asyncio.sleep(0.005)

    async def move(self, request_id: str) -> dict[str, Any]:
        """Move a running request to the other engine."""
        source = await self.until_running(request_id)
        target = "e1" if source == "e0" else "e0"
        _, answer = await self.post("/orchestrrl/move", {"moves": [{"request_id": request_id, "to_engine_id": target}]})
        item: dict[str, Any] = answer["items"][0]
        return item


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    options = SimulatedOptions(speed=20.0, tick_s=0.002)
    clock = WallClock()
    async with (
        SimulatedServer(options) as first,
        SimulatedServer(options) as second,
        aiohttp.ClientSession() as http,
    ):
        pause_registry: deque[int] = deque()
        released = asyncio.Event()
        fleet = EngineBackends(lambda url: InterruptibleEngine(url, pause_registry, released), clock=clock)
        gateway = Gateway(NodeId("gateway"), fleet, limits=RelayLimits())
        gateway.set_routes([EngineRoute(EngineId("e0"), first.url), EngineRoute(EngineId("e1"), second.url)])
        server = GatewayServer(gateway)
        url = await server.start("127.0.0.1", 0)
        operator_url = await server.start_operator("127.0.0.1", 0)
        yield Harness(url, [first.url, second.url], gateway, http, pause_registry, released, operator_url)
        await server.close()
        await fleet.close()


def same(answer: dict[str, Any], other: dict[str, Any]) -> None:
    """Return whether two responses are equal except for ids, times and empty fields."""
    assert comparable(answer) == comparable(other)


def comparable(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: comparable(item) for name, item in value.items() if item is not None and name not in ("id", "created")
        }
    return [comparable(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 20}),
        ("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 20}),
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 20, "return_token_ids": True, "logprobs": 2}),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 20}),
        (
            "/v1/chat/completions",
            {"messages": MESSAGES, "max_tokens": 9, "return_token_ids": True, "logprobs": True, "top_logprobs": 2},
        ),
    ],
)
async def test_answer_equals_the_engines_own(harness: Harness, path: str, body: dict[str, Any]) -> None:
    body = {"model": "simulated", "temperature": 0, **body}
    status, answer = await harness.post(path, body)
    assert status == 200, answer
    _, direct = await harness.post(path, body, harness.engine_urls[0])
    same(answer, direct)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": PROMPT, "return_token_ids": True, "logprobs": 1}),
        ("/v1/chat/completions", {"messages": MESSAGES, "return_token_ids": True, "logprobs": True, "top_logprobs": 1}),
    ],
)
@pytest.mark.parametrize("moves", [0, 1, 3])
async def test_stream_equals_the_engines_own_after_any_moves(
    harness: Harness, path: str, body: dict[str, Any], moves: int
) -> None:
    body = {"model": "simulated", "temperature": 0, "max_tokens": 300, "ignore_eos": True, **body}
    body["stream_options"] = {"include_usage": True}
    harness.pause_registry.extend([11] * moves)
    reading = asyncio.create_task(harness.stream(path, body, **{"X-Request-Id": "r"}))
    for _ in range(moves):
        result = await harness.move("r")
        assert result["done"], result
    events = await reading
    direct = await harness.stream(path, body, harness.engine_urls[0])
    assert joined(events) == joined(direct)
    assert events[-1]["usage"] == direct[-1]["usage"]
    assert [event["choices"][0]["finish_reason"] for event in events if event["choices"]].count("length") == 1
    finished = harness.gateway.ledger.finished[-1]
    assert finished.moves == moves
    assert harness.gateway.moves_done == moves


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the content of a stream, independent of its division into chunks."""
    whole: dict[str, Any] = {"text": "", "token_ids": [], "logprobs": [], "prompt_token_ids": None, "roles": []}
    for event in events:
        whole["prompt_token_ids"] = event.get("prompt_token_ids") or whole["prompt_token_ids"]
        for choice in event["choices"]:
            whole["prompt_token_ids"] = choice.get("prompt_token_ids") or whole["prompt_token_ids"]
            delta = choice.get("delta", {})
            whole["roles"] += [delta["role"]] if "role" in delta else []
            whole["text"] += (delta.get("content") or "") if delta else choice["text"]
            whole["token_ids"] += choice.get("token_ids") or []
            logprobs = choice.get("logprobs") or {}
            whole["logprobs"] += logprobs.get("content") or logprobs.get("token_logprobs") or []
            whole["finish_reason"] = choice["finish_reason"]
    return whole


async def test_moved_non_streamed_answer_equals_the_engines_own(harness: Harness) -> None:
    body = {"model": "simulated", "prompt": PROMPT, "temperature": 0, "max_tokens": 300, "ignore_eos": True}
    body |= {"return_token_ids": True, "logprobs": 1}
    harness.pause_registry.append(7)
    asking = asyncio.create_task(harness.post("/v1/completions", body, **{"X-Request-Id": "r"}))
    result = await harness.move("r")
    assert result["done"], result
    assert result["recomputed_tokens"] > len(PROMPT)
    status, answer = await asking
    assert status == 200
    _, direct = await harness.post("/v1/completions", body, harness.engine_urls[0])
    same(answer, direct)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_n_answers_are_in_order_of_their_seeds(harness: Harness, path: str) -> None:
    asked: dict[str, Any] = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": MESSAGES}
    body = {"model": "simulated", "temperature": 1, "max_tokens": 9, "return_token_ids": True, **asked}
    status, answer = await harness.post(path, {**body, "n": 3, "seed": 5})
    assert status == 200
    for index, choice in enumerate(answer["choices"]):
        _, direct = await harness.post(path, {**body, "seed": 5 + index}, harness.engine_urls[0])
        assert comparable({**choice, "index": 0}) == comparable(direct["choices"][0])
    assert answer["usage"]["prompt_tokens"] == direct["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in answer["choices"])


async def test_answers_are_in_order_of_their_prompts(harness: Harness) -> None:
    body = {"model": "simulated", "temperature": 1, "max_tokens": 5, "return_token_ids": True}
    prompts = [PROMPT, PROMPT[:3], [7]]
    _, answer = await harness.post("/v1/completions", {**body, "prompt": prompts, "n": 2})
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [prompts[index // 2] for index in range(6)]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))


async def test_stream_of_several_answers(harness: Harness) -> None:
    body = {"model": "simulated", "prompt": PROMPT, "temperature": 1, "max_tokens": 30, "n": 3, "seed": 1}
    events = await harness.stream("/v1/completions", {**body, "return_token_ids": True})
    _, whole = await harness.post("/v1/completions", {**body, "return_token_ids": True})
    for choice in whole["choices"]:
        mine = [event for event in events if event["choices"][0]["index"] == choice["index"]]
        assert joined(mine)["token_ids"] == choice["token_ids"]
        assert joined(mine)["text"] == choice["text"]


@pytest.mark.parametrize("stream", [False, True])
async def test_engine_refusal_equals_the_gateways(harness: Harness, stream: bool) -> None:
    body = {"model": "simulated", "prompt": PROMPT, "max_tokens": -3}
    status, answer = await harness.post("/v1/completions", {**body, "stream": stream})
    direct_status, direct = await harness.post("/v1/completions", body, harness.engine_urls[0])
    assert (status, answer) == (direct_status, direct)
    assert status == 400
    assert answer["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ([], None),
        ({"prompt": {}}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": "x", "n": 0}, "n"),
        ({"prompt": "x", "n": "2"}, "n"),
        ({"prompt": "x", "n": 5000}, "n"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
async def test_invalid_requests_return_openai_errors(harness: Harness, body: Any, param: str | None) -> None:
    status, answer = await harness.post("/v1/completions", body)
    assert status == 400
    assert answer["error"]["param"] == param
    assert answer["error"]["code"] == 400


@pytest.mark.parametrize("header", ["X-Request-Id", "X-Group-Id", "X-Tag", "X-Session-ID"])
@pytest.mark.parametrize("value", [b"\xff", b"a\tb", b"x" * 257])
async def test_unprintable_labels_are_refused(harness: Harness, header: str, value: bytes) -> None:
    body = json.dumps({"model": "simulated", "prompt": PROMPT, "max_tokens": 3}).encode()
    host, port = harness.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nConnection: close\r\n")
    writer.write(header.encode() + b": " + value + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert header.encode() in answer


async def test_invalid_json_unknown_path_and_large_body_are_refused(harness: Harness) -> None:
    async with harness.http.post(harness.url + "/v1/completions", data=b"{") as answer:
        assert answer.status == 400
        assert "JSON" in (await answer.json())["error"]["message"]
    status, answer_body = await harness.get("/v2/nothing")
    assert status == 404
    assert answer_body["error"]["code"] == 404
    async with harness.http.post(harness.url + "/v1/completions", data=b" " * (MOST_BODY_BYTES + 1)) as answer:
        assert answer.status == 413


async def test_id_in_flight_is_refused(harness: Harness) -> None:
    body = {"model": "simulated", "prompt": PROMPT, "max_tokens": 300, "ignore_eos": True}
    harness.pause_registry.append(7)
    first = asyncio.create_task(harness.post("/v1/completions", body, **{"X-Request-Id": "same"}))
    await harness.until_running("same")
    status, answer = await harness.post("/v1/completions", body, **{"X-Request-Id": "same"})
    assert status == 409
    assert "in flight" in answer["error"]["message"]
    harness.released.set()
    assert (await first)[0] == 200
    status, _ = await harness.post("/v1/completions", {**body, "max_tokens": 3}, **{"X-Request-Id": "same"})
    assert status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_client_disconnect_frees_the_engine(harness: Harness, stream: bool) -> None:
    body = {"model": "simulated", "prompt": PROMPT, "max_tokens": 300, "ignore_eos": True, "stream": stream}
    harness.pause_registry.append(7)
    asking = asyncio.create_task(harness.post("/v1/completions", body, **{"X-Request-Id": "r"}))
    await harness.until_running("r")
    asking.cancel()
    async with asyncio.timeout(DEADLINE_S):
        while len(harness.gateway.ledger) or (await engine_load(harness)):
            await asyncio.sleep(0.01)


async def engine_load(harness: Harness) -> int:
    total = 0
    for url in harness.engine_urls:
        engine = SimulatedEngine(url)
        metrics = await engine.metrics()
        total += metrics.running + metrics.waiting
        await engine.close()
    return total


async def test_operator_pages(harness: Harness) -> None:
    headers = {"X-Request-Id": "r", "X-Group-Id": "g", "X-Tag": "step7", "X-Session-ID": "a"}
    body = {"model": "simulated", "prompt": PROMPT, "max_tokens": 300, "ignore_eos": True, "presence_penalty": 1.0}
    harness.pause_registry.append(7)
    asking = asyncio.create_task(harness.post("/v1/completions", body, **headers))
    await harness.until_running("r")
    _, ledger = await harness.get("/orchestrrl/requests")
    (shown,) = ledger["in_flight"]
    assert (shown["id"], shown["group"], shown["tag"], shown["attempt"]) == ("r", "g", "step7", 1)
    assert (shown["session"], shown["cached_tokens"]) == ("a", 0)
    assert not shown["movable"]
    assert "presence_penalty" in shown["movable_detail"]
    async with harness.http.get(harness.url + "/metrics") as answer:
        text = await answer.text()
    assert 'orchestrrl_gateway_requests{engine="e0",state="running"} 1.0' in text
    assert 'orchestrrl_gateway_engine_usable{engine="e1"} 1.0' in text
    assert (await harness.get("/health")) == (200, {"engines": ["e0", "e1"], "draining": False})
    status, models = await harness.get("/v1/models")
    assert status == 200
    assert [model["id"] for model in models["data"]] == ["simulated"]
    assert (await harness.get("/version"))[1]["gateway"] == "gateway"
    harness.released.set()
    assert (await asking)[0] == 200
    _, ledger = await harness.get("/orchestrrl/requests")
    assert ledger["finished"][-1]["generated_tokens"] == 300


@pytest.mark.parametrize("body", [[], {"moves": 3}, {"moves": [{"request_id": "r"}]}, {"moves": [7]}])
async def test_invalid_moves_are_named(harness: Harness, body: Any) -> None:
    status, answer = await harness.post("/orchestrrl/move", body)
    assert status == 400
    assert answer["error"]["message"].startswith(
        "moves" if isinstance(body, dict) else "(document): should be an object"
    )
