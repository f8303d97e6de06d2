"""The queue of requests that wait in the gateway for an engine with room. This module performs no I/O.

Requests that have been on an engine before, for example because they were moved or their engine failed, precede new
requests. Both kinds of requests are served in the order of arrival. A request that may not go to any of the engines
with room is skipped.
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
    """One request in the queue. `placed` is called once, with the request's engine or with a NoBackend error.
    `newcomer` describes the request to the routing strategy."""

    record: RequestRecord
    placed: Callable[[Any], None]
    without: frozenset[EngineId] = frozenset()  # excluded engines
    avoiding: frozenset[EngineId] = frozenset()  # engines to use only if there is no other
    again: bool = False  # it has been on an engine before
    patience_s: float = float("inf")  # the longest time without an eligible engine
    newcomer: RoutedRequest = field(init=False)
    since_s: float = 0.0
    alone_since_s: float | None = None  # start of the time without an eligible engine; None: there is one


class RequestQueue:
    """The waiting requests in two lines. Requests that have been on an engine before are served first, then new
    requests. Each line is served in the order of arrival."""

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
        """Remove the request. Does nothing if the request is not in the queue."""
        self._line(waiter).pop(waiter, None)

    def _line(self, waiter: QueuedRequest) -> OrderedDict[QueuedRequest, None]:
        return self._again if waiter.again else self._new

    def next(self, place_for: Callable[[QueuedRequest], T | None]) -> tuple[QueuedRequest, T] | None:
        """Remove the first request for which `place_for` returns a place, and return the request and the place. Return
        None if there is no such request. The search ends when a request that excludes and avoids no engines gets no
        place, because no later request would get a place either."""
        for waiter in self:
            place = place_for(waiter)
            if place is not None:
                self.leave(waiter)
                return waiter, place
            if not waiter.without and not waiter.avoiding:
                return None
        return None
