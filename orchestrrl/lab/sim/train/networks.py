"""Collectives on the networks that a fabric is in a job's periods. Pure."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from orchestrrl.lab.sim.net.fabrics.base import SimulatedFabric
from orchestrrl.lab.sim.net.model import LinkNetwork
from orchestrrl.lab.sim.net.timing import seconds
from orchestrrl.lab.sim.train.circuits import Gradients
from orchestrrl.lab.sim.train.compute import compute_of
from orchestrrl.lab.sim.train.constants import TrainConstants
from orchestrrl.lab.sim.train.kernels import Kernels
from orchestrrl.lab.sim.train.model import TrainJob
from orchestrrl.lab.sim.train.passes import Pass
from orchestrrl.lab.sim.train.periods import layer_periods_of, periods_of
from orchestrrl.lab.sim.train.stages import StageLoad, loaded
from orchestrrl.lab.sim.train.traffic import FORWARD_BACKWARD, GroupCollective


@dataclass(frozen=True, slots=True)
class TrainingOnFabric:
    """`kept`: gradients on the circuits of forward and backward; `changed`: on those made for them, None where they are
    the same."""

    given: StageLoad
    kept: Gradients
    changed: Gradients | None
    within_layers: bool


def on_fabric(
    job: TrainJob, fabric: SimulatedFabric, exchanges: Mapping[str, GroupCollective], constants: TrainConstants
) -> TrainingOnFabric:
    passes_period, gradients_period = periods_of(job, exchanges)
    network = fabric.network(passes_period)
    given = _loaded(job, exchanges, once_s(network, exchanges, FORWARD_BACKWARD), constants)
    followed = _followed(given, fabric, exchanges) if constants.within_layers else None
    changed = None
    if "dp" in given.crossing and fabric.changes(passes_period, gradients_period):
        changed = gradients(fabric.network(gradients_period), exchanges)
    return TrainingOnFabric(followed or given, gradients(network, exchanges), changed, followed is not None)


def group_of(kind: str) -> str:
    return "dp" if kind.endswith(("_reduce", "_gather")) else kind


def once_s(network: LinkNetwork, exchanges: Mapping[str, GroupCollective], kinds: Iterable[str]) -> dict[str, float]:
    """Of each kind alone: a rank has one collective under way at a time."""
    return {kind: float(seconds(network, [exchanges[kind].transfer])[0]) for kind in kinds if kind in exchanges}


def gradients(network: LinkNetwork, exchanges: Mapping[str, GroupCollective]) -> Gradients:
    """Dense parameters and experts one behind the other: both leave by the same NICs."""
    try:
        each_s = once_s(network, exchanges, [kind for kind in exchanges if group_of(kind) == "dp"])
    except ValueError:  # circuits of another period may leave data-parallel ranks apart
        return Gradients(math.inf, math.inf)
    return Gradients(
        sum(each for kind, each in each_s.items() if kind.endswith("_reduce")),
        sum(each for kind, each in each_s.items() if kind.endswith("_gather")),
    )


def _loaded(
    job: TrainJob, exchanges: Mapping[str, GroupCollective], each_s: Mapping[str, float], constants: TrainConstants
) -> StageLoad:
    crossing = frozenset(group_of(kind) for kind, each in exchanges.items() if each.crosses)
    return loaded(job, compute_of(job, Kernels(job.gpu, constants)), each_s, crossing, constants)


def _followed(given: StageLoad, fabric: SimulatedFabric, exchanges: Mapping[str, GroupCollective]) -> StageLoad | None:
    """With circuits for attention and for experts; None where they are the same, a window between the two is too short
    to change them unnoticed, or nothing is gained."""
    if not {"cp", "ep"} <= given.crossing:
        return None
    attention, experts = layer_periods_of(given.job, exchanges)
    if not fabric.changes(attention, experts):
        return None
    each_s = once_s(fabric.network(attention), exchanges, ("tp", "cp", "pp"))
    each_s |= once_s(fabric.network(experts), exchanges, ("ep",))
    found = _loaded(given.job, exchanges, each_s, given.constants)
    passes, before = (found.passes.forward, found.passes.backward), (given.passes.forward, given.passes.backward)
    if min(shortest_window_s(found, each) for each in passes) < fabric.reconfigures_s:
        return None
    if sum(each.seconds for each in passes) >= sum(each.seconds for each in before):
        return None
    return found


def shortest_window_s(given: StageLoad, each: Pass) -> float:
    """Between a collective of the experts and one that is not, layer after layer."""
    sent, at_s = [], 0.0
    for segment in each.segments:
        if given.sends(segment):
            sent.append((segment.group == "ep", at_s, at_s + segment.sends_s))
        at_s += segment.seconds
    after = [*sent[1:], *((kind, begin_s + at_s, end_s + at_s) for kind, begin_s, end_s in sent[:1])]
    return min(
        (begin_s - end_s for (kind, _, end_s), (then, begin_s, _) in zip(sent, after, strict=True) if kind != then),
        default=math.inf,
    )
