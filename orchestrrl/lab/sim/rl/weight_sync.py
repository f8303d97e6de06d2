"""A weight version from the trainer's GPUs to every engine's, on a fabric: circuits, then step by step as flows. Pure.

The plan is the product's own (planner/sync_tree), over servers as its peers are; what it takes is the network's word,
not the plan's estimate. Where the fabric has circuits, those that are there are kept, or they are set for all of the
plan at once, or anew for each wave that wants others: whichever is sooner. Others may send beside it: then whichever
costs least, what those are late by included.

The tree hands shards from server to server over all of their NICs, and each server passes on to its own GPUs over
NVLink what comes in, chunk by chunk. `naive`: every GPU straight from a holder, all at once. `two_stage` (figure 4 of
the OrchestrRL paper): to the first engine of each PoD, and from there along a chain of the PoD's servers.

Beside them bursts are taken to be spread evenly: a flow wishes in each second what it sends in the mean. What stays
inside a server is left out, for NVLink carries many times what NICs bring.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from orchestrrl.lab.sim.net.fabrics.base import FabricStage, Period, SimulatedFabric
from orchestrrl.lab.sim.net.fluid import TierBytes, finish_beside, finish_s, summed, tier_bytes
from orchestrrl.lab.sim.net.model import Bools, Floats, FlowRoutes, GpuFlows, Ints, LinkNetwork, Servers
from orchestrrl.lab.sim.rl.generation_fleet import UniformFleet, token_flows
from orchestrrl.lab.sim.rl.model import SyncCourse, SyncStage
from orchestrrl.lab.sim.rl.scenario import TrainingSection
from orchestrrl.lab.sim.rl.training import training_flows
from orchestrrl.lab.sim.rl.weight_sync_shards import ServerShard, SyncSite, shards_of, site_of
from orchestrrl.lab.sim.train.model import TrainJob
from planner.cost.models import Model
from planner.sync_tree.model import Shard, SyncPlan, SyncProblem, WaveEdges
from planner.sync_tree.plan import make_plan

Row = tuple[int, int, float]


@dataclass(frozen=True, slots=True)
class FlowStep:
    """Flows that begin together, once those of the step before are through. `above`: of each flow, how many chunks it
    waits for, one of each flow above it."""

    flows: GpuFlows
    above: Ints  # [flow]


def tree_steps(plan: SyncPlan, shards: Sequence[ServerShard], site: SyncSite, gpus_per_server: int) -> list[FlowStep]:
    """One for each wave."""
    steps: list[FlowStep] = []
    for edges in (wave.edges for wave in plan.waves):
        shard, src, dst, size, above = (
            (edges.shard, edges.src, edges.dst, edges.bytes.astype(np.float64), edges.above)
            if site.has_switches
            else _in_chains(edges)
        )
        inside = _passed_on(shards, shard, dst, size, gpus_per_server)
        sent = spread(src, dst, size, gpus_per_server)
        steps.append(_with_last_hop(sent, np.repeat(above, gpus_per_server), inside))
    return steps


CHAINS = 2  # of a piece, where as many hold it: with more, chunks of each come later


def _in_chains(edges: WaveEdges) -> tuple[Ints, Ints, Ints, Floats, Ints]:
    """Return the shard, sender, receiver, bytes and depth of each flow where servers are joined directly: holders send
    an equal part of a piece each, and every server sends it on to one other. Those that it is sent to lie as near as
    the topology is made for them, and a server that sends to many has few NICs for each."""
    rows: list[tuple[float, ...]] = []
    for shard, offset in np.unique(np.stack([edges.shard, edges.offset]), axis=1).T.tolist():
        these = (edges.shard == shard) & (edges.offset == offset)
        receivers = np.sort(edges.dst[these])
        holders = np.setdiff1d(edges.src[these], receivers)[:CHAINS]
        size = float(edges.bytes[these][0]) / len(holders)
        for turn, holder in enumerate(holders.tolist()):
            chain = [holder, *np.roll(receivers, -(turn * len(receivers) // len(holders))).tolist()]
            rows += [(shard, src, dst, size, above) for above, (src, dst) in enumerate(pairwise(chain))]
    columns = np.array(rows).T
    shards, src, dst, above = columns[[0, 1, 2, 4]].astype(np.int64)
    return shards, src, dst, columns[3], above


def naive_steps(shards: Sequence[ServerShard], gpus_per_server: int) -> list[FlowStep]:
    """Holders in turn."""
    rows: list[Row] = [
        (shard.holders[turn % len(shard.holders)] * gpus_per_server + place, server * gpus_per_server + place, size)
        for shard in shards
        for turn, (server, needs) in enumerate(zip(shard.receivers, shard.needs.tolist(), strict=True))
        for place, size in enumerate(needs)
        if size
    ]
    return [FlowStep(GpuFlows.of(rows), np.zeros(len(rows), np.int64))]


def two_stage_steps(shards: Sequence[ServerShard], site: SyncSite, gpus_per_server: int) -> list[FlowStep]:
    first: list[Row] = []
    chains: list[tuple[int, int, float, int]] = []  # server, server, bytes, how far down
    at: list[tuple[int, int, float]] = []  # shard, server, bytes that come there
    for number, shard in enumerate(shards):
        for turn, servers in enumerate(_by_pod(shard, site)):
            holder, seed = shard.holders[turn % len(shard.holders)], servers[0]
            places = _first_engine(shard, seed)
            first += [
                (holder * gpus_per_server + place, seed * gpus_per_server + place, shard.bytes / len(places))
                for place in places
            ]
            chains += [(servers[k], servers[k + 1], shard.bytes, k) for k in range(len(servers) - 1)]
            at += [(number, server, shard.bytes) for server in servers]
    steps = [FlowStep(GpuFlows.of(first), np.zeros(len(first), np.int64))]
    of, server, came = (np.array(each) for each in zip(*at, strict=True))
    inside = _passed_on(shards, of, server, came.astype(np.float64), gpus_per_server)
    chain, depth = GpuFlows.none(), np.empty(0, np.int64)
    if chains:
        src, dst, along, depth = (np.array(each) for each in zip(*chains, strict=True))
        chain = spread(src, dst, along.astype(np.float64), gpus_per_server)
    return [*steps, _with_last_hop(chain, np.repeat(depth, gpus_per_server), inside)]


def spread(src: Ints, dst: Ints, size: Floats, gpus_per_server: int) -> GpuFlows:
    """From server to server, an equal share from each GPU to the one in its place."""
    place = np.arange(gpus_per_server)
    return GpuFlows(
        (src[:, None] * gpus_per_server + place).reshape(-1),
        (dst[:, None] * gpus_per_server + place).reshape(-1),
        np.repeat(size / gpus_per_server, gpus_per_server),
    )


def _passed_on(shards: Sequence[ServerShard], of: Ints, server: Ints, size: Floats, gpus_per_server: int) -> GpuFlows:
    """What came evenly to a server's GPUs goes from there to each that needs it."""
    places = [{at: row for row, at in enumerate(shard.receivers)} for shard in shards]
    wanted: dict[int, Floats] = {}  # [GPU of the server], by server
    for shard, at, came in zip(of.tolist(), server.tolist(), size.tolist(), strict=True):
        row = places[shard].get(at)
        if row is not None:
            needs = shards[shard].needs[row] * (came / shards[shard].bytes)
            wanted[at] = wanted.get(at, np.zeros(gpus_per_server)) + needs
    rows = [
        (at * gpus_per_server + one, at * gpus_per_server + other, bytes / gpus_per_server)
        for at, needs in sorted(wanted.items())
        for other, bytes in enumerate(needs.tolist())
        for one in range(gpus_per_server)
        if one != other and bytes > 0
    ]
    return GpuFlows.of(rows)


def _with_last_hop(sent: GpuFlows, above: Ints, inside: GpuFlows) -> FlowStep:
    """What goes on inside a server does so chunk by chunk, as the last of those below the others."""
    last = int(above.max(initial=0)) + 1
    return FlowStep(GpuFlows.joined([sent, inside]), np.concatenate([above, np.full(len(inside), last, np.int64)]))


def _by_pod(shard: ServerShard, site: SyncSite) -> Iterator[list[int]]:
    pods = site.pod[list(shard.receivers)]
    for pod in np.unique(pods).tolist():
        yield [server for server, its in zip(shard.receivers, pods.tolist(), strict=True) if its == pod]


def _first_engine(shard: ServerShard, server: int) -> list[int]:
    """Places of the GPUs among which one copy of the shard is spread."""
    needs = shard.needs[shard.receivers.index(server)]
    wanting = np.flatnonzero(needs > 0)
    copies = max(1, round(float(needs.sum()) / shard.bytes))
    return [int(place) for place in wanting[: -(-len(wanting) // copies)]]


@dataclass(frozen=True, slots=True, eq=False)  # arrays have no one answer to ==
class Beside:
    """Those of a stage. `group` [flow]: flows of a group wait for each other."""

    stage: FabricStage
    flows: GpuFlows  # bytes: a second
    group: Ints

    @classmethod
    def of(cls, stage: FabricStage, flows: GpuFlows, group: Ints, servers: Servers) -> "Beside":
        """Between two GPUs there is one flow, of what all of theirs send; it is of the group of the first of them."""
        far = flows.cross(servers) & (flows.bytes > 0)
        merged, of = flows.only(far).merged()
        groups = np.zeros(len(merged), np.int64)
        groups[of[::-1]] = group[far][::-1]
        return cls(stage, merged, groups)

    def held_s(self, behind_s: Floats) -> float:
        """By which the stage is late: each group by its slowest flow, in the mean over groups. `behind_s` [flow]."""
        groups, which = np.unique(self.group, return_inverse=True)
        slowest_s = np.zeros(len(groups))
        np.maximum.at(slowest_s, which, behind_s)
        return float(slowest_s.mean()) if len(groups) else 0.0

    def has_way(self, network: LinkNetwork) -> bool:
        """Whether all of it has: circuits that are set for others may leave servers apart."""
        try:
            network.routes(self.flows)
        except ValueError:
            return False
        return True


def training_beside(job: TrainJob, recipe: TrainingSection, seconds: float, servers: Servers) -> Beside:
    """Of a training step that takes so long. All its GPUs wait for each other."""
    flows = training_flows(job, recipe, servers).times(1 / seconds)
    return Beside.of(FabricStage.TRAIN, flows, np.zeros(len(flows), np.int64), servers)


def generation_beside(fleet: UniformFleet, model: Model, tokens_per_s: float, servers: Servers) -> Beside:
    """Of engines that pass so many tokens together. None of them waits for another."""
    flows = token_flows(fleet, model, servers).times(tokens_per_s)
    engine = np.zeros(servers.gpus, np.int64)
    engine[fleet.gpus] = np.arange(len(fleet))[:, None]
    return Beside.of(FabricStage.GEN, flows, engine[flows.src], servers)


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
    pod: Ints  # [server]

    def crosses(self, flows: GpuFlows) -> Bools:
        """[flow], whether it goes from PoD to PoD."""
        gpus = self.fabric.servers.gpus_per_server
        return np.asarray(self.pod[flows.src // gpus] != self.pod[flows.dst // gpus])

    def period(self, flows: GpuFlows, share: float = 1.0) -> Period:
        """For these flows, and what others send in that share of the time."""
        others = [each.flows.times(self.bound_s * share) for each in self.beside]
        sent = GpuFlows.joined([flows, *others])
        return Period.of("weight sync", FabricStage.WEIGHT_SYNC, sent.only(sent.cross(self.fabric.servers)))

    def circuits_s(self, before: Period | None, after: Period) -> float:
        return self.fabric.reconfigures_s if self.fabric.changes(before, after) else 0.0


def sync_stage(
    job: TrainJob,
    fleet: UniformFleet,
    fabric: SimulatedFabric,
    scheme: str = "tree",
    *,
    beside: Sequence[Beside] = (),
) -> SyncStage:
    """To the engines of `fleet`. `beside`: what others send all the while. Raises ValueError where a layout cannot
    divide the model."""
    shards, site = shards_of(job, fleet, fabric.servers.gpus_per_server), site_of(fabric.network(None))
    sending = [each for each in beside if len(each.flows)]
    found = _courses(scheme, shards, site, _Ground(fabric, sending, bound_s(shards, site), site.pod))
    return min(found, key=lambda each: each.cost_s)  # of those that are alike, the one that changes least


def steps_of(
    scheme: str, shards: Sequence[ServerShard], site: SyncSite, servers: Servers, wave_s: float = 0.0
) -> list[FlowStep]:
    gpus = servers.gpus_per_server
    if scheme == "naive":
        return naive_steps(shards, gpus)
    if scheme == "two_stage":
        return two_stage_steps(shards, site, gpus)
    plan = make_plan(problem_of(shards, site, servers), wave_s=wave_s)
    return tree_steps(plan, shards, site, gpus)


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
    if not 1 < len(steps) <= MOST_WAVES:
        return
    before: Period | None = None
    circuits_s, networks = 0.0, []
    for step in steps:
        if step.flows.cross(fabric.servers).any():
            period = ground.period(step.flows, 1 / len(steps))
            circuits_s += ground.circuits_s(before, period)
            before = period
        networks.append(fabric.network(before))
    yield _stage(SyncCourse.CHANGE_BY_WAVE, circuits_s, steps, networks, ground)


def _stage(
    course: SyncCourse, circuits_s: float, steps: Sequence[FlowStep], networks: Sequence[LinkNetwork], ground: _Ground
) -> SyncStage:
    times = [_step_s(network, step, ground) for network, step in zip(networks, steps, strict=True)]
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


def _step_s(network: LinkNetwork, step: FlowStep, ground: _Ground) -> _StepTime:
    """Who is below others waits for a chunk and a hop of each above it."""
    flows, beside = step.flows, ground.beside
    if not len(flows):
        return _StepTime(0.0, 0.0, {}, {each.stage: 0.0 for each in beside})
    routes = network.routes(flows)
    ends_s, late_s = _shared(network, flows, routes, [each for each in beside if each.has_way(network)])
    chunk_s = ends_s * np.minimum(1.0, CHUNK_BYTES / network.servers.gpus_per_server / flows.bytes)
    ends_s = ends_s + routes.latency_s + step.above * (chunk_s + routes.latency_s)
    seconds = float(ends_s.max())
    held_s = {each.stage: late_s.get(each.stage, seconds) for each in beside}  # without a way, all the while
    crossing_s = float(ends_s[ground.crosses(flows)].max(initial=0.0))
    return _StepTime(crossing_s, seconds, tier_bytes(network, flows, routes), held_s)


def _shared(
    network: LinkNetwork, flows: GpuFlows, routes: FlowRoutes, beside: Sequence[Beside]
) -> tuple[Floats, Mapping[FabricStage, float]]:
    """When flows end, and how late they make those beside them."""
    if not beside:
        return finish_s(network, flows, routes), {}
    end_s, behind_s = finish_beside(network, flows, routes, GpuFlows.joined([each.flows for each in beside]))
    parts = np.split(behind_s, np.cumsum([len(each.flows) for each in beside])[:-1])
    return end_s, {each.stage: each.held_s(part) for each, part in zip(beside, parts, strict=True)}
