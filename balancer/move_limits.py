"""Limit moves, so that requests do not move back and forth and engines do not spend all their time on prefills. Has no
side effects."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from balancer.kv_headroom import ForecastKvHeadroom
from balancer.load_index import Worker
from planner.model import EngineId, RequestId, Snapshot


class LastMoves:
    """The time of the latest move of each request. The times are lost in a restart, so a request may then move sooner
    after its last move than the settings allow."""

    def __init__(self) -> None:
        self._moved_s: dict[RequestId, float] = {}

    def moved(self, at_s: float, requests: Iterable[RequestId]) -> None:
        """Record that the requests were moved at `at_s`."""
        self._moved_s.update(dict.fromkeys(requests, at_s))

    def within(self, rest_s: float, now_s: float) -> Mapping[RequestId, float]:
        """Return the time of each request's latest move, for moves in the last `rest_s` seconds. Older times are
        deleted."""
        self._moved_s = {request: at_s for request, at_s in self._moved_s.items() if now_s - at_s < rest_s}
        return self._moved_s


def resting(
    snapshot: Snapshot, workers: Iterable[Worker], moved_s: Mapping[RequestId, float], rest_s: float
) -> frozenset[RequestId]:
    """Return the requests that moved less than `rest_s` seconds ago. Requests on stalled engines are exempt."""
    if not moved_s:
        return frozenset()
    stalled = {worker.id for worker in workers if worker.stalled}
    return frozenset(
        request.id
        for request in snapshot.requests
        if snapshot.now_s - moved_s.get(request.id, float("-inf")) < rest_s and request.engine not in stalled
    )


class MoveLimits:
    """Limits the moves of a tick. At most `max_to_engine` running requests move to any one engine. If `room` is given,
    each moved request must also fit in the KV headroom of its destination.

    If `keep_last` is True, a running request that is alone on an engine does not move to an empty engine unless its
    engine is stalled. Such a move would only change which of the two engines is idle.
    """

    def __init__(
        self, workers: Sequence[Worker], room: ForecastKvHeadroom | None, *, max_to_engine: int, keep_last: bool
    ) -> None:
        self._room = room
        self._max_to_engine = max_to_engine
        self._keep_last = keep_last
        self._stalled = {worker.id for worker in workers if worker.stalled}
        self._running = {request.id for worker in workers for request in worker.running}
        self._held = Counter({worker.id: len(worker.running) + len(worker.waiting) for worker in workers})
        self._coming: Counter[EngineId] = Counter()

    def fits(self, request: RequestId, source: EngineId, destination: EngineId) -> bool:
        if request in self._running:
            if self._coming[destination] >= self._max_to_engine:
                return False
            alone = self._held[source] == 1 and not self._held[destination]
            if self._keep_last and alone and source not in self._stalled:
                return False
        return self._room is None or self._room.fits(request, source, destination)

    def moved(self, request: RequestId, source: EngineId, destination: EngineId) -> None:
        self._held[source] -= 1
        self._held[destination] += 1
        self._coming[destination] += request in self._running
        if self._room is not None:
            self._room.moved(request, source, destination)
