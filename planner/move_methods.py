"""Choose KV transfer or recomputation for each move of a running request, and predict how long the move takes. Has no
side effects.

The cost of a move has a part that grows with the context and a fixed part. The growing part is the prefill or the
transfer. It is calculated from profiles and link speeds. The fixed part includes sending the order to the engines,
finishing the destination's current step, and returning the first token. It is learned from completed moves
(`FixedMoveCost`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from planner.cost.profile import EngineProfile
from planner.model import ConfigurationId, EngineId, EngineView, MoveMethod, RequestMove, RequestState, Snapshot
from planner.solver.problem import KvTransferCost

# Used until moves are measured: two HTTP requests to busy servers, and half a decode step.
FIXED_PRIOR_S = 0.03
PRIOR_COUNTS_FOR = 3  # measured orders
MOST_ORDERS = 16  # newest measurements kept
MOST_FIXED_S = 60.0


@dataclass(frozen=True, slots=True)
class FixedMoveCost:
    """The fixed cost of moves by one method, in seconds. It is the median of the newest measurements and the prior.

    The part of the cost that grows with the context is excluded. The prior has the weight of `PRIOR_COUNTS_FOR`
    measurements, so that a single stalled move at the beginning does not determine the estimate.
    """

    prior_s: float = FIXED_PRIOR_S
    measured_s: tuple[float, ...] = ()

    def after(self, seconds: float) -> "FixedMoveCost":
        """Return a copy with one more measurement.

        A measurement below 0, which means that the growing part was overestimated, is stored as 0. A measurement above
        `MOST_FIXED_S` is stored as `MOST_FIXED_S`. NaN is ignored.
        """
        if math.isnan(seconds):
            return self
        newest = (*self.measured_s, min(MOST_FIXED_S, max(0.0, seconds)))[-MOST_ORDERS:]
        return replace(self, measured_s=newest)

    @property
    def seconds(self) -> float:
        return median((*(self.prior_s,) * PRIOR_COUNTS_FOR, *self.measured_s))


@dataclass(frozen=True, slots=True)
class MovePricing:
    """The inputs for calculating the cost of a move.

    `per_node` is the number of GPUs per node. `kv_versions` maps each engine that supports KV transfer to its KV
    transfer version. Two engines can transfer KV if their versions are equal.
    """

    profiles: Mapping[ConfigurationId, EngineProfile]
    transfer: KvTransferCost
    per_node: int
    kv_versions: Mapping[EngineId, str]


def choose_move_methods(
    moves: Sequence[RequestMove], snapshot: Snapshot, costing: MovePricing
) -> tuple[RequestMove, ...]:
    """Return the moves, each with the cheaper method (the paper's appendix A) and its predicted duration.

    An engine recomputes contexts one after the other, in the order of `moves`; KV transfers and the fixed parts of all
    moves run in parallel. A preempted request has no KV cache and is recomputed. No prediction is made for requests
    that have not run yet, because their prompts must be prefilled in any case, or for moves to engines whose prefill
    rate is unknown.
    """
    engines = {engine.id: engine for engine in snapshot.engines}
    wanted = {move.request for move in moves}
    views = {view.id: view for view in snapshot.requests if view.id in wanted}
    transfer_fixed_s, recompute_fixed_s = costing.transfer.transfer_fixed_s, costing.transfer.recompute_fixed_s
    before_s: dict[EngineId, float] = {}  # prefill already assigned to each engine
    priced = []
    for move in moves:
        view, target = views.get(move.request), engines.get(move.to_engine)
        prefill_s = None if view is None or target is None else _prefill_s(view.context_tokens, target, costing)
        if view is None or target is None or prefill_s is None:
            priced.append(move)
            continue
        prefill_s += before_s.get(move.to_engine, 0.0)
        runs = view.state is RequestState.RUNNING
        source = engines.get(move.from_engine) if runs else None
        transfer_s = _transfer_s(view.context_tokens, source, target, costing)
        recompute_s = recompute_fixed_s + prefill_s
        if transfer_s is not None and transfer_s < recompute_s:
            method, fixed_s = MoveMethod.TRANSFER, transfer_fixed_s
            priced.append(replace(move, method=method, predicted_s=transfer_s, other_s=recompute_s, fixed_s=fixed_s))
            continue
        before_s[move.to_engine] = prefill_s
        if runs or view.generated_tokens:
            move = replace(move, predicted_s=recompute_s, other_s=transfer_s or 0.0, fixed_s=recompute_fixed_s)
        priced.append(move)
    return tuple(priced)


def _prefill_s(tokens: int, target: EngineView, costing: MovePricing) -> float | None:
    profile = None if target.configuration is None else costing.profiles.get(target.configuration)
    if profile is None or not profile.prefill_tokens_per_s > 0:
        return None
    context, rate = np.array([float(tokens)]), np.array([profile.prefill_tokens_per_s])
    return float(costing.transfer.recompute_s(context, rate)[0])


def _transfer_s(tokens: int, source: EngineView | None, target: EngineView, costing: MovePricing) -> float | None:
    """Return the duration of a KV transfer in seconds; None if the two engines cannot transfer KV to each other."""
    version = costing.kv_versions.get(target.id, "")
    if source is None or not version or costing.kv_versions.get(source.id) != version:
        return None
    assert target.configuration is not None, "a version names the configuration"
    gpus = costing.profiles[target.configuration].parallelism.gpus  # same for the source: equal versions
    nodes = {gpu // costing.per_node for engine in (source, target) for gpu in engine.gpus}
    inside = len(nodes) == 1 and bool(source.gpus) and bool(target.gpus)
    (seconds,) = costing.transfer.transfer_s(np.array([float(tokens)]), np.array([gpus]), np.array([inside]))
    return float(seconds) + costing.transfer.transfer_fixed_s if np.isfinite(seconds) else None
