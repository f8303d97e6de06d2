"""Requests that wait in the gateway for an engine with room: who is next. Pure.

Two lines: who has been on an engine before (cut, moved, or left by one that failed) goes before who is new; within a
line it is first come, first served. Somebody whom every engine with room refuses is passed by.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

from orchestrrl.gateway.ledger.ledger import RequestRecord
from orchestrrl.gateway.routing.strategies import RoutedRequest
from planner.model import EngineId

T = TypeVar("T")


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
