"""A weight version from the trainer's GPUs to every engine's, on a fabric: circuits, then step by step as flows. Pure.

The plan is the product's own (planner/sync_tree), over servers as its peers are; what it takes is the network's word,
not the plan's estimate. Where the fabric has circuits, those that are there are kept, or they are set for all of the
plan at once, or anew for each wave that wants others: whichever is sooner. Others may send beside it: then whichever
costs least, what those are late by included.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from orchestrrl.lab.sim.net.fabrics.base import FabricStage, Period, SimulatedFabric
from orchestrrl.lab.sim.net.fluid import TierBytes, finish_beside, finish_s, summed, tier_bytes
from orchestrrl.lab.sim.net.model import Floats, FlowRoutes, GpuFlows, LinkNetwork, Servers
from orchestrrl.lab.sim.rl.generation_fleet import UniformFleet
from orchestrrl.lab.sim.rl.model import SyncCourse, SyncStage
from orchestrrl.lab.sim.rl.weight_sync_flows import Beside, FlowStep, naive_steps, tree_steps, two_stage_steps
from orchestrrl.lab.sim.rl.weight_sync_shards import ServerShard, SyncSite, shards_of, site_of
from orchestrrl.lab.sim.train.model import TrainJob
from planner.sync_tree.model import Shard, SyncProblem
from planner.sync_tree.plan import make_plan

SCHEMES = ("tree", "naive", "two_stage")
CHUNK_BYTES = 64 << 20  # that a server passes on while the rest is still coming
HOP_S = 5e-6  # for the plan alone
GBPS = 8e-9  # gigabits of a byte
MOST_WAVES = 24  # that circuits are tried anew for: working them out takes its time


@dataclass(frozen=True, slots=True)
class _Ground:
    """What all courses of a sync have in common: the fabric, who sends beside it, and the time that none is under."""

    fabric: SimulatedFabric
    beside: Sequence[Beside]
    bound_s: float

    def period(self, flows: GpuFlows, share: float = 1.0) -> Period:
        """For these flows, and what others send in that share of the time."""
        others = [each.flows.times(self.bound_s * share) for each in self.beside]
        sent = GpuFlows.joined([flows, *others])
        return Period.of("weight sync", FabricStage.WEIGHT_SYNC, sent.only(sent.cross(self.fabric.servers)))

    def circuits_s(self, before: Period | None, after: Period) -> float:
        return self.fabric.reconfigures_s if self.fabric.changes(before, after) else 0.0


def sync_stage(
    job: TrainJob,
    fleets: Sequence[UniformFleet],
    fabric: SimulatedFabric,
    scheme: str = "tree",
    *,
    beside: Sequence[Beside] = (),
) -> SyncStage:
    """To the engines of all `fleets`. `beside`: what others send all the while. Raises ValueError for a scheme that is
    not known, and where a layout cannot divide the model."""
    if scheme not in SCHEMES:
        raise ValueError(f"scheme must be one of {', '.join(SCHEMES)}, got {scheme!r}")
    shards, site = shards_of(job, fleets, fabric.servers.gpus_per_server), site_of(fabric.network(None))
    sending = [each for each in beside if len(each.flows)]
    found = _courses(scheme, shards, site, _Ground(fabric, sending, bound_s(shards, site)))
    return min(found, key=lambda each: each.cost_s)  # of those that are alike, the one that changes least


def steps_of(
    scheme: str, shards: Sequence[ServerShard], site: SyncSite, servers: Servers, wave_s: float = 0.0
) -> list[FlowStep]:
    gpus = servers.gpus_per_server
    if scheme == "naive":
        return naive_steps(shards, site, gpus)
    if scheme == "two_stage":
        return two_stage_steps(shards, site, gpus)
    plan = make_plan(problem_of(shards, site, servers), wave_s=wave_s)
    return tree_steps(plan, shards, gpus)


def problem_of(shards: Sequence[ServerShard], site: SyncSite, servers: Servers) -> SyncProblem:
    """Servers are endpoints; a PoD's budget is how many NICs' worth leaves it."""
    link_bytes_per_s = servers.nic_bytes_per_s
    return SyncProblem(
        link_gbps=link_bytes_per_s * GBPS,
        pods=tuple(f"pod{number}" for number in range(site.pods)),
        boundary_circuits=np.floor(site.pod_bytes_per_s / link_bytes_per_s + 1e-6).astype(np.int64),
        tors=tuple(f"tor{number}" for number in range(len(site.tor_bytes_per_s))),
        tor_gbps=site.tor_bytes_per_s * GBPS,
        endpoints=tuple(f"server{number}" for number in range(len(site.pod))),
        pod=site.pod,
        tor=site.tor,
        nic_gbps=site.nic_bytes_per_s * GBPS,
        shards=tuple(
            Shard(f"shard{number}", max(1, round(shard.bytes)), shard.holders, shard.receivers)
            for number, shard in enumerate(shards)
        ),
        seeds_per_pod=1,
        chunk_bytes=CHUNK_BYTES,
        hop_latency_s=HOP_S,
    )


def bound_s(shards: Sequence[ServerShard], site: SyncSite) -> float:
    """No plan is shorter: what each server, ToR and PoD has to take in, and what has to leave the holders at all."""
    arriving = np.zeros(len(site.pod))
    entering, climbing = np.zeros(site.pods), np.zeros(len(site.tor_bytes_per_s))
    for shard in shards:
        receivers, holders = list(shard.receivers), list(shard.holders)
        arriving[receivers] += shard.bytes
        entering[np.setdiff1d(site.pod[receivers], site.pod[holders])] += shard.bytes
        climbing[np.setdiff1d(site.tor[receivers], site.tor[holders])] += shard.bytes
    holding = sorted({holder for shard in shards for holder in shard.holders})
    leaving_s = sum(shard.bytes for shard in shards) / float(site.nic_bytes_per_s[holding].sum()) if shards else 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        rates = ((arriving, site.nic_bytes_per_s), (entering, site.pod_bytes_per_s), (climbing, site.tor_bytes_per_s))
        found = [np.where(size > 0, size / rate, 0.0).max(initial=0.0) for size, rate in rates]
    return float(max(leaving_s, *found))


def _courses(scheme: str, shards: Sequence[ServerShard], site: SyncSite, ground: _Ground) -> Iterator[SyncStage]:
    """Waves cost nothing where circuits are kept: a plan for those may have more of them."""
    fabric = ground.fabric
    steps = steps_of(scheme, shards, site, fabric.servers)
    try:
        yield _stage(SyncCourse.KEEP, 0.0, steps, [fabric.network(None)] * len(steps), ground)
    except ValueError:  # circuits of another period may leave servers apart
        if not fabric.reconfigures_s:
            raise
    if not fabric.reconfigures_s:
        return
    if scheme == "tree":
        steps = steps_of(scheme, shards, site, fabric.servers, fabric.reconfigures_s)
    period = ground.period(GpuFlows.joined([step.flows for step in steps]))
    networks = [fabric.network(period)] * len(steps)
    yield _stage(SyncCourse.CHANGE, ground.circuits_s(None, period), steps, networks, ground)
    if 1 < len(steps) <= MOST_WAVES:
        yield _by_wave(steps, ground)


def _by_wave(steps: Sequence[FlowStep], ground: _Ground) -> SyncStage:
    before: Period | None = None
    circuits_s, networks = 0.0, []
    for step in steps:
        if step.flows.cross(ground.fabric.servers).any():
            period = ground.period(step.flows, 1 / len(steps))
            circuits_s += ground.circuits_s(before, period)
            before = period
        networks.append(ground.fabric.network(before))
    return _stage(SyncCourse.CHANGE_BY_WAVE, circuits_s, steps, networks, ground)


def _stage(
    course: SyncCourse, circuits_s: float, steps: Sequence[FlowStep], networks: Sequence[LinkNetwork], ground: _Ground
) -> SyncStage:
    times = [_step_s(network, step, ground.beside) for network, step in zip(networks, steps, strict=True)]
    crossing_s = sum(each.crossing_s for each in times)
    inside_s = sum(each.seconds for each in times) - crossing_s
    held_s: dict[FabricStage, float] = {}
    for stage, late_s in (pair for each in times for pair in each.held_s.items()):
        held_s[stage] = held_s.get(stage, circuits_s) + late_s
    return SyncStage(
        seconds=circuits_s + crossing_s + inside_s,
        phases_s={"circuits": circuits_s, "phase A": crossing_s, "phase B": inside_s},
        bound_s=ground.bound_s,
        tier_bytes=summed(each.tier_bytes for each in times),
        circuits=course,
        held_s=held_s,
    )


@dataclass(frozen=True, slots=True)
class _StepTime:
    crossing_s: float  # until the last flow between PoDs is through
    seconds: float  # until all are
    tier_bytes: TierBytes
    held_s: Mapping[FabricStage, float]


def _step_s(network: LinkNetwork, step: FlowStep, beside: Sequence[Beside]) -> _StepTime:
    """Who is below others waits for a chunk and a hop of each above it."""
    flows = step.flows
    if not len(flows):
        return _StepTime(0.0, 0.0, {}, {each.stage: 0.0 for each in beside})
    routes = network.routes(flows)
    ends_s, late_s = _shared(network, flows, routes, [each for each in beside if each.has_way(network)])
    chunk_s = ends_s * np.minimum(1.0, CHUNK_BYTES / network.servers.gpus_per_server / flows.bytes)
    ends_s = ends_s + routes.latency_s + step.above * (chunk_s + routes.latency_s)
    seconds = float(ends_s.max())
    held_s = {each.stage: late_s.get(each.stage, seconds) for each in beside}  # without a way, all the while
    crossing_s = float(ends_s[step.crosses].max(initial=0.0))
    return _StepTime(crossing_s, seconds, tier_bytes(network, flows, routes), held_s)


def _shared(
    network: LinkNetwork, flows: GpuFlows, routes: FlowRoutes, beside: Sequence[Beside]
) -> tuple[Floats, Mapping[FabricStage, float]]:
    """When flows end, and how late they make those beside them."""
    if not beside:
        return finish_s(network, flows, routes), {}
    found = finish_beside(network, flows, routes, GpuFlows.joined([each.flows for each in beside]))
    parts = np.split(found.behind_s, np.cumsum([len(each.flows) for each in beside])[:-1])
    return found.end_s, {each.stage: each.held_s(part) for each, part in zip(beside, parts, strict=True)}
