"""A weight version from the trainer's GPUs to every engine's, on a fabric: circuits, then step by step as flows. Pure.

The plan is the product's own (planner/sync_tree), over servers as its peers are; what it takes is the network's word,
not the plan's estimate. Where the fabric has circuits, those that are there are kept, or they are set for all of the
plan at once, or anew for each wave that wants others: whichever is sooner.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from orchestrrl.sim.net.fabrics.base import Fabric, Period, Stage
from orchestrrl.sim.net.fluid import finish_routed_s
from orchestrrl.sim.net.model import Flows, Network, Servers
from orchestrrl.sim.net.problem import routes_of
from orchestrrl.sim.net.timing import tier_bytes
from orchestrrl.sim.rl.generation_bytes import summed
from orchestrrl.sim.rl.generation_fleet import Fleet
from orchestrrl.sim.rl.model import SyncStage
from orchestrrl.sim.rl.weight_sync_flows import Step, naive_steps, tree_steps, two_stage_steps
from orchestrrl.sim.rl.weight_sync_shards import ServerShard, shards_of
from orchestrrl.sim.rl.weight_sync_site import Site, site_of
from orchestrrl.sim.train.model import TrainJob
from planner.sync_tree.model import Shard, SyncProblem
from planner.sync_tree.plan import make_plan

SCHEMES = ("tree", "naive", "two_stage")
CHUNK_BYTES = 64 << 20  # that a server passes on while the rest is still coming
HOP_S = 5e-6  # for the plan alone
GBPS = 8e-9  # gigabits of a byte
MOST_WAVES = 24  # that circuits are tried anew for: working them out takes its time


class Course(StrEnum):
    KEEP = "keep"  # circuits stay as they are
    CHANGE = "change"  # once, for all that is sent
    CHANGE_BY_WAVE = "change_by_wave"  # before each wave that wants others


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of steps on a fabric."""

    course: Course
    circuits_s: float
    crossing_s: float  # phase A: until the last bytes have come from other PoDs
    inside_s: float  # phase B, beyond that
    tier_bytes: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return self.circuits_s + self.crossing_s + self.inside_s


def sync_stage(
    job: TrainJob,
    fleets: Sequence[Fleet],
    fabric: Fabric,
    scheme: str = "tree",
    *,
    bits: int = 16,
    before: Period | None = None,
) -> SyncStage:
    """To the engines of all `fleets`. `before`: what circuits are set for when it begins; None: as they are at rest.
    Raises ValueError for a scheme that is not known, and where a layout cannot divide the model."""
    if scheme not in SCHEMES:
        raise ValueError(f"scheme must be one of {', '.join(SCHEMES)}, got {scheme!r}")
    servers = fabric.servers
    shards = shards_of(job, fleets, servers.gpus_per_server, bits)
    site = site_of(fabric.network(None))
    found = list(_courses(scheme, shards, site, fabric, before))
    timed, steps = min(found, key=lambda each: each[0].seconds)  # of those that are alike, the one that changes least
    return SyncStage(
        seconds=timed.seconds,
        phases_s={"circuits": timed.circuits_s, "phase A": timed.crossing_s, "phase B": timed.inside_s},
        bytes=sum(float(step.flows.bytes[_outside(step.flows, servers)].sum()) for step in steps),
        bound_s=bound_s(shards, site),
        tier_bytes=timed.tier_bytes,
        circuits=timed.course.value,
    )


def steps_of(
    scheme: str, shards: Sequence[ServerShard], site: Site, servers: Servers, wave_s: float = 0.0
) -> list[Step]:
    gpus = servers.gpus_per_server
    if scheme == "naive":
        return naive_steps(shards, site, gpus)
    if scheme == "two_stage":
        return two_stage_steps(shards, site, gpus)
    plan = make_plan(problem_of(shards, site, servers), wave_s=wave_s)
    return tree_steps(plan, shards, gpus)


def problem_of(shards: Sequence[ServerShard], site: Site, servers: Servers) -> SyncProblem:
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


def bound_s(shards: Sequence[ServerShard], site: Site) -> float:
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
    scheme: str, shards: Sequence[ServerShard], site: Site, fabric: Fabric, before: Period | None
) -> Iterator[tuple[Timed, Sequence[Step]]]:
    """Waves cost nothing where circuits are kept: a plan for those may have more of them."""
    steps = steps_of(scheme, shards, site, fabric.servers)
    yield _kept(steps, fabric, before), steps
    if not fabric.reconfigures_s:
        return
    if scheme == "tree":
        steps = steps_of(scheme, shards, site, fabric.servers, fabric.reconfigures_s)
    yield _at_once(steps, fabric, before), steps
    if 1 < len(steps) <= MOST_WAVES:
        yield _step_by_step(steps, fabric, before), steps


def _kept(steps: Sequence[Step], fabric: Fabric, before: Period | None) -> Timed:
    network = fabric.network(before)
    try:
        return _timed(Course.KEEP, 0.0, [_step_s(network, step) for step in steps])
    except ValueError:  # circuits of another period may leave servers apart
        if not fabric.reconfigures_s:
            raise
        return Timed(Course.KEEP, 0.0, math.inf, 0.0, {})


def _at_once(steps: Sequence[Step], fabric: Fabric, before: Period | None) -> Timed:
    period = _period(Flows.joined([step.flows for step in steps]), fabric.servers)
    network = fabric.network(period)
    circuits_s = fabric.reconfigures_s if fabric.changes(before, period) else 0.0
    return _timed(Course.CHANGE, circuits_s, [_step_s(network, step) for step in steps])


def _step_by_step(steps: Sequence[Step], fabric: Fabric, before: Period | None) -> Timed:
    circuits_s, times = 0.0, []
    for step in steps:
        if not _outside(step.flows, fabric.servers).any():
            network = fabric.network(before)
        else:
            period = _period(step.flows, fabric.servers)
            circuits_s += fabric.reconfigures_s if fabric.changes(before, period) else 0.0
            network, before = fabric.network(period), period
        times.append(_step_s(network, step))
    return _timed(Course.CHANGE_BY_WAVE, circuits_s, times)


def _timed(course: Course, circuits_s: float, times: Sequence["_StepTime"]) -> Timed:
    crossing_s = sum(each.crossing_s for each in times)
    whole_s = sum(each.seconds for each in times)
    return Timed(course, circuits_s, crossing_s, whole_s - crossing_s, summed([each.tier_bytes for each in times]))


def _period(flows: Flows, servers: Servers) -> Period:
    outside = _outside(flows, servers)
    return Period.of(
        "weight sync", Stage.WEIGHT_SYNC, Flows(flows.src[outside], flows.dst[outside], flows.bytes[outside])
    )


def _outside(flows: Flows, servers: Servers) -> NDArray[np.bool_]:
    return np.asarray(flows.src // servers.gpus_per_server != flows.dst // servers.gpus_per_server)


@dataclass(frozen=True, slots=True)
class _StepTime:
    crossing_s: float = 0.0  # until the last flow between PoDs is through
    seconds: float = 0.0  # until all are
    tier_bytes: Mapping[str, float] = field(default_factory=dict)


def _step_s(network: Network, step: Step) -> _StepTime:
    """Who is below others waits for a chunk and a hop of each above it."""
    flows = step.flows
    if not len(flows):
        return _StepTime()
    routes = routes_of(network, flows)
    ends_s = finish_routed_s(network, flows, routes)
    chunk_s = ends_s * np.minimum(1.0, CHUNK_BYTES / network.servers.gpus_per_server / flows.bytes)
    ends_s = ends_s + routes.latency_s + step.above * (chunk_s + routes.latency_s)
    sent = {tier.value: size for tier, size in tier_bytes(network, flows, routes).items()}
    return _StepTime(float(ends_s[step.crosses].max(initial=0.0)), float(ends_s.max()), sent)
