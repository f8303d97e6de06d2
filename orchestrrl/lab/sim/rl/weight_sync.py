"""A weight version from the trainer's GPUs to every engine's, on a fabric: circuits, then step by step as flows. Pure.

The plan is the product's own (planner/sync_tree), over servers as its peers are; what it takes is the network's word,
not the plan's estimate. Where the fabric has circuits, those that are there are kept, or they are set for all of the
plan at once, or anew for each wave that wants others: whichever is sooner. Others may send beside it: then whichever
costs least, what those are late by included.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from orchestrrl.lab.sim.net.fabrics.base import FabricStage, Period, SimulatedFabric
from orchestrrl.lab.sim.net.fluid import finish_beside, finish_s, tier_bytes
from orchestrrl.lab.sim.net.model import Floats, FlowRoutes, GpuFlows, LinkNetwork, Servers
from orchestrrl.lab.sim.rl.generation_fleet import UniformFleet, summed
from orchestrrl.lab.sim.rl.model import SyncStage
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


class SyncCourse(StrEnum):
    KEEP = "keep"  # circuits stay as they are
    CHANGE = "change"  # once, for all that is sent
    CHANGE_BY_WAVE = "change_by_wave"  # before each wave that wants others


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of steps on a fabric."""

    course: SyncCourse
    circuits_s: float
    crossing_s: float  # phase A: until the last bytes have come from other PoDs
    inside_s: float  # phase B, beyond that
    tier_bytes: Mapping[str, float]
    held_s: Mapping[FabricStage, float]  # of those beside it; nobody sends while circuits change

    @property
    def seconds(self) -> float:
        return self.circuits_s + self.crossing_s + self.inside_s

    @property
    def cost_s(self) -> float:
        return self.seconds + sum(self.held_s.values())


@dataclass(frozen=True, slots=True)
class _Ground:
    """The fabric of steps, its circuits at rest, and who sends beside them. `meanwhile_s`: no sync is shorter."""

    fabric: SimulatedFabric
    beside: Sequence[Beside]
    meanwhile_s: float

    def period(self, flows: GpuFlows, share: float = 1.0) -> Period:
        """For these flows, and what others send in that share of the time."""
        others = [each.flows.times(self.meanwhile_s * share) for each in self.beside]
        return _period(GpuFlows.joined([flows, *others]), self.fabric.servers)


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
    servers = fabric.servers
    shards = shards_of(job, fleets, servers.gpus_per_server)
    site = site_of(fabric.network(None))
    least_s = bound_s(shards, site)
    sending = [each for each in beside if len(each.flows)]
    found = list(_courses(scheme, shards, site, _Ground(fabric, sending, least_s)))
    timed, steps = min(found, key=lambda each: each[0].cost_s)  # of those that are alike, the one that changes least
    return SyncStage(
        seconds=timed.seconds,
        phases_s={"circuits": timed.circuits_s, "phase A": timed.crossing_s, "phase B": timed.inside_s},
        bytes=sum(float(step.flows.bytes[_outside(step.flows, servers)].sum()) for step in steps),
        bound_s=least_s,
        tier_bytes=timed.tier_bytes,
        circuits=timed.course.value,
        held_s=timed.held_s,
    )


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


def _courses(
    scheme: str, shards: Sequence[ServerShard], site: SyncSite, ground: _Ground
) -> Iterator[tuple[Timed, Sequence[FlowStep]]]:
    """Waves cost nothing where circuits are kept: a plan for those may have more of them."""
    fabric = ground.fabric
    steps = steps_of(scheme, shards, site, fabric.servers)
    yield _kept(steps, ground), steps
    if not fabric.reconfigures_s:
        return
    if scheme == "tree":
        steps = steps_of(scheme, shards, site, fabric.servers, fabric.reconfigures_s)
    yield _at_once(steps, ground), steps
    if 1 < len(steps) <= MOST_WAVES:
        yield _step_by_step(steps, ground), steps


def _kept(steps: Sequence[FlowStep], ground: _Ground) -> Timed:
    network = ground.fabric.network(None)
    try:
        return _timed(SyncCourse.KEEP, 0.0, [_step_s(network, step, ground.beside) for step in steps])
    except ValueError:  # circuits of another period may leave servers apart
        if not ground.fabric.reconfigures_s:
            raise
        return Timed(SyncCourse.KEEP, 0.0, math.inf, 0.0, {}, {})


def _at_once(steps: Sequence[FlowStep], ground: _Ground) -> Timed:
    fabric = ground.fabric
    period = ground.period(GpuFlows.joined([step.flows for step in steps]))
    network = fabric.network(period)
    circuits_s = fabric.reconfigures_s if fabric.changes(None, period) else 0.0
    return _timed(SyncCourse.CHANGE, circuits_s, [_step_s(network, step, ground.beside) for step in steps])


def _step_by_step(steps: Sequence[FlowStep], ground: _Ground) -> Timed:
    fabric: SimulatedFabric = ground.fabric
    before: Period | None = None
    circuits_s, times = 0.0, []
    for step in steps:
        if not _outside(step.flows, fabric.servers).any():
            network = fabric.network(before)
        else:
            period = ground.period(step.flows, 1 / len(steps))
            circuits_s += fabric.reconfigures_s if fabric.changes(before, period) else 0.0
            network, before = fabric.network(period), period
        times.append(_step_s(network, step, ground.beside))
    return _timed(SyncCourse.CHANGE_BY_WAVE, circuits_s, times)


def _timed(course: SyncCourse, circuits_s: float, times: Sequence["_StepTime"]) -> Timed:
    crossing_s = sum(each.crossing_s for each in times)
    whole_s = sum(each.seconds for each in times)
    held_s: dict[FabricStage, float] = {}
    for stage, late_s in (pair for each in times for pair in each.held_s.items()):
        held_s[stage] = held_s.get(stage, circuits_s) + late_s
    sent = summed([each.tier_bytes for each in times])
    return Timed(course, circuits_s, crossing_s, whole_s - crossing_s, sent, held_s)


def _period(flows: GpuFlows, servers: Servers) -> Period:
    outside = _outside(flows, servers)
    return Period.of(
        "weight sync", FabricStage.WEIGHT_SYNC, GpuFlows(flows.src[outside], flows.dst[outside], flows.bytes[outside])
    )


def _outside(flows: GpuFlows, servers: Servers) -> NDArray[np.bool_]:
    return np.asarray(flows.src // servers.gpus_per_server != flows.dst // servers.gpus_per_server)


@dataclass(frozen=True, slots=True)
class _StepTime:
    crossing_s: float  # until the last flow between PoDs is through
    seconds: float  # until all are
    tier_bytes: Mapping[str, float]
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
    sent = {tier.value: size for tier, size in tier_bytes(network, flows, routes).items()}
    seconds = float(ends_s.max())
    held_s = {each.stage: late_s.get(each.stage, seconds) for each in beside}  # without a way, all the while
    return _StepTime(float(ends_s[step.crosses].max(initial=0.0)), seconds, sent, held_s)


def _shared(
    network: LinkNetwork, flows: GpuFlows, routes: FlowRoutes, beside: Sequence[Beside]
) -> tuple[Floats, Mapping[FabricStage, float]]:
    """When flows end, and how late they make those beside them."""
    if not beside:
        return finish_s(network, flows, routes), {}
    found = finish_beside(network, flows, routes, GpuFlows.joined([each.flows for each in beside]))
    parts = np.split(found.behind_s, np.cumsum([len(each.flows) for each in beside])[:-1])
    return found.end_s, {each.stage: each.held_s(part) for each, part in zip(beside, parts, strict=True)}
