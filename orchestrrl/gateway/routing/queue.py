"""Requests that wait in the gateway for an engine with room: who is next, and how long they waited. Pure.

Two lines: who has been on an engine before (cut, moved, or left by one that failed) goes before who is new; within a
line it is first come, first served. Somebody whom every engine with room refuses is passed by.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any, TypeVar

from orchestrrl.gateway.ledger.ledger import RequestRecord
from orchestrrl.gateway.routing.strategies import RoutedRequest
from planner.model import EngineId

T = TypeVar("T")

WAIT_BOUNDS_S = (0.0, 0.01, 0.1, 1.0, 5.0, 15.0, 60.0, 300.0, 1800.0, 7200.0)


@dataclass(eq=False, slots=True)
class QueuedRequest:
    """One request in the queue. `placed` is called once, with its engine or with the reason why there is none."""

    record: RequestRecord
    placed: Callable[[Any], None]
    without: frozenset[EngineId] = frozenset()  # engines that it may not go to
    avoiding: frozenset[EngineId] = frozenset()  # those that it goes to only where there is no other
    again: bool = False  # it has been on an engine before
    patience_s: float = float("inf")  # without an engine that it could ever go to
    newcomer: RoutedRequest = field(init=False)
    since_s: float = 0.0
    alone_since_s: float | None = None  # since when there has been no such engine; None: there is one


@dataclass(slots=True)
class QueueWaits:
    """How long requests waited: one more than `bounds_s` counts, the last of what is beyond all of them."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(WAIT_BOUNDS_S) + 1))
    sum_s: float = 0.0

    def add(self, waited_s: float) -> None:
        self.counts[bisect_left(WAIT_BOUNDS_S, waited_s)] += 1
        self.sum_s += waited_s

    def buckets(self) -> list[tuple[str, float]]:
        """As Prometheus wants them: upper bound and how many waited no longer."""
        names = [*(str(bound_s) for bound_s in WAIT_BOUNDS_S), "+Inf"]
        return [(name, float(total)) for name, total in zip(names, accumulate(self.counts), strict=True)]


class RequestQueue:
    """Holds the waiters. `next` offers places in order."""

    def __init__(self) -> None:
        self._again: OrderedDict[QueuedRequest, None] = OrderedDict()
        self._new: OrderedDict[QueuedRequest, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._again) + len(self._new)

    def __iter__(self) -> Iterator[QueuedRequest]:
        return chain(self._again, self._new)

    def __contains__(self, waiter: QueuedRequest) -> bool:
        return waiter in self._line(waiter)

    def join(self, waiter: QueuedRequest) -> None:
        self._line(waiter)[waiter] = None

    def leave(self, waiter: QueuedRequest) -> None:
        """Harmless for one that has left."""
        self._line(waiter).pop(waiter, None)

    def _line(self, waiter: QueuedRequest) -> OrderedDict[QueuedRequest, None]:
        return self._again if waiter.again else self._new

    def next(self, place_for: Callable[[QueuedRequest], T | None]) -> tuple[QueuedRequest, T] | None:
        """The first who finds a place, with it; that one leaves the queue. None: nobody does. The search ends at the
        first who finds none although any engine would do: nobody behind would find one."""
        for waiter in self:
            place = place_for(waiter)
            if place is not None:
                self.leave(waiter)
                return waiter, place
            if not waiter.without and not waiter.avoiding:
                return None
        return None
