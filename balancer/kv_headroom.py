"""Check whether an engine's KV cache has room for one more request until that request ends. Has no side effects.

The check includes the growth of the engine's requests and the KV that they free when they end.

Remaining lengths are given as equally likely scenarios, each with a number of remaining tokens for every request.
Within one scenario, all requests grow by one token per iteration and leave when they end, so that KV usage peaks just
before a request ends. Exactly known lengths form a single scenario.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from balancer.load_index import Worker
from planner.model import EngineId, RequestId, RequestState, RequestView

# KV is allocated in blocks of this size; the last block of a request may contain a single token.
BLOCK_TOKENS = 16
ROUNDING_TOKENS = BLOCK_TOKENS - 1
# Iterations by which a moved request may start late. The requests at its destination grow by one token in each.
ARRIVES_LATE = 64
# Engines examined in one tick. All others count as full.
MOST_LOOKED_AT = 48


class LengthDistributions(Protocol):
    """Samples of the number of tokens that requests will still generate (see planner/workload/remaining_tokens.py)."""

    def of(self, requests: Sequence[RequestView]) -> Sequence[Sequence[int]]:
        """Return, for each request, the number of its remaining tokens in each scenario. Every number is at least 1."""


class ForecastKvHeadroom:
    """Tracks the KV headroom of engines while the moves of a tick are chosen.

    A request fits if the KV cache overflows in at most the fraction `risk` (0 <= risk < 1) of the scenarios. KV held by
    requests that are not listed in the workers is assumed to stay in use.
    """

    def __init__(self, workers: Iterable[Worker], distributions: LengthDistributions, risk: float) -> None:
        if not 0 <= risk < 1:
            raise ValueError(f"risk must be >= 0 and < 1, got {risk}")
        self._workers = {worker.id: worker for worker in workers}
        self._distributions = distributions
        self._risk = risk
        self._stays: dict[EngineId, dict[RequestId, _Stay]] = {}
        self._held: dict[EngineId, _Held] = {}

    def fits(self, request: RequestId, source: EngineId, destination: EngineId) -> bool:
        """Return whether the destination can take the request within the accepted risk of a preemption.

        The result is also True for a waiting request if the destination is overcommitted even without it, because the
        request can wait on either engine.
        """
        held = self._of(destination)
        stay = self._stays_on(source)[request]
        return held is not None and ((not stay.runs and held.overcommitted) or held.takes(stay))

    def moved(self, request: RequestId, source: EngineId, destination: EngineId) -> None:
        stay = self._stays_on(source)[request]
        if source in self._held:
            self._held[source].lose(stay)
        held = self._of(destination)
        if held is not None:
            held.gain(stay)

    def _stays_on(self, engine: EngineId) -> "dict[RequestId, _Stay]":
        if engine not in self._stays:
            requests = self._workers[engine].requests
            self._stays[engine] = {
                request.id: _Stay(request.context_tokens, remaining, request.state is RequestState.RUNNING)
                for request, remaining in zip(requests, self._distributions.of(requests), strict=True)
            }
        return self._stays[engine]

    def _of(self, engine: EngineId) -> "_Held | None":
        held = self._held.get(engine)
        if held is None and len(self._held) < MOST_LOOKED_AT:
            held = self._held[engine] = _Held(self._workers[engine], self._stays_on(engine).values(), self._risk)
        return held


class _Stay(NamedTuple):
    """One request on an engine. `remaining_tokens` has one value per scenario, each at least 1. `runs` is False if the
    request is waiting."""

    context_tokens: int
    remaining_tokens: Sequence[int]
    runs: bool


class _Part(NamedTuple):
    """One request in one scenario. Objects are ordered by `until_tokens`."""

    until_tokens: int  # iterations until the request has certainly ended
    context_tokens: int
    late: int  # the part of `until_tokens` that allows for a late start


class _Held:
    """The requests of one engine in each scenario."""

    def __init__(self, worker: Worker, stays: Iterable[_Stay], risk: float) -> None:
        resident = sum(request.context_tokens for request in worker.running)
        self._kv_tokens = min(worker.kv_capacity_tokens, worker.kv_free_tokens + resident)
        self._seats = worker.max_sequences
        self._risk = risk
        self._distributions: list[list[_Part]] = []  # ascending
        self._count = 0
        self._refused: float | None = None  # size of the smallest refused request: larger ones are not examined
        self._overcommitted: bool | None = None  # None: not calculated since the last change
        for stay in stays:
            self.gain(stay, late=not stay.runs)

    @property
    def overcommitted(self) -> bool:
        """True if there are more held requests than sequence slots, or if their KV exceeds the KV capacity, even by an
        optimistic estimate, in more scenarios than the accepted risk allows."""
        if self._overcommitted is None:
            kv_tokens = self._kv_tokens + ROUNDING_TOKENS * self._count
            over = sum(_overflows(_punctual(held), kv_tokens) for held in self._distributions)
            self._overcommitted = self._count > self._seats or over > self._spare
        return self._overcommitted

    @property
    def _spare(self) -> int:
        """The number of scenarios in which the KV cache is allowed to overflow."""
        return int(self._risk * len(self._distributions))

    def takes(self, stay: _Stay) -> bool:
        size = stay.context_tokens + sum(stay.remaining_tokens) / len(stay.remaining_tokens)
        if self._count >= self._seats or (self._refused is not None and size >= self._refused):
            return False
        self._distributions = self._distributions or [[] for _ in stay.remaining_tokens]
        kv_tokens = self._kv_tokens - ROUNDING_TOKENS * (self._count + 1)
        wrong = 0
        for held, part in zip(self._distributions, _parts(stay, late=True), strict=True):
            place = bisect_left(held, part)
            wrong += _overflows([*held[:place], part, *held[place:]], kv_tokens)
            if wrong > self._spare:
                self._refused = size
                return False
        return True

    def gain(self, stay: _Stay, late: bool = True) -> None:
        self._count += 1
        self._overcommitted = None
        self._distributions = self._distributions or [[] for _ in stay.remaining_tokens]
        for held, part in zip(self._distributions, _parts(stay, late), strict=True):
            insort(held, part)

    def lose(self, stay: _Stay) -> None:
        self._count -= 1
        self._overcommitted = self._refused = None
        for held, part in zip(self._distributions, _parts(stay, late=not stay.runs), strict=True):
            held.remove(part)


def _parts(stay: _Stay, late: bool) -> list[_Part]:
    delay = ARRIVES_LATE if late else 0
    return [_Part(remaining + delay, stay.context_tokens, delay) for remaining in stay.remaining_tokens]


def _punctual(held: Sequence[_Part]) -> list[_Part]:
    return sorted(_Part(part.until_tokens - part.late, part.context_tokens, 0) for part in held)


def _overflows(held: Sequence[_Part], kv_tokens: int) -> bool:
    """Return whether the total KV of requests that grow together exceeds `kv_tokens` tokens just before any of them
    ends.

    `held` is sorted by `until_tokens`, ascending. The longest requests are examined first.
    """
    tokens = 0
    for count, (until_tokens, context_tokens, _) in enumerate(reversed(held), start=1):
        tokens += context_tokens
        if tokens + count * until_tokens > kv_tokens:
            return True
    return False
