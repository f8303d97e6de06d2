"""The whole gateway under attack: no token is lost or duplicated, and every request ends."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from orchestrrl.core.clock import WallClock
from orchestrrl.core.operations import EngineRoute
from orchestrrl.engines.base import CompletionEndpoint
from orchestrrl.engines.vllm import VllmEngine
from orchestrrl.gateway.core import Gateway
from orchestrrl.gateway.http.connections import MOST_BODY_BYTES, HttpRequest
from orchestrrl.gateway.http.server import GatewayServer, _stream
from orchestrrl.gateway.relay import RelayLimits
from orchestrrl.gateway.routing.backends import EngineBackends
from planner.model import EngineId, NodeId
from tests.orchestrrl.gateway.fakes import FakeEngine

DEADLINE_S = 120.0
PATH = "/v1/completions"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\n"


def event(text: str, ids: list[int], finish_reason: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "token_ids": ids, "finish_reason": finish_reason, **more}
    return b"data: %b\n\n" % json.dumps({"id": "c", "choices": [choice]}).encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


ANSWER = event("a", [1], prompt_token_ids=[7]) + event("b", [2]) + event("", [3], "length") + b"data: [DONE]\n\n"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
WHOLE = STREAM + chunk(ANSWER) + b"0\r\n\r\n"


@dataclass
class ScriptedEngine:
    """An HTTP server that answers completions with the test's script, and reports that it is healthy."""

    script: Callable[["ScriptedEngine", bytes, asyncio.StreamWriter], Any]
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[bytes] = field(default_factory=list)
    running: int = 0
    left: int = 0  # requests whose client disconnected before the end
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.lower().split(b"\r\n")
                length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
                body = await reader.readexactly(length)
                if head.startswith(b"GET /health "):
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                    continue
                if not head.startswith(b"POST /v1/"):
                    writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}")
                    continue
                self.heads.append(head)
                self.bodies.append(json.loads(body))
                self.running += 1
                gone = asyncio.create_task(reader.read(1))
                answering = asyncio.ensure_future(self.script(self, body, writer))
                await asyncio.wait({gone, answering}, return_when=asyncio.FIRST_COMPLETED)
                self.running -= 1
                if not answering.done():
                    self.left += 1
                    answering.cancel()
                    return
                gone.cancel()
                await asyncio.wait({gone})
                answering.result()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


async def answer_all(engine: ScriptedEngine, body: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(WHOLE)


async def answer_for_ever(engine: ScriptedEngine, body: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM + chunk(event("a", [1], prompt_token_ids=[7])))
    while True:
        await asyncio.sleep(0.01)
        writer.write(chunk(event("b", [2])))


async def hang(engine: ScriptedEngine, body: bytes, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


@dataclass
class Harness:
    url: str
    port: int
    engine: ScriptedEngine
    gateway: Gateway
    server: GatewayServer
    http: aiohttp.ClientSession

    async def post(self, body: Any, **headers: str) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(self.url + PATH, data=data, headers=headers) as answer:
            return answer.status, await answer.json()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def until(self, so: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not so():
                await asyncio.sleep(0.01)


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    engine = ScriptedEngine(answer_all)
    listening = await asyncio.start_server(engine.serve, "127.0.0.1", 0, backlog=4096)
    engine.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    clock = WallClock()
    fleet = EngineBackends(VllmEngine, clock=clock)
    gateway = Gateway(NodeId("gateway"), fleet, limits=RelayLimits(engine_wait_s=5.0))
    gateway.set_routes([EngineRoute(EngineId("e0"), engine.url)])
    server = GatewayServer(gateway)
    url = await server.start("127.0.0.1", 0)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        yield Harness(url, int(url.rpartition(":")[2]), engine, gateway, server, http)
    await server.close()
    await fleet.close()
    listening.close()


def stream_request(more: bytes = b"", **body: Any) -> bytes:
    text = json.dumps({"prompt": "x", "max_tokens": 4000, "stream": True, **body}).encode()
    return HEAD + more + b"Content-Length: %d\r\n\r\n%b" % (len(text), text)


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 100_000,
        b'{"prompt": "a", "max_tokens": 1' + b"0" * 5000 + b"}",
        b'{"prompt": "\xff"}',
        b"",
        b"null",
        b'{"prompt": "a", "stream_options": [1]}',
        b'{"prompt": "a", "n": 1e9}',
        b'{"prompt": "a", "n": 4097}',
        b'{"prompt": "a", "request_id": {"a": 1}, "n": true}',
    ],
)
async def test_nonsensical_body_is_a_client_error(harness: Harness, body: bytes) -> None:
    status, answer = await harness.post(body)
    assert status == 400, answer
    assert answer["error"]["code"] == 400
    assert not harness.engine.bodies


@pytest.mark.parametrize(
    "more", [b"", b"Expect: 100-continue\r\n", b"Connection: close\r\n", b"Expect: 100-Continue\r\n"]
)
async def test_body_may_wait_for_100_continue(harness: Harness, more: bytes) -> None:
    """A client with `Expect` sends its body only after 100 Continue."""
    reader, writer = await harness.connect()
    head, body = stream_request(more).split(b"\r\n\r\n")
    writer.write(head + b"\r\n\r\n")
    async with asyncio.timeout(DEADLINE_S):
        if b"Expect" in more:
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await reader.readuntil(b"[DONE]")).startswith(b"HTTP/1.1 200 OK\r\n")
    writer.close()


async def test_bodies_up_to_the_limit_are_accepted(harness: Harness) -> None:
    """Bodies up to 64 MB are accepted, larger ones refused. In both cases the next request is served."""
    prompt = "x" * (MOST_BODY_BYTES - 100)
    status, _ = await harness.post({"prompt": prompt, "max_tokens": 3})
    assert status == 200
    assert harness.engine.bodies[-1]["prompt"] == prompt
    status, answer = await harness.post({"prompt": prompt + "x" * 100})
    assert (status, answer["error"]["code"]) == (413, 413)
    assert (await harness.post({"prompt": "x", "max_tokens": 3}))[0] == 200


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("script", [answer_for_ever, hang])
@pytest.mark.parametrize("leave", ["close", "abort", "half"])
@pytest.mark.parametrize("more", [b"", b"Connection: close\r\n"])
async def test_client_disconnect_frees_the_engine(
    harness: Harness, stream: bool, script: Any, leave: str, more: bytes
) -> None:
    harness.engine.script = script
    _, writer = await harness.connect()
    writer.write(stream_request(more, stream=stream))
    await harness.until(lambda: harness.engine.running == 1)
    await asyncio.sleep(0.05)
    if leave == "half":
        writer.write_eof()
    elif leave == "abort":
        writer.transport.abort()
    else:
        writer.close()
    await harness.until(lambda: harness.engine.left == 1 and len(harness.gateway.ledger) == 0)
    assert not harness.gateway.relays
    assert len(harness.engine.bodies) == 1
    writer.close()


@pytest.mark.parametrize("more", [b"", b"Connection: close\r\n"])
async def test_running_streams_are_cut_at_shutdown(harness: Harness, more: bytes) -> None:
    harness.engine.script = answer_for_ever
    reader, writer = await harness.connect()
    writer.write(stream_request(more))
    async with asyncio.timeout(60.0):
        await reader.readuntil(b"data:")
        assert await harness.server.drain(0.1) == 1
        await harness.server.close()
        rest = await reader.read()
    assert not rest.endswith(b"0\r\n\r\n")  # the client can detect that it is incomplete
    await harness.until(lambda: harness.engine.left == 1 and len(harness.gateway.ledger) == 0)
    writer.close()


async def test_ids_in_flight_are_refused_in_headers_and_bodies(harness: Harness) -> None:
    harness.engine.script = hang
    _, writer = await harness.connect()
    writer.write(stream_request(b"X-Request-Id: r\r\n"))
    await harness.until(lambda: harness.engine.running == 1)
    for headers, body in (
        ({"X-Request-Id": "r"}, {}),
        ({}, {"request_id": "r"}),
        ({"X-Request-Id": "r"}, {"stream": True}),
    ):
        assert (await harness.post({"prompt": "x", **body}, **headers))[0] == 409
    reader, other = await harness.connect()
    for _ in range(2):  # the connection stays open after a refusal
        other.write(stream_request(b"X-Request-Id: r\r\n"))
        async with asyncio.timeout(DEADLINE_S):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 409 ")
            await reader.readuntil(b"}}")
    other.close()
    writer.close()
    await harness.until(lambda: harness.engine.left == 1)
    assert len(harness.engine.bodies) == 1


async def test_burst_is_answered_completely(harness: Harness) -> None:
    requests = 600

    async def one(number: int) -> None:
        reader, writer = await harness.connect()
        writer.write(stream_request(b"X-Request-Id: r%d\r\n" % number, stream=number % 2 == 0))
        answer = await reader.readuntil(b"[DONE]" if number % 2 == 0 else b"}}")
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n"), answer
        writer.close()

    async with asyncio.timeout(120):
        await asyncio.gather(*(one(number) for number in range(requests)))
    await harness.until(lambda: len(harness.gateway.ledger) == 0)
    assert len(harness.engine.bodies) == requests
    assert not harness.gateway.relays
    assert harness.gateway.ledger.finished_by_reason == {"length": requests}


# --- engines ---


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
async def test_events_may_be_cut_anywhere(harness: Harness, cut: int, end: bytes) -> None:
    """Characters of several bytes, comments, both line ends, and no [DONE] at the end."""
    content = b": a comment\n\n" + event("é", [1], prompt_token_ids=[7]) + event("漢😀", [2]) + b"event: x\nid: 3\n\n"
    content += event("\\ud83d", [3], "length")
    content = content.replace(b"\\u00e9", "é".encode()).replace(b"\n", end)

    async def script(engine: ScriptedEngine, body: bytes, writer: asyncio.StreamWriter) -> None:
        data = STREAM + chunk(content) + b"0\r\n\r\n"
        for at in range(0, len(data), cut):
            writer.write(data[at : at + cut])
            await asyncio.sleep(0)

    harness.engine.script = script
    status, answer = await harness.post({"prompt": "x", "max_tokens": 3, "return_token_ids": True})
    assert status == 200, answer
    assert answer["choices"][0]["text"] == "é漢😀\\ud83d"
    assert answer["choices"][0]["token_ids"] == [1, 2, 3]


BROKEN = {
    "nothing": b"",
    "500": b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 4\r\n\r\noops",
    "500, cut": b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 40\r\n\r\noops",
    "half a JSON": STREAM
    + chunk(event("a", [1], prompt_token_ids=[7]) + b'data: {"choices": [{"te\n\n')
    + b"0\r\n\r\n",
    "an end too early": STREAM + chunk(event("a", [1], prompt_token_ids=[7])) + b"0\r\n\r\n",
    "cut": STREAM + chunk(event("a", [1], prompt_token_ids=[7]))[:-5],
    "no chunk": STREAM + chunk(event("a", [1], prompt_token_ids=[7])) + b"nonsense\r\n",
    "no http": b"\x15\x03\x01\x00\x02\x02\x46",
    "an error": STREAM + chunk(b'data: {"error": {"message": "dying", "code": 500}}\n\n') + b"0\r\n\r\n",
    "nesting": STREAM + chunk(b"data: " + b"[" * 100_000 + b"\n\n") + b"0\r\n\r\n",
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", BROKEN)
async def test_broken_engine_is_retried_without_duplicate_tokens(harness: Harness, name: str, stream: bool) -> None:
    async def script(engine: ScriptedEngine, body: bytes, writer: asyncio.StreamWriter) -> None:
        asked = json.loads(body)
        if len(engine.bodies) == 1:
            writer.write(BROKEN[name])
            writer.close()
        else:  # the rest of the answer
            rest = [event("b", [2], prompt_token_ids=[7, 1]), event("", [3], "length"), b"data: [DONE]\n\n"]
            first = [] if asked["prompt"] == [7, 1] else [event("a", [1], prompt_token_ids=[7])]
            writer.write(STREAM + chunk(b"".join(first + rest)) + b"0\r\n\r\n")

    harness.engine.script = script
    reader, writer = await harness.connect()
    writer.write(stream_request(stream=stream, return_token_ids=True, max_tokens=3))
    async with asyncio.timeout(DEADLINE_S):
        answer = await reader.readuntil(b"[DONE]" if stream else b"}}")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n"), answer
    assert [token for token in (1, 2, 3) if answer.count(b'"token_ids":[%d]' % token) == 1] == [1, 2, 3] or (
        b'"token_ids": [1, 2, 3]' in answer
    ), answer
    assert len(harness.engine.bodies) == 2
    writer.close()


async def test_broken_idle_connection_is_retried_and_answers_once(harness: Harness) -> None:
    """The engine reads the second request and closes the connection, so it may have begun. The retry has the same id,
    and one answer is delivered."""

    async def script(engine: ScriptedEngine, body: bytes, writer: asyncio.StreamWriter) -> None:
        if len(engine.bodies) == 2:
            writer.close()
        else:
            writer.write(WHOLE)

    harness.engine.script = script
    for number in range(2):
        status, answer = await harness.post({"prompt": "x", "max_tokens": 3}, **{"X-Request-Id": f"r{number}"})
        assert status == 200
        assert answer["choices"][0]["text"] == "ab"
        assert answer["usage"]["completion_tokens"] == 3
    assert len(harness.engine.bodies) == 3
    ids = [line for head in harness.engine.heads for line in head.split(b"\r\n") if line.startswith(b"X-Request-Id")]
    assert ids[1] == ids[2] != ids[0]


# --- a client that reads slowly, with any buffer sizes ---


class OnePieceDoor:
    """A connection that is full after every piece until a writer waits for it."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.writable = True
        self.answered = False
        self.on_writable: Callable[[], None] | None = None

    def piece(self, data: bytes, *, last: bool = False) -> None:
        assert self.writable or last
        self.answered, self.writable = True, self.writable and last
        self.pieces.append(data)

    async def drain(self) -> None:
        if not self.writable:
            await asyncio.sleep(0)
            self.writable = True
            if self.on_writable is not None:
                self.on_writable()


@pytest.mark.parametrize("answers", [1, 3])
async def test_slow_reader_receives_complete_answers(answers: int) -> None:
    clock = WallClock()
    engine = FakeEngine()
    fleet = EngineBackends(lambda url: engine, clock=clock)
    gateway = Gateway(NodeId("gateway"), fleet, limits=RelayLimits())
    gateway.set_routes([EngineRoute(EngineId("e0"), "fake")])
    server = GatewayServer(gateway)
    body = {
        "prompt": [1, 2, 3],
        "max_tokens": 20,
        "min_tokens": 20,
        "n": answers,
        "stream": True,
        "return_token_ids": True,
    }
    headers = (("X-Request-Id", "r"), ("Content-Length", "1"))
    asked = HttpRequest("POST", PATH, headers, json.dumps(body).encode())
    job = server._job(CompletionEndpoint.COMPLETIONS, asked)
    connection = OnePieceDoor()
    streaming = asyncio.create_task(_stream(connection, job))  # type: ignore[arg-type]
    async with asyncio.timeout(DEADLINE_S):
        while not streaming.done():
            engine.step()
            await asyncio.sleep(0.001)
    await streaming
    found: dict[int, list[int]] = {}
    for line in b"".join(connection.pieces).split(b"\n\n"):
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                found.setdefault(choice["index"], []).extend(choice.get("token_ids") or [])
    assert {index: len(ids) for index, ids in found.items()} == dict.fromkeys(range(answers), 20)
    assert connection.pieces[-1].endswith(b"data: [DONE]\n\n")
    await fleet.close()
