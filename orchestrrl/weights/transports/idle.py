"""Connections between two versions: kept for the next link between the same two peers, bounded in number and time.

Both ends keep theirs only where all that was meant to move has moved, and know them by one name; one that only one end
still has is never used again, and goes when its time is over.
"""

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

MOST_IDLE = 32
IDLE_S = 900.0  # longer than between two versions, mostly

C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class _Idle(Generic[C]):
    connection: C
    place: str  # that it leads to
    since_s: float


class IdleConnections(Generic[C]):
    """`let_go` closes one, and may be called from a thread of its own."""

    def __init__(
        self,
        let_go: Callable[[C], None],
        most: int = MOST_IDLE,
        idle_s: float = IDLE_S,
        steady_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._let_go = let_go
        self._most = most
        self._idle_s = idle_s
        self._steady_s = steady_s
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._idle: OrderedDict[str, _Idle[C]] = OrderedDict()  # the one that is idle longest comes first
        self._offers = 0
        self._timer: threading.Timer | None = None
        self._closed = False

    def keep(self, name: str, place: str, connection: C) -> None:
        with self._lock:
            is_kept = not self._closed
            if is_kept:
                self._idle[name] = _Idle(connection, place, self._steady_s())
                self._changed.notify_all()
        if is_kept:
            self.tidy()
        else:
            self._let_go(connection)

    def take(self, name: str, within_s: float = 0.0) -> C | None:
        """It may come within that time, if it is under way."""
        with self._changed:
            self._changed.wait_for(lambda: name in self._idle or self._closed, within_s)
            found = self._idle.pop(name, None)
        return None if found is None else found.connection

    def take_first(self, names: list[str], place: str) -> tuple[str, C] | None:
        """One of these that leads there."""
        with self._lock:
            for name in names:
                if (found := self._idle.get(name)) is not None and found.place == place:
                    del self._idle[name]
                    return name, found.connection
        return None

    @contextlib.contextmanager
    def offered(self) -> Iterator[list[str]]:
        """Names of all, the last one first; until the block ends none is let go of."""
        with self._lock:
            self._offers += 1
            names = list(reversed(self._idle))
        try:
            yield names
        finally:
            with self._lock:
                self._offers -= 1
            self.tidy()

    def tidy(self) -> None:
        """Let go of those that are too many, or idle for too long."""
        with self._lock:
            over: list[C] = []
            now_s = self._steady_s()
            while self._idle and not self._offers:
                first = next(iter(self._idle.values()))
                if len(self._idle) <= self._most and now_s - first.since_s < self._idle_s:
                    break
                over.append(self._idle.popitem(last=False)[1].connection)
            if self._idle and self._timer is None and not self._closed:
                self._timer = threading.Timer(self._idle_s, self._late)
                self._timer.name, self._timer.daemon = "weights-idle", True
                self._timer.start()
        for each in over:
            self._let_go(each)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._changed.notify_all()
            over = [each.connection for each in self._idle.values()]
            self._idle.clear()
            timer = self._timer
        for each in over:
            self._let_go(each)
        if timer is not None:  # no thread of ours outlives its transport
            timer.cancel()
            timer.join()

    def _late(self) -> None:
        with self._lock:
            self._timer = None
        self.tidy()
