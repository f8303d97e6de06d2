"""The pause barrier over HTTP, for trainers: pause, renew, resume, set policy versions, and cancel requests.

A gateway with a daemon forwards these calls to the daemon, since there may be other gateways. A gateway without a
daemon handles the calls itself.
"""

import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any

from pydantic import Field

from orchestrrl.core.errors import OrchestrRLError
from orchestrrl.core.operations import CloseBarrier, FrozenRequests, OpenBarrier, OperationItemResult, PauseMode
from orchestrrl.gateway.core import Gateway
from orchestrrl.gateway.http.bodies import RequestBody, read_as
from orchestrrl.gateway.http.connections import HttpAnswer, HttpConnection, HttpRequest
from orchestrrl.gateway.http.field_types import HttpRefusal
from planner.model import EngineId, RequestId

DEFAULT_LEASE_S = 60.0
MAX_LEASE_S = 24 * 3600.0

_Seconds = Annotated[float, Field(gt=0, le=MAX_LEASE_S, allow_inf_nan=False)]
_Version = Annotated[int, Field(ge=0, lt=1 << 63)]


class PauseBody(RequestBody):
    """The body of POST /orchestrrl/pause."""

    mode: Annotated[PauseMode, Field(strict=False)] = PauseMode.KEEP
    frozen: Annotated[FrozenRequests, Field(strict=False)] = FrozenRequests.RECOMPUTE
    holder: str = ""
    lease_s: _Seconds = DEFAULT_LEASE_S
    deadline_s: _Seconds | None = None  # None: the same as the lease

    @property
    def within_s(self) -> float:
        """The time, in seconds, within which all engines must be quiet."""
        return self.lease_s if self.deadline_s is None else self.deadline_s


class RenewBody(RequestBody):
    """The body of POST /orchestrrl/renew."""

    lease_id: Annotated[str, Field(min_length=1)]
    lease_s: _Seconds = DEFAULT_LEASE_S


class ResumeBody(RequestBody):
    """The body of POST /orchestrrl/resume. If `lease_id` is omitted, the pause barrier opens regardless of the lease
    that holds it."""

    lease_id: str = ""
    policy_version: _Version | None = None
    weights_source: str = ""  # folder of the weights that engines now have
    without_engine_ids: list[str] = Field(default_factory=list, alias="without_engines")
    reason: str = ""


class SetVersionBody(RequestBody):
    """The body of POST /orchestrrl/set-version."""

    engine_ids: Annotated[list[str], Field(min_length=1, alias="engines")]
    policy_version: _Version
    reason: str = ""
    weights_source: str = ""


class CancelBody(RequestBody):
    """The body of POST /orchestrrl/cancel."""

    request_ids: list[str] = Field(default_factory=list, alias="requests")
    group_ids: list[str] = Field(default_factory=list, alias="groups")
    reason: str = ""


# Calls a method of the daemon and returns its answer as plain values. Raises HttpRefusal.
Daemon = Callable[[str, RequestBody | None], Awaitable[Mapping[str, Any]]]
_Handler = Callable[[HttpRequest, HttpConnection], Awaitable[HttpAnswer]]


class PauseEndpoints:
    """The HTTP endpoints of the pause barrier. `daemon` is a function that calls the daemon, which commands all
    gateways. It is None if the gateway has no daemon."""

    def __init__(self, gateway: Gateway, daemon: Daemon | None = None, *, alone: bool = True) -> None:
        """Create the endpoints. `alone` is False if other processes serve the same port. In that case, calls are
        refused if `daemon` is None."""
        self._gateway = gateway
        self._daemon = daemon
        self._alone = alone
        self._set_source: tuple[int | None, str] = (None, "")  # version and folder; used without a daemon

    def routes(self) -> Mapping[tuple[str, str], _Handler]:
        """Return the handlers by path and method."""
        return {
            ("/orchestrrl/barrier", "GET"): self._handler("GetPauseBarrier", None, lambda _: self._shown()),
            ("/orchestrrl/pause", "POST"): self._handler("PauseFleet", PauseBody, self._pause),
            ("/orchestrrl/renew", "POST"): self._handler("RenewPause", RenewBody, self._renew),
            ("/orchestrrl/resume", "POST"): self._handler("ResumeFleet", ResumeBody, self._resume),
            ("/orchestrrl/set-version", "POST"): self._handler("SetPolicyVersion", SetVersionBody, self._set_version),
            ("/orchestrrl/cancel", "POST"): self._handler("CancelRequests", CancelBody, self._cancel),
        }

    def _handler(
        self, method: str, kind: type[RequestBody] | None, act: Callable[[Any], Awaitable[Mapping[str, Any]]]
    ) -> _Handler:
        """Return a handler that calls the daemon's `method`, or `act` if the gateway has no daemon. `kind` is the type
        of the request's body, or None if the request has no body."""

        async def handle(request: HttpRequest, _: HttpConnection) -> HttpAnswer:
            body = None if kind is None else read_as(kind, request)
            if self._daemon is not None:
                return HttpAnswer.of_json(self._with_urls(await self._daemon(method, body)))
            if not self._alone:
                wrong = "several gateway processes serve this port; restart them with --daemon"
                raise HttpRefusal(wrong, status=503)
            try:
                return HttpAnswer.of_json(await act(body))
            except OrchestrRLError as error:
                raise HttpRefusal(str(error), status=409) from error

        return handle

    def _with_urls(self, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add each engine's URL to the daemon's response, for clients that transfer weights. The daemon itself returns
        no URLs."""
        for engine in answer.get("engines", ()):
            backend = self._gateway.fleet.get(EngineId(engine["engine_id"]))
            engine["url"] = "" if backend is None else backend.engine.url
        return answer

    # --- a gateway without a daemon ----------------------------------------------------------------------------------

    async def _pause(self, body: PauseBody) -> Mapping[str, Any]:
        now_s = self._gateway.clock.now_s()
        order = CloseBarrier(
            lease=uuid.uuid4().hex[:16],
            holder=body.holder,
            mode=body.mode,
            frozen=body.frozen,
            lease_until_s=now_s + body.lease_s,
            quiet_by_s=now_s + body.within_s,
        )
        return await self._shown(await self._gateway.barrier.close(order))

    async def _renew(self, body: RenewBody) -> Mapping[str, Any]:
        self._gateway.barrier.renew(body.lease_id, self._gateway.clock.now_s() + body.lease_s)
        return await self._shown()

    async def _resume(self, body: ResumeBody) -> Mapping[str, Any]:
        without = tuple(map(EngineId, body.without_engine_ids))
        items = await self._gateway.barrier.open(OpenBarrier(body.lease_id, body.policy_version, without))
        self._remember(body.policy_version, body.weights_source)
        return await self._shown(items)

    async def _set_version(self, body: SetVersionBody) -> Mapping[str, Any]:
        await self._gateway.barrier.set_version(tuple(map(EngineId, body.engine_ids)), body.policy_version)
        self._remember(body.policy_version, body.weights_source)
        return await self._shown()

    def _remember(self, version: int | None, source: str) -> None:
        """Store `source`, the folder of the weights, if `version` is None or the newest version. If a newer version has
        no known folder, the stored folder is cleared."""
        newest = self._gateway.barrier.report().policy_version
        known_version, known = self._set_source
        given = source if version in (None, newest) else ""
        self._set_source = (newest, given or (known if newest == known_version else ""))

    async def _cancel(self, body: CancelBody) -> Mapping[str, Any]:
        cancelled = self._gateway.cancel(map(RequestId, body.request_ids), body.group_ids, body.reason)
        return {"cancelled_ids": list(cancelled)}

    async def _shown(self, items: tuple[OperationItemResult, ...] = ()) -> Mapping[str, Any]:
        """Return the state of the barrier in the daemon's format. `items` are the results of the engines. If `items` is
        empty, the results of the last closing are used."""

        barrier = self._gateway.barrier
        report, closed = barrier.report(), barrier.closed
        results = {item.id: item for item in items or barrier.rest.values()}
        return {
            "phase": report.phase,
            "lease_id": report.lease,
            "holder": "" if closed is None else closed.holder,
            "mode": None if closed is None else closed.mode,
            "frozen": None if closed is None else closed.frozen,
            "lease_until_unix_s": None if closed is None else closed.lease_until_s,
            "policy_version": report.policy_version,
            "weights_source": self._set_source[1],
            "requests": {"running": report.running, "frozen": report.frozen, "held": report.held},
            "engines": [
                {
                    "engine_id": backend.id,
                    "done": backend.id not in results or results[backend.id].done,
                    "detail": results[backend.id].detail if backend.id in results else "",
                    "policy_version": backend.policy_version,
                    "url": backend.engine.url,
                    "paused": backend.paused,
                }
                for backend in self._gateway.fleet
            ],
            "detail": barrier.opened_because if closed is None else "",
        }
