"""The room that engines have for requests that may move, of a snapshot: by how long each may go on, or by flat headroom
where that is not known. Pure."""

from collections.abc import Sequence
from typing import Protocol

from balancer.kv_headroom import ForecastKvHeadroom, Stay, Tenancy
from planner.model import EngineId, EngineView, RequestState, RequestView, Snapshot

# Of an engine that does not tell: its KV limits it then.
UNKNOWN_MAX_SEQUENCES = 1 << 20


class LengthDistributions(Protocol):
    """How long requests may go on (orchestrrl/daemon/length_distributions.py)."""

    def of(self, requests: Sequence[RequestView]) -> Sequence[Sequence[int]]:
        """[request, future]: remaining tokens, at least 1."""
        ...


def future_room(snapshot: Snapshot, distributions: LengthDistributions, risk: float) -> ForecastKvHeadroom:
    """Room as forecast. What others than the requests of the snapshot hold on an engine, they keep."""
    engines = {engine.id: engine for engine in snapshot.engines}
    held: dict[EngineId, list[RequestView]] = {engine: [] for engine in engines}
    for request in snapshot.requests:
        if request.engine in held:
            held[request.engine].append(request)
    return ForecastKvHeadroom(lambda engine: _tenancy(engines[engine], held[engine], distributions), risk)


def _tenancy(engine: EngineView, requests: Sequence[RequestView], distributions: LengthDistributions) -> Tenancy:
    resident = sum(request.context_tokens for request in requests if request.state is RequestState.RUNNING)
    stays = {
        request.id: Stay(request.context_tokens, remaining, request.state is RequestState.RUNNING)
        for request, remaining in zip(requests, distributions.of(requests), strict=True)
    }
    kv_tokens = min(engine.kv_capacity_tokens, engine.kv_free_tokens + resident)
    return Tenancy(kv_tokens, engine.max_sequences or UNKNOWN_MAX_SEQUENCES, stays)
