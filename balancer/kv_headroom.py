"""KV headroom: an engine's room for one more request until that request ends, with what the requests there still need
and what they free by ending. Pure.

Lengths are given as equally likely futures; in each, every request has a number of tokens left. Within one future the
need follows: requests grow together, one token in each iteration, and leave when they are through, so that the need
peaks just as one of them ends. Lengths that are known exactly are one future.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from balancer.load_index import Worker
from planner.model import EngineId, RequestId, RequestState, RequestView

# KV is handed out in blocks of so many tokens, and the last one of each request may be all but empty.
BLOCK_TOKENS = 16
ROUNDING_TOKENS = BLOCK_TOKENS - 1
# Iterations that a request may arrive later than those that run at its destination go on: they are so much longer then.
ARRIVES_LATE = 64
# Engines that are looked at in one tick. The others count as full.
MOST_LOOKED_AT = 48


class LengthDistributions(Protocol):
    """How many tokens requests may still generate (planner/workload/remaining_tokens.py)."""

    def of(self, requests: Sequence[RequestView]) -> Sequence[Sequence[int]]:
        """Return the remaining tokens of [request, future], at least 1."""


class ForecastKvHeadroom:
    """Room in all futures but a share `risk` (0 to 1) of them, as moves are being chosen.

    What others than the requests of the workers hold on an engine, they keep.
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
        """Return True if the destination gets by without a preemption once the request has joined those it holds.

        A request that waits may also queue where some will be preempted anyhow: it waits there as well as here.
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
    """One request on an engine. `remaining_tokens`: in each future, at least 1."""

    context_tokens: int
    remaining_tokens: Sequence[int]
    runs: bool


class _Part(NamedTuple):
    """A request in one future. In order of `until_tokens`."""

    until_tokens: int  # iterations until it has ended for certain
    context_tokens: int
    late: int  # iterations of these that it may begin late


class _Held:
    """What one engine holds in each future."""

    def __init__(self, worker: Worker, stays: Iterable[_Stay], risk: float) -> None:
        resident = sum(request.context_tokens for request in worker.running)
        self._kv_tokens = min(worker.kv_capacity_tokens, worker.kv_free_tokens + resident)
        self._seats = worker.max_sequences
        self._risk = risk
        self._distributions: list[list[_Part]] = []  # ascending
        self._count = 0
        self._refused: float | None = None  # the smallest that did not fit: no larger one is looked at
        self._overcommitted: bool | None = None  # None: not asked for since it last changed
        for stay in stays:
            self.gain(stay, late=not stay.runs)

    @property
    def overcommitted(self) -> bool:
        """Whether it will hardly get by with what it holds, at best."""
        if self._overcommitted is None:
            kv_tokens = self._kv_tokens + ROUNDING_TOKENS * self._count
            over = sum(_overflows(_punctual(held), kv_tokens) for held in self._distributions)
            self._overcommitted = self._count > self._seats or over > self._spare
        return self._overcommitted

    @property
    def _spare(self) -> int:
        """Futures that may go wrong."""
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
    """Whether requests that grow together need more than there is, at the end of any of them; the longest first."""
    tokens = 0
    for count, (until_tokens, context_tokens, _) in enumerate(reversed(held), start=1):
        tokens += context_tokens
        if tokens + count * until_tokens > kv_tokens:
            return True
    return False
