"""Which requests to move so that no worker straggles: the fast loop's decision (section 4.2 of the paper). Pure.

From the most congested worker, waiting before running and short contexts first, to the least congested worker that
has the KV room, for as long as the spread of load indices exceeds theta. Ids break every tie.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from math import inf, isinf
from operator import attrgetter

from balancer.load_index import Worker, concurrency_cap, load_index, stand_in_tokens_per_s
from balancer.move_limits import MoveLimits
from planner.model import EngineId, RequestId, RequestMove, RequestState

WITHIN_THETA = "within_theta"

NO_FEASIBLE_MOVE = "no_feasible_move"
MAX_MOVES = "max_moves"


@dataclass(frozen=True, slots=True)
class Balance:
    """The moves, in order, and the load indices around them. None: the worker is stalled, so is the spread."""

    load_before: Mapping[EngineId, float | None]
    load_after: Mapping[EngineId, float | None]
    spread_before: float | None
    spread_after: float | None
    moves: tuple[RequestMove, ...]
    stopped_because: str  # within_theta | no_feasible_move | max_moves


def decide(
    theta: float,
    workers: Sequence[Worker],
    *,
    max_moves: int | None = None,
    excluded: AbstractSet[RequestId] = frozenset(),
    forget_stuck: bool = False,
    room: MoveLimits | None = None,
) -> Balance:
    """Return the moves of one tick, down to a spread of load indices of `theta`.

    For the live loop: at most `max_moves`; never a request in `excluded` (not movable, or moved too often already);
    with `forget_stuck`, a stalled worker that nothing can leave does not keep the others from being balanced; only to
    where `room` has room, beside what the rule itself asks of free KV. Raises ValueError for a theta below 0.
    """
    if not theta >= 0:
        raise ValueError(f"theta must be >= 0, got {theta}")
    fleet = _Fleet(workers, excluded, room)
    load_before, spread_before = fleet.load_indices(), fleet.spread
    moves: list[RequestMove] = []
    stopped_because = WITHIN_THETA
    while (spread := fleet.counted_spread) > theta:
        if max_moves is not None and len(moves) >= max_moves:
            stopped_because = MAX_MOVES
            break
        source = fleet.most_congested()
        if source is None:
            stopped_because = NO_FEASIBLE_MOVE
            break
        found = fleet.find_move(source, spread)
        if found is None:
            fleet.set_aside(source, forget=forget_stuck and source.stalled)
        else:
            moves.append(fleet.carry_out(source, found))
    return Balance(
        load_before=load_before,
        load_after=fleet.load_indices(),
        spread_before=_reported(spread_before),
        spread_after=_reported(fleet.spread),
        moves=tuple(moves),
        stopped_because=stopped_because,
    )


def balance_of(workers: Sequence[Worker], moves: Sequence[RequestMove], stopped_because: str) -> Balance:
    """Return moves that were chosen otherwise, with the load indices around them."""
    fleet = _Fleet(workers, frozenset(), None)
    load_before, spread_before = fleet.load_indices(), fleet.spread
    fleet.carry_out_all(moves)
    spreads = _reported(spread_before), _reported(fleet.spread)
    return Balance(load_before, fleet.load_indices(), *spreads, tuple(moves), stopped_because)


def _reported(index: float) -> float | None:
    return None if isinf(index) else index


# What a worker holds at one point of the decision, and what follows from it: requests running, all requests, their
# context tokens, free KV tokens, concurrency cap, load index (inf: stalled). A plain tuple: thousands are made.
_Holding = tuple[int, int, int, int, int, float]

# A request that may leave its worker: context tokens, id, state. Their order is that of leaving, within one state.
_Departure = tuple[int, RequestId, RequestState]


class _Load:
    """One worker while moves are being chosen."""

    def __init__(
        self, position: int, worker: Worker, contexts: list[int], tokens_per_s: float, fleet: tuple[int, int]
    ) -> None:
        self.position = position  # in the order of ids
        self.worker = worker
        # A stall is a fact of the measurement: a request that arrives later does not make one, nor one that leaves
        # end it while others are still stuck there.
        self.stalled = worker.stalled
        self.contexts = contexts  # tokens of each request that it held at first
        self.departures: list[_Departure] | None = None  # in order; None: not asked for yet
        self.set_aside = False
        self._max_sequences = worker.max_sequences
        self._tokens_per_s = worker.decode_tokens_per_s or tokens_per_s
        self._fleet = fleet
        self.become(self._holding(len(worker.running), len(contexts), sum(contexts), worker.kv_free_tokens))

    def become(self, holding: _Holding) -> None:
        """Go on from what a move leaves it with."""
        self.running, self.requests, self.context_tokens, self.kv_free_tokens, self.cap, self.load_index = holding
        self.entry = self.load_index, self.position  # in the order of congestion
        # As far as is known, in tokens: it takes no longer context.
        self.room = -1 if self.stalled else self.kv_free_tokens

    def _holding(self, running: int, requests: int, context_tokens: int, kv_free_tokens: int) -> _Holding:
        cap = concurrency_cap(running, requests, context_tokens, kv_free_tokens, self._max_sequences, self._fleet)
        if self.stalled and requests:
            return running, requests, context_tokens, kv_free_tokens, cap, inf
        return running, requests, context_tokens, kv_free_tokens, cap, load_index(requests, cap, self._tokens_per_s)

    def without(self, departure: _Departure) -> _Holding:
        """After one of its requests has left; a running one gives its KV back."""
        tokens, _, state = departure
        requests, context_tokens = self.requests - 1, self.context_tokens - tokens
        if state is RequestState.RUNNING:
            return self._holding(self.running - 1, requests, context_tokens, self.kv_free_tokens + tokens)
        return self._holding(self.running, requests, context_tokens, self.kv_free_tokens)

    def joined_by(self, tokens: int) -> _Holding:
        """After a request of so many context tokens has arrived: it runs where a seat and KV are free, else it
        waits."""
        requests, context_tokens = self.requests + 1, self.context_tokens + tokens
        if self.running < self._max_sequences and tokens <= self.kv_free_tokens:
            return self._holding(self.running + 1, requests, context_tokens, self.kv_free_tokens - tokens)
        return self._holding(self.running, requests, context_tokens, self.kv_free_tokens)

    def having(self, tokens: int) -> _Holding | None:
        """After a request of so many context tokens has arrived; None where there is no room, or those that are here
        would lose concurrency, as they would by any longer context.
        """
        if tokens > self.room:
            return None
        after = self.joined_by(tokens)
        _, requests, _, _, cap, _ = after
        if cap < self.cap and cap < requests:
            self.room = tokens - 1
            return None
        return after


_by_congestion = attrgetter("entry")
_room = attrgetter("room")

# A move that is feasible: its place among the source's departures, the destination, and what the two then hold.
_Found = tuple[int, _Load, _Holding, _Holding]


class _Fleet:
    """All workers while moves are being chosen, kept in order of congestion."""

    def __init__(self, listed: Sequence[Worker], excluded: AbstractSet[RequestId], room: MoveLimits | None) -> None:
        workers = sorted(listed, key=lambda worker: worker.id)
        tokens_per_s = stand_in_tokens_per_s(workers)
        contexts = [[r.prompt_tokens + r.generated_tokens for r in worker.requests] for worker in workers]
        fleet = sum(map(len, contexts)), sum(map(sum, contexts))
        self._loads = [
            _Load(position, worker, contexts[position], tokens_per_s, fleet) for position, worker in enumerate(workers)
        ]
        self._excluded = excluded
        self._further_room = room
        self._output_order = [worker.id for worker in listed]
        self._forgotten: list[_Load] = []
        self._ascending = sorted(self._loads, key=_by_congestion)
        # Superseded entries stay in the heap and are skipped.
        self._sources = [(-load.load_index, load.position) for load in self._loads]
        heapify(self._sources)

    def load_indices(self) -> dict[EngineId, float | None]:
        """Load index by worker, in the order in which the workers are listed."""
        indices = {load.worker.id: _reported(load.load_index) for load in self._loads}
        return {worker: indices[worker] for worker in self._output_order}

    @property
    def counted_spread(self) -> float:
        """Highest minus lowest index, inf while a worker is stalled; forgotten workers left out."""
        if not self._ascending:
            return 0.0
        highest = self._ascending[-1].load_index
        return inf if highest == inf else highest - self._ascending[0].load_index

    @property
    def spread(self) -> float:
        """Highest minus lowest index over all workers, inf while one is stalled."""
        return inf if any(load.load_index == inf for load in self._forgotten) else self.counted_spread

    def most_congested(self) -> _Load | None:
        """The first by index, then id, among those not set aside."""
        while self._sources:
            index, position = self._sources[0]
            load = self._loads[position]
            if load.load_index == -index and not load.set_aside:
                return load
            heappop(self._sources)
        return None

    def set_aside(self, load: _Load, forget: bool) -> None:
        """Nothing leaves this worker any more. To forget it takes it out of the spread as well."""
        load.set_aside = True
        if forget:
            self._remove(load)
            self._forgotten.append(load)

    def find_move(self, source: _Load, spread: float) -> _Found | None:
        """The first request of the source, in its order of departure, that has a destination. `spread`: as it is."""
        if not source.stalled and isinf(spread):
            return None  # while another worker is stalled, no move from this one lowers the spread
        # Of the others, the two with the lowest index and the two with the highest, where there are so many.
        low = [load for load in self._ascending[:3] if load is not source]
        high = [load for load in self._ascending[:-4:-1] if load is not source]
        lowest, highest = (low[0].load_index, high[0].load_index) if low else (inf, -inf)
        failed: tuple[int, RequestState] | None = None
        longest: float = inf  # context that anybody may have room for
        for place, departure in enumerate(self._departures(source)):
            context_tokens, request, state = departure
            if context_tokens > longest or (context_tokens, state) == failed:
                continue
            left = source.without(departure)
            index = left[-1]
            # While the others alone are as far apart, only what changes the lowest or the highest of them helps.
            anywhere = source.stalled or max(highest, index) - min(lowest, index) < spread
            for destination in self._ascending if anywhere else (low[0], high[0]):
                if destination.room < context_tokens or destination is source:
                    continue
                arrived = destination.having(context_tokens)
                if arrived is None:
                    continue
                least = lowest if destination is not low[0] else low[1].load_index if len(low) > 1 else inf
                most = highest if destination is not high[0] else high[1].load_index if len(high) > 1 else -inf
                after = max(most, index, arrived[-1]) - min(least, index, arrived[-1])
                if (source.stalled or after < spread) and self._fits(request, source, destination):
                    return place, destination, left, arrived
            if self._further_room is None:  # with it, requests of one context differ
                failed = context_tokens, state
            only_ends = not source.stalled and highest - lowest >= spread
            longest = max(map(_room, (low[0], high[0]) if only_ends else self._loads))
        return None

    def _fits(self, request: RequestId, source: _Load, destination: _Load) -> bool:
        room = self._further_room
        return room is None or room.fits(request, source.worker.id, destination.worker.id)

    def _departures(self, source: _Load) -> list[_Departure]:
        """What may leave: waiting before running, short contexts first, then by id."""
        if source.departures is None:
            excluded, worker, count = self._excluded, source.worker, len(source.worker.running)
            running, waiting = source.contexts[:count], source.contexts[count:]
            source.departures = [
                departure
                for queue, contexts in ((worker.waiting, waiting), (worker.running, running))
                for departure in sorted(
                    [
                        (tokens, request.id, request.state)
                        for tokens, request in zip(contexts, queue, strict=True)
                        if request.id not in excluded
                    ]
                )
            ]
        return source.departures

    def carry_out(self, source: _Load, found: _Found) -> RequestMove:
        """Make the move, and put both workers where they then belong."""
        place, destination, left, arrived = found
        assert source.departures is not None
        _, request, state = source.departures.pop(place)
        if self._further_room is not None:
            self._further_room.moved(request, source.worker.id, destination.worker.id)
        self._become(source, left)
        heapreplace(self._sources, (-source.load_index, source.position))  # it was the first of them
        self._become(destination, arrived)
        if not destination.set_aside:
            heappush(self._sources, (-destination.load_index, destination.position))
        return RequestMove(request, source.worker.id, destination.worker.id, state=state)

    def carry_out_all(self, moves: Sequence[RequestMove]) -> None:
        loads = {load.worker.id: load for load in self._loads}
        contexts = {request.id: request.context_tokens for load in self._loads for request in load.worker.requests}
        for move in moves:
            source, tokens = loads[move.from_engine], contexts[move.request]
            self._become(source, source.without((tokens, move.request, move.state)))
            self._become(loads[move.to_engine], loads[move.to_engine].joined_by(tokens))

    def _become(self, load: _Load, holding: _Holding) -> None:
        self._remove(load)
        load.become(holding)
        insort(self._ascending, load, key=_by_congestion)

    def _remove(self, load: _Load) -> None:
        del self._ascending[bisect_left(self._ascending, load.entry, key=_by_congestion)]
