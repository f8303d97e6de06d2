"""The gateway's two HTTP listeners: one with OpenAI's endpoints for trainers, and one with the operator API.

The operator API shows every request's text, moves and cancels requests and closes the pause barrier. It therefore has
its own port, and listens on loopback unless configured otherwise.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Annotated, Any
from urllib.parse import parse_qs, unquote, urlsplit

from prometheus_client import CollectorRegistry, generate_latest
from pydantic import BaseModel, ConfigDict, Field

from orchestrrl import __version__
from orchestrrl.core.errors import cut
from orchestrrl.core.operations import OperationItemResult
from orchestrrl.engines.base import PATHS, CompletionEndpoint
from orchestrrl.gateway.core import Gateway, RequestGroup
from orchestrrl.gateway.http.bodies import read_as, read_body
from orchestrrl.gateway.http.completion_requests import read_completion_request
from orchestrrl.gateway.http.connections import HttpAnswer, HttpConnection, HttpRequest, HttpServer, log_refusal
from orchestrrl.gateway.http.engine_answers import HOP_BY_HOP
from orchestrrl.gateway.http.field_types import HttpRefusal, name_set, read_json
from orchestrrl.gateway.http.generate_responses import (
    GenerateChunkWriter,
    GenerateStream,
    generate_response,
    generate_usage_chunk,
)
from orchestrrl.gateway.http.passthrough import Handler, PassThrough
from orchestrrl.gateway.http.pause import PauseEndpoints
from orchestrrl.gateway.http.responses import DONE, ChunkWriter, event, response, usage_chunk
from orchestrrl.gateway.http.vllm_endpoints import path_hint
from orchestrrl.gateway.ledger.ledger import RequestRecord
from orchestrrl.gateway.metrics import GatewayCollector
from orchestrrl.gateway.moves.reseed import RESEED_HEADER
from planner.model import EngineId, MoveMethod, RequestId, RequestMove

DRAIN_POLL_S = 0.05
OPERATORS_WITHIN_S = 1.0  # time for pending operator responses at shutdown

ENDPOINTS = {path: endpoint for endpoint, path in PATHS.items()}
OPERATOR_PREFIX = "/orchestrrl/"
WILDCARDS = ("0.0.0.0", "::")

# The fields that the operator API shows of a request in flight, an ended request, and a move.
_RECORD_FIELDS = ("id", "engine", "attempt", "endpoint", "state", "prompt_tokens", "generated_tokens", "max_tokens")
_SESSION_FIELDS = ("session", "cached_tokens")
_VIEW_FIELDS = ("group", "tag", "movable", "movable_detail", "moves", "age_s")
_FINISHED_FIELDS = ("id", "engine", "prompt_tokens", "generated_tokens", "finish_reason", "moves", "tag", "duration_s")
_MOVE_FIELDS = ("id", "done", "detail", "recomputed_tokens", "duration_s", "method", "loaded_tokens")

# Headers that the gateway sets for each attempt, reads itself, or that describe a body or an answer that it rewrites.
_OWN = name_set(
    """
    accept accept-charset accept-encoding expect host if-match if-modified-since if-none-match if-range
    if-unmodified-since range x-group-id x-request-id x-reseed x-tag
    """
)
KEPT_HERE = HOP_BY_HOP | _OWN

Elsewhere = Callable[[RequestId, EngineId], Awaitable[OperationItemResult]]
Routes = Mapping[tuple[str, str], Handler]  # by path and method


class MoveBody(BaseModel):
    """One requested move. If `from_engine_id` is omitted, the request moves from its current engine."""

    model_config = ConfigDict(strict=True)

    request_id: str
    to_engine_id: str
    from_engine_id: str | None = None
    method: Annotated[MoveMethod, Field(strict=False)] = MoveMethod.RECOMPUTE


class MovesBody(BaseModel):
    """The body of POST /orchestrrl/move."""

    moves: list[MoveBody]


def url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class GatewayServer:
    """The HTTP server of one gateway. Call `start` and `start_operator` to start it, and `drain` and then `close` to
    stop it."""

    def __init__(
        self,
        gateway: Gateway,
        *,
        barrier: PauseEndpoints | None = None,
        elsewhere: Elsewhere | None = None,
        reseed: bool = False,
    ) -> None:
        """Create the server. `elsewhere` is a function that moves a request held by another gateway. It is None if this
        server cannot move such requests. `reseed` allows seeded requests to continue with another seed."""
        self._gateway = gateway
        self._reseed = reseed
        self._draining = False
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(GatewayCollector(gateway))
        self._operator_at: tuple[str, int] | None = None  # host and port; None: the operator API is not served
        self._elsewhere = elsewhere
        self._pass_through = PassThrough(gateway, self._accepted)
        # These show no single request, so both listeners serve them.
        common: dict[tuple[str, str], Handler] = {
            ("/health", "GET"): self._health,
            ("/metrics", "GET"): self._metrics,
            ("/version", "GET"): self._version,
        }
        self.routes: Routes = {
            **{(path, "POST"): partial(self._complete, endpoint) for path, endpoint in ENDPOINTS.items()},
            ("/v1/models", "GET"): self._models,
            **common,
        }
        self.operator_routes: Routes = {
            (f"{OPERATOR_PREFIX}requests", "GET"): self._requests,
            (f"{OPERATOR_PREFIX}move", "POST"): self._move,
            **(barrier or PauseEndpoints(gateway)).routes(),
            **common,
        }
        self.trainers = HttpServer(partial(self._answer, self.routes))
        self._operators = HttpServer(partial(self._answer, self.operator_routes))

    async def start(self, host: str, port: int) -> str:
        """Start the listener for trainers and return its URL. Port 0 selects a free port."""
        return url_of(host, await self.trainers.listen(host, port))

    async def start_operator(self, host: str, port: int) -> str:
        """Start the listener for operators and return its URL. Port 0 selects a free port."""
        self._operator_at = host, await self._operators.listen(host, port)
        return url_of(*self._operator_at)

    async def drain(self, limit_s: float) -> int:
        """Refuse new requests and wait up to `limit_s` seconds for running requests. Returns the number of requests
        that are still running."""
        self._draining = True
        deadline_s = self._gateway.clock.now_s() + limit_s
        # A request still runs, or its response is still being written.
        while (len(self._gateway.ledger) or self.trainers.busy) and self._gateway.clock.now_s() < deadline_s:
            await self._gateway.clock.sleep(DRAIN_POLL_S)
        return len(self._gateway.ledger)

    async def close(self) -> None:
        await self.trainers.close()
        until_s = self._gateway.clock.now_s() + OPERATORS_WITHIN_S
        while self._operators.busy and self._gateway.clock.now_s() < until_s:
            await self._gateway.clock.sleep(DRAIN_POLL_S)
        await self._operators.close()

    async def _answer(self, routes: Routes, request: HttpRequest, connection: HttpConnection) -> None:
        try:
            answer = await self._handler(routes, request)(request, connection)
        except HttpRefusal as refusal:
            log_refusal(_asked(request), connection.peer, refusal.status, str(refusal))
            answer = HttpAnswer.of_refusal(refusal)
        if answer is not None:
            connection.whole(answer)

    def _handler(self, routes: Routes, request: HttpRequest) -> Handler:
        """Return the handler of the request's path and method. Raises HttpRefusal if there is none."""
        method = "GET" if request.method == "HEAD" else request.method
        if (handler := routes.get((request.url, method))) is not None:
            return handler
        path, _ = _target(request)
        if (handler := routes.get((path, method))) is not None:
            return handler
        if routes is self.routes and (handler := self._pass_through.handler(path, request.method)) is not None:
            return handler
        asked = _asked(request)
        if routes is self.routes and path.startswith(OPERATOR_PREFIX):
            url = self._operator_url(request)
            where = "is not served" if url is None else f"is at {url}"
            raise HttpRefusal(f"{asked}: Not Found; the operator API {where}", status=404)
        if allowed := [method for other, method in routes if other == path]:
            listed = ",".join("GET,HEAD" if method == "GET" else method for method in allowed)
            raise HttpRefusal(f"{asked}: Method Not Allowed", status=405, headers={"Allow": listed})
        raise HttpRefusal(f"{asked}: Not Found{path_hint(path)}", status=404)

    # --- OpenAI ------------------------------------------------------------------------------------------------------

    async def _complete(
        self, endpoint: CompletionEndpoint, request: HttpRequest, connection: HttpConnection
    ) -> HttpAnswer | None:
        job = self._job(endpoint, request)
        if job.request.streaming:
            await _stream(connection, job)
            if connection.answered:
                return None
        else:
            await job.run()
        if job.failure is None:
            form = job.request.form
            if endpoint is CompletionEndpoint.GENERATE:
                form = replace(form, model=form.model or self._gateway.default_model())  # known by now
                return HttpAnswer.of_json(generate_response(form, job.records))
            return HttpAnswer.of_json(response(form, job.records, job.request.answers_per_prompt))
        error = job.failure.error.get("error")
        message = str(error.get("message") if isinstance(error, Mapping) else error)
        log_refusal(_asked(request), connection.peer, job.failure.status, message)
        return HttpAnswer.of_json(job.failure.error, job.failure.status)

    def _job(self, endpoint: CompletionEndpoint, request: HttpRequest) -> RequestGroup:
        """Parse the request and return the RequestGroup with its records. Raises HttpRefusal if the request is invalid
        or the gateway is draining."""
        headers = self._accepted(request)
        body = read_json(read_body(request))
        request_id, group, tag = (request.fields.get(name, "") for name in ("x-request-id", "x-group-id", "x-tag"))
        name = request_id or str((body.get("request_id") if isinstance(body, dict) else None) or "")
        ask = read_completion_request(
            endpoint,
            body,
            request_id=name or uuid.uuid4().hex,
            group=group,
            tag=tag,
            session=request.fields.get("x-session-id", ""),
            default_model=self._gateway.default_model(),
            now_s=self._gateway.clock.now_s(),
            headers=headers,
            reseed=self._reseed,
            reseed_header=request.fields.get(RESEED_HEADER.lower()),
        )
        return self._gateway.request_group(ask, _named(body, headers) if name else None)

    def _accepted(self, request: HttpRequest) -> tuple[tuple[str, str], ...]:
        """Return the request's headers that are forwarded to engines. Raises HttpRefusal if the gateway is draining."""
        if self._draining:
            raise HttpRefusal("the gateway is shutting down", status=503)
        return end_to_end(request.headers)

    async def _models(self, request: HttpRequest, _: HttpConnection) -> HttpAnswer:
        models = await self._gateway.models()
        if not models:
            raise HttpRefusal("no engine has reported its models", status=503)
        data = [
            {"id": name, "object": "model", "created": 0, "owned_by": "orchestrrl", "max_model_len": longest}
            for name, longest in models.items()
        ]
        return HttpAnswer.of_json({"object": "list", "data": data})

    # --- operation ---------------------------------------------------------------------------------------------------

    async def _health(self, request: HttpRequest, _: HttpConnection) -> HttpAnswer:
        """Return status 200 if an engine is usable or expected and the gateway is not draining, else status 503."""
        fleet = self._gateway.fleet
        engines, expected = [backend.id for backend in fleet if backend.usable], sorted(fleet.expected)
        status = 200 if (engines or expected) and not self._draining else 503
        health: dict[str, Any] = {"engines": engines, "draining": self._draining}
        if expected:
            health["expected"] = expected
        if self._gateway.store is not None:  # clients may wait for a restart, since answers are stored
            health["ledger"] = True
        return HttpAnswer.of_json(health, status)

    async def _version(self, request: HttpRequest, _: HttpConnection) -> HttpAnswer:
        info = {"version": __version__, "gateway": self._gateway.node}
        if (url := self._operator_url(request)) is not None:
            info["operator_url"] = url
        return HttpAnswer.of_json(info)

    def _operator_url(self, request: HttpRequest) -> str | None:
        """Return the URL at which the client can reach the operator API, or None if the operator API is not served."""
        if self._operator_at is None:
            return None
        host, port = self._operator_at
        if host in WILDCARDS:
            with suppress(ValueError):  # an invalid Host header
                host = urlsplit(f"//{request.fields.get('host', '')}").hostname or host
        return url_of(host, port)

    async def _metrics(self, request: HttpRequest, _: HttpConnection) -> HttpAnswer:
        text = generate_latest(self._registry)
        return HttpAnswer(text, content_type="text/plain; version=0.0.4; charset=utf-8")

    async def _requests(self, request: HttpRequest, _: HttpConnection) -> HttpAnswer:
        """Return the requests in flight and the requests that ended last. If the query is `?id=R`, return only request
        R with its tokens. Request R must be in flight."""
        wanted = next(iter(parse_qs(_target(request)[1], keep_blank_values=True).get("id", ())), None)
        now_s = self._gateway.clock.now_s()
        if wanted is not None:
            record = self._gateway.ledger.get(RequestId(wanted))
            if record is None:
                raise HttpRefusal(f"request {wanted!r} is not in flight", status=404)
            return HttpAnswer.of_json(_shown(record, now_s, tokens=True))
        finished = [_fields(summary, _FINISHED_FIELDS) for summary in self._gateway.ledger.finished]
        in_flight = [_shown(record, now_s, tokens=False) for record in self._gateway.ledger]
        return HttpAnswer.of_json({"in_flight": in_flight, "finished": finished})

    async def _move(self, request: HttpRequest, _: HttpConnection) -> HttpAnswer:
        moves = [self._move_of(item) for item in read_as(MovesBody, request).moves]
        results = await asyncio.gather(*(self._carry_out(move) for move in moves))
        return HttpAnswer.of_json({"items": [_fields(result, _MOVE_FIELDS) for result in results]})

    async def _carry_out(self, move: RequestMove) -> OperationItemResult:
        if self._elsewhere is not None and not self._gateway.has_request(move.request):
            return await self._elsewhere(move.request, move.to_engine)
        (result,) = await self._gateway.move((move,))
        return result

    def _move_of(self, item: MoveBody) -> RequestMove:
        record = self._gateway.ledger.get(RequestId(item.request_id))
        source = item.from_engine_id or (record.engine if record is not None else None) or ""
        ids = RequestId(item.request_id), EngineId(source), EngineId(item.to_engine_id)
        return RequestMove(*ids, method=item.method)


def _target(request: HttpRequest) -> tuple[str, str]:
    """Return the percent-decoded path and the query of the request's URL. A path with an encoded slash is not decoded.
    Raises HttpRefusal if the URL is invalid."""
    url = request.url
    if not url.startswith("/"):
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise HttpRefusal(f"the request line must have a valid URL, got {cut(repr(url), 80)}") from error
        url = f"{parts.path}?{parts.query}"
    path, _, query = url.partition("?")
    return path if "%2f" in path.lower() else unquote(path), query  # an encoded slash separates nothing


def _asked(request: HttpRequest) -> str:
    """Return the request's method and path for log messages. The URL's query and credentials are omitted, because they
    may be secret."""
    with suppress(HttpRefusal):
        return f"{request.method} {cut(_target(request)[0], 100)}"
    return request.method


def end_to_end(headers: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Return the headers to forward to the engine, in their original order. Headers that concern only the connection,
    that describe the body, or that the gateway sets or reads are omitted. Examples of forwarded headers are
    `Authorization`, `X-Session-ID` and `traceparent`."""
    passed_on = [
        (name, value) for name, value in headers if name.lower() not in _OWN and not name.lower().startswith("content-")
    ]
    named = {
        token.strip().lower() for name, value in passed_on if name.lower() == "connection" for token in value.split(",")
    }
    return tuple((name, value) for name, value in passed_on if name.lower() not in HOP_BY_HOP | named)


def _named(body: Mapping[str, Any], headers: Iterable[tuple[str, str]]) -> Mapping[str, Any]:
    """Return the body that identifies a named request in the ledger. It includes a digest of the client's credential,
    so that a stored answer is returned only to a client with the same credential."""
    credentials = [value for name, value in headers if name.lower() == "authorization"]
    if not credentials:
        return body
    return {**body, "Authorization": blake2b("\0".join(credentials).encode(errors="surrogateescape")).hexdigest()}


async def _stream(connection: HttpConnection, job: RequestGroup) -> None:
    """Run the request and write its answers as server-sent events. Text that a slow client has not read stays in the
    records. If the request fails before the first event, nothing is written."""
    indices = {record.id: index for index, record in enumerate(job.records)}
    writers: dict[RequestId, ChunkWriter | GenerateChunkWriter] = {}  # created once the creation time is known
    generates = job.request.form.endpoint is CompletionEndpoint.GENERATE
    stream = GenerateStream(job.request.form)

    def write(record: RequestRecord) -> None:
        # Nothing is written before the first token, so that an engine's refusal keeps its status.
        if not connection.writable or record.failure is not None:
            return
        if record.id not in writers:
            index = indices[record.id]
            writers[record.id] = (
                stream.writer(index, record) if generates else ChunkWriter(job.request.form, index, record)
            )
        if data := writers[record.id].news():
            connection.piece(data)

    def write_all() -> None:
        for record in job.records:
            write(record)

    connection.on_writable = write_all
    await job.run(write)
    if job.failure is not None and not connection.answered:
        return
    for record in job.records:
        while not connection.writable:
            await connection.drain()
        write(record)
    form, last = job.request.form, b""
    if job.failure is not None:
        last = event(job.failure.error)
    elif form.usage:
        last = (
            generate_usage_chunk(form, job.records)
            if generates
            else usage_chunk(form, job.records, job.request.answers_per_prompt)
        )
    connection.piece(last + DONE, last=True)


def _fields(value: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def _shown(record: RequestRecord, now_s: float, *, tokens: bool) -> dict[str, Any]:
    shown = _fields(record, _RECORD_FIELDS + _SESSION_FIELDS) | _fields(record.view(now_s), _VIEW_FIELDS)
    shown["endpoint"] = record.passed_path or record.endpoint
    shown["first_token_after_s"] = None if record.started_s is None else record.started_s - record.arrived_s
    if tokens:
        shown["prompt_token_ids"] = None if record.prompt_ids is None else list(record.prompt_ids)
        shown["token_ids"] = list(record.generated_ids)
        shown["text"] = record.text
    return shown
