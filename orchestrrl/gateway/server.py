"""The gateway's HTTP face: OpenAI's endpoints, and two of our own to look at the ledger and to move requests."""

import asyncio
import json
import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from orchestrrl import __version__
from orchestrrl.engines.base import Endpoint
from orchestrrl.gateway.ask import BadAsk, read_ask
from orchestrrl.gateway.core import Gateway, Job
from orchestrrl.gateway.door import Door, Head, House
from orchestrrl.gateway.gate_http import GateFace
from orchestrrl.gateway.ledger import DuplicateRequest, Failure, Record
from orchestrrl.gateway.metrics import GatewayCollector
from orchestrrl.gateway.openai import DONE, ChunkWriter, error_body, event, response, usage_chunk
from orchestrrl.operations import ItemResult, MoveMethod, RequestMove
from planner.model import EngineId, RequestId

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 1024 * 1024
DRAIN_POLL_S = 0.05
# aiohttp's own patience with what it serves when it ends; drain() has been patient before.
END_WITHIN_S = 1.0

Elsewhere = Callable[[RequestId, EngineId], Awaitable[ItemResult]]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def error_response(failure: Failure, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response(failure.error, status=failure.status, headers=headers)


def failure_of(message: str, status: int, param: str | None = None) -> Failure:
    return Failure(status, error_body(message, status, param))


def our_error(message: str, status: int, param: str | None = None) -> web.Response:
    return error_response(failure_of(message, status, param))


def _refuse(door: Door, failure: Failure) -> None:
    door.whole(failure.status, json.dumps(failure.error).encode())


@web.middleware
async def openai_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """What aiohttp itself refuses (no such path, body too large) as OpenAI error objects too."""
    try:
        return await handler(request)
    except web.HTTPException as refusal:
        if refusal.status < 400:
            raise
        return our_error(f"{request.method} {request.path}: {refusal.reason}", refusal.status)


class Server:
    """Serves one gateway. Call `start`, then `drain` and `close`. `plain`: by aiohttp alone, without the door."""

    def __init__(self, gateway: Gateway, *, plain: bool = False) -> None:
        self._gateway = gateway
        self._plain = plain
        self._draining = False
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(GatewayCollector(gateway))
        self._runner: web.AppRunner | None = None
        self._house: House | None = None
        self._servers: list[asyncio.Server] = []
        self.elsewhere: Elsewhere | None = None  # has a request moved that another gateway holds
        self.gate = GateFace(gateway)
        self.app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[openai_errors])
        self.app.add_routes(
            [
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chat),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.get("/version", self._version),
                web.get("/orchestrrl/requests", self._requests),
                web.post("/orchestrrl/move", self._move),
                *self.gate.routes(),
            ]
        )

    async def start(self, host: str, port: int) -> str:
        """Listen; returns the URL, with the port that was chosen where 0 was asked for."""
        # A client that leaves ends its handler, which stops its request on the engine.
        self._runner = web.AppRunner(
            self.app, handler_cancellation=True, access_log=None, shutdown_timeout=END_WITHIN_S
        )
        await self._runner.setup()
        assert self._runner.server is not None
        self._house = House(self._usual, self._runner.server)
        bound_port = await self.listen(host, port)
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{bound_port}"

    async def listen(self, host: str, port: int, *, shared: bool = False) -> int:
        """Listen on one more port. `shared`: other processes may listen on it, too."""
        assert self._house is not None
        loop = asyncio.get_running_loop()
        connected = self._house.general if self._plain else self._house.door
        server = await loop.create_server(connected, host, port, backlog=4096, reuse_port=shared or None)
        self._servers.append(server)
        bound_port: int = server.sockets[0].getsockname()[1]
        return bound_port

    async def drain(self, limit_s: float) -> int:
        """Take nothing new and wait for what runs, up to `limit_s`. Returns how many requests are left."""
        self._draining = True
        deadline_s = self._gateway.clock.now_s() + limit_s
        while self._busy() and self._gateway.clock.now_s() < deadline_s:
            await self._gateway.clock.sleep(DRAIN_POLL_S)
        return len(self._gateway.ledger)

    def _busy(self) -> bool:
        """A request runs, or its answer is still being written."""
        return len(self._gateway.ledger) > 0 or (self._house is not None and self._house.busy)

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        if self._house is not None:
            await self._house.close()
        if self._runner is not None:
            await self._runner.cleanup()

    # --- OpenAI ------------------------------------------------------------------------------------------------------

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, Endpoint.COMPLETIONS)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, Endpoint.CHAT)

    async def _usual(self, head: Head, body: bytes, door: Door) -> None:
        """A usual request, answered at its door."""
        job = self._job(head.endpoint, body, head.request_id, head.group, head.tag)
        if isinstance(job, Failure):
            _refuse(door, job)
            return
        try:
            if job.ask.streaming:
                await _stream_at(door, job)
                return
            await job.run()
        except DuplicateRequest as fault:
            _refuse(door, failure_of(str(fault), 409))
            return
        if job.failure is not None:
            _refuse(door, job.failure)
        else:
            door.whole(200, json.dumps(_whole(job)).encode())

    async def _answer(self, request: web.Request, endpoint: Endpoint) -> web.StreamResponse:
        """A request that is unusual for its HTTP."""
        labels = (request.headers.get(name, "") for name in ("X-Request-Id", "X-Group-Id", "X-Tag"))
        job = self._job(endpoint, await request.read(), *labels)
        if isinstance(job, Failure):
            return error_response(job)
        held = False
        try:
            async with job:
                held = True
                if job.ask.streaming:
                    return await self._stream(request, job)
                await job.finished()
                return error_response(job.failure) if job.failure is not None else web.json_response(_whole(job))
        except DuplicateRequest as fault:
            return our_error(str(fault), 409)
        finally:
            # aiohttp may cancel this a second time while it tidies up: no record stays in the ledger for that.
            if held:
                job.close()

    def _job(self, endpoint: Endpoint, text: bytes, request_id: str, group: str, tag: str) -> Job | Failure:
        """What is asked, or why it is refused."""
        if self._draining:
            return failure_of("the gateway is shutting down", 503)
        try:
            body = json.loads(text)
        except (ValueError, RecursionError) as error:
            return failure_of(f"the body is not JSON: {error}", 400)
        name = request_id or str((body.get("request_id") if isinstance(body, dict) else None) or "")
        try:
            ask = read_ask(
                endpoint,
                body,
                request_id=name or uuid.uuid4().hex,
                group=group,
                tag=tag,
                default_model=self._gateway.default_model(),
                now_s=self._gateway.clock.now_s(),
                max_version_lag=self._gateway.limits.max_version_lag,
                on_stale=self._gateway.limits.on_stale,
            )
        except BadAsk as fault:
            return failure_of(str(fault), 400, fault.param)
        return self._gateway.job(ask, body if name else None)

    async def _stream(self, request: web.Request, job: Job) -> web.StreamResponse:
        """Server-sent events. Headers wait for the first token, so that an engine's refusal keeps its status."""
        while not job.done and not any(record.generated_ids for record in job.records):
            await job.progress()
        if job.failure is not None:
            return error_response(job.failure)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await answer.prepare(request)
        writers = [ChunkWriter(job.ask.form, index, record) for index, record in enumerate(job.records)]
        open_answers = list(zip(job.records, writers, strict=True))
        while open_answers and job.failure is None:
            data = b"".join(_news(record, writer) for record, writer in open_answers)
            open_answers = [(record, writer) for record, writer in open_answers if record.finish_reason is None]
            if data:
                await answer.write(data)
            elif open_answers:
                await job.progress()
        await answer.write(_closing(job))
        await answer.write_eof()
        return answer

    async def _models(self, request: web.Request) -> web.Response:
        models = await self._gateway.models()
        if not models:
            return our_error("no engine has told its models", 503)
        data = [
            {"id": name, "object": "model", "created": 0, "owned_by": "orchestrrl", "max_model_len": longest}
            for name, longest in models.items()
        ]
        return web.json_response({"object": "list", "data": data})

    # --- operation ---------------------------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        """200 while a request would find an engine, or waits for one that is being started."""
        engines, expected = self._gateway.usable_engines(), sorted(self._gateway.fleet.expected)
        status = 200 if (engines or expected) and not self._draining else 503
        told: dict[str, Any] = {"engines": engines, "draining": self._draining}
        if expected:
            told["expected"] = expected
        if self._gateway.store is not None:  # a client that finds it gone may wait for its answer to come back with it
            told["ledger"] = True
        return web.json_response(told, status=status)

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": __version__, "gateway": self._gateway.node})

    async def _metrics(self, request: web.Request) -> web.Response:
        text = generate_latest(self._registry)
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _requests(self, request: web.Request) -> web.Response:
        """The ledger: everything in flight and what ended last. `?id=R` gives the tokens of R too."""
        wanted = request.query.get("id")
        now_s = self._gateway.clock.now_s()
        if wanted is not None:
            record = self._gateway.ledger.get(RequestId(wanted))
            if record is None:
                return our_error(f"request {wanted!r} is not in flight", 404)
            return web.json_response(_shown(record, now_s, tokens=True))
        finished = [
            {
                "id": summary.id,
                "engine": summary.engine,
                "prompt_tokens": summary.prompt_tokens,
                "generated_tokens": summary.generated_tokens,
                "finish_reason": summary.finish_reason,
                "moves": summary.moves,
                "tag": summary.tag,
                "duration_s": summary.duration_s,
            }
            for summary in self._gateway.ledger.finished
        ]
        in_flight = [_shown(record, now_s, tokens=False) for record in self._gateway.ledger]
        return web.json_response({"in_flight": in_flight, "finished": finished})

    async def _move(self, request: web.Request) -> web.Response:
        """Body: `{"moves": [{"request_id", "to_engine_id", "from_engine_id", "method" (optional)}]}`."""
        try:
            moves = self._read_moves(json.loads(await request.read()))
        except ValueError as error:
            return our_error(str(error), 400)
        results = await asyncio.gather(*(self._carry_out(move) for move in moves))
        items = [
            {
                "id": item.id,
                "done": item.done,
                "detail": item.detail,
                "recomputed_tokens": item.recomputed_tokens,
                "duration_s": item.duration_s,
                "method": item.method,
                "loaded_tokens": item.loaded_tokens,
            }
            for item in results
        ]
        return web.json_response({"items": items})

    async def _carry_out(self, move: RequestMove) -> ItemResult:
        if self.elsewhere is not None and not self._gateway.knows(move.request):
            return await self.elsewhere(move.request, move.to_engine)
        (result,) = await self._gateway.move((move,))
        return result

    def _read_moves(self, body: Any) -> list[RequestMove]:
        """Raises ValueError. Without `from_engine_id`: from wherever the request is."""
        items = body.get("moves") if isinstance(body, dict) else None
        if not isinstance(items, list):
            raise ValueError("moves: must be a list of moves")
        moves = []
        for index, item in enumerate(items):
            for name in ("request_id", "to_engine_id"):
                if not isinstance(item, dict) or not isinstance(item.get(name), str):
                    raise ValueError(f"moves[{index}].{name}: must be text")
            record = self._gateway.ledger.get(RequestId(item["request_id"]))
            source = item.get("from_engine_id") or (record.engine if record is not None else None) or ""
            method = item.get("method", MoveMethod.RECOMPUTE)
            if method not in list(MoveMethod):
                raise ValueError(f"moves[{index}].method: must be one of {', '.join(MoveMethod)}, got {method!r}")
            ids = RequestId(item["request_id"]), EngineId(source), EngineId(item["to_engine_id"])
            moves.append(RequestMove(*ids, method=MoveMethod(method)))
        return moves


def _whole(job: Job) -> dict[str, Any]:
    return response(job.ask.form, job.records, job.ask.answers_per_prompt)


async def _stream_at(door: Door, job: Job) -> None:
    """Server-sent events, written as the tokens come. What a slow client has not read waits in the records."""
    indices = {record.id: index for index, record in enumerate(job.records)}
    writers: dict[RequestId, ChunkWriter] = {}  # made once the answer's time is known
    ended: set[RequestId] = set()

    def write(record: Record) -> None:
        # Nothing is written before the first token, so that an engine's refusal keeps its status.
        if not door.writable or record.id in ended or record.failure is not None:
            return
        if record.id not in writers:
            writers[record.id] = ChunkWriter(job.ask.form, indices[record.id], record)
        data = _news(record, writers[record.id])
        if record.finish_reason is not None:
            ended.add(record.id)
        if data:
            door.piece(data)

    def write_all() -> None:
        for record in job.records:
            write(record)

    door.on_writable = write_all
    await job.run(write)
    for record in job.records:
        while not door.writable:
            await door.drain()
        write(record)
    if job.failure is not None and not door.answered:
        _refuse(door, job.failure)
    else:
        door.last_piece(_closing(job))


def _news(record: Record, writer: ChunkWriter) -> bytes:
    deltas = record.take_undelivered()
    ended = record.finish_reason is not None
    return writer.chunks(deltas, last=ended) if deltas or ended else b""


def _closing(job: Job) -> bytes:
    if job.failure is not None:
        return event(job.failure.error) + DONE
    form = job.ask.form
    return (usage_chunk(form, job.records, job.ask.answers_per_prompt) if form.usage else b"") + DONE


def _shown(record: Record, now_s: float, *, tokens: bool) -> dict[str, Any]:
    view = record.view(now_s)
    shown: dict[str, Any] = {
        "id": view.id,
        "engine": view.engine,
        "attempt": record.attempt,
        "endpoint": record.endpoint,
        "state": view.state,
        "prompt_tokens": view.prompt_tokens,
        "generated_tokens": view.generated_tokens,
        "max_tokens": view.max_tokens,
        "group": view.group,
        "tag": view.tag,
        "movable": view.movable,
        "movable_detail": view.movable_detail,
        "moves": view.moves,
        "age_s": view.age_s,
        "first_token_after_s": None if record.started_s is None else record.started_s - record.arrived_s,
    }
    if tokens:
        shown["prompt_token_ids"] = None if record.prompt_ids is None else list(record.prompt_ids)
        shown["token_ids"] = list(record.generated_ids)
        shown["text"] = record.text
    return shown
