"""Simulate the gateway with the real ledger, engine backends and routing, but without the relay's HTTP.

A request is represented by its number of tokens. Moves, holds, and the handling of requests whose engine died follow
gateway/relay.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from orchestrrl.core.clock import Clock
from orchestrrl.core.operations import (
    MoveRequests,
    Operation,
    OperationItemResult,
    OperationResult,
    OperationStatus,
    SetRoutes,
    status_of,
)
from orchestrrl.engines.base import CompletionEndpoint, Engine
from orchestrrl.fleet.reports import GatewayReport
from orchestrrl.gateway.ledger.ledger import Ledger, RequestRecord
from orchestrrl.gateway.routing.backend import EngineBackend
from orchestrrl.gateway.routing.backends import EngineBackends, NoBackend
from orchestrrl.gateway.routing.queue import QueuedRequest
from orchestrrl.gateway.routing.strategies import RoutingPolicy
from orchestrrl.lab.sim.engines import VirtualEngine, VirtualManaged
from orchestrrl.lab.sim.workload import SimRequest
from orchestrrl.lab.simulated_engine.scheduler import SequenceProgress
from planner.model import EngineId, NodeId, RequestId, RequestMove, RequestState


@dataclass(slots=True)
class CountedRecord(RequestRecord):
    """A request record that counts its tokens instead of storing them."""

    generated: int = 0
    output_tokens: int = 1  # final length of the answer

    @property
    def generated_tokens(self) -> int:
        return self.generated

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens_estimate + self.generated

    @property
    def left_tokens(self) -> int:
        return self.output_tokens - self.generated

    def grow(self, tokens: int, now_s: float) -> None:
        self.generated += tokens
        self.progressed_s = now_s
        self.state = RequestState.RUNNING
        if self.started_s is None:
            self.started_s = now_s


def record_of(request: SimRequest, now_s: float) -> CountedRecord:
    return CountedRecord(
        request.id,
        CompletionEndpoint.COMPLETIONS,
        {},
        False,
        now_s,
        request.max_tokens,
        group=request.group,
        prompt_tokens_estimate=request.prompt_tokens,
        output_tokens=request.output_tokens,
    )


Arrive = Callable[[CountedRecord, VirtualEngine, VirtualEngine | None], None]
Finished = Callable[[CountedRecord], None]


class VirtualGateway:
    """A gateway that serves every request of the simulated fleet. `engine_at` returns the engine at a URL. `arrive`
    submits a request to an engine. Its last argument is the engine that holds the request's KV cache, or None if the
    request has no KV cache to transfer. `finished` is called for every completed answer."""

    def __init__(
        self,
        node: NodeId,
        clock: Clock,
        engine_at: Callable[[str], VirtualEngine],
        arrive: Arrive,
        finished: Finished,
        routing: RoutingPolicy | None = None,
    ) -> None:
        self.node = node
        self.clock = clock
        self._engine_at = engine_at
        self._arrive = arrive
        self._finished = finished
        # EngineBackends uses only the methods that VirtualManaged has: URL, health and capabilities.
        self.fleet = EngineBackends(
            lambda url: cast(Engine, VirtualManaged(url, engine_at)), clock=clock, routing=routing
        )
        self.ledger = Ledger(keep_finished=1 << 20)
        self.records: dict[RequestId, CountedRecord] = {}
        self.tokens_recomputed = 0
        self._held: dict[RequestId, tuple[EngineId, float]] = {}  # destination, deadline

    def submit(self, requests: Sequence[SimRequest], to: Sequence[EngineId] | None = None) -> None:
        """Accept new requests, and send each request to the engine at the same index of `to`. If `to` is None, route
        each request separately."""
        now_s = self.clock.now_s()
        for index, request in enumerate(requests):
            record = record_of(request, now_s)
            self.ledger.add(record)
            self.records[record.id] = record
            self._send(record, None if to is None else self.fleet.get(to[index]), None)

    def progressed(self, engine: VirtualEngine, made: Sequence[SequenceProgress], now_s: float) -> None:
        """Record the tokens that an engine has generated, and close the requests that have finished."""
        if not made:
            return
        backend = self.fleet.get(engine.id)
        for progress in made:
            record = self.records[progress.id]
            before, was = record.context_tokens, record.state
            record.grow(progress.tokens, now_s)
            if backend is not None:
                backend.advance(record, before, was, now_s)
                if was is not record.state:
                    self.fleet.dispatch()
            if progress.finished_s is not None:
                self._close(record, backend, progress.finished_s)

    def engine_died(self, engine: VirtualEngine) -> None:
        """Resume the requests of a dead engine on other engines, which recompute the KV cache from the requests'
        tokens."""
        backend = self.fleet.get(engine.id)
        if backend is None:
            return
        orphans = [cast(CountedRecord, record) for record in backend.records.values()]
        if not orphans and (backend.route.draining or not backend.routed):
            return  # the engine was drained first: a stop, not a crash
        self.fleet.suspect(backend, "connection refused")
        for record in orphans:
            self.fleet.release(backend, record)
            self._send(record, None, None)

    def perform(self, operation: Operation) -> OperationResult:
        """Carry out one of the daemon's operations and return its result. Operations take no virtual time."""
        now_s = self.clock.now_s()
        if now_s > operation.valid_until_s:
            return OperationResult(operation.id, self.node, OperationStatus.REFUSED, "the operation has expired")
        match operation.action:
            case SetRoutes(routes):
                faults = self.fleet.set_routes(routes)
                self._place_held(now_s)
                status = OperationStatus.PARTIAL if faults else OperationStatus.DONE
                return OperationResult(operation.id, self.node, status, "; ".join(faults))
            case MoveRequests(moves):
                items = tuple(self._move(move, now_s) for move in moves)
                return OperationResult(operation.id, self.node, status_of(items), items=items)
            case other:
                detail = f"gateways do not support {other.kind}"
                return OperationResult(operation.id, self.node, OperationStatus.FAILED, detail)

    def report(self) -> GatewayReport:
        now_s = self.clock.now_s()
        self._place_held(now_s)
        sequence, finished = self.ledger.report()
        in_flight = tuple(record.view(now_s) for record in self.records.values())
        return GatewayReport(self.node, sequence, now_s, "", in_flight, finished)

    # --- inside

    def _send(self, record: CountedRecord, backend: EngineBackend | None, source: VirtualEngine | None) -> None:
        def placed(backend: EngineBackend | NoBackend) -> None:
            assert isinstance(backend, EngineBackend)  # the queue has no time limit
            backend.enter(record, self.clock.now_s())
            self._arrive(record, self._engine_at(backend.engine.url), source)

        if backend is not None:
            placed(backend)
            return
        record.detach()
        self.fleet.enqueue(QueuedRequest(record, placed, again=record.attempt > 0))

    def _close(self, record: CountedRecord, backend: EngineBackend | None, finished_s: float) -> None:
        capped = record.max_tokens is not None and record.generated >= record.max_tokens
        record.finish("length" if capped else "stop", None, finished_s)
        if backend is not None:
            self.fleet.release(backend, record)
        del self.records[record.id]
        self.ledger.close(record)
        self._finished(record)

    def _move(self, move: RequestMove, now_s: float) -> OperationItemResult:
        """Move a request to another engine, with the same checks as gateway/core.py and gateway/relay.py."""
        record = self.records.get(move.request)
        source_slot, target = self.fleet.get(move.from_engine), self.fleet.get(move.to_engine)

        def refused(detail: str) -> OperationItemResult:
            return OperationItemResult(move.request, done=False, detail=detail)

        if record is None:
            return refused("no such request")
        if record.engine != move.from_engine:
            return refused(f"the request must be assigned to engine {move.from_engine}, got {record.engine or 'none'}")
        if source_slot is None:
            return refused(f"engine {move.from_engine!r} is not in the routes")
        if (target is None or not target.usable) and not move.hold_s:
            return refused(f"engine {move.to_engine!r} is not in the routes" if target is None else "takes no requests")
        source = self._engine_at(source_slot.engine.url)
        self.progressed(source, source.advance(now_s), now_s)
        if move.request not in self.records:
            return refused("the request finished before the move")
        computed = bool(record.generated) and record.state is RequestState.RUNNING
        source.scheduler.abort([record.id])
        self.fleet.release(source_slot, record)
        record.moves += 1
        before = self.tokens_recomputed
        if target is not None and target.usable:
            self._send(record, target, source if computed else None)
        else:
            self.tokens_recomputed += record.context_tokens if computed else 0
            record.detach()
            self._held[record.id] = (move.to_engine, now_s + move.hold_s)
        recomputed_tokens = self.tokens_recomputed - before
        return OperationItemResult(move.request, done=True, detail="", recomputed_tokens=recomputed_tokens)

    def _place_held(self, now_s: float) -> None:
        for request, (engine, until_s) in list(self._held.items()):
            backend = self.fleet.get(engine)
            if (backend is not None and backend.usable) or now_s >= until_s:
                del self._held[request]
                self._send(self.records[request], backend if backend is not None and backend.usable else None, None)
