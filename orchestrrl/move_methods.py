"""Which way each running request moves, by KV or by computing its context again, and what that should take. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from orchestrrl.beliefs import Moving
from orchestrrl.operations import ItemResult, MoveMethod, RequestMove
from planner.model import ConfigurationId, EngineId, EngineView, RequestId, RequestState, Snapshot
from planner.profile import EngineProfile


@dataclass(frozen=True, slots=True)
class MoveCosting:
    """What moves are priced by. `kv_versions`: of the engines that can hand KV over; those of the same one to each
    other."""

    profiles: Mapping[ConfigurationId, EngineProfile]
    moving: Moving
    per_node: int
    kv_versions: Mapping[EngineId, str]


@dataclass(frozen=True, slots=True)
class MovedRequest:
    """A move and what became of it, for people: predicted against actual."""

    ended_s: float
    move: RequestMove
    item: ItemResult


def with_methods(moves: Sequence[RequestMove], snapshot: Snapshot, costing: MoveCosting) -> tuple[RequestMove, ...]:
    """The moves, each by the cheaper method (appendix A), with what it is predicted to take.

    Contexts that an engine computes again are computed one after the other, in this order; KV comes at once. Requests
    that are waiting bring nothing, and engines of an unknown configuration predict nothing.
    """
    engines = {engine.id: engine for engine in snapshot.engines}
    wanted = {move.request for move in moves}
    context_tokens: dict[RequestId, int] = {
        view.id: view.context_tokens
        for view in snapshot.requests
        if view.id in wanted and view.state is RequestState.RUNNING
    }
    before_s: dict[EngineId, float] = {}  # of what is to be computed at an engine already
    priced = []
    for move in moves:
        tokens, target = context_tokens.get(move.request), engines.get(move.to_engine)
        recompute_s = None if tokens is None or target is None else _recompute_s(tokens, target, costing)
        if tokens is None or target is None or recompute_s is None:
            priced.append(move)
            continue
        recompute_s += before_s.get(move.to_engine, 0.0)
        transfer_s = _transfer_s(tokens, engines.get(move.from_engine), target, costing)
        if transfer_s is not None and transfer_s < recompute_s:
            priced.append(replace(move, method=MoveMethod.TRANSFER, predicted_s=transfer_s, other_s=recompute_s))
        else:
            before_s[move.to_engine] = recompute_s
            priced.append(replace(move, predicted_s=recompute_s, other_s=transfer_s or 0.0))
    return tuple(priced)


def ended(at_s: float, moves: Iterable[RequestMove], items: Iterable[ItemResult]) -> list[MovedRequest]:
    """Those moves that were carried out."""
    by_id = {item.id: item for item in items}
    return [
        MovedRequest(at_s, move, by_id[move.request])
        for move in moves
        if move.request in by_id and by_id[move.request].done
    ]


def _recompute_s(tokens: int, target: EngineView, costing: MoveCosting) -> float | None:
    profile = None if target.configuration is None else costing.profiles.get(target.configuration)
    if profile is None or not profile.prefill_tokens_per_s > 0:
        return None
    context, rate = np.array([float(tokens)]), np.array([profile.prefill_tokens_per_s])
    return float(costing.moving.transfer.recompute_s(context, rate)[0])


def _transfer_s(tokens: int, source: EngineView | None, target: EngineView, costing: MoveCosting) -> float | None:
    """None where the two hand nothing over to each other."""
    version = costing.kv_versions.get(target.id, "")
    if source is None or not version or costing.kv_versions.get(source.id) != version:
        return None
    assert target.configuration is not None, "a version names the configuration"
    gpus = costing.profiles[target.configuration].parallelism.gpus  # the source has as many: it is configured alike
    nodes = {gpu // costing.per_node for engine in (source, target) for gpu in engine.gpus}
    transfer = costing.moving.transfer
    inside = len(nodes) == 1 and bool(source.gpus) and bool(target.gpus)
    context = np.array([float(tokens)])
    (seconds,) = transfer.transfer_s(context, costing.moving.kv_bytes_per_token, np.array([gpus]), np.array([inside]))
    return float(seconds) if np.isfinite(seconds) else None
