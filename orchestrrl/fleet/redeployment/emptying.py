"""Choose new engines for the requests of leaving engines. A request goes to an engine that stays or to an engine that
is being started. All leaving engines are emptied at the same time, from one snapshot of the fleet."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrrl.fleet.redeployment.steps import Redeployment
from planner.model import Configuration, ConfigurationId, EngineId, RequestId, RequestMove, RequestView, Snapshot

if TYPE_CHECKING:
    from orchestrrl.fleet.redeployment.actions import FleetControl

# Without further orders a gateway keeps a request for its new engine this long, plus twice the engine's expected start
# time; then it sends the request elsewhere.
HOLD_S = 30.0
# After an order a gateway has this long to report its requests; then the remaining ones are ordered again.
TOLD_WITHIN_S = 1.5
# A snapshot of ten thousands of requests blocks the event loop for tens of milliseconds: it is reused for this long.
LOOK_S = 0.05
LOOK_S_PER_REQUEST = 1.5e-5


@dataclass(frozen=True, slots=True)
class _Look:
    snapshot: Snapshot
    requests: Mapping[EngineId, Sequence[RequestView]]
    willing: Mapping[EngineId, int]  # engines that accept requests, or will, and their GPU counts
    load: Counter[EngineId]  # requests there or on their way; grows as more are sent


class Emptying:
    """Moves requests off the leaving engines of one redeployment. A request goes to its planned destination if that
    engine accepts requests, and to the least loaded engine otherwise."""

    def __init__(
        self,
        control_plane: "FleetControl",
        redeployment: Redeployment,
        configurations: Mapping[ConfigurationId, Configuration],
    ) -> None:
        self.moved: set[RequestId] = set()
        self.parked: set[RequestId] = set()  # kept by their gateway for an engine that is being started
        self._control_plane = control_plane
        self._redeployment = redeployment
        self._coming = {spec.engine: spec.configuration for spec in redeployment.preparing}
        self._hold_s = {
            engine: HOLD_S + 2 * (configurations[id].switch_s if id in configurations else 0.0)
            for engine, id in self._coming.items()
        }
        self._given: dict[RequestId, EngineId] = {}  # as last ordered
        self._until_s: dict[RequestId, float] = {}  # the earliest time of the next order
        self._refused: defaultdict[RequestId, set[EngineId]] = defaultdict(set)  # by these engines
        self._polled: _Look | None = None

    def here(self, engine: EngineId) -> Sequence[RequestView]:
        """Return the requests that run or wait on the engine, according to the gateways' reports."""
        return self._recent_snapshot().requests.get(engine, ())

    async def order(self, engine: EngineId) -> int:
        """Order moves of all movable requests on the engine to other engines, except requests that were recently
        ordered to move. Return the number of requests that left the engine."""
        look, now_s = self._recent_snapshot(), self._control_plane.clock.now_s()
        due = [r for r in self.here(engine) if r.movable and self._until_s.get(r.id, 0.0) <= now_s]
        moves = [move for request in due if (move := self._move(request, look)) is not None]
        if not moves:
            return 0
        self._until_s |= {move.request: now_s + TOLD_WITHIN_S for move in moves}
        outcome = await self._control_plane.carry_out(moves, look.snapshot)
        left = 0
        for move, item in zip(moves, outcome.items, strict=True):
            if not item.done:
                self._refused[move.request].add(move.to_engine)
                continue
            left += 1
            parks = move.to_engine in self._control_plane.routes.expected
            (self.parked if parks else self.moved).add(move.request)
        return left

    def _move(self, request: RequestView, look: _Look) -> RequestMove | None:
        assert request.engine is not None
        refused = self._refused.get(request.id, set())
        if refused.issuperset(look.willing):  # all have refused once; their reasons may be gone
            refused = set()
        open_to = [engine for engine in look.willing if engine not in refused]
        if not open_to:
            return None
        destination = self._redeployment.destinations.get(request.id)
        if destination is None or destination not in open_to:
            destination = min(open_to, key=lambda engine: (look.load[engine] / look.willing[engine], engine))
        look.load[self._headed(request)] -= 1
        look.load[destination] += 1
        self._given[request.id] = destination
        return RequestMove(
            request.id, request.engine, destination, self._hold_s.get(destination, 0.0), state=request.state
        )

    def _headed(self, request: RequestView) -> EngineId:
        there = request.engine or EngineId("")
        return self._given.get(request.id) or self._redeployment.destinations.get(request.id) or there

    def _recent_snapshot(self) -> _Look:
        now_s = self._control_plane.clock.now_s()
        before = self._polled
        if before is not None:
            age_s, requests = now_s - before.snapshot.now_s, len(before.snapshot.requests)
            if 0 <= age_s <= LOOK_S + LOOK_S_PER_REQUEST * requests:
                return before
        snapshot = self._control_plane.state.snapshot(now_s)
        requests_of: defaultdict[EngineId, list[RequestView]] = defaultdict(list)
        for request in snapshot.requests:
            if request.engine is not None:
                requests_of[request.engine].append(request)
        takes = {view.id for view in snapshot.engines if self._control_plane.routes.accepts(view)}
        willing = {
            spec.engine: len(spec.gpus) or 1
            for spec in self._redeployment.new
            if spec.engine in self._coming or spec.engine in takes
        }
        load = Counter(map(self._headed, snapshot.requests))
        self._polled = _Look(snapshot, requests_of, willing, load)
        return self._polled
