"""Which requests to move so that no worker straggles: the fast loop's decision (section 4.2 of the paper). Pure.

From the most congested worker, waiting before running and short contexts first, to the least congested worker that
has the KV room, for as long as the spread of load indices exceeds theta. Ids break every tie.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf, isinf
from typing import NamedTuple

from balancer.load import Problem, Worker, concurrency_cap, load_index, stand_in_tokens_per_s
from planner.model import EngineId, RequestId, RequestState

WITHIN_THETA = "within_theta"
NO_FEASIBLE_MOVE = "no_feasible_move"
MAX_MOVES = "max_moves"


@dataclass(frozen=True, slots=True)
class Move:
    """One request to be moved, and the queue of the source that it stands in."""

    request: RequestId
    source: EngineId
    destination: EngineId
    state: RequestState


@dataclass(frozen=True, slots=True)
class Balance:
    """The moves, in order, and the load indices around them. None: the worker is stalled, so is the spread."""

    load_before: Mapping[EngineId, float | None]
    load_after: Mapping[EngineId, float | None]
    spread_before: float | None
    spread_after: float | None
    moves: tuple[Move, ...]
    stopped_because: str  # within_theta | no_feasible_move | max_moves


def decide(
    problem: Problem,
    *,
    max_moves: int | None = None,
    excluded: AbstractSet[RequestId] = frozenset(),
    forget_stuck: bool = False,
) -> Balance:
    """The moves of one tick.

    For the live loop: at most `max_moves`; never a request in `excluded` (not movable, or moved too often already);
    with `forget_stuck`, a stalled worker that nothing can leave does not keep the others from being balanced.
    """
    fleet = _Fleet(problem, excluded)
    load_before, spread_before = fleet.load_indices(), fleet.spread
    moves: list[Move] = []
    stopped_because = WITHIN_THETA
    while fleet.counted_spread > problem.theta:
        if max_moves is not None and len(moves) >= max_moves:
            stopped_because = MAX_MOVES
            break
        source = fleet.most_congested()
        if source is None:
            stopped_because = NO_FEASIBLE_MOVE
            break
        found = fleet.find_move(source)
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


def _reported(index: float) -> float | None:
    return None if isinf(index) else index


class _Holding(NamedTuple):
    """What a worker holds at one point of the decision, and what follows from it."""

    running: int
    requests: int
    context_tokens: int
    kv_free_tokens: int
    cap: int
    load_index: float  # inf: stalled


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
        self._tokens_per_s = worker.decode_tokens_per_s or tokens_per_s
        self._fleet = fleet
        self.become(self._holding(len(worker.running), len(contexts), sum(contexts), worker.kv_free_tokens))

    def become(self, holding: _Holding) -> None:
        """Go on from what a move leaves it with."""
        self.now = holding
        # What is known of the contexts, in tokens, that it could take: none longer than `room`; none longer than
        # `relief` lowers its index, which a short one beside long ones can; none up to `no_burden` raises it.
        self.room = -1 if self.stalled else holding.kv_free_tokens
        self.relief, self.no_burden = self.room, -1

    def _holding(self, running: int, requests: int, context_tokens: int, kv_free_tokens: int) -> _Holding:
        max_sequences = self.worker.max_sequences
        cap = concurrency_cap(running, requests, context_tokens, kv_free_tokens, max_sequences, self._fleet)
        index = inf if self.stalled and requests else load_index(requests, cap, self._tokens_per_s)
        return _Holding(running, requests, context_tokens, kv_free_tokens, cap, index)

    def without(self, departure: _Departure) -> _Holding:
        """After one of its requests has left; a running one gives its KV back."""
        now, context_tokens, was_running = self.now, departure[0], departure[2] is RequestState.RUNNING
        return self._holding(
            now.running - was_running,
            now.requests - 1,
            now.context_tokens - context_tokens,
            now.kv_free_tokens + (context_tokens if was_running else 0),
        )

    def having(self, context_tokens: int) -> _Holding | None:
        """After a request has arrived; None where there is no room, or those that are here would lose concurrency.

        The longer the context, the smaller the cap and the higher the index: each answer settles others.
        """
        if context_tokens > self.room:
            return None
        now = self.now
        runs = now.running < self.worker.max_sequences
        after = self._holding(
            now.running + runs,
            now.requests + 1,
            now.context_tokens + context_tokens,
            now.kv_free_tokens - (context_tokens if runs else 0),
        )
        if after.load_index >= now.load_index:
            self.relief = min(self.relief, context_tokens - 1)
        if after.load_index <= now.load_index:
            self.no_burden = max(self.no_burden, context_tokens)
        if after.cap < min(now.cap, after.requests):
            self.room = context_tokens - 1
            return None
        return after


class _Found(NamedTuple):
    """A move that is feasible, and what the two workers then hold."""

    place: int  # among the source's departures
    destination: _Load
    left: _Holding
    arrived: _Holding


class _Fleet:
    """All workers while moves are being chosen, kept in order of congestion."""

    def __init__(self, problem: Problem, excluded: AbstractSet[RequestId]) -> None:
        workers = sorted(problem.workers, key=lambda worker: worker.id)
        tokens_per_s = stand_in_tokens_per_s(workers)
        contexts = [[request.context_tokens for request in worker.running + worker.waiting] for worker in workers]
        fleet = sum(map(len, contexts)), sum(map(sum, contexts))
        self._loads = [
            _Load(position, worker, contexts[position], tokens_per_s, fleet) for position, worker in enumerate(workers)
        ]
        self._excluded = excluded
        self._output_order = [worker.id for worker in problem.workers]
        self._forgotten: list[_Load] = []
        self._ascending = sorted((load.now.load_index, load.position) for load in self._loads)
        # Beside it: what each had room for when last looked at, or less by now.
        self._room = [self._loads[position].room for _, position in self._ascending]
        # Superseded entries stay in the heap and are skipped.
        self._sources = [(-load.now.load_index, load.position) for load in self._loads]
        heapify(self._sources)

    def load_indices(self) -> dict[EngineId, float | None]:
        """Load index by worker, in the order of the problem."""
        indices = {load.worker.id: _reported(load.now.load_index) for load in self._loads}
        return {worker: indices[worker] for worker in self._output_order}

    @property
    def counted_spread(self) -> float:
        """Highest minus lowest index, inf while a worker is stalled; forgotten workers left out."""
        if not self._ascending:
            return 0.0
        return self._ascending[-1][0] - self._ascending[0][0] if not isinf(self._ascending[-1][0]) else inf

    @property
    def spread(self) -> float:
        """Highest minus lowest index over all workers, inf while one is stalled."""
        return inf if any(load.now.load_index == inf for load in self._forgotten) else self.counted_spread

    def most_congested(self) -> _Load | None:
        """The first by index, then id, among those not set aside."""
        while self._sources:
            index, position = self._sources[0]
            load = self._loads[position]
            if load.now.load_index == -index and not load.set_aside:
                return load
            heappop(self._sources)
        return None

    def set_aside(self, load: _Load, forget: bool) -> None:
        """Nothing leaves this worker any more. To forget it takes it out of the spread as well."""
        load.set_aside = True
        if forget:
            self._remove(load)
            self._forgotten.append(load)

    def find_move(self, source: _Load) -> _Found | None:
        """The first request of the source, in its order of departure, that has a destination."""
        spread = self.counted_spread
        if not source.stalled and isinf(spread):
            return None  # while another worker is stalled, no move from this one lowers the spread
        rest = _Rest(self._ascending, source.position)
        anywhere = source.stalled or rest.least_spread(None) < spread
        extremes = [self._loads[p] for p in rest.extremes if anywhere or rest.least_spread(p) < spread]
        windows: list[tuple[int, float]] = [(-1, inf)] if anywhere else [rest.window(load) for load in extremes]
        if not anywhere and not any(low < tokens <= high for low, high in windows for tokens in source.contexts):
            return None
        failed: tuple[int, RequestState] | None = None
        for place, departure in enumerate(self._departures(source)):
            context_tokens, _, state = departure
            if (context_tokens, state) == failed or not any(low < context_tokens <= high for low, high in windows):
                continue
            left = source.without(departure)
            if anywhere and (source.stalled or rest.spread_with(None, left.load_index, left.load_index) < spread):
                destinations = self._with_room(context_tokens)
            else:
                destinations = iter(extremes)
            for destination in destinations:
                arrived = destination.having(context_tokens) if destination is not source else None
                if arrived is not None and (
                    source.stalled
                    or rest.spread_with(destination.position, left.load_index, arrived.load_index) < spread
                ):
                    return _Found(place, destination, left, arrived)
            failed = context_tokens, state
            if anywhere:
                windows = [(-1, max(self._room))]
        return None

    def _departures(self, source: _Load) -> list[_Departure]:
        """What may leave: waiting before running, short contexts first, then by id."""
        if source.departures is None:
            source.departures = [
                departure
                for state, queue in (
                    (RequestState.WAITING, source.worker.waiting),
                    (RequestState.RUNNING, source.worker.running),
                )
                for departure in sorted([(request.context_tokens, request.id, state) for request in queue])
                if departure[1] not in self._excluded
            ]
        return source.departures

    def _with_room(self, context_tokens: int) -> Iterator[_Load]:
        """Workers that may have room, least congested first."""
        for place, room in enumerate(self._room):
            if room >= context_tokens:
                load = self._loads[self._ascending[place][1]]
                yield load
                self._room[place] = load.room

    def carry_out(self, source: _Load, found: _Found) -> Move:
        """Make the move, and put both workers where they then belong."""
        _, request, state = self._departures(source).pop(found.place)
        for load, holding in ((source, found.left), (found.destination, found.arrived)):
            self._remove(load)
            load.become(holding)
            entry = (holding.load_index, load.position)
            place = bisect_left(self._ascending, entry)
            self._ascending.insert(place, entry)
            self._room.insert(place, load.room)
            if not load.set_aside:
                heappush(self._sources, (-holding.load_index, load.position))
        return Move(request, source.worker.id, found.destination.worker.id, state)

    def _remove(self, load: _Load) -> None:
        place = bisect_left(self._ascending, (load.now.load_index, load.position))
        del self._ascending[place], self._room[place]


class _Rest:
    """The two lowest and the two highest indices of the workers other than the source.

    With them the spread after a move is known at once, and most destinations can be told apart from those that matter:
    after a move to any but the `extremes`, the spread still reaches from the lowest to the highest.
    """

    def __init__(self, ascending: list[tuple[float, int]], source: int) -> None:
        low = [entry for entry in ascending[:3] if entry[1] != source]
        high = [entry for entry in ascending[:-4:-1] if entry[1] != source]
        self._low, lowest = low[0] if low else (inf, None)
        self._high, highest = high[0] if high else (-inf, None)
        self._second_low = low[1][0] if len(low) > 1 else inf
        self._second_high = high[1][0] if len(high) > 1 else -inf
        self._lowest, self._highest = lowest, highest
        self.extremes = [place for place in dict.fromkeys((lowest, highest)) if place is not None]

    def window(self, extreme: _Load) -> tuple[int, int]:
        """Contexts with which a move to an extreme might lower the spread: above the first, up to the second.

        While one end of the spread stays, only a fall of the highest or a rise of the lowest helps.
        """
        if self._lowest == self._highest:
            return -1, extreme.room
        return (-1, extreme.relief) if extreme.position == self._highest else (extreme.no_burden, extreme.room)

    def least_spread(self, destination: int | None) -> float:
        """Below this no move to the destination gets; None stands for any that is no extreme."""
        high = self._second_high if destination == self._highest else self._high
        low = self._second_low if destination == self._lowest else self._low
        return high - low

    def spread_with(self, destination: int | None, left: float, arrived: float) -> float:
        """Highest minus lowest once the source has index `left` and the destination index `arrived`."""
        high = self._second_high if destination == self._highest else self._high
        low = self._second_low if destination == self._lowest else self._low
        return max(high, left, arrived) - min(low, left, arrived)
