"""Limits on moves, so that requests do not go to and fro and engines do more than prefill. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from balancer.kv_headroom import ForecastKvHeadroom
from balancer.load_index import Worker
from planner.model import EngineId, RequestId, Snapshot


class LastMoves:
    """Stores when requests moved last. It is empty after a restart: requests may then move once too early."""

    def __init__(self) -> None:
        self._moved_s: dict[RequestId, float] = {}

    def moved(self, at_s: float, requests: Iterable[RequestId]) -> None:
        """Record moves that were carried out."""
        self._moved_s.update(dict.fromkeys(requests, at_s))

    def within(self, rest_s: float, now_s: float) -> Mapping[RequestId, float]:
        """Those of the last `rest_s`; the others are forgotten."""
        self._moved_s = {request: at_s for request, at_s in self._moved_s.items() if now_s - at_s < rest_s}
        return self._moved_s


def resting(
    snapshot: Snapshot, workers: Iterable[Worker], moved_s: Mapping[RequestId, float], rest_s: float
) -> frozenset[RequestId]:
    """Requests that have moved too lately to move again. None rests on an engine that is stalled."""
    if not moved_s:
        return frozenset()
    stalled = {worker.id for worker in workers if worker.stalled}
    return frozenset(
        request.id
        for request in snapshot.requests
        if snapshot.now_s - moved_s.get(request.id, float("-inf")) < rest_s and request.engine not in stalled
    )


class MoveLimits:
    """Room, as far as there is any, for so many running requests to come to one engine at a time. With `keep_last`, the
    only request of an engine that is well does not run to an empty one: that changes which of the two is idle."""

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
