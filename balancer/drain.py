"""Choose destinations for the requests of engines that are being emptied. Has no side effects.

Engines whose free KV has room for the context of a request are preferred, then engines of the pool that the request
leaves. If several engines are equally preferred, the request moves to the one that has the smallest share of its slots
in use after the move. Waiting requests move first, because moving them costs nothing. Then running requests move. Those
with short contexts come first, because their contexts are recomputed fastest and they are expected to generate the most
further tokens. Ids break ties.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from statistics import median

from planner.model import EngineId, EngineView, RequestId, RequestMove, RequestState, RequestView


def leave(
    requests: Sequence[RequestView],
    leaving: Collection[EngineId],
    engines: Sequence[EngineView],
    *,
    willing: Collection[EngineId],
    max_moves: int,
    avoid: Mapping[RequestId, Collection[EngineId]],
    excluded: Collection[RequestId] = frozenset(),
) -> tuple[RequestMove, ...]:
    """Return at most `max_moves` moves of movable requests from the engines `leaving` to the engines `willing`.

    `requests` are all requests in flight, which determine the load of each engine. `avoid` maps a request to the
    engines that have refused it. A request that all engines have refused may be moved to them again. Requests in
    `excluded` are not moved.
    """
    targets = [engine for engine in engines if engine.id in willing and engine.id not in leaving]
    if not targets:
        return ()
    pools = {engine.id: engine.pool for engine in engines}
    held = Counter(request.engine for request in requests)
    typical = median([engine.max_sequences for engine in targets if engine.max_sequences] or [1])
    free_tokens = {engine.id: engine.kv_free_tokens for engine in targets}

    def rank(request: RequestView, engine: EngineView) -> tuple[bool, bool, float, EngineId]:
        unknown = engine.kv_capacity_tokens == 0 or engine.age_s is None
        room = unknown or free_tokens[engine.id] >= request.context_tokens
        pool = "" if request.engine is None else pools.get(request.engine, "")
        return not room, engine.pool != pool, (held[engine.id] + 1) / (engine.max_sequences or typical), engine.id

    moves = []
    going = [r for r in requests if r.engine in leaving and r.movable and r.id not in excluded]
    for request in sorted(going, key=lambda r: (r.state is RequestState.RUNNING, r.context_tokens, r.id))[:max_moves]:
        assert request.engine is not None
        refused_by = avoid.get(request.id, ())
        open_to = [engine for engine in targets if engine.id not in refused_by] or targets
        best = min(open_to, key=partial(rank, request)).id
        held[best] += 1
        free_tokens[best] -= request.context_tokens
        moves.append(RequestMove(request.id, request.engine, best, state=request.state))
    return tuple(moves)
