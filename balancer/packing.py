"""Which requests to move so that the last engine ends sooner, from what is known of the lengths: an alternative to the
paper's rule. Pure.

An engine whose iterations take `alpha + beta*sequences + gamma*kv_tokens` and that runs all it holds at once ends after
`alpha * longest + sum(beta*r + gamma*(c*r + r*r/2))`: every engine that holds one long request pays `alpha * longest`,
so requests that will run long belong together, on engines that take little else. Who will run long is known only as
a distribution: that of all outputs, given how far a request has come. Its mean is what enters here. Requests as old as
each other look equally long and are spread evenly, which is the best that can be done with them; with heavy tails the
older ones have more to come, and are gathered on engines that shed the younger ones and those that wait.
"""

from bisect import insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum, inf
from typing import NamedTuple

from balancer.kv_headroom import KvHeadroom
from balancer.load_index_moves import MAX_MOVES, Move
from planner.model import Configuration, EngineId, RequestId, RequestState

NO_GAIN = "no_gain"
# Destinations that are looked at for each source: those that end first.
DESTINATIONS = 4
# Engines that are looked at in vain before the rest are left alone, those that end last first.
SOURCES = 32
MIN_GAIN_SHARE = 0.001
# Of the time until the end, that it is worth to keep a group together, or to bring one together.
TOGETHER_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class PackingRequest:
    """One request, and how many tokens it is expected to generate yet."""

    id: RequestId
    state: RequestState
    context_tokens: int
    remaining_tokens: float
    movable: bool = True
    group: str = ""  # samples of one prompt; empty: of none
    prompt_tokens: int = 0  # that the group has in common

    def __post_init__(self) -> None:
        if self.context_tokens < 0:
            raise ValueError(f"context_tokens must be >= 0, got {self.context_tokens}")
        if not 0 < self.remaining_tokens < inf:
            raise ValueError(f"remaining_tokens must be > 0, got {self.remaining_tokens}")


@dataclass(frozen=True, slots=True)
class PackingEngine:
    """One engine that requests may move from or to."""

    id: EngineId
    configuration: Configuration  # with the engine's own KV capacity and slots
    requests: tuple[PackingRequest, ...]
    kv_free_tokens: int
    slowdown: float = 1.0  # how many times longer its iterations take than its configuration says

    def __post_init__(self) -> None:
        if self.kv_free_tokens < 0:
            raise ValueError(f"kv_free_tokens must be >= 0, got {self.kv_free_tokens}")
        if not 0 < self.slowdown < inf:
            raise ValueError(f"slowdown must be > 0, got {self.slowdown}")


@dataclass(frozen=True, slots=True)
class Packing:
    """The moves, in order, and when each engine is expected to end, in seconds from now, without and with them."""

    ends_before_s: dict[EngineId, float]
    ends_after_s: dict[EngineId, float]
    moves: tuple[Move, ...]
    stopped_because: str  # no_gain | max_moves

    @property
    def makespan_before_s(self) -> float:
        return max(self.ends_before_s.values(), default=0.0)

    @property
    def makespan_after_s(self) -> float:
        return max(self.ends_after_s.values(), default=0.0)


def pack(
    engines: Sequence[PackingEngine],
    *,
    max_moves: int,
    tolerance: float,
    min_gain_share: float = MIN_GAIN_SHARE,
    together: bool = False,
    move_fixed_s: float = 0.0,
    room: KvHeadroom | None = None,
) -> Packing:
    """The moves of one tick.

    From the engine that ends last to those that end earlier by more than `tolerance` (0 to 1) of the time until then,
    for as long as the later of the two then ends sooner by `min_gain_share` of that time, the moved request's prefill
    included; only to where `room` has room. An engine that nothing useful can leave is set aside, and the next one is
    looked at: lengths are uncertain, and any engine may turn out the last. No request moves twice. With `together`,
    samples of one prompt had rather be on one engine, where its prompt is not prefilled again. A running request stands
    still for `move_fixed_s` when it moves, while its destination works on.
    """
    loads = sorted((_Load(engine, together, move_fixed_s) for engine in engines), key=_by_end)
    ends_s = {load.engine.id: load.end_s for load in loads}
    before = {engine.id: ends_s[engine.id] for engine in engines}
    moves: list[Move] = []
    set_aside: set[EngineId] = set()
    while len(moves) < max_moves and len(set_aside) < SOURCES:
        source = next((load for load in reversed(loads) if load.engine.id not in set_aside), None)
        if source is None:
            break
        found = _best_move(source, loads, tolerance, min_gain_share, room)
        if found is None:
            set_aside.add(source.engine.id)
            continue
        request, destination = found
        source.lose(request)
        destination.gain(request)
        if room is not None:
            room.moved(request.id, source.engine.id, destination.engine.id)
        loads.sort(key=_by_end)
        moves.append(Move(request.id, source.engine.id, destination.engine.id, request.state))
    after = before | {load.engine.id: load.end_s for load in loads}
    return Packing(before, after, tuple(moves), MAX_MOVES if len(moves) >= max_moves else NO_GAIN)


def _by_id(request: PackingRequest) -> RequestId:
    return request.id


def _by_end(load: "_Load") -> tuple[float, EngineId]:
    return load.end_s, load.engine.id


def _best_move(
    source: "_Load", ascending: Sequence["_Load"], tolerance: float, min_gain_share: float, room: KvHeadroom | None
) -> "tuple[PackingRequest, _Load] | None":
    """The request and the destination after which the later of the two engines ends soonest."""
    best: tuple[float, PackingRequest, _Load] | None = None
    early_s, limit_s = source.end_s * (1 - tolerance), source.end_s * (1 - min_gain_share)
    destinations = [load for load in ascending[: DESTINATIONS + 1] if load is not source and load.end_s < early_s]
    for request in source.may_leave:
        left_s = source.end_without_s(request)
        if left_s > limit_s:
            continue
        for destination in destinations[:DESTINATIONS]:
            later_s = max(left_s, destination.end_with_s(request))
            if later_s > limit_s:
                continue
            later_s += (
                source.end_s
                * TOGETHER_SHARE
                * (source.has_others(request, itself=True) - destination.has_others(request))
            )
            if best is not None and later_s >= best[0]:
                continue
            if room is None or room.fits(request.id, source.engine.id, destination.engine.id):
                best = later_s, request, destination
    return None if best is None else best[1:]


class _Load:
    """What one engine holds while moves are being chosen, and when it will end."""

    def __init__(self, engine: PackingEngine, together: bool, move_fixed_s: float = 0.0) -> None:
        self.engine = engine
        # Requests by group; None: it does not matter.
        self._groups = Counter(request.group for request in engine.requests if request.group) if together else None
        configuration = engine.configuration
        self._alpha_s = configuration.alpha_s * engine.slowdown
        self._beta_s = configuration.beta_s * engine.slowdown
        self._gamma_s = configuration.gamma_s * engine.slowdown
        self._prefill_s = engine.slowdown / configuration.prefill_tokens_per_s
        # Iterations that a running request misses when it comes here.
        self._missed = move_fixed_s / self._alpha_s if self._alpha_s > 0 else 0.0
        self._may_leave: list[PackingRequest] | None = None  # by id; None: not asked for yet, as of most engines
        self._remaining = [request.remaining_tokens for request in engine.requests]
        self._remaining.sort()
        # Sums that are the same in any order of the requests: a decision must not hang on the last bit.
        areas: list[float] = []
        freed: list[float] = []
        longest_waiting = 0.0
        kv_waiting = 0
        for request in engine.requests:
            tokens, left = request.context_tokens, request.remaining_tokens
            areas.append(tokens * left + left**2 / 2)
            if request.state is RequestState.RUNNING:
                freed.append(tokens / left)
            else:
                kv_waiting += tokens
                if left > longest_waiting:
                    longest_waiting = left
        seat_area = sum(self._remaining)
        kv_area = fsum(areas)
        self._held = _Held(
            work_s=self._beta_s * seat_area + self._gamma_s * kv_area,
            kv_area=kv_area,
            seat_area=seat_area,
            kv_wanted=kv_waiting - engine.kv_free_tokens,
            running=len(freed),
            kv_freed=fsum(freed),
            longest_waiting=longest_waiting,
        )
        self.end_s = self._end_s(self._held, self._remaining[-1] if self._remaining else 0.0)

    @property
    def may_leave(self) -> list[PackingRequest]:
        """Its own requests that can be moved, by id."""
        if self._may_leave is None:
            self._may_leave = sorted((request for request in self.engine.requests if request.movable), key=_by_id)
        return self._may_leave

    def has_others(self, request: PackingRequest, *, itself: bool = False) -> bool:
        """Whether others of its group are here. `itself`: it is as well."""
        return self._groups is not None and bool(request.group) and self._groups[request.group] > itself

    def _work_s(self, request: PackingRequest) -> float:
        """Seconds that a request adds to the iterations of those that run beside it."""
        return self._beta_s * request.remaining_tokens + self._gamma_s * _kv_area(request)

    def _end_s(self, held: "_Held", longest: float) -> float:
        """Where not all fit at once: as many iterations as their KV or seats take, and until the last that waits has
        begun and come to its end."""
        configuration = self.engine.configuration
        iterations = max(
            longest,
            held.kv_area / configuration.kv_capacity_tokens,
            held.seat_area / configuration.max_sequences,
        )
        if held.longest_waiting and held.kv_wanted > 0 and held.running and held.kv_freed > 0:
            iterations = max(iterations, held.kv_wanted / held.kv_freed + held.longest_waiting)
        return self._alpha_s * iterations + held.work_s

    def end_without_s(self, request: PackingRequest) -> float:
        return self._end_s(self._without(request), self._longest_without(request))

    def end_with_s(self, request: PackingRequest) -> float:
        longest = self._remaining[-1] if self._remaining else 0.0
        return self._end_s(self._with(request), max(self._iterations_here(request), longest))

    def _iterations_here(self, request: PackingRequest) -> float:
        """Of this engine, until a request that comes here has ended."""
        missed = self._missed if request.state is RequestState.RUNNING else 0.0
        return request.remaining_tokens + missed

    def lose(self, request: PackingRequest) -> None:
        self.end_s = self.end_without_s(request)
        self._held = self._without(request)
        self._remaining.remove(request.remaining_tokens)
        self.may_leave.remove(request)
        if self._groups is not None:
            self._groups[request.group] -= 1

    def gain(self, request: PackingRequest) -> None:
        """It is not put among those that may leave: no request moves twice."""
        self.end_s = self.end_with_s(request)
        self._held = self._with(request)
        insort(self._remaining, self._iterations_here(request))
        if self._groups is not None:
            self._groups[request.group] += 1

    def _longest_without(self, request: PackingRequest) -> float:
        if request.remaining_tokens < self._remaining[-1]:
            return self._remaining[-1]
        return self._remaining[-2] if len(self._remaining) > 1 else 0.0

    def _without(self, request: PackingRequest) -> "_Held":
        """`longest_waiting` stays, as if another were as long: it errs on the side of staying."""
        held, runs = self._held, request.state is RequestState.RUNNING
        return _Held(
            work_s=held.work_s - self._work_s(request),
            kv_area=held.kv_area - _kv_area(request),
            seat_area=held.seat_area - request.remaining_tokens,
            kv_wanted=held.kv_wanted - request.context_tokens,
            running=held.running - runs,
            kv_freed=held.kv_freed - (_kv_freed(request) if runs else 0.0),
            longest_waiting=held.longest_waiting,
        )

    def _with(self, request: PackingRequest) -> "_Held":
        held = self._held
        kv_wanted = held.kv_wanted + request.context_tokens
        prefill_tokens = request.context_tokens - (request.prompt_tokens if self.has_others(request) else 0)
        return _Held(
            work_s=held.work_s + self._work_s(request) + prefill_tokens * self._prefill_s,
            kv_area=held.kv_area + _kv_area(request),
            seat_area=held.seat_area + request.remaining_tokens,
            kv_wanted=kv_wanted,
            running=held.running,
            kv_freed=held.kv_freed,
            longest_waiting=max(held.longest_waiting, request.remaining_tokens)
            if kv_wanted > 0
            else held.longest_waiting,
        )


class _Held(NamedTuple):
    """What an engine's end follows from."""

    work_s: float  # beside alpha
    kv_area: float  # tokens times iterations
    seat_area: float  # sequences times iterations
    kv_wanted: int  # tokens that the waiting ones need beyond what is free; below 0: room
    running: int  # that were here from the beginning
    kv_freed: float  # tokens per iteration that these give back by ending
    longest_waiting: float  # tokens


def _kv_area(request: PackingRequest) -> float:
    return request.context_tokens * request.remaining_tokens + request.remaining_tokens**2 / 2


def _kv_freed(request: PackingRequest) -> float:
    return request.context_tokens / request.remaining_tokens
