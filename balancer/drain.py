"""Where the requests of engines that are to be empty go. Pure.

Each goes to the engine with the smallest share of its slots taken once it is there, among those whose KV has room for
its context, and rather inside its engine's pool. Who waits goes first, since that costs nothing; then short contexts,
which are computed again soonest and have the most to come. Ids break ties.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
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
    """Moves of movable requests on `leaving` engines to `willing` ones, at most `max_moves`.

    `requests` are all in flight: those that stay tell how full engines are. `avoid` names engines that have refused a
    request; one that all have refused may try them again. Who is `excluded` stays for now.
    """
    targets = _Targets([engine for engine in engines if engine.id in willing and engine.id not in leaving], requests)
    pools = {engine.id: engine.pool for engine in engines}
    moves = []
    going = [r for r in requests if r.engine in leaving and r.movable and r.id not in excluded]
    for request in sorted(going, key=_turn)[:max_moves]:
        assert request.engine is not None
        target = targets.take(request, pools.get(request.engine, ""), avoid.get(request.id, ()))
        if target is not None:
            moves.append(RequestMove(request.id, request.engine, target, state=request.state))
    return tuple(moves)


def _turn(request: RequestView) -> tuple[bool, int, RequestId]:
    return request.state is RequestState.RUNNING, request.context_tokens, request.id


class _Targets:
    """Who may take requests, with those that were sent there counted in."""

    def __init__(self, engines: Sequence[EngineView], requests: Sequence[RequestView]) -> None:
        self._engines = engines
        self._held = Counter(request.engine for request in requests)
        known = [engine.max_sequences for engine in engines if engine.max_sequences]
        self._typical = median(known) if known else 1
        self._free_tokens = {engine.id: engine.kv_free_tokens for engine in engines}

    def take(self, request: RequestView, pool: str, avoid: Collection[EngineId]) -> EngineId | None:
        """The engine that the request goes to; it is counted there from now on."""
        willing = [engine for engine in self._engines if engine.id not in avoid] or self._engines
        if not willing:
            return None

        def rank(engine: EngineView) -> tuple[bool, bool, float, EngineId]:
            unknown = engine.kv_capacity_tokens == 0 or engine.age_s is None
            room = unknown or self._free_tokens[engine.id] >= request.context_tokens
            load = (self._held[engine.id] + 1) / (engine.max_sequences or self._typical)
            return not room, engine.pool != pool, load, engine.id

        best = min(willing, key=rank).id
        self._held[best] += 1
        self._free_tokens[best] -= request.context_tokens
        return best
