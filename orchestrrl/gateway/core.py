"""The core of a gateway, without its HTTP server. It accepts requests, relays them to engines, carries out moves and
reports its state."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from orchestrrl.core.addresses import same_address
from orchestrrl.core.clock import stop
from orchestrrl.core.errors import OrchestrRLError
from orchestrrl.core.operations import EngineRoute, OperationItemResult
from orchestrrl.fleet.reports import GatewayReport
from orchestrrl.gateway.http.completion_requests import CompletionRequest
from orchestrrl.gateway.ledger.ledger import DuplicateRequest, InFlightGroups, Ledger, RequestFailure, RequestRecord
from orchestrrl.gateway.ledger.store import LedgerEntry, LedgerStore
from orchestrrl.gateway.moves.move import MoveRefused
from orchestrrl.gateway.passed import PassedCall
from orchestrrl.gateway.pause import GatewayPause
from orchestrrl.gateway.relay import RelayLimits, RequestRelay
from orchestrrl.gateway.routing.backend import EngineBackend
from orchestrrl.gateway.routing.backends import EngineBackends
from planner.model import EngineId, NodeId, RequestId, RequestMove

logger = logging.getLogger(__name__)

COUNTED_REASONS = frozenset({"redundant", "cancelled"})
WATCH_FRACTION = 0.25  # the interval between checks for stalled requests, as a fraction of `stall_s`


class RequestGroup:
    """The records of one HTTP request, with one record per answer. If `run` is cancelled, the incomplete answers are
    stopped."""

    def __init__(
        self, request: CompletionRequest, gateway: "Gateway", named_body: Mapping[str, Any] | None = None
    ) -> None:
        self.request = request
        self._gateway = gateway
        self._named_body = named_body
        self._entry: LedgerEntry | None = None
        self._listener: Callable[[RequestRecord], None] | None = None
        self._counted: set[RequestId] = set()  # ended records that the metrics include

    @property
    def records(self) -> Sequence[RequestRecord]:
        return self.request.records

    @property
    def failure(self) -> RequestFailure | None:
        return next((record.failure for record in self.records if record.failure is not None), None)

    async def run(self, listener: Callable[[RequestRecord], None] | None = None) -> None:
        """Generate all answers, and return when all of them have ended or one of them has failed. `listener` is called
        with each record that ends, and with each streamed record that grows. Raises DuplicateRequest if a request id is
        already in flight or is stored with another body."""
        self._listener = listener
        await self._enter()
        try:
            answers = [self._answer(record) for record in self.records]
            if len(answers) == 1:
                await answers[0]
            else:
                await self._answer_all(answers)
        finally:
            self.close()

    async def _answer_all(self, answers: Sequence[Coroutine[Any, Any, None]]) -> None:
        """Run the coroutines of all answers concurrently. If an answer fails, cancel the other answers."""

        async def failed(record: RequestRecord, answer: Coroutine[Any, Any, None]) -> bool:
            await answer
            return record.failure is not None

        tasks = [asyncio.create_task(failed(*each)) for each in zip(self.records, answers, strict=True)]
        try:
            for ended in asyncio.as_completed(tasks):
                if await ended:
                    return
        finally:
            await stop(*tasks)

    async def _enter(self) -> None:
        store = self._gateway.store
        if store is not None and self._named_body is not None:
            self._entry = await store.enter(self.request, self._named_body)
            if self._entry is not None:  # an answer that was begun earlier keeps its creation time
                form = replace(self.request.form, created_unix_s=int(self._entry.created_s))
                self.request = replace(self.request, form=form)
        try:
            # The process that generated a complete answer has counted and reported it.
            self._gateway.ledger.add(*(record for record in self.records if not record.done))
        except DuplicateRequest:
            self._leave()
            raise

    def _leave(self) -> None:
        entry, self._entry = self._entry, None
        if entry is not None and self._gateway.store is not None:
            self._gateway.store.leave(entry)

    def close(self) -> None:
        """Close all records after they have ended or their client has left. A repeated call has no effect."""
        try:
            self._leave()
        finally:
            self._listener = None  # breaks a reference cycle
            for record in self.records:
                self._gateway.close(record)

    def _answer(self, record: RequestRecord) -> Coroutine[Any, Any, None]:
        """Return a coroutine that generates the answer of the record, or that sends the stored answer if the record is
        done. A new relay is registered at once, before the coroutine runs."""
        return self._give_again(record) if record.done else self._gateway.relay(record, self._grown).run()

    async def _give_again(self, record: RequestRecord) -> None:
        """Send a stored answer to the client again. The answer is not counted again, but it is added to its group
        again, because the group may have been forgotten in the meantime."""
        self._counted.add(record.id)
        self._gateway.groups.enter(record)
        self._gateway.cancel_redundant(record)
        self._grown(record)

    def _grown(self, record: RequestRecord) -> None:
        if record.done and record.id not in self._counted:  # the relay calls once more when it ends
            self._counted.add(record.id)
            self._gateway.answered(record)
        if self._listener is not None:
            self._listener(record)


class Gateway:
    """The core of one gateway, which owns the ledger, the relays and the pause barrier."""

    def __init__(
        self, node: NodeId, fleet: EngineBackends, *, limits: RelayLimits, store: LedgerStore | None = None
    ) -> None:
        """Create a gateway. `store` keeps answers across restarts of the process. If `store` is None, answers are not
        stored."""
        self.node = node
        self.url = ""
        self.fleet = fleet
        self.limits = limits
        self.clock = fleet.clock
        self.ledger = Ledger()
        self.store = store
        self.relays: dict[RequestId, RequestRelay] = {}
        self.groups = InFlightGroups()
        self.barrier = GatewayPause(fleet, self.relays)
        self.version_lags: Counter[int] = Counter()  # ended answers, by the version lag of their oldest token
        self.cancelled_total: Counter[str] = Counter()  # by reason
        self.moves_done = 0
        self.moves_refused = 0
        self.tokens_recomputed = 0
        self.tokens_loaded = 0

    def request_group(self, request: CompletionRequest, named_body: Mapping[str, Any] | None = None) -> RequestGroup:
        """Return a RequestGroup that runs the request. If the client gave the request an id, `named_body` is the body
        that identifies the request in the ledger, so that the client can reconnect for the answer. It is None for
        requests without an id."""
        return RequestGroup(request, self, named_body)

    async def pass_through(self, record: RequestRecord, call: PassedCall) -> None:
        """Run a request that is passed through, and return when it has ended. Raises DuplicateRequest if its id is
        already in flight."""
        self.ledger.add(record)
        try:
            await self.relay(record, lambda _: None, call).run()
        finally:
            self.close(record)

    def relay(
        self, record: RequestRecord, grown: Callable[[RequestRecord], None], passed: PassedCall | None = None
    ) -> RequestRelay:
        """Register a relay for the record and return it. `grown` is called with the record when the record ends
        and, if the record is streamed, each time it grows. `passed` is given if the request is passed through."""
        relay = RequestRelay(record, self.fleet, self.limits, grown, passed)
        self.relays[record.id] = relay
        self.groups.enter(record)
        self.barrier.park_to_bound(relay)  # tokens from an earlier process may exceed the version lag
        if self.groups.redundant(record):
            self._cancel(record, "redundant")
        return relay

    def answered(self, record: RequestRecord) -> None:
        """Record the version lag of a record that has ended, and end the answers of its group that are now redundant.
        The client may not have received the record's answer yet."""
        if record.versions.oldest is not None and record.generated_tokens:
            self.version_lags[record.versions.lag(self.fleet.policy_version)] += 1
        self.cancel_redundant(record)

    def cancel_redundant(self, record: RequestRecord) -> None:
        """End the answers that are redundant in the record's group now that the record has ended."""
        for other in self.groups.ended(record):
            self._cancel(other, "redundant")

    def close(self, record: RequestRecord) -> None:
        """Close the record in the ledger, which keeps a summary. A record that has not ended is ended first."""
        if not record.done:
            record.finish("abort", None, self.clock.now_s())
        relay = self.relays.get(record.id)
        if relay is not None and relay.record is record:  # a stored answer has no relay
            del self.relays[record.id]
        self.groups.leave(record)
        self.ledger.close(record)

    def cancel(self, requests: Iterable[RequestId], groups: Iterable[str], reason: str) -> tuple[RequestId, ...]:
        """End the answers of these requests and groups with the tokens generated so far. `reason` becomes the stop
        reason of the answers, and an empty string means `cancelled`. Returns the ids of the requests that were still
        running."""
        named = [record for name in requests if (record := self.ledger.get(name)) is not None]
        named += [record for group in groups for record in self.groups.members(group)]
        return tuple(record.id for record in named if self._cancel(record, reason or "cancelled"))

    def _cancel(self, record: RequestRecord, reason: str) -> bool:
        relay = self.relays.get(record.id)
        if relay is None or not relay.end("abort", reason):
            return False
        # Clients choose reasons freely, and the number of metric labels must stay bounded.
        self.cancelled_total[reason if reason in COUNTED_REASONS else "other"] += 1
        return True

    def set_routes(
        self, routes: Iterable[EngineRoute], expected: Iterable[EngineId] = (), expected_until_s: float = 0.0
    ) -> list[str]:
        known = {id(backend) for backend in self.fleet}
        routes = tuple(routes)
        faults = self.fleet.set_routes(routes, expected, expected_until_s)
        for backend in self.fleet:
            if id(backend) not in known:
                self.fleet.in_background(self.barrier.meet(backend))
                self.fleet.in_background(self.fleet.learn(backend))
        newest = (route.newest_policy_version for route in routes)
        self.barrier.learn(next((version for version in newest if version is not None), None))
        self.barrier.wake_engines()
        return faults

    async def move(self, moves: Sequence[RequestMove]) -> tuple[OperationItemResult, ...]:
        """Carry out the moves concurrently. Returns one result per move, in the same order."""
        results = await asyncio.gather(*(self._move(move) for move in moves))
        for result in results:
            self.moves_done += result.done
            self.moves_refused += not result.done
            self.tokens_recomputed += result.recomputed_tokens
            self.tokens_loaded += result.loaded_tokens
        return tuple(results)

    def has_request(self, request: RequestId) -> bool:
        """Return whether the request is in flight in this gateway or ended here recently."""
        return request in self.relays or any(summary.id == request for summary in reversed(self.ledger.finished))

    async def _move(self, move: RequestMove) -> OperationItemResult:
        try:
            return await self._carry_out(move)
        except MoveRefused as refusal:
            return OperationItemResult(move.request, done=False, detail=str(refusal))

    async def _carry_out(self, move: RequestMove) -> OperationItemResult:
        """Carry out one move. Raises MoveRefused if the pause barrier is closed, if the request has ended or cannot
        leave its engine, or if the target cannot accept the request."""
        relay = self.relays.get(move.request)
        target = self.fleet.get(move.to_engine)
        if not self.fleet.barrier_open:
            raise MoveRefused("requests cannot move while the pause barrier is closed")
        if relay is None:
            ended = self.has_request(move.request)
            raise MoveRefused("the request finished before the move" if ended else "no such request")
        to_come = target is None or not target.usable
        held = to_come and (move.hold_s > 0 or move.to_engine in self.fleet.expected)
        if target is None and not held:
            raise MoveRefused(f"engine {move.to_engine!r} is not in the routes")
        if (relay.record.engine or "") not in (move.from_engine, self.fleet.id_of(move.from_engine)):
            at = relay.record.engine or "none"
            raise MoveRefused(f"the request must be assigned to engine {move.from_engine or 'none'}, got {at}")
        if not move.from_engine:
            return relay.redirect(move.to_engine, move.hold_s)
        if held:
            return relay.park_for(move.to_engine, move.hold_s)
        assert target is not None
        return await relay.move(target, move)

    def report(self) -> GatewayReport:
        """Return the report for the daemon. The report lists every request in flight."""
        now_s = self.clock.now_s()
        sequence, finished = self.ledger.report()
        in_flight = tuple(record.view(now_s) for record in self.ledger)
        failovers = self.fleet.failovers.report(sequence)
        barrier, start = self.barrier.report(), self.fleet.incarnation
        return GatewayReport(self.node, sequence, now_s, self.url, in_flight, finished, barrier, failovers, start)

    def acknowledge(self, sequence: int) -> None:
        """Forget the entries of all reports up to sequence number `sequence`. The daemon has stored these reports."""
        self.ledger.acknowledge(sequence)
        self.fleet.failovers.acknowledge(sequence)

    async def identify_engines(self) -> None:
        """Read the server identities of the engines that the gateway was started with. If the daemon's routes list the
        server of such an engine under another address, the engine is renamed to the id of that route."""
        fleet = self.fleet
        slots = {engine: fleet.get(engine) for engine in fleet.own}
        lost = [engine for engine, backend in slots.items() if backend is None or not backend.routed]
        asked = [backend for backend in fleet if lost or any(backend is own for own in slots.values())]
        await asyncio.gather(*(self._identify(backend) for backend in asked))
        for engine, backend in slots.items():
            own = fleet.own[engine]
            if backend is not None and backend.server and same_address(backend.engine.url, own.url):
                fleet.own[engine] = replace(own, server=backend.server)
        by_server = {backend.server: backend.id for backend in asked if backend.routed and backend.server}
        for engine in lost:
            if (same := by_server.get(fleet.own[engine].server)) is not None:
                fleet.use_id(engine, same)

    async def _identify(self, backend: EngineBackend) -> None:
        try:
            backend.server = (await backend.engine.metrics()).server
        except OrchestrRLError as error:
            logger.debug("metrics of %s: %s", backend.id, error)

    async def watch(self) -> None:
        """Move requests away from stalled engines, and try again to read the capabilities of engines that did not
        report them at the first attempt. The method runs until it is cancelled."""
        while True:
            await self.clock.sleep(self.limits.stall_s * WATCH_FRACTION)
            now_s = self.clock.now_s()
            stalled = [relay for relay in self.relays.values() if relay.stalled(now_s)]
            await asyncio.gather(*(relay.leave_stalled() for relay in stalled))
            # Engines that were not yet up at the first attempt.
            for backend in self.fleet:
                backend.unlearnable = False
            await asyncio.gather(*(self.fleet.learn(backend) for backend in self.fleet if backend.usable))
            if self.fleet.models_differ:  # an adapter that one engine serves may have been loaded on another
                await self.fleet.read_models_again()

    async def models(self) -> dict[str, int | None]:
        """Return the context length, in tokens, of each model that a responding engine serves. The keys are model
        names. A length is None if it is unknown."""
        slots = [backend for backend in self.fleet if backend.usable]
        answers = await asyncio.gather(*(self.fleet.capabilities(backend) for backend in slots), return_exceptions=True)
        models: dict[str, int | None] = {}
        for answer in answers:
            if not isinstance(answer, BaseException):
                models.update(dict.fromkeys(answer.models, answer.max_model_len_tokens))
            elif not isinstance(answer, OrchestrRLError):
                raise answer
        return models

    def default_model(self) -> str:
        """Return the model name for requests that name no model. It is the first name that an engine reported, or "" if
        no name is known."""
        known = (backend.capabilities.models for backend in self.fleet if backend.capabilities is not None)
        return next((models[0] for models in known if models), "")
