"""Choose moves by the load index, so that no worker falls behind the others (section 4.2 of the paper). Has no side
effects.

Requests move from the most congested worker to the least congested worker with enough free KV, for as long as the
spread exceeds theta. The spread is the difference between the highest and the lowest load index. Waiting requests move
before running requests, and short contexts before long contexts. Ids break ties.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from math import inf, isinf

from balancer.load_index import Worker, concurrency_cap, load_index, stand_in_tokens_per_s
from balancer.move_limits import MoveLimits
from planner.model import EngineId, RequestId, RequestMove, RequestState

WITHIN_THETA = "within_theta"
NO_WORKER = -1

NO_FEASIBLE_MOVE = "no_feasible_move"
MAX_MOVES = "max_moves"


@dataclass(frozen=True, slots=True)
class Balance:
    """The moves of one tick, in order, with the load indices before and after them. An index is None if its worker is
    stalled. A spread is None if any worker is stalled."""

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
    """Return the moves of one tick, which reduce the spread of load indices to `theta` if possible.

    The keyword parameters extend the paper's rule for the live loop. At most `max_moves` moves are returned. Requests
    in `excluded` are not moved. If `forget_stuck` is True, a stalled worker without a possible move is ignored, so that
    all other workers are still balanced. Moves must satisfy the limits `room` in addition to the check of free KV.
    Raises ValueError if `theta` is negative or NaN.
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
    """Return the balance of moves that another policy chose, with the load indices before and after the moves.
    `stopped_because` is the reason why that policy chose no further moves."""
    fleet = _Fleet(workers, frozenset(), None)
    load_before, spread_before = fleet.load_indices(), fleet.spread
    fleet.carry_out_all(moves)
    spreads = _reported(spread_before), _reported(fleet.spread)
    return Balance(load_before, fleet.load_indices(), *spreads, tuple(moves), stopped_because)


def _reported(index: float) -> float | None:
    return None if isinf(index) else index


# The load of a worker during the decision: running requests, all requests, their context tokens, free KV tokens,
# concurrency cap, load index (inf: stalled). A plain tuple for speed: thousands are created.
_Holding = tuple[int, int, int, int, int, float]

# A request that may leave its worker: context tokens, id, state. Sorts in the order of departure within one state.
_Departure = tuple[int, RequestId, RequestState]


class _Load:
    """The state of one worker while moves are being chosen."""

    def __init__(
        self, position: int, worker: Worker, contexts: list[int], tokens_per_s: float, fleet: tuple[int, int]
    ) -> None:
        self.position = position  # in the order of ids
        self.worker = worker
        # A stall is measured: an arriving request does not cause one, and a departure does not end it while other
        # requests remain.
        self.stalled = worker.stalled
        self.contexts = contexts  # context tokens of each original request
        self.departures: list[_Departure] | None = None  # in order; None: not calculated yet
        self.set_aside = False
        self._max_sequences = worker.max_sequences
        self._tokens_per_s = worker.decode_tokens_per_s or tokens_per_s
        self._fleet = fleet
        self.become(self._holding(len(worker.running), len(contexts), sum(contexts), worker.kv_free_tokens))

    def become(self, holding: _Holding) -> None:
        """Set the worker's state to `holding`, its load after a move."""
        self.running, self.requests, self.context_tokens, self.kv_free_tokens, self.cap, self.load_index = holding
        self.entry = self.load_index, self.position  # sorts by congestion
        # Bounds on arriving contexts, in tokens. A context longer than `room` does not fit. One longer than `relief`
        # does not lower the index (a context shorter than the mean can). One up to `no_burden` does not raise it.
        self.room = self.relief = -1 if self.stalled else self.kv_free_tokens
        self.no_burden = -1

    def _holding(self, running: int, requests: int, context_tokens: int, kv_free_tokens: int) -> _Holding:
        cap = concurrency_cap(running, requests, context_tokens, kv_free_tokens, self._max_sequences, self._fleet)
        if self.stalled and requests:
            return running, requests, context_tokens, kv_free_tokens, cap, inf
        return running, requests, context_tokens, kv_free_tokens, cap, load_index(requests, cap, self._tokens_per_s)

    def without(self, departure: _Departure) -> _Holding:
        """Return the worker's load after the request `departure` has left. A request that was running frees its KV."""
        tokens, _, state = departure
        requests, context_tokens = self.requests - 1, self.context_tokens - tokens
        if state is RequestState.RUNNING:
            return self._holding(self.running - 1, requests, context_tokens, self.kv_free_tokens + tokens)
        return self._holding(self.running, requests, context_tokens, self.kv_free_tokens)

    def joined_by(self, tokens: int) -> _Holding:
        """Return the worker's load after a request of `tokens` context tokens has arrived.

        The request runs if a slot and enough KV are free. Otherwise, it waits.
        """
        requests, context_tokens = self.requests + 1, self.context_tokens + tokens
        if self.running < self._max_sequences and tokens <= self.kv_free_tokens:
            return self._holding(self.running + 1, requests, context_tokens, self.kv_free_tokens - tokens)
        return self._holding(self.running, requests, context_tokens, self.kv_free_tokens)

    def having(self, tokens: int) -> _Holding | None:
        """Return the worker's load after a request of `tokens` context tokens has arrived.

        Return None if the context does not fit, or if the arrival would lower the concurrency cap so far that some
        requests must wait. Each call also updates the bounds `room`, `relief` and `no_burden` on the contexts of other
        requests. This is possible because a longer context gives a lower cap and a higher load index.
        """
        if tokens > self.room:
            return None
        after = self.joined_by(tokens)
        _, requests, _, _, cap, index = after
        if index >= self.load_index and tokens <= self.relief:
            self.relief = tokens - 1
        if index <= self.load_index and tokens > self.no_burden:
            self.no_burden = tokens
        if cap < self.cap and cap < requests:
            self.room = tokens - 1
            return None
        return after


# A feasible move: its index in the source's departures, the destination, the loads of source and destination after it.
_Found = tuple[int, _Load, _Holding, _Holding]


class _Fleet:
    """The loads of all workers while moves are being chosen, sorted by congestion."""

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
        self._ascending = sorted(load.entry for load in self._loads)
        # In the same order: an upper bound of each worker's room.
        self._room = [self._loads[position].room for _, position in self._ascending]
        # Superseded entries remain in the heap and are skipped.
        self._sources = [(-load.load_index, load.position) for load in self._loads]
        heapify(self._sources)

    def load_indices(self) -> dict[EngineId, float | None]:
        """Return the load index of each worker, in the order in which the workers were given. The index is None for a
        stalled worker."""
        indices = {load.worker.id: _reported(load.load_index) for load in self._loads}
        return {worker: indices[worker] for worker in self._output_order}

    @property
    def counted_spread(self) -> float:
        """The highest minus the lowest load index of the workers that `set_aside` has not excluded. The value is inf
        while one of them is stalled."""
        if not self._ascending:
            return 0.0
        highest = self._ascending[-1][0]
        return inf if highest == inf else highest - self._ascending[0][0]

    @property
    def spread(self) -> float:
        """The highest minus the lowest load index of all workers. The value is inf while any worker is stalled."""
        return inf if any(load.load_index == inf for load in self._forgotten) else self.counted_spread

    def most_congested(self) -> _Load | None:
        """Return the most congested worker that is not set aside, or None if all are set aside. The lowest id breaks
        ties."""
        while self._sources:
            index, position = self._sources[0]
            load = self._loads[position]
            if load.load_index == -index and not load.set_aside:
                return load
            heappop(self._sources)
        return None

    def set_aside(self, load: _Load, forget: bool) -> None:
        """Stop moving requests away from this worker. If `forget` is True, also exclude the worker from
        `counted_spread`."""
        load.set_aside = True
        if forget:
            self._remove(load)
            self._forgotten.append(load)

    def find_move(self, source: _Load, spread: float) -> _Found | None:
        """Return the first feasible move away from the source, in the order of its departures, or None if there is
        none. `spread` is the current spread."""
        if not source.stalled and isinf(spread):
            return None  # while another worker is stalled, no move from this one lowers the spread
        rest = _Rest(self._ascending, source.position)
        if not source.stalled and rest.high - rest.low >= spread:
            return self._move_to_extreme(source, spread, rest)
        failed: tuple[int, RequestState] | None = None
        longest: float = inf  # upper bound of the contexts that fit on any worker
        for place, departure in enumerate(self._departures(source)):
            context_tokens, _, state = departure
            if context_tokens > longest or (context_tokens, state) == failed:
                continue
            left = source.without(departure)
            found = (
                self._anywhere(source, departure, left, spread, rest)
                if source.stalled or rest.spread_beside(left[-1]) < spread
                else self._among(source, rest.extremes, departure, left, spread, rest)
            )
            if found is not None:
                return place, found[0], left, found[1]
            if self._further_room is None:  # with it, requests of one context differ
                failed = context_tokens, state
            longest = max(self._room)
        return None

    def _anywhere(
        self, source: _Load, departure: _Departure, left: _Holding, spread: float, rest: "_Rest"
    ) -> tuple[_Load, _Holding] | None:
        """Return the least congested worker to which the request `departure` can move, with that worker's load after
        the move. Return None if there is no such worker. `left` is the source's load after the move."""
        context_tokens = departure[0]
        for place, room in enumerate(self._room):
            if room < context_tokens:
                continue
            destination = self._loads[self._ascending[place][1]]
            arrived = destination.having(context_tokens) if destination is not source else None
            if (
                arrived is not None
                and (source.stalled or rest.spread_with(destination.position, left[-1], arrived[-1]) < spread)
                and self._fits(departure, source, destination)
            ):
                return destination, arrived
            self._room[place] = destination.room
        return None

    def _move_to_extreme(self, source: _Load, spread: float, rest: "_Rest") -> _Found | None:
        """Return the first feasible move away from a source whose load index does not determine the spread, or None if
        there is none.

        For such a source, only a move to the worker with the lowest or the highest index can lower the spread.
        """
        extremes = [place for place in rest.extremes if rest.least_spread(place) < spread]
        windows = [rest.window(self._loads[place]) for place in extremes]
        if not any(low < tokens <= high for low, high in windows for tokens in source.contexts):
            return None
        failed: tuple[int, RequestState] | None = None
        for place, departure in enumerate(self._departures(source)):
            context_tokens, _, state = departure
            if (context_tokens, state) == failed or not any(low < context_tokens <= high for low, high in windows):
                continue
            left = source.without(departure)
            found = self._among(source, extremes, departure, left, spread, rest)
            if found is not None:
                return place, found[0], left, found[1]
            if self._further_room is None:
                failed = context_tokens, state
        return None

    def _among(
        self, source: _Load, places: Sequence[int], departure: _Departure, left: _Holding, spread: float, rest: "_Rest"
    ) -> tuple[_Load, _Holding] | None:
        """Return the first worker at the positions `places`, except the source, to which the request `departure` can
        move and for which the move lowers the spread. Also return that worker's load after the move. Return None if
        there is no such worker. `left` is the source's load after the move."""
        for destination in map(self._loads.__getitem__, places):
            arrived = destination.having(departure[0])
            if (
                arrived is not None
                and rest.spread_with(destination.position, left[-1], arrived[-1]) < spread
                and self._fits(departure, source, destination)
            ):
                return destination, arrived
        return None

    def _fits(self, departure: _Departure, source: _Load, destination: _Load) -> bool:
        return self._further_room is None or self._further_room.fits(
            departure[1], source.worker.id, destination.worker.id
        )

    def _departures(self, source: _Load) -> list[_Departure]:
        """Return the requests that may leave the source, in the order of their departure. Waiting requests come before
        running requests. In each of these groups, short contexts come before long contexts. Ids break ties."""
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
        """Apply the move `found`, restore the order of the workers, and return the move."""
        place, destination, left, arrived = found
        assert source.departures is not None
        _, request, state = source.departures.pop(place)
        if self._further_room is not None:
            self._further_room.moved(request, source.worker.id, destination.worker.id)
        self._become(source, left)
        heapreplace(self._sources, (-source.load_index, source.position))  # the source was on top of the heap
        self._become(destination, arrived)
        if not destination.set_aside:
            heappush(self._sources, (-destination.load_index, destination.position))
        return RequestMove(request, source.worker.id, destination.worker.id, state=state)

    def carry_out_all(self, moves: Sequence[RequestMove]) -> None:
        """Apply moves chosen by another policy."""
        loads = {load.worker.id: load for load in self._loads}
        contexts = {request.id: request.context_tokens for load in self._loads for request in load.worker.requests}
        for move in moves:
            source, tokens = loads[move.from_engine], contexts[move.request]
            self._become(source, source.without((tokens, move.request, move.state)))
            self._become(loads[move.to_engine], loads[move.to_engine].joined_by(tokens))

    def _become(self, load: _Load, holding: _Holding) -> None:
        ascending, room = self._ascending, self._room
        place = -1 if ascending[-1] is load.entry else bisect_left(ascending, load.entry)
        del ascending[place], room[place]
        load.become(holding)
        place = bisect_left(ascending, load.entry)
        ascending.insert(place, load.entry)
        room.insert(place, load.room)

    def _remove(self, load: _Load) -> None:
        place = bisect_left(self._ascending, load.entry)
        del self._ascending[place], self._room[place]


class _Rest:
    """The two lowest and the two highest load indices of the workers other than the source.

    With these four indices, the spread after any move is calculated without a search. The lowest and the highest index
    of the workers that do not take part in the move are those of this object, unless the destination is one of the
    `extremes`. In that case, the second lowest or the second highest index replaces the destination's.
    """

    __slots__ = ("_highest", "_lowest", "_second_high", "_second_low", "high", "low")

    def __init__(self, ascending: list[tuple[float, int]], source: int) -> None:
        if len(ascending) > 3 and ascending[-1][1] == source:  # the usual case
            self.low, self._lowest = ascending[0]
            self._second_low = ascending[1][0]
            self.high, self._highest = ascending[-2]
            self._second_high = ascending[-3][0]
            return
        low = [entry for entry in ascending[:3] if entry[1] != source]
        high = [entry for entry in ascending[:-4:-1] if entry[1] != source]
        self.low, self._lowest = low[0] if low else (inf, NO_WORKER)
        self.high, self._highest = high[0] if high else (-inf, NO_WORKER)
        self._second_low = low[1][0] if len(low) > 1 else inf
        self._second_high = high[1][0] if len(high) > 1 else -inf

    @property
    def extremes(self) -> list[int]:
        """The positions of the workers with the lowest and the highest index, without duplicates. The list is empty if
        the source is the only worker."""
        return [place for place in dict.fromkeys((self._lowest, self._highest)) if place != NO_WORKER]

    def window(self, extreme: _Load) -> tuple[int, int]:
        """Return the range (low, high] of context lengths, in tokens, with which a move to `extreme` can lower the
        spread.

        The spread falls only if the highest index falls or the lowest index rises.
        """
        if self._lowest == self._highest:
            return -1, extreme.room
        return (-1, extreme.relief) if extreme.position == self._highest else (extreme.no_burden, extreme.room)

    def least_spread(self, destination: int) -> float:
        """Return a lower bound for the spread after a move to the destination."""
        high = self._second_high if destination == self._highest else self.high
        low = self._second_low if destination == self._lowest else self.low
        return high - low

    def spread_beside(self, left: float) -> float:
        """Return a lower bound for the spread after the source's index becomes `left`, if the destination is not an
        extreme."""
        high, low = self.high, self.low
        return (high if high > left else left) - (low if low < left else left)

    def spread_with(self, destination: int, left: float, arrived: float) -> float:
        """Return the spread after the source's index becomes `left` and the destination's index becomes `arrived`."""
        high = self._second_high if destination == self._highest else self.high
        low = self._second_low if destination == self._lowest else self.low
        more, less = (left, arrived) if left > arrived else (arrived, left)
        return (high if high > more else more) - (low if low < less else less)
