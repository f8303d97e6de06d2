"""The gateway's two HTTP listeners: OpenAI's endpoints for trainers, and the operator API.

The operator API shows every request's text, moves and cancels requests and closes the pause barrier, so trainers'
clients do not reach it at their port, and it stays on loopback unless it is told otherwise.
"""

import asyncio
import json
import logging
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import CollectorRegistry, generate_latest

from orchestrrl import __version__
from orchestrrl.core.errors import cut, shorten
from orchestrrl.core.operations import OperationItemResult
from orchestrrl.engines.base import CompletionEndpoint
from orchestrrl.gateway.core import Gateway, RequestGroup
from orchestrrl.gateway.http.completion_requests import read_completion_request
from orchestrrl.gateway.http.connections import HttpConnection, HttpServer, RequestHead
from orchestrrl.gateway.http.faults import (
    MOST_BODY_BYTES,
    FaultReportingHandler,
    error_answer,
    expected,
    log_refusal,
    read_body,
)
from orchestrrl.gateway.http.field_types import HttpRefusal, read_json
from orchestrrl.gateway.http.headers import end_to_end
from orchestrrl.gateway.http.pause import PauseEndpoints
from orchestrrl.gateway.http.responses import DONE, ChunkWriter, error_body, event, response, usage_chunk
from orchestrrl.gateway.ledger.ledger import RequestFailure, RequestRecord
from orchestrrl.gateway.metrics import GatewayCollector
from planner.model import EngineId, MoveMethod, RequestId, RequestMove

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = MOST_BODY_BYTES
DRAIN_POLL_S = 0.05
# aiohttp's own patience with what it serves when it ends; drain() has been patient before.
END_WITHIN_S = 1.0

ENDPOINTS = {"/v1/completions": CompletionEndpoint.COMPLETIONS, "/v1/chat/completions": CompletionEndpoint.CHAT}
OPERATOR_PREFIX = "/orchestrrl/"
WILDCARDS = ("0.0.0.0", "::")

# What the operator API shows of a request in flight, of one that has ended, and of a move.
_RECORD_FIELDS = ("id", "engine", "attempt", "endpoint", "state", "prompt_tokens", "generated_tokens", "max_tokens")
_VIEW_FIELDS = ("group", "tag", "movable", "movable_detail", "moves", "age_s")
_FINISHED_FIELDS = ("id", "engine", "prompt_tokens", "generated_tokens", "finish_reason", "moves", "tag", "duration_s")
_MOVE_FIELDS = ("id", "done", "detail", "recomputed_tokens", "duration_s", "method", "loaded_tokens")

Elsewhere = Callable[[RequestId, EngineId], Awaitable[OperationItemResult]]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def failure_of(message: str, status: int, param: str | None = None) -> RequestFailure:
    return RequestFailure(status, error_body(message, status, param))


def _refuse(connection: HttpConnection, failure: RequestFailure) -> None:
    _log_fault("a request", connection.peer, failure)
    connection.whole(failure.status, json.dumps(failure.error).encode())


def _log_fault(asked: str, peer: object, failure: RequestFailure) -> None:
    """Log a client's fault in one line; other failures are logged where they happen."""
    if failure.status < 500:
        error = failure.error.get("error")
        log_refusal(asked, peer, failure.status, str(error.get("message") if isinstance(error, Mapping) else error))


async def _set_up(app: web.Application) -> web.AppRunner:
    # A client that leaves ends its handler, which stops its request on the engine.
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=END_WITHIN_S)
    await runner.setup()
    return runner


def _connection(runner: web.AppRunner) -> FaultReportingHandler:
    """Return a connection for aiohttp to serve. `read_body` decompresses, and reports what it cannot decompress."""
    assert runner.server is not None
    options: dict[str, Any] = {"access_log": None, "auto_decompress": False}
    return FaultReportingHandler(runner.server, loop=asyncio.get_running_loop(), **options)


@web.middleware
async def openai_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """What aiohttp itself refuses (no such path, body too large) as OpenAI error objects too."""
    asked = f"{request.method} {cut(request.path, 100)}"
    headers: Mapping[str, str] = {}
    torn = False
    try:
        return await handler(request)
    except web.HTTPException as refusal:
        if refusal.status < 400:
            raise
        failure = failure_of(f"{asked}: {refusal.reason}", refusal.status)
        headers = {name: value for name, value in refusal.headers.items() if name == "Allow"}
    except HttpRefusal as refusal:
        failure, headers = failure_of(str(refusal), refusal.status, refusal.param), refusal.headers
    except (HttpProcessingError, web.RequestPayloadError) as error:
        torn = True  # where the next request would begin is not known
        failure = failure_of(f"the body does not match its head: {cut(' '.join(str(error).split()), 100)}", 400)
    _log_fault(asked, request.remote, failure)
    answer = web.json_response(failure.error, status=failure.status, headers=headers)
    if torn:
        answer.force_close()
    return answer


class GatewayServer:
    """Serves one gateway. Call `start` and `start_operator`, then `drain` and `close`. `plain`: by aiohttp alone,
    without the door."""

    def __init__(
        self,
        gateway: Gateway,
        *,
        plain: bool = False,
        barrier: PauseEndpoints | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        """`elsewhere` has a request moved that another gateway holds."""
        self._gateway = gateway
        self._plain = plain
        self._draining = False
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(GatewayCollector(gateway))
        self._runner: web.AppRunner | None = None
        self._server: HttpServer | None = None
        self._servers: list[asyncio.Server] = []
        self._operator_runner: web.AppRunner | None = None
        self._operator_at: tuple[str, int] | None = None  # host and port; None: the operator API is not served
        self._elsewhere = elsewhere
        barrier = barrier or PauseEndpoints(gateway)
        # Nothing of a single request is in these: both listeners have them.
        common = [
            web.get("/health", self._health),
            web.get("/metrics", self._metrics),
            web.get("/version", self._version),
        ]
        self.app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[openai_errors])
        self.app.add_routes(
            [
                *(web.post(path, partial(self._answer, of), expect_handler=expected) for path, of in ENDPOINTS.items()),
                web.get("/v1/models", self._models),
                web.route("*", f"{OPERATOR_PREFIX}{{path:.*}}", self._operator_elsewhere),
                *common,
            ]
        )
        self.operator_app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[openai_errors])
        self.operator_app.add_routes(
            [
                web.get(f"{OPERATOR_PREFIX}requests", self._requests),
                web.post(f"{OPERATOR_PREFIX}move", self._move),
                *barrier.routes(),
                *common,
            ]
        )

    async def start(self, host: str, port: int) -> str:
        """Listen for trainers; returns the URL, with the port that was chosen where 0 was asked for."""
        self._runner = await _set_up(self.app)
        self._server = HttpServer(self._usual, partial(_connection, self._runner))
        bound_port = await self.listen(host, port)
        return url_of(host, bound_port)

    async def start_operator(self, host: str, port: int) -> str:
        """Serve the operator API; returns its URL, as `start` does."""
        self._operator_runner = await _set_up(self.operator_app)
        self._operator_at = host, await self._serve(partial(_connection, self._operator_runner), host, port)
        return url_of(*self._operator_at)

    async def listen(self, host: str, port: int, *, shared: bool = False) -> int:
        """Listen on one more port. `shared`: other processes may listen on it, too."""
        assert self._server is not None
        return await self._serve(
            self._server.general if self._plain else self._server.connection, host, port, shared=shared
        )

    async def _serve(
        self, connected: Callable[[], asyncio.BaseProtocol], host: str, port: int, *, shared: bool = False
    ) -> int:
        loop = asyncio.get_running_loop()
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
        return len(self._gateway.ledger) > 0 or (self._server is not None and self._server.busy)

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        if self._server is not None:
            await self._server.close()
        for runner in (self._runner, self._operator_runner):
            if runner is not None:
                await runner.cleanup()

    # --- OpenAI ------------------------------------------------------------------------------------------------------

    async def _usual(self, head: RequestHead, body: bytes, connection: HttpConnection) -> None:
        """A usual request, answered at its door."""
        try:
            job = self._job(head, body)
            if job.request.streaming:
                await _stream_at(connection, job)
                return
            await job.run()
        except HttpRefusal as refusal:
            _refuse(connection, failure_of(str(refusal), refusal.status, refusal.param))
            return
        if job.failure is not None:
            _refuse(connection, job.failure)
        else:
            connection.whole(200, json.dumps(_whole(job)).encode())

    async def _answer(self, endpoint: CompletionEndpoint, request: web.Request) -> web.StreamResponse:
        """A request that is unusual for its HTTP."""
        request_id, group, tag = (request.headers.get(name, "") for name in ("X-Request-Id", "X-Group-Id", "X-Tag"))
        body = await read_body(request)
        head = RequestHead(endpoint, request_id, group, tag, len(body), end_to_end(request.headers.items()))
        job = self._job(head, body)
        held = False
        try:
            async with job:
                held = True
                if job.request.streaming:
                    return await self._stream(request, job)
                await job.finished()
                return _refused(request, job.failure) if job.failure is not None else web.json_response(_whole(job))
        finally:
            # aiohttp may cancel this a second time while it tidies up: no record stays in the ledger for that.
            if held:
                job.close()

    def _job(self, head: RequestHead, text: bytes) -> RequestGroup:
        """Return the requests that the body asks for. Raises HttpRefusal."""
        if self._draining:
            raise HttpRefusal("the gateway is shutting down", status=503)
        body = read_json(text)
        name = head.request_id or str((body.get("request_id") if isinstance(body, dict) else None) or "")
        ask = read_completion_request(
            head.endpoint,
            body,
            request_id=name or uuid.uuid4().hex,
            group=head.group,
            tag=head.tag,
            default_model=self._gateway.default_model(),
            now_s=self._gateway.clock.now_s(),
            headers=head.headers,
            max_version_lag=self._gateway.limits.max_version_lag,
            on_stale=self._gateway.limits.on_stale,
        )
        return self._gateway.request_group(ask, _named(body, head.headers) if name else None)

    async def _stream(self, request: web.Request, job: RequestGroup) -> web.StreamResponse:
        """Server-sent events. Headers wait for the first token, so that an engine's refusal keeps its status."""
        while not job.done and all(record.started_s is None for record in job.records):
            await job.progress()
        if job.failure is not None:
            return _refused(request, job.failure)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await answer.prepare(request)
        writers = [ChunkWriter(job.request.form, index, record) for index, record in enumerate(job.records)]
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
            return error_answer("no engine has told its models", 503)
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
        told = {"version": __version__, "gateway": self._gateway.node}
        if (url := self._operator_url(request)) is not None:
            told["operator_url"] = url
        return web.json_response(told)

    def _operator_url(self, request: web.Request) -> str | None:
        """Where the client finds the operator API; None where it is not served."""
        if self._operator_at is None:
            return None
        host, port = self._operator_at
        if host in WILDCARDS:
            with suppress(ValueError):  # a Host header that names none
                host = request.url.host or host
        return url_of(host, port)

    async def _operator_elsewhere(self, request: web.Request) -> web.Response:
        """The trainers' port has no operator API, and says where it is."""
        url = self._operator_url(request)
        where = "is not served" if url is None else f"is at {url}"
        return error_answer(f"{request.method} {request.path}: Not Found; the operator API {where}", 404)

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
                return error_answer(f"request {wanted!r} is not in flight", 404)
            return web.json_response(_shown(record, now_s, tokens=True))
        finished = [_fields(summary, _FINISHED_FIELDS) for summary in self._gateway.ledger.finished]
        in_flight = [_shown(record, now_s, tokens=False) for record in self._gateway.ledger]
        return web.json_response({"in_flight": in_flight, "finished": finished})

    async def _move(self, request: web.Request) -> web.Response:
        """Body: `{"moves": [{"request_id", "to_engine_id", "from_engine_id", "method" (optional)}]}`."""
        moves = self._read_moves(read_json(await read_body(request)))
        results = await asyncio.gather(*(self._carry_out(move) for move in moves))
        return web.json_response({"items": [_fields(result, _MOVE_FIELDS) for result in results]})

    async def _carry_out(self, move: RequestMove) -> OperationItemResult:
        if self._elsewhere is not None and not self._gateway.has_request(move.request):
            return await self._elsewhere(move.request, move.to_engine)
        (result,) = await self._gateway.move((move,))
        return result

    def _read_moves(self, body: Any) -> list[RequestMove]:
        """Raises HttpRefusal. Without `from_engine_id`, a request moves from the engine that it is on."""
        items = body.get("moves") if isinstance(body, dict) else None
        if not isinstance(items, list):
            raise HttpRefusal("moves: must be a list of moves")
        moves = []
        for index, item in enumerate(items):
            for name in ("request_id", "to_engine_id"):
                if not isinstance(item, dict) or not isinstance(item.get(name), str):
                    got = shorten(item.get(name) if isinstance(item, dict) else item)
                    raise HttpRefusal(f"moves[{index}].{name}: must be text, got {got}")
            if not isinstance(item.get("from_engine_id"), str | None):
                got = shorten(item["from_engine_id"])
                raise HttpRefusal(f"moves[{index}].from_engine_id: must be text, got {got}")
            record = self._gateway.ledger.get(RequestId(item["request_id"]))
            source = item.get("from_engine_id") or (record.engine if record is not None else None) or ""
            method = item.get("method", MoveMethod.RECOMPUTE)
            if method not in list(MoveMethod):
                methods = ", ".join(MoveMethod)
                raise HttpRefusal(f"moves[{index}].method: must be one of {methods}, got {method!r}")
            ids = RequestId(item["request_id"]), EngineId(source), EngineId(item["to_engine_id"])
            moves.append(RequestMove(*ids, method=MoveMethod(method)))
        return moves


def _refused(request: web.Request, failure: RequestFailure) -> web.Response:
    _log_fault(f"{request.method} {request.path}", request.remote, failure)
    return web.json_response(failure.error, status=failure.status)


def _named(body: Mapping[str, Any], headers: Iterable[tuple[str, str]]) -> Mapping[str, Any]:
    """Return what identifies a named request in the ledger: its body and a digest of its credential, so that the answer
    is returned for that credential alone."""
    credentials = [value for name, value in headers if name.lower() == "authorization"]
    if not credentials:
        return body
    return {**body, "Authorization": blake2b("\0".join(credentials).encode(errors="surrogateescape")).hexdigest()}


def _whole(job: RequestGroup) -> dict[str, Any]:
    return response(job.request.form, job.records, job.request.answers_per_prompt)


async def _stream_at(connection: HttpConnection, job: RequestGroup) -> None:
    """Server-sent events, written as the tokens come. What a slow client has not read waits in the records."""
    indices = {record.id: index for index, record in enumerate(job.records)}
    writers: dict[RequestId, ChunkWriter] = {}  # made once the answer's time is known
    ended: set[RequestId] = set()

    def write(record: RequestRecord) -> None:
        # Nothing is written before the first token, so that an engine's refusal keeps its status.
        if not connection.writable or record.id in ended or record.failure is not None:
            return
        if record.id not in writers:
            writers[record.id] = ChunkWriter(job.request.form, indices[record.id], record)
        data = _news(record, writers[record.id])
        if record.finish_reason is not None:
            ended.add(record.id)
        if data:
            connection.piece(data)

    def write_all() -> None:
        for record in job.records:
            write(record)

    connection.on_writable = write_all
    await job.run(write)
    if job.failure is not None and not connection.answered:
        _refuse(connection, job.failure)
        return
    for record in job.records:
        while not connection.writable:
            await connection.drain()
        write(record)
    connection.last_piece(_closing(job))


def _news(record: RequestRecord, writer: ChunkWriter) -> bytes:
    deltas = record.take_undelivered()
    ended = record.finish_reason is not None
    return writer.chunks(deltas, last=ended) if deltas or ended else b""


def _closing(job: RequestGroup) -> bytes:
    if job.failure is not None:
        return event(job.failure.error) + DONE
    form = job.request.form
    return (usage_chunk(form, job.records, job.request.answers_per_prompt) if form.usage else b"") + DONE


def _fields(value: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def _shown(record: RequestRecord, now_s: float, *, tokens: bool) -> dict[str, Any]:
    shown = _fields(record, _RECORD_FIELDS) | _fields(record.view(now_s), _VIEW_FIELDS)
    shown["first_token_after_s"] = None if record.started_s is None else record.started_s - record.arrived_s
    if tokens:
        shown["prompt_token_ids"] = None if record.prompt_ids is None else list(record.prompt_ids)
        shown["token_ids"] = list(record.generated_ids)
        shown["text"] = record.text
    return shown
