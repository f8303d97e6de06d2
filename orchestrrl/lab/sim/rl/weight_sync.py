"""Simulate the sync of a weight version from the trainer's GPUs to all engines on a fabric. Each step of a sync is a
set of flows. The functions have no side effects.

The plan comes from the production planner (planner/sync_tree), with servers as endpoints. The duration is measured on
the simulated network, and may differ from the plan's estimate. If the fabric has circuits, they are kept, set once for
the whole plan, or set again for each wave that needs other circuits, whichever is fastest. If other stages send during
the sync, the choice also considers their delay.

In the scheme `tree`, each shard is sent between servers over all of their NICs, and each server forwards it to its own
GPUs over NVLink, chunk by chunk. In the scheme `naive`, every GPU receives directly from a holder, and all transfers
begin at once. In the scheme `two_stage` (figure 4 of the OrchestrRL paper), weights are sent to the first engine of
each PoD, then along a chain of the PoD's servers.

Concurrent traffic is assumed to be uniform: each flow demands its mean rate. Concurrent traffic inside a server is
ignored, because NVLink has many times the bandwidth of the NICs.
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
    """Flows that begin together, after the flows of the previous step have ended. `above` is the number of flows
    upstream of each flow; a flow waits for one chunk of each upstream flow."""

    flows: GpuFlows
    above: Ints  # [flow]


def tree_steps(plan: SyncPlan, shards: Sequence[ServerShard], site: SyncSite, gpus_per_server: int) -> list[FlowStep]:
    """Return one step of flows for each wave of the plan."""
    steps: list[FlowStep] = []
    for edges in (wave.edges for wave in plan.waves):
        shard, src, dst, size, above = (
            (edges.shard, edges.src, edges.dst, edges.bytes.astype(np.float64), edges.above)
            if site.has_switches
            else _in_chains(edges)
        )
        inside = _forwarded(shards, shard, dst, size, gpus_per_server)
        sent = spread(src, dst, size, gpus_per_server)
        steps.append(_with_last_hop(sent, np.repeat(above, gpus_per_server), inside))
    return steps


CHAINS = 2  # chains per piece, if it has that many holders; with more chains, each chunk arrives later


def _in_chains(edges: WaveEdges) -> tuple[Ints, Ints, Ints, Floats, Ints]:
    """Return the shard, sender, receiver, number of bytes and depth of each flow, for a network that connects servers
    directly. Up to CHAINS holders of a piece of a shard send equal parts of the piece, each along a chain of all
    receivers. Chains are used instead of trees for two reasons: a server that sent to many receivers would have few
    NICs for each of them, and the topology is built for the traffic between chain neighbours."""
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
    """Return one step in which each GPU receives its weights directly from servers that hold them. Receivers are
    assigned to holders in rotation."""
    rows: list[Row] = [
        (shard.holders[turn % len(shard.holders)] * gpus_per_server + place, server * gpus_per_server + place, size)
        for shard in shards
        for turn, (server, needs) in enumerate(zip(shard.receivers, shard.needs.tolist(), strict=True))
        for place, size in enumerate(needs)
        if size
    ]
    return [FlowStep(GpuFlows.of(rows), np.zeros(len(rows), np.int64))]


def two_stage_steps(shards: Sequence[ServerShard], site: SyncSite, gpus_per_server: int) -> list[FlowStep]:
    """Return two steps of flows: weights are sent first to the first engine of each PoD, then along a chain of the
    PoD's servers."""
    first: list[Row] = []
    chains: list[tuple[int, int, float, int]] = []  # server, server, bytes, depth
    at: list[tuple[int, int, float]] = []  # shard, server, bytes that arrive there
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
    inside = _forwarded(shards, of, server, came.astype(np.float64), gpus_per_server)
    chain, depth = GpuFlows.none(), np.empty(0, np.int64)
    if chains:
        src, dst, along, depth = (np.array(each) for each in zip(*chains, strict=True))
        chain = spread(src, dst, along.astype(np.float64), gpus_per_server)
    return [*steps, _with_last_hop(chain, np.repeat(depth, gpus_per_server), inside)]


def spread(src: Ints, dst: Ints, size: Floats, gpus_per_server: int) -> GpuFlows:
    """Return the flows of transfers between servers. Each GPU of the sender sends an equal part to the GPU of the same
    index in the receiver."""
    place = np.arange(gpus_per_server)
    return GpuFlows(
        (src[:, None] * gpus_per_server + place).reshape(-1),
        (dst[:, None] * gpus_per_server + place).reshape(-1),
        np.repeat(size / gpus_per_server, gpus_per_server),
    )


def _forwarded(shards: Sequence[ServerShard], of: Ints, server: Ints, size: Floats, gpus_per_server: int) -> GpuFlows:
    """Return the flows inside servers that forward the received data to the GPUs that need it. `of`, `server` and
    `size` contain the shard, the receiving server and the number of bytes of each transfer. The data of a transfer has
    arrived in equal parts at the server's GPUs."""
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
    """Return a step with the flows `sent` between servers and the flows `inside` servers. `above` is the number of
    flows upstream of each flow between servers. The flows inside servers are the last hop, and forward chunk by chunk.
    """
    last = int(above.max(initial=0)) + 1
    return FlowStep(GpuFlows.joined([sent, inside]), np.concatenate([above, np.full(len(inside), last, np.int64)]))


def _by_pod(shard: ServerShard, site: SyncSite) -> Iterator[list[int]]:
    pods = site.pod[list(shard.receivers)]
    for pod in np.unique(pods).tolist():
        yield [server for server, its in zip(shard.receivers, pods.tolist(), strict=True) if its == pod]


def _first_engine(shard: ServerShard, server: int) -> list[int]:
    """Return the indices, in the server, of GPUs that together receive one copy of the shard."""
    needs = shard.needs[shard.receivers.index(server)]
    wanting = np.flatnonzero(needs > 0)
    copies = max(1, round(float(needs.sum()) / shard.bytes))
    return [int(place) for place in wanting[: -(-len(wanting) // copies)]]


@dataclass(frozen=True, slots=True, eq=False)  # == of arrays has no single truth value
class Beside:
    """The traffic of a stage that runs during a sync. `group` contains the group of each flow. Flows of a group wait
    for each other."""

    stage: FabricStage
    flows: GpuFlows  # bytes per second
    group: Ints

    @classmethod
    def of(cls, stage: FabricStage, flows: GpuFlows, group: Ints, servers: Servers) -> "Beside":
        """Build the traffic from the flows between different servers. Flows between the same two GPUs are merged into
        the group of the first of these flows."""
        far = flows.cross(servers) & (flows.bytes > 0)
        merged, of = flows.only(far).merged()
        groups = np.zeros(len(merged), np.int64)
        groups[of[::-1]] = group[far][::-1]
        return cls(stage, merged, groups)

    def held_s(self, behind_s: Floats) -> float:
        """Return the delay of the stage in seconds: the largest delay of a flow in each group, averaged over groups.
        `behind_s` is the delay of each flow in seconds."""
        groups, which = np.unique(self.group, return_inverse=True)
        slowest_s = np.zeros(len(groups))
        np.maximum.at(slowest_s, which, behind_s)
        return float(slowest_s.mean()) if len(groups) else 0.0

    def has_way(self, network: LinkNetwork) -> bool:
        """Return whether all flows have a path on `network`. Circuits set for other traffic may disconnect servers."""
        try:
            network.routes(self.flows)
        except ValueError:
            return False
        return True


def training_beside(job: TrainJob, recipe: TrainingSection, seconds: float, servers: Servers) -> Beside:
    """Return the mean traffic of a training step that takes `seconds`. All GPUs of the training step wait for each
    other."""
    flows = training_flows(job, recipe, servers).times(1 / seconds)
    return Beside.of(FabricStage.TRAIN, flows, np.zeros(len(flows), np.int64), servers)


def generation_beside(fleet: UniformFleet, model: Model, tokens_per_s: float, servers: Servers) -> Beside:
    """Return the mean traffic of engines that process `tokens_per_s` together. Engines do not wait for each other."""
    flows = token_flows(fleet, model, servers).times(tokens_per_s)
    engine = np.zeros(servers.gpus, np.int64)
    engine[fleet.gpus] = np.arange(len(fleet))[:, None]
    return Beside.of(FabricStage.GEN, flows, engine[flows.src], servers)


CHUNK_BYTES = 64 << 20  # a server forwards each chunk while it receives the next
HOP_S = 5e-6  # used only for planning
GBPS = 8e-9  # gigabits per byte
MOST_WAVES = 24  # with more waves, circuits are not computed per wave, because this is slow


@dataclass(frozen=True, slots=True)
class _Ground:
    """The inputs that all alternatives for a sync's circuits share: the fabric, concurrent traffic, the lower bound on
    the sync's duration, and the PoDs of servers."""

    fabric: SimulatedFabric
    beside: Sequence[Beside]
    bound_s: float
    pod: Ints  # [server]

    def crosses(self, flows: GpuFlows) -> Bools:
        """Return whether each flow is between PoDs, as an array indexed by flow."""
        gpus = self.fabric.servers.gpus_per_server
        return np.asarray(self.pod[flows.src // gpus] != self.pod[flows.dst // gpus])

    def period(self, flows: GpuFlows, share: float = 1.0) -> Period:
        """Return the communication period whose demand consists of `flows` and the fraction `share` of the concurrent
        traffic."""
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
    """Simulate the sync to `fleet`, with the concurrent traffic `beside`. Raises ValueError if an engine layout cannot
    divide the model."""
    shards, site = shards_of(job, fleet, fabric.servers.gpus_per_server), site_of(fabric.network(None))
    sending = [each for each in beside if len(each.flows)]
    found = _courses(scheme, shards, site, _Ground(fabric, sending, bound_s(shards, site), site.pod))
    return min(found, key=lambda each: each.cost_s)  # on a tie, the course with the fewest changes


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
    """Return the planning problem of a sync, with servers as endpoints. The budget of a PoD is its outbound bandwidth,
    in units of a NIC's bandwidth."""
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
    """Return a lower bound, in seconds, on the duration of any plan. The bound is the largest of several times: the
    time in which each server, ToR and PoD receives its required bytes, and the time in which the holders send every
    shard once."""
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
    """Yield the simulated sync for each alternative use of circuits. If circuits are kept, no wave has to wait for a
    circuit change, so that the plan may have more waves than the plan for the other alternatives."""
    fabric = ground.fabric
    steps = steps_of(scheme, shards, site, fabric.servers)
    try:
        yield _stage(SyncCourse.KEEP, 0.0, steps, [fabric.network(None)] * len(steps), ground)
    except ValueError:  # circuits of another period may not connect all servers
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
    crossing_s: float  # until the last flow between PoDs ends
    seconds: float  # until the last flow ends
    tier_bytes: TierBytes
    held_s: Mapping[FabricStage, float]


def _step_s(network: LinkNetwork, step: FlowStep, ground: _Ground) -> _StepTime:
    """Return the duration and traffic of a step, and the delays of concurrent stages. For each flow upstream of it, a
    flow is delayed by the time to send one chunk and by the latency of one hop."""
    flows, beside = step.flows, ground.beside
    if not len(flows):
        return _StepTime(0.0, 0.0, {}, {each.stage: 0.0 for each in beside})
    routes = network.routes(flows)
    ends_s, late_s = _shared(network, flows, routes, [each for each in beside if each.has_way(network)])
    chunk_s = ends_s * np.minimum(1.0, CHUNK_BYTES / network.servers.gpus_per_server / flows.bytes)
    ends_s = ends_s + routes.latency_s + step.above * (chunk_s + routes.latency_s)
    seconds = float(ends_s.max())
    held_s = {each.stage: late_s.get(each.stage, seconds) for each in beside}  # without a path, for the whole step
    crossing_s = float(ends_s[ground.crosses(flows)].max(initial=0.0))
    return _StepTime(crossing_s, seconds, tier_bytes(network, flows, routes), held_s)


def _shared(
    network: LinkNetwork, flows: GpuFlows, routes: FlowRoutes, beside: Sequence[Beside]
) -> tuple[Floats, Mapping[FabricStage, float]]:
    """Return the end times of `flows` in seconds, and the delay in seconds that they cause to each concurrent stage."""
    if not beside:
        return finish_s(network, flows, routes), {}
    end_s, behind_s = finish_beside(network, flows, routes, GpuFlows.joined([each.flows for each in beside]))
    parts = np.split(behind_s, np.cumsum([len(each.flows) for each in beside])[:-1])
    return end_s, {each.stage: each.held_s(part) for each, part in zip(beside, parts, strict=True)}
