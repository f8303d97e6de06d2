"""A gateway with one scripted engine, and its captured log."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from orchestrrl.core.clock import WallClock
from orchestrrl.core.operations import EngineRoute
from orchestrrl.engines.vllm import VllmEngine
from orchestrrl.gateway.core import Gateway
from orchestrrl.gateway.http.server import OPERATOR_PREFIX, GatewayServer
from orchestrrl.gateway.ledger.store import LedgerStore
from orchestrrl.gateway.relay import RelayLimits
from orchestrrl.gateway.routing.backends import EngineBackends
from planner.model import EngineId, NodeId

DEADLINE_S = 120.0
PATH = "/v1/completions"
CHAT_PATH = "/v1/chat/completions"
SANE = {"prompt": "sane", "max_tokens": 3}


@dataclass
class Asked:
    """A request as received by the engine."""

    headers: list[tuple[str, str]]
    body: dict[str, Any]

    def values(self, name: str) -> list[str]:
        return [value for other, value in self.headers if other.lower() == name.lower()]


@dataclass
class UpstreamEngine:
    """An engine that answers with three tokens, streamed or whole as requested. `choice_fields` and `answer_fields` are
    added to each event, to the last one, or to whole answers only."""

    choice_fields: dict[str, Any] = field(default_factory=dict)
    answer_fields: dict[str, Any] = field(default_factory=dict)
    placed: str = "each"  # each, last or whole
    refuses: Callable[[dict[str, Any]], web.Response | None] = lambda body: None
    hold_after: int | None = None  # tokens of a stream before it waits for release; a whole answer waits at the start
    released: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[Asked] = field(default_factory=list)
    url: str = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(Asked(list(request.headers.items()), body))
        if (refusal := self.refuses(body)) is not None:
            return refusal
        chat = request.path == CHAT_PATH
        prompt = body.get("prompt")
        prompt_ids = prompt if isinstance(prompt, list) else [7, 8]
        tokens = max(1, min(3, body.get("max_tokens") or 3))
        if not body.get("stream"):
            if self.hold_after is not None:
                await self.released.wait()
            return web.json_response(self._whole(body, chat, prompt_ids, tokens))
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for number in range(1, tokens + 1):
            await answer.write(b"data: " + json.dumps(self._event(chat, prompt_ids, number, tokens)).encode() + b"\n\n")
            if number == self.hold_after:
                await self.released.wait()
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = {"choices": [], "usage": usage_of(len(prompt_ids), tokens)}
            await answer.write(b"data: " + json.dumps(usage).encode() + b"\n\n")
        await answer.write(b"data: [DONE]\n\n")
        await answer.write_eof()
        return answer

    def _event(self, chat: bool, prompt_ids: list[int], number: int, tokens: int) -> dict[str, Any]:
        last = number == tokens
        has_fields = self.placed == "each" or (self.placed == "last" and last)
        text = "abc"[number - 1]
        choice: dict[str, Any] = {"index": 0, **({"delta": {"content": text}} if chat else {"text": text})}
        choice |= {"token_ids": [number], "finish_reason": "length" if last else None}
        event: dict[str, Any] = {"id": "theirs", "object": "o", "created": 1, "model": "m", "choices": [choice]}
        if number == 1:
            (event if chat else choice)["prompt_token_ids"] = prompt_ids
        if has_fields:
            choice |= self.choice_fields
            event |= self.answer_fields
        return event

    def _whole(self, body: dict[str, Any], chat: bool, prompt_ids: list[int], tokens: int) -> dict[str, Any]:
        text = "abc"[:tokens]
        if body.get("echo"):
            text = f"{body.get('prompt')}{text}"
        message: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        choice = {"index": 0, **message, "finish_reason": "length", "stop_reason": None, **self.choice_fields}
        answer = {"id": "theirs", "object": "o", "created": 1, "model": "m", "choices": [choice]}
        return {**answer, "usage": usage_of(len(prompt_ids), tokens), **self.answer_fields}


async def _healthy(_: web.Request) -> web.Response:
    return web.Response()


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


class LogLines(logging.Handler):
    """A handler that stores each log record of the gateway as formatted lines."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != "upstream":
            self.records.append(self.format(record))

    def take(self) -> list[str]:
        taken, self.records = self.records, []
        return taken


@dataclass
class HttpHarness:
    port: int
    engines: list[UpstreamEngine]
    gateway: Gateway
    server: GatewayServer
    log: LogLines
    operator_port: int

    @property
    def engine(self) -> UpstreamEngine:
        return self.engines[0]

    @property
    def tries(self) -> int:
        return sum(len(engine.asked) for engine in self.engines)

    async def send(self, data: bytes, *, pieces: int = 1, patience_s: float = DEADLINE_S) -> tuple[int, bytes]:
        """Send the data and return the status and body of the first answer. The status is 0 if the connection was
        closed without an answer, or none arrived in time. Requests of the operator API go to its own port."""
        port = self.operator_port if OPERATOR_PREFIX.encode() in data.partition(b"\r\n")[0] else self.port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            async with asyncio.timeout(DEADLINE_S):
                size = max(1, -(-len(data) // pieces))
                try:
                    for start in range(0, len(data), size):
                        writer.write(data[start : start + size])
                        await writer.drain()
                except ConnectionError:
                    pass  # it was answered before it was complete
                try:
                    async with asyncio.timeout(patience_s):
                        return await _read_answer(reader)
                except (ConnectionError, asyncio.IncompleteReadError, TimeoutError):
                    return 0, b""
        finally:
            writer.close()

    async def post(self, body: Any, path: str = PATH, headers: bytes = b"") -> tuple[int, Any]:
        status, answer = await self.send(request(json.dumps(body).encode(), path=path.encode(), headers=headers))
        return status, json.loads(answer)

    async def stream(self, body: Any, path: str = PATH, headers: bytes = b"") -> list[dict[str, Any]]:
        data = request(json.dumps({**body, "stream": True}).encode(), path=path.encode(), headers=headers)
        status, answer = await self.send(data)
        assert status == 200, answer
        events = [line[len(b"data: ") :] for line in answer.split(b"\n\n") if line.startswith(b"data: ")]
        assert events[-1] == b"[DONE]"
        return [json.loads(event) for event in events[:-1]]


async def _read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    status = int(head.split(b" ")[1])
    if status == 100:
        return await _read_answer(reader)
    lines = head.lower().split(b"\r\n")
    if b"transfer-encoding: chunked" in lines:
        body = b""
        while size := int((await reader.readuntil(b"\r\n")).strip(), 16):
            body += await reader.readexactly(size)
            await reader.readexactly(2)
        return status, body
    length = next((int(line.partition(b":")[2]) for line in lines if line.startswith(b"content-length:")), 0)
    return status, await reader.readexactly(length)


def request(
    body: bytes,
    *,
    path: bytes = PATH.encode(),
    headers: bytes = b"",
    length: int | None = None,
    method: bytes = b"POST",
) -> bytes:
    stated_bytes = len(body) if length is None else length
    return b"%b %b HTTP/1.1\r\nHost: h\r\n%bContent-Length: %d\r\n\r\n%b" % (method, path, headers, stated_bytes, body)


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])


@asynccontextmanager
async def http_harness(*, engines: int = 1, store: LedgerStore | None = None) -> AsyncIterator[HttpHarness]:
    upstream, runners = [], []
    for _ in range(engines):
        engine = UpstreamEngine()
        application = web.Application(client_max_size=1 << 30)
        application.router.add_post(PATH, engine.answer)
        application.router.add_post(CHAT_PATH, engine.answer)
        application.router.add_get("/health", _healthy)
        own_log = logging.getLogger("upstream")
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1, logger=own_log)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        upstream.append(engine)
        runners.append(runner)
    log = LogLines()
    logging.getLogger().addHandler(log)
    clock = WallClock()
    fleet = EngineBackends(VllmEngine, clock=clock)
    gateway = Gateway(NodeId("gateway"), fleet, limits=RelayLimits(engine_wait_s=5.0))
    gateway.store = store
    gateway.set_routes([EngineRoute(EngineId(f"e{index}"), engine.url) for index, engine in enumerate(upstream)])
    server = GatewayServer(gateway)
    url, operator_url = await server.start("127.0.0.1", 0), await server.start_operator("127.0.0.1", 0)
    try:
        yield HttpHarness(_port(url), upstream, gateway, server, log, _port(operator_url))
    finally:
        logging.getLogger().removeHandler(log)
        await server.close()
        await fleet.close()
        for runner in runners:
            await runner.cleanup()
