"""A generation step that changes its engines once, by order: what the network does to each of its phases. Pure.

The case of figure 18 of the OrchestrRL paper. All instances of one configuration are replaced by another's when so many
requests are left; parameters are loaded from CPU memory, KV goes over the fabric (or is computed again), and the rest
is decoded there. Requests are dealt evenly by what they hold, since lengths are not known, among the instances on the
GPUs that they were on, so that KV has a short way.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from orchestrrl.lab.sim.engines import EngineKind
from orchestrrl.lab.sim.net.fabrics.base import SimulatedFabric
from orchestrrl.lab.sim.rl.generation import stage_of
from orchestrrl.lab.sim.rl.generation_fleet import GenGpus, Hardware, UniformFleet, deployed, on_fabric
from orchestrrl.lab.sim.rl.kv_moves import KvOutcome, Leaving, OverFabric, Place
from orchestrrl.lab.sim.rl.model import GenStage
from orchestrrl.lab.sim.workload import SimRequest
from orchestrrl.lab.simulated_engine.scheduler import Scheduler
from planner.cost.predict import published_precision
from planner.cost.profile import Parallelism
from planner.model import GpuId, RequestId

NEVER_S = 1e12


@dataclass(frozen=True, slots=True)
class RedeploymentCase:
    """`left_share` of the requests are still to be finished when engines change."""

    hardware: Hardware
    where: GenGpus
    first: Parallelism
    then: Parallelism
    requests: tuple[SimRequest, ...]
    left_share: float

    def __post_init__(self) -> None:
        if not 0 < self.left_share < 1:
            raise ValueError(f"left_share must be in (0, 1), got {self.left_share}")


@dataclass(frozen=True, slots=True)
class _Left:
    """A request when engines change. `runs`: its KV is there."""

    request: SimRequest
    generated: int
    instance: int
    runs: bool

    @property
    def context_tokens(self) -> int:
        return self.request.prompt_tokens + self.generated


def redeployed_stage(case: RedeploymentCase, fabric: SimulatedFabric) -> GenStage:
    """Phases: by the names of the two configurations, `redeploying` and `moving KV`."""
    profile = on_fabric(case.hardware, (case.first, case.then), case.where, fabric)
    if len(profile.configurations) < 2:
        raise ValueError(f"one of {case.first} and {case.then} does not fit")
    one, other = (EngineKind(each) for each in profile.configurations)
    before, after = (deployed(each, case.where, fabric.servers, fabric.pods) for each in (case.first, case.then))
    first_s, finish_s, left = _until_redeployment(case, one, len(before))
    targets = _dealt(left, before, after)
    moved = _moved(case, left, targets, before, after, other, fabric)
    rest = _decoded(left, targets, moved.transferred, other, len(after))
    switch_s, kv_s = other.profile.switch_s, moved.seconds if moved.transferred else 0.0
    begin_s = first_s + switch_s + kv_s
    ends_s = sorted([*finish_s, *(begin_s + at_s for at_s in rest)])
    phases_s = {str(one.id): first_s, "redeploying": switch_s, "moving KV": kv_s, str(other.id): ends_s[-1] - begin_s}
    return stage_of(ends_s, case.requests, phases_s, {})


def _until_redeployment(
    case: RedeploymentCase, kind: EngineKind, instances: int
) -> tuple[float, list[float], list[_Left]]:
    """When it is, who has been answered by then and when, and who has not."""
    wanted = len(case.requests) - int(case.left_share * len(case.requests))
    ends_s = sorted(at_s for at_s, _ in _run(case.requests, kind, instances, NEVER_S)[0])
    at_s = ends_s[wanted - 1]
    finished, engines = _run(case.requests, kind, instances, at_s)
    by_id = {request.id: request for request in case.requests}
    left = [
        _Left(by_id[held.id], held.generated, place, runs)
        for place, engine in enumerate(engines)
        for runs, some in ((True, engine.running), (False, engine.waiting))
        for held in some
    ]
    return at_s, [end_s for end_s, _ in finished], left


def _run(
    requests: Sequence[SimRequest], kind: EngineKind, instances: int, until_s: float
) -> tuple[list[tuple[float, RequestId]], list[Scheduler]]:
    engines = [Scheduler(kind.shape) for _ in range(instances)]
    for place, request in enumerate(requests):
        request.submit(engines[place % instances], 0.0)
    finished = [
        (progress.finished_s, progress.id)
        for engine in engines
        for progress in engine.advance(until_s)
        if progress.finished_s is not None
    ]
    return finished, engines


def _dealt(left: Sequence[_Left], before: UniformFleet, after: UniformFleet) -> list[int]:
    """[request], the instance: of those on its GPUs, or of all, the one that holds least, the largest request first."""
    near = [np.flatnonzero(np.isin(after.gpus, gpus).any(axis=1)).tolist() for gpus in before.gpus]
    held = [0] * len(after)
    targets = [0] * len(left)
    for number in sorted(range(len(left)), key=lambda number: (-left[number].context_tokens, left[number].request.id)):
        places = near[left[number].instance] or range(len(after))
        target = min(places, key=lambda place: (held[place], place))
        targets[number] = target
        held[target] += left[number].context_tokens
    return targets


def _moved(
    case: RedeploymentCase,
    left: Sequence[_Left],
    targets: Sequence[int],
    before: UniformFleet,
    after: UniformFleet,
    kind: EngineKind,
    fabric: SimulatedFabric,
) -> KvOutcome:
    model, prefill_tokens_per_s = case.hardware.model, kind.profile.prefill_tokens_per_s
    sources, destinations = _places(before), _places(after)
    leaving = [
        Leaving(
            each.request.id, sources[each.instance], destinations[target], prefill_tokens_per_s, each.context_tokens
        )
        for each, target in zip(left, targets, strict=True)
        if each.runs
    ]
    return OverFabric(fabric, 0, model.kv_bytes_per_token(published_precision(model).kv_bits))(leaving)


def _places(fleet: UniformFleet) -> list[Place]:
    return [(fleet.parallelism, tuple(map(GpuId, gpus))) for gpus in fleet.gpus.tolist()]


def _decoded(
    left: Sequence[_Left], targets: Sequence[int], comes: Collection[RequestId], kind: EngineKind, instances: int
) -> list[float]:
    """When each of them ends, from when all KV is there."""
    engines = [Scheduler(kind.shape) for _ in range(instances)]
    for each, target in sorted(zip(left, targets, strict=True), key=lambda pair: not pair[0].runs):
        each.request.submit(engines[target], 0.0, each.generated, prefilled=each.request.id in comes)
    return [
        progress.finished_s
        for engine in engines
        for progress in engine.advance(NEVER_S)
        if progress.finished_s is not None
    ]
