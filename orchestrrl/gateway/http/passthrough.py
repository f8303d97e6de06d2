"""Serve the endpoints of vLLM that the gateway passes through to one engine (vllm_endpoints.py).

A request that runs the model has a record in the ledger: it waits for the pause barrier, counts as load on its engine,
and is sent again to another engine only while the client has received nothing. Other requests are sent at once.
"""

import asyncio
import json
import string
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from urllib.parse import quote

from orchestrrl.core.clock import until_set
from orchestrrl.core.errors import OrchestrRLError
from orchestrrl.engines.base import CompletionEndpoint, NoConnection
from orchestrrl.engines.exchange import EngineConnection
from orchestrrl.engines.forwarding import ForwardedRequest, forwarded, forwards
from orchestrrl.gateway.core import Gateway
from orchestrrl.gateway.http.bodies import read_body
from orchestrrl.gateway.http.completion_requests import CHARACTERS_PER_TOKEN, MAX_NAME_LENGTH, header_faults
from orchestrrl.gateway.http.connections import HttpAnswer, HttpConnection, HttpRequest
from orchestrrl.gateway.http.engine_answers import AnswerWriter
from orchestrrl.gateway.http.field_types import HttpRefusal, raise_faults, read_json, shown
from orchestrrl.gateway.http.response_owners import FirstEvent, ResponseOwners, response_id
from orchestrrl.gateway.http.vllm_endpoints import (
    ONE_RESPONSE,
    RESPONSES,
    EndpointHandling,
    VllmEndpoint,
    find_endpoint,
)
from orchestrrl.gateway.ledger.ledger import RequestRecord
from orchestrrl.gateway.moves.movable import MOST_TOKENS
from orchestrrl.gateway.passed import PassedCall
from orchestrrl.gateway.routing.backend import EngineBackend
from planner.model import EngineId, RequestId

# None: the handler has written the answer itself.
Handler = Callable[[HttpRequest, HttpConnection], Awaitable[HttpAnswer | None]]
# Returns the headers to forward. Raises HttpRefusal if the gateway accepts no requests.
Accept = Callable[[HttpRequest], tuple[tuple[str, str], ...]]

_LIMITS = ("max_output_tokens", "max_completion_tokens", "max_tokens")
_ROUTED_BY = ("model", "messages")  # fields that determine the engine; others may have any type


@dataclass(frozen=True, slots=True)
class _Passed:
    """A request to pass through."""

    endpoint: VllmEndpoint
    request: ForwardedRequest
    body: Mapping[str, Any]  # the JSON object in the body; empty if there is none
    only_engine: EngineId | None = None  # the engine that holds the request's response; None: any engine


class PassThrough:
    """Passes requests through to the engines of one gateway."""

    def __init__(self, gateway: Gateway, accept: Accept) -> None:
        self._gateway = gateway
        self._fleet = gateway.fleet
        self._accept = accept
        self._owners = ResponseOwners()
        self._turn = 0  # requests that do not run the model go to the engines in turn

    def handler(self, path: str, method: str) -> Handler | None:
        """Return the handler of a path, or None if the path is not one of vLLM's or the gateway serves it itself.
        Raises HttpRefusal if the fleet does not offer the endpoint, or the endpoint does not have the method."""
        found = find_endpoint(path)
        if found is None or found[0].handling is EndpointHandling.GATEWAY:
            return None
        endpoint, response = found
        asked = f"{method} {endpoint.path}"
        if endpoint.handling is EndpointHandling.REFUSED:
            raise HttpRefusal(f"{asked}: the fleet does not offer this endpoint; {endpoint.instead}", status=404)
        if method not in endpoint.methods:
            allowed = {"Allow": ",".join(endpoint.methods)}
            raise HttpRefusal(f"{asked}: Method Not Allowed", status=405, headers=allowed)
        if endpoint.handling is EndpointHandling.LOAD:
            return self._load
        if endpoint.handling is EndpointHandling.WORLD_SIZE:
            return self._world_size
        return partial(self._pass, endpoint, response)

    async def _load(self, _: HttpRequest, __: HttpConnection) -> HttpAnswer:
        return HttpAnswer.of_json({"server_load": len(self._gateway.ledger)})

    async def _world_size(self, request: HttpRequest, _: HttpConnection) -> HttpAnswer:
        """Return the number of workers of all engines that are to stay in the fleet. If one of them does not report its
        number, the request fails, because a trainer would form a group that is too small."""
        sent = ForwardedRequest("GET", f"/get_world_size{_query(request)}", headers=self._accept(request))
        engines = [backend for backend in self._fleet if backend.routed and not backend.route.draining]
        if not engines:
            raise HttpRefusal("no engine is available", status=503)
        sizes = []
        for backend, (status, text) in zip(engines, await self._ask(engines, sent), strict=True):
            try:
                sizes.append(int(json.loads(text)["world_size"]))
            except (ValueError, KeyError, TypeError) as error:
                wrong = f"engine {backend.id} does not report its world size: status {status}"
                raise HttpRefusal(wrong, status=502) from error
        return HttpAnswer.of_json({"world_size": sum(sizes)})

    async def _pass(
        self, endpoint: VllmEndpoint, response: str, request: HttpRequest, connection: HttpConnection
    ) -> HttpAnswer | None:
        call = self._call(endpoint, response, request)
        if endpoint.path == RESPONSES:
            response = call.body.get("previous_response_id") or ""
        if isinstance(response, str) and 0 < len(response) <= MAX_NAME_LENGTH:  # an engine refuses a longer id
            call = replace(call, only_engine=await self._owner(response, call))
        writer = AnswerWriter(connection)
        if endpoint.handling is EndpointHandling.MODEL and self._is_offered(endpoint):
            await self._run(call, request, writer)
        else:
            await self._send(call, writer)
        return None

    def _call(self, endpoint: VllmEndpoint, response: str, request: HttpRequest) -> _Passed:
        headers = self._accept(request)
        if name := request.fields.get("x-request-id"):  # vLLM's answers contain it
            headers = (*headers, ("X-Request-Id", name))
        data = read_body(request, empty=b"")
        target = endpoint.path.replace("{response_id}", quote(response, safe="")) + _query(request)
        content_type = request.fields.get("content-type", "application/json")
        sent = ForwardedRequest(request.method, target, data, headers, content_type)
        return _Passed(endpoint, sent, _json_object(data) if "json" in content_type else {})

    # --- engines -----------------------------------------------------------------------------------------------------

    def _is_offered(self, endpoint: VllmEndpoint) -> bool:
        """Return whether an engine has the endpoint. If none has it, any engine refuses the request itself."""
        return any(_has(backend, endpoint.path) for backend in self._fleet if backend.routed)

    def _unable(self, call: _Passed) -> frozenset[EngineId]:
        """Return the engines that cannot answer the request, apart from those that do not serve its model."""
        if call.only_engine is not None:
            others = self._fleet.expected.union(backend.id for backend in self._fleet)
            return others - {self._fleet.id_of(call.only_engine)}
        if not self._is_offered(call.endpoint):
            return frozenset(backend.id for backend in self._fleet if not forwards(backend.engine))
        return frozenset(backend.id for backend in self._fleet if not _has(backend, call.endpoint.path))

    async def _owner(self, response: str, call: _Passed) -> EngineId | None:
        """Return the engine that holds a response. If it is unknown, ask every engine, because another process may have
        served the request that created the response. Return None if no engine holds it. Raises HttpRefusal if the
        engine has left the fleet."""
        owner = self._owners.get(response)
        if owner is not None:
            if self._fleet.get(owner) is None:
                wrong = f"response {shown(response)} was held by engine {owner}, which has left the fleet"
                raise HttpRefusal(wrong, status=404)
            return owner
        engines = [backend for backend in self._fleet if backend.usable and _has(backend, ONE_RESPONSE)]
        ask = ForwardedRequest("GET", f"{RESPONSES}/{quote(response, safe='')}", headers=call.request.headers)
        for backend, (status, _) in zip(engines, await self._ask(engines, ask), strict=True):
            if status == 200:
                self._owners.remember(response, backend.id)
                return backend.id
        return None

    async def _ask(self, engines: Collection[EngineBackend], request: ForwardedRequest) -> list[tuple[int, bytes]]:
        """Return the status and body of each engine's answer, or status 502 with the error if there is none."""

        async def ask(backend: EngineBackend) -> tuple[int, bytes]:
            try:
                async with forwarded(backend.engine, request, self._gateway.limits.stall_s) as answer:
                    return answer.status, await answer.read_all()
            except OrchestrRLError as error:
                return 502, str(error).encode()

        return await asyncio.gather(*(ask(backend) for backend in engines))

    # --- requests that run the model ---------------------------------------------------------------------------------

    async def _run(self, call: _Passed, request: HttpRequest, writer: AnswerWriter) -> None:
        record = self._record(call, request)

        async def deliver(backend: EngineBackend, answer: EngineConnection, received: Callable[[], None]) -> None:
            creates = call.endpoint.path == RESPONSES and answer.status == 200
            first = FirstEvent()

            def on_data(data: bytes) -> None:
                received()
                if creates and (event := first.feed(data)) is not None:
                    self._created(event, backend)

            def on_begin() -> None:
                record.delivered = True

            body = await writer.write(answer, on_data, on_begin)
            if creates and body:
                self._created(body, backend)

        await self._gateway.pass_through(record, PassedCall(call.request, deliver, partial(self._unable, call)))
        if record.failure is not None:
            writer.fail(record.failure.error["error"]["message"], record.failure.status)
        elif record.finish_reason == "abort":
            writer.fail(f"the request was ended: {record.stop_reason}", 503)

    def _created(self, document: bytes, backend: EngineBackend) -> None:
        if (response := response_id(document)) is not None:
            self._owners.remember(response, backend.id)

    def _record(self, call: _Passed, request: HttpRequest) -> RequestRecord:
        """Return the record of a request. Raises HttpRefusal if its id, group or tag is invalid."""
        name, group, tag = (request.fields.get(header, "") for header in ("x-request-id", "x-group-id", "x-tag"))
        name = name or uuid.uuid4().hex
        raise_faults(header_faults(name, group, tag))
        now_s = self._fleet.clock.now_s()
        limits = (call.body.get(field) for field in _LIMITS)
        return RequestRecord(
            id=RequestId(name),
            endpoint=CompletionEndpoint.COMPLETIONS,
            passed_path=call.endpoint.path,
            body={field: call.body[field] for field in _ROUTED_BY if field in call.body},
            streaming=False,
            arrived_s=now_s,
            progressed_s=now_s,
            max_tokens=next((limit for limit in limits if type(limit) is int and 0 <= limit <= MOST_TOKENS), None),
            group=group,
            tag=tag,
            immovable_because=f"{call.endpoint.path}: the engine's answer is passed through",
            prompt_tokens_estimate=len(call.request.body) // CHARACTERS_PER_TOKEN + 1 if call.body else 1,
        )

    # --- other requests ----------------------------------------------------------------------------------------------

    async def _send(self, call: _Passed, writer: AnswerWriter) -> None:
        """Send the request to one engine, and to another engine if the first one fails before the client has received
        anything."""
        limits, failed = self._gateway.limits, dict[EngineId, str]()
        await self._fleet.find_model(call.body.get("model"))
        until_s = self._fleet.clock.now_s() + limits.engine_wait_s
        while len(failed) < limits.failures and not writer.begun:
            backend = await self._next_engine(call, failed, until_s)
            if backend is None:
                break
            try:
                async with forwarded(backend.engine, call.request, limits.stall_s) as answer:
                    await writer.write(answer)
                return
            except OrchestrRLError as error:
                failed[backend.id] = str(error)
                if not isinstance(error, NoConnection):
                    self._fleet.suspect(backend, str(error))
        if failed:
            engine, because = failed.popitem()
            writer.fail(f"engine {engine} failed: {because}", 502)
        else:
            writer.fail(f"no engine was available for {limits.engine_wait_s:g} s", 503)

    async def _next_engine(self, call: _Passed, failed: Mapping[EngineId, str], until_s: float) -> EngineBackend | None:
        """Return an engine that can answer the request. If no engine is usable and none has failed, wait until time
        `until_s` for one. Return None if there is none."""
        while True:
            unable = failed.keys() | self._unable(call) | self._fleet.without_model(call.body.get("model"))
            # An engine that drains still holds its responses.
            holds = call.only_engine is not None
            able = [backend for backend in self._fleet if backend.id not in unable and (backend.usable or holds)]
            if able:
                self._turn += 1
                return able[self._turn % len(able)]
            left_s = until_s - self._fleet.clock.now_s()
            if failed or left_s <= 0:
                return None
            await until_set(self._fleet.clock, self._fleet.changed, left_s)


def _has(backend: EngineBackend, path: str) -> bool:
    """Return whether requests to the path can be passed to the engine."""
    return forwards(backend.engine) and backend.has_path(path)


def _query(request: HttpRequest) -> str:
    """Return the query of the request's URL in ASCII, with its question mark, or ""."""
    query = request.url.partition("?")[2]
    return f"?{quote(query, safe=string.punctuation, errors='surrogateescape')}" if query else ""


def _json_object(data: bytes) -> Mapping[str, Any]:
    """Return the JSON object in the body, or {} if there is none or it has values that a completion request must not
    have. The engine reports the faults of the body."""
    try:
        body = read_json(data)
    except HttpRefusal:
        return {}
    return body if isinstance(body, dict) else {}
