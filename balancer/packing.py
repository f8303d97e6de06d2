"""Choose moves that let the engine that finishes last finish earlier, given the expected remaining lengths of requests.
Has no side effects.

This is an alternative to the paper's rule (load_index_moves.py).

An iteration of an engine takes `alpha + beta*sequences + gamma*kv_tokens` seconds. If the engine runs all its requests
at once, it finishes after `alpha * longest + sum(beta*r + gamma*(c*r + r*r/2))` seconds. Here, c is the context and r
is the number of remaining tokens of each request, and `longest` is the largest r.

Every engine with a long request needs `alpha * longest` seconds, so long requests belong together, on engines with few
other requests. The expected remaining length of a request is the mean of the distribution of all output lengths, given
the request's age, which is the number of tokens that it has generated. Requests of equal age have equal expected
lengths and are spread evenly. If the distribution has a heavy tail, older requests are expected to have more tokens
left. They stay together on engines from which younger and waiting requests are moved away.
"""

from bisect import insort
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import fsum, inf
from operator import add, attrgetter, sub
from typing import NamedTuple

from balancer.load_index import Worker
from balancer.load_index_moves import MAX_MOVES
from balancer.move_limits import MoveLimits
from planner.model import Configuration, EngineId, RequestId, RequestMove, RequestState, RequestView

NO_GAIN = "no_gain"
# Destinations examined for each source: the engines that finish first.
DESTINATIONS = 4
# Sources without a useful move after which the search stops. The engines that finish last are examined first.
SOURCES = 32
MIN_GAIN_SHARE = 0.001  # share of the time until the end that each move must gain


@dataclass(frozen=True, slots=True)
class Packing:
    """The moves of one tick, in order, with the expected finish time of each engine before and after the moves. Times
    are in seconds from now."""

    ends_before_s: dict[EngineId, float]
    ends_after_s: dict[EngineId, float]
    moves: tuple[RequestMove, ...]
    stopped_because: str  # no_gain | max_moves

    @property
    def makespan_before_s(self) -> float:
        return max(self.ends_before_s.values(), default=0.0)

    @property
    def makespan_after_s(self) -> float:
        return max(self.ends_after_s.values(), default=0.0)


def pack(
    workers: Sequence[Worker],
    configurations: Mapping[EngineId, Configuration],
    remaining_tokens: Mapping[RequestId, float],
    *,
    stuck: AbstractSet[RequestId] = frozenset(),
    max_moves: int,
    tolerance: float,
    move_fixed_s: float = 0.0,
    room: MoveLimits | None = None,
) -> Packing:
    """Return moves for one tick that let the engines that finish last finish earlier.

    `configurations` has each engine's step times, KV capacity and slots. `remaining_tokens` has the number of tokens
    that each request is expected to generate. Requests in `stuck` are not moved, and no request moves twice.

    The source is the engine that finishes last. A destination must finish earlier than the source by more than the
    fraction `tolerance` (0 to 1) of the source's remaining time. A move must shorten this remaining time by at least
    the fraction MIN_GAIN_SHARE. The destination must finish within the shortened time too, although it repeats the
    prefill. The move must also satisfy the limits `room`. A source without such a move is set aside and the next engine
    is examined, because lengths are uncertain and any engine may turn out to be the last. A running request that moves
    pauses for `move_fixed_s` seconds, while its destination continues to decode.
    """
    loads = sorted(
        (_Load(worker, configurations[worker.id], remaining_tokens, stuck, move_fixed_s) for worker in workers),
        key=_by_end,
    )
    ends_s = {load.id: load.end_s for load in loads}
    before = {worker.id: ends_s[worker.id] for worker in workers}
    moves: list[RequestMove] = []
    set_aside: set[EngineId] = set()
    while len(moves) < max_moves and len(set_aside) < SOURCES:
        source = next((load for load in reversed(loads) if load.id not in set_aside), None)
        if source is None:
            break
        found = _best_move(source, loads, tolerance, room)
        if found is None:
            set_aside.add(source.id)
            continue
        request, destination = found
        source.lose(request)
        destination.gain(request)
        if room is not None:
            room.moved(request.id, source.id, destination.id)
        loads.sort(key=_by_end)
        moves.append(RequestMove(request.id, source.id, destination.id, state=request.state))
    after = before | {load.id: load.end_s for load in loads}
    return Packing(before, after, tuple(moves), MAX_MOVES if len(moves) >= max_moves else NO_GAIN)


_by_end = attrgetter("end_s", "id")  # of a `_Load`


def _best_move(
    source: "_Load", ascending: Sequence["_Load"], tolerance: float, room: MoveLimits | None
) -> "tuple[RequestView, _Load] | None":
    """Return the request and the destination for which the later of the two engines' finish times after the move is
    earliest, or None if no move helps. `ascending` contains all engines, sorted by finish time."""
    best: tuple[float, RequestView, _Load] | None = None
    early_s, limit_s = source.end_s * (1 - tolerance), source.end_s * (1 - MIN_GAIN_SHARE)
    destinations = [load for load in ascending[: DESTINATIONS + 1] if load is not source and load.end_s < early_s]
    for request in source.may_leave:
        left_s = source.end_without_s(request)
        if left_s > limit_s:
            continue
        for destination in destinations[:DESTINATIONS]:
            later_s = max(left_s, destination.end_with_s(request))
            if later_s > limit_s or (best is not None and later_s >= best[0]):
                continue
            if room is None or room.fits(request.id, source.id, destination.id):
                best = later_s, request, destination
    return None if best is None else best[1:]


class _Load:
    """The requests of one engine while moves are being chosen, with the predicted time until the engine finishes.

    Raises ValueError if the remaining tokens of a request are not finite and > 0.
    """

    def __init__(
        self,
        worker: Worker,
        configuration: Configuration,
        remaining_tokens: Mapping[RequestId, float],
        stuck: AbstractSet[RequestId] = frozenset(),
        move_fixed_s: float = 0.0,
    ) -> None:
        self.id = worker.id
        self._worker = worker
        self._remaining_tokens = remaining_tokens
        self._stuck = stuck
        self._configuration = configuration
        self._prefill_s = 1 / configuration.prefill_tokens_per_s
        # Iterations that pass here before a moved running request joins.
        self._missed = move_fixed_s / configuration.alpha_s if configuration.alpha_s > 0 else 0.0
        self._may_leave: list[RequestView] | None = None  # by id; None: not calculated yet, as for most engines
        self._remaining: list[float] = []
        # `fsum` is independent of the order of the requests, so that decisions do not depend on rounding.
        areas: list[float] = []
        freed: list[float] = []
        longest_waiting = 0.0
        kv_waiting = 0
        for request in worker.requests:
            tokens, left = request.prompt_tokens + request.generated_tokens, self._remaining_tokens[request.id]
            if not 0 < left < inf:
                raise ValueError(f"remaining_tokens of request {request.id} must be > 0, got {left}")
            self._remaining.append(left)
            areas.append(tokens * left + left**2 / 2)
            if request.state is RequestState.RUNNING:
                freed.append(tokens / left)
            else:
                kv_waiting += tokens
                if left > longest_waiting:
                    longest_waiting = left
        self._remaining.sort()
        seat_area = sum(self._remaining)
        kv_area = fsum(areas)
        self._held = _Held(
            work_s=configuration.beta_s * seat_area + configuration.gamma_s * kv_area,
            kv_area=kv_area,
            seat_area=seat_area,
            kv_wanted=kv_waiting - worker.kv_free_tokens,
            running=len(freed),
            kv_freed=fsum(freed),
            longest_waiting=longest_waiting,
        )
        self.end_s = self._end_s(self._held, self._remaining[-1] if self._remaining else 0.0)

    @property
    def may_leave(self) -> list[RequestView]:
        """The engine's original requests that can still be moved, sorted by id."""
        if self._may_leave is None:
            movable = (request for request in self._worker.requests if request.id not in self._stuck)
            self._may_leave = sorted(movable, key=attrgetter("id"))
        return self._may_leave

    def _left(self, request: RequestView) -> float:
        return self._remaining_tokens[request.id]

    def _end_s(self, held: "_Held", longest: float) -> float:
        """Return the time, in seconds, until all held requests have ended. `longest` is the number of iterations that
        the longest request needs if it runs at once.

        If the requests do not fit at once, the number of iterations must also suffice for their total KV and slot
        usage, and for the longest waiting request to start and end.
        """
        configuration = self._configuration
        iterations = max(
            longest, held.kv_area / configuration.kv_capacity_tokens, held.seat_area / configuration.max_sequences
        )
        if held.longest_waiting and held.kv_wanted > 0 and held.running and held.kv_freed > 0:
            iterations = max(iterations, held.kv_wanted / held.kv_freed + held.longest_waiting)
        return configuration.alpha_s * iterations + held.work_s

    def end_without_s(self, request: RequestView) -> float:
        return self._end_s(self._without(request), self._longest_without(request))

    def end_with_s(self, request: RequestView) -> float:
        longest = self._remaining[-1] if self._remaining else 0.0
        return self._end_s(self._with(request), max(self._iterations_here(request), longest))

    def _iterations_here(self, request: RequestView) -> float:
        """Return the number of iterations of this engine until a request that moves to it has ended."""
        missed = self._missed if request.state is RequestState.RUNNING else 0.0
        return self._left(request) + missed

    def lose(self, request: RequestView) -> None:
        self.end_s = self.end_without_s(request)
        self._held = self._without(request)
        self._remaining.remove(self._left(request))
        self.may_leave.remove(request)

    def gain(self, request: RequestView) -> None:
        """Add a request. It is not added to `may_leave`, because no request moves twice."""
        self.end_s = self.end_with_s(request)
        self._held = self._with(request)
        insort(self._remaining, self._iterations_here(request))

    def _longest_without(self, request: RequestView) -> float:
        if self._left(request) < self._remaining[-1]:
            return self._remaining[-1]
        return self._remaining[-2] if len(self._remaining) > 1 else 0.0

    def _part(self, request: RequestView, runs: bool) -> "_Held":
        """Return the contribution of one request to the totals of this engine. `runs` is True if the request was
        running on this engine from the beginning."""
        tokens, left = request.context_tokens, self._left(request)
        kv_area = tokens * left + left**2 / 2
        work_s = self._configuration.beta_s * left + self._configuration.gamma_s * kv_area
        return _Held(work_s, kv_area, left, tokens, int(runs), tokens / left if runs else 0.0, 0.0)

    def _without(self, request: RequestView) -> "_Held":
        """Return the totals without the request. `longest_waiting` stays the same, so the gain of a move may be
        underestimated."""
        return _Held(*map(sub, self._held, self._part(request, request.state is RequestState.RUNNING)))

    def _with(self, request: RequestView) -> "_Held":
        held = _Held(*map(add, self._held, self._part(request, runs=False)))
        longest = max(held.longest_waiting, self._left(request)) if held.kv_wanted > 0 else held.longest_waiting
        return _Held(held.work_s + request.context_tokens * self._prefill_s, *held[1:-1], longest)


class _Held(NamedTuple):
    """Totals that determine when an engine finishes, or the contribution of one request to them."""

    work_s: float  # without alpha
    kv_area: float  # tokens times iterations
    seat_area: float  # sequences times iterations
    kv_wanted: int  # KV tokens that waiting requests need beyond the free ones; below 0: free tokens remain
    running: int  # requests that were running here from the beginning
    kv_freed: float  # KV tokens per iteration that these free when they end
    longest_waiting: float  # remaining tokens
