"""Which requests to move so that the last engine ends sooner, from what is known of the lengths: an alternative to the
paper's rule. Pure.

An engine whose iterations take `alpha + beta*sequences + gamma*kv_tokens` and that runs all it holds at once ends after
`alpha * longest + sum(beta*r + gamma*(c*r + r*r/2))`: every engine that holds one long request pays `alpha * longest`,
so requests that will run long belong together, on engines that take little else. Who will run long is known only as
a distribution: that of all outputs, given how far a request has come. Its first two moments are what enters here, as
if each request ended at its mean. Requests as old as each other look equally long and are spread evenly, which is the
best that can be done with them; older ones are gathered as they show.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from operator import itemgetter

from planner.model import Configuration, EngineId, RequestId, RequestState

PACKED = "packed"
NO_GAIN = "no_gain"
MAX_MOVES = "max_moves"
# Destinations that are looked at for each source: those that end first.
DESTINATIONS = 4


@dataclass(frozen=True, slots=True)
class Outlook:
    """One request, and what is expected of it. The moments are those of its remaining tokens."""

    id: RequestId
    state: RequestState
    context_tokens: int
    mean_tokens: float
    square_tokens: float  # mean of the square
    movable: bool = True

    def __post_init__(self) -> None:
        if self.context_tokens < 0:
            raise ValueError(f"context_tokens must be >= 0, got {self.context_tokens}")
        if not 0 < self.mean_tokens < inf:
            raise ValueError(f"mean_tokens must be > 0, got {self.mean_tokens}")
        if not self.mean_tokens**2 <= self.square_tokens * (1 + 1e-9) < inf:
            raise ValueError(f"square_tokens must be >= mean_tokens squared, got {self.square_tokens}")


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine that requests may move from or to."""

    id: EngineId
    configuration: Configuration  # with the engine's own KV capacity and slots
    requests: tuple[Outlook, ...]
    kv_free_tokens: int
    slowdown: float = 1.0  # how many times longer its iterations take than its configuration says

    def __post_init__(self) -> None:
        if self.kv_free_tokens < 0:
            raise ValueError(f"kv_free_tokens must be >= 0, got {self.kv_free_tokens}")
        if not 0 < self.slowdown < inf:
            raise ValueError(f"slowdown must be > 0, got {self.slowdown}")


@dataclass(frozen=True, slots=True)
class PackingMove:
    """One request to be moved, and the queue of the source that it stands in."""

    request: RequestId
    source: EngineId
    destination: EngineId
    state: RequestState


@dataclass(frozen=True, slots=True)
class Packing:
    """The moves, in order, and when each engine is expected to end, in seconds from now, without and with them."""

    ends_before_s: dict[EngineId, float]
    ends_after_s: dict[EngineId, float]
    moves: tuple[PackingMove, ...]
    stopped_because: str  # packed | no_gain | max_moves

    @property
    def makespan_before_s(self) -> float:
        return max(self.ends_before_s.values(), default=0.0)

    @property
    def makespan_after_s(self) -> float:
        return max(self.ends_after_s.values(), default=0.0)


def pack(engines: Sequence[Engine], *, max_moves: int, min_gain_s: float, min_gain_share: float = 0.0) -> Packing:
    """The moves of one tick.

    From the engine that ends last to one that ends early, for as long as the later of the two then ends at least
    `min_gain_s` and `min_gain_share` of it sooner, the moved request's prefill included. An engine that nothing useful
    can leave is set aside, and the next one is looked at: lengths are uncertain, and any engine may turn out the last.
    No request moves twice.
    """
    loads = [_Load(engine) for engine in sorted(engines, key=lambda engine: engine.id)]
    before = {load.engine.id: load.end_s for load in loads}
    moves: list[PackingMove] = []
    sources = list(loads)
    stopped_because = NO_GAIN
    while sources:
        if len(moves) >= max_moves:
            stopped_because = MAX_MOVES
            break
        source = max(sources, key=lambda load: load.end_s)
        gain_s = max(min_gain_s, min_gain_share * source.end_s)
        found = _best_move(source, loads, gain_s)
        if found is None:
            sources.remove(source)
            continue
        request, destination = found
        source.lose(request)
        destination.gain(request)
        moves.append(PackingMove(request.id, source.engine.id, destination.engine.id, request.state))
    if moves and stopped_because == NO_GAIN:
        stopped_because = PACKED
    after = {load.engine.id: load.end_s for load in loads}
    return Packing(before, after, tuple(moves), stopped_because)


def _best_move(source: "_Load", loads: Sequence["_Load"], gain_s: float) -> "tuple[Outlook, _Load] | None":
    """The request and the destination after which the later of the two engines ends soonest."""
    best: tuple[float, Outlook, _Load] | None = None
    limit_s = source.end_s - gain_s
    destinations = sorted(
        (load for load in loads if load is not source and load.end_s < limit_s), key=lambda load: load.end_s
    )[:DESTINATIONS]
    if not destinations:
        return None
    for request in source.may_leave:
        left_s = source.end_without_s(request)
        if left_s > limit_s:
            continue
        for destination in destinations:
            if not destination.has_room(request):
                continue
            later_s = max(left_s, destination.end_with_s(request))
            if later_s <= limit_s and (best is None or later_s < best[0]):
                best = later_s, request, destination
    return None if best is None else best[1:]


class _Load:
    """What one engine holds while moves are being chosen, and when it will end."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        configuration = engine.configuration
        self._alpha_s = configuration.alpha_s * engine.slowdown
        self._beta_s = configuration.beta_s * engine.slowdown
        self._gamma_s = configuration.gamma_s * engine.slowdown
        self._prefill_s = engine.slowdown / configuration.prefill_tokens_per_s
        self._kv_free_tokens = engine.kv_free_tokens
        self._running = sum(request.state is RequestState.RUNNING for request in engine.requests)
        self._waiting = len(engine.requests) - self._running
        self.may_leave = sorted((request for request in engine.requests if request.movable), key=lambda r: r.id)
        self._longest = sorted(request.mean_tokens for request in engine.requests)
        self._work_s = sum(self._work_of_s(request) for request in engine.requests)
        self._kv_area = sum(_kv_area(request) for request in engine.requests)  # tokens times iterations
        self._seat_area = sum(self._longest)  # sequences times iterations
        self._prefills_s = 0.0
        self.end_s = self._end_s(self._longest[-1] if self._longest else 0.0, 0.0, 0.0, 0.0)

    def _work_of_s(self, request: Outlook) -> float:
        """Seconds that a request adds to the iterations of those that run beside it."""
        kv_area = request.context_tokens * request.mean_tokens + request.square_tokens / 2
        return self._beta_s * request.mean_tokens + self._gamma_s * kv_area

    def _end_s(self, longest: float, work_s: float, kv_area: float, seat_area: float) -> float:
        """The end with so much more than is held. Where not all fit at once, as many iterations as seats and KV take."""
        configuration = self.engine.configuration
        iterations = max(
            longest,
            (self._kv_area + kv_area) / configuration.kv_capacity_tokens,
            (self._seat_area + seat_area) / configuration.max_sequences,
        )
        return self._alpha_s * iterations + self._work_s + work_s + self._prefills_s

    def has_room(self, request: Outlook) -> bool:
        """It would run at once: a seat is free, nobody waits, and the context fits."""
        seats = self.engine.configuration.max_sequences - self._running - self._waiting
        return seats > 0 and self._waiting == 0 and request.context_tokens <= self._kv_free_tokens

    def end_without_s(self, request: Outlook) -> float:
        last = self._longest[-1]
        longest = last if request.mean_tokens < last else (self._longest[-2] if len(self._longest) > 1 else 0.0)
        return self._end_s(longest, -self._work_of_s(request), -_kv_area(request), -request.mean_tokens)

    def end_with_s(self, request: Outlook) -> float:
        longest = max(request.mean_tokens, self._longest[-1] if self._longest else 0.0)
        prefill_s = request.context_tokens * self._prefill_s
        return self._end_s(longest, self._work_of_s(request) + prefill_s, _kv_area(request), request.mean_tokens)

    def lose(self, request: Outlook) -> None:
        self.end_s = self.end_without_s(request)
        self.may_leave.remove(request)
        self._longest.remove(request.mean_tokens)
        self._count(request, -1)

    def gain(self, request: Outlook) -> None:
        """It is not put among those that may leave: no request moves twice."""
        self.end_s = self.end_with_s(request)
        insort(self._longest, request.mean_tokens)
        self._prefills_s += request.context_tokens * self._prefill_s
        self._count(request, 1)

    def _count(self, request: Outlook, sign: int) -> None:
        self._work_s += sign * self._work_of_s(request)
        self._kv_area += sign * _kv_area(request)
        self._seat_area += sign * request.mean_tokens
        if sign > 0:
            self._running += 1
            self._kv_free_tokens -= request.context_tokens
        elif request.state is RequestState.RUNNING:
            self._running -= 1
            self._kv_free_tokens += request.context_tokens
        else:
            self._waiting -= 1


def _kv_area(request: Outlook) -> float:
    return request.context_tokens * request.mean_tokens + request.square_tokens / 2
