"""Place the instances of a configuration on GPUs, and simulate the exchanges inside instances and the KV moves between
instances. The functions have no side effects.

An instance uses part of a server, a whole server, or consecutive whole servers. Under AFD its attention GPUs come
first. Instances that fit into a PoD of the fabric stay inside one. The remaining servers of several PoDs form instances
together if this does not reduce their bandwidth, as in trees of packet switches. Otherwise the remaining servers stay
idle, because an instance that spans PoDs would get half or a third of the bandwidth of other instances.

EP sends all-to-all traffic among an instance's ranks. AFD sends traffic between attention and FFN GPUs in both
directions. Wide TP sends traffic in rings along rails. A rate is the number of bytes that a GPU sends, divided by the
time until the instance's last flow ends. The roofline (planner/cost/roofline.py) divides by this rate. Tensor
parallelism reduces twice in each layer. With expert parallelism each token is sent to its experts and back; under AFD
it is sent to the FFN GPUs and back. Each configuration is evaluated alone, on the whole fleet.

If a request moves to another instance, its KV is sent over the fabric, or recomputed if that is faster. Before and
after the move, the KV is on the GPUs of one attention replica, with its heads spread evenly. If there are fewer KV
heads than GPUs, two GPUs hold the same heads: each receives one half and copies the other half over NVLink in
negligible time. All transfers begin at once. An instance recomputes its requests one after another.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from orchestrrl.lab.sim.net.collectives import m2n
from orchestrrl.lab.sim.net.fabrics.base import FabricStage, Period, Pods, SimulatedFabric
from orchestrrl.lab.sim.net.fluid import TierBytes, finish_s, tier_bytes
from orchestrrl.lab.sim.net.model import Floats, GpuFlows, Ints, LinkNetwork, Servers
from planner.cost.engines import EngineModel
from planner.cost.hardware import GpuModel
from planner.cost.models import Model
from planner.cost.predict import DoesNotFit, identifier, move_costs, predict
from planner.cost.profile import Parallelism, Profile
from planner.cost.roofline import ACTIVATION_BYTES
from planner.model import GpuId, RequestId


@dataclass(frozen=True, slots=True)
class UniformFleet:
    """The instances of one configuration and their GPUs."""

    parallelism: Parallelism
    gpus: Ints  # [instance, rank]; under AFD attention GPUs before FFN GPUs

    def __len__(self) -> int:
        return len(self.gpus)

    @property
    def attention(self) -> Ints:
        """The GPUs that hold KV, as an array indexed by [instance, rank]."""
        return self.gpus[:, : self.parallelism.attention_gpus] if self.parallelism.afd else self.gpus

    @property
    def ffn(self) -> Ints:
        """The FFN GPUs under AFD, as an array indexed by [instance, rank]. Without AFD, the array is empty."""
        return self.gpus[:, self.parallelism.attention_gpus :] if self.parallelism.afd else self.gpus[:, :0]


def deployed(parallelism: Parallelism, where: range, servers: Servers, pods: Pods | None = None) -> UniformFleet:
    """Return a fleet of as many instances as fit on the GPUs `where`. If `pods` is None, all servers form one PoD.
    Raises ValueError if `where` does not consist of whole servers, or if an instance is larger than a server but does
    not use whole servers."""
    size, per_server = parallelism.gpus, servers.gpus_per_server
    if where.start % per_server or len(where) % per_server:
        raise ValueError(f"the GPUs for generation must be whole servers of {per_server} GPUs, got {where}")
    if size > per_server and size % per_server:
        raise ValueError(f"an instance larger than a server must use whole servers of {per_server} GPUs, got {size}")
    server = np.arange(where.start, where.stop, per_server) // per_server
    if size > per_server:
        rows = _in_pods(server, size // per_server, pods or Pods(np.zeros(servers.count, np.int64), apart=False))
        return UniformFleet(parallelism, (rows[:, :, None] * per_server + np.arange(per_server)).reshape(-1, size))
    starts = (server[:, None] * per_server + np.arange(0, per_server - size + 1, size)).reshape(-1)
    return UniformFleet(parallelism, starts[:, None] + np.arange(size))


def left_idle(fleet: UniformFleet, where: range) -> int:
    """Return the number of the GPUs `where` that stay idle because instances do not span PoDs."""
    size = fleet.parallelism.gpus
    return (len(where) // size - len(fleet)) * size


def _in_pods(servers: Ints, each: int, pods: Pods) -> Ints:
    """Return the servers of each instance, as an array indexed by [instance, server]. An instance has `each` servers.
    The remaining servers of several PoDs form instances together if bandwidth is not lower between PoDs than inside a
    PoD, or if no PoD is large enough for an instance."""
    groups = [servers[pods.of[servers] == pod] for pod in np.unique(pods.of[servers])]
    whole = [len(group) // each * each for group in groups]
    rest = np.concatenate([group[count:] for group, count in zip(groups, whole, strict=True)])
    if pods.apart and any(whole):
        rest = rest[:0]
    rest = rest[: len(rest) // each * each]
    rows = np.concatenate([*(group[:count] for group, count in zip(groups, whole, strict=True)), rest])
    rows = rows.reshape(-1, each)
    return np.asarray(rows[np.argsort(rows[:, 0])])


# Bytes sent by each GPU: large enough to make latency negligible, so that rates are those of the links.
SENT_BYTES = 64e6


@dataclass(frozen=True, slots=True)
class TokenExchange:
    """The measured exchange of activations between the GPUs of an instance. `bytes_per_s` is computed from the mean
    time over instances. `extra_hop_s` is the time by which the largest latency exceeds the latency of two links and one
    switch."""

    bytes_per_s: float  # per GPU
    extra_hop_s: float


def leaves_servers(fleet: UniformFleet, servers: Servers) -> bool:
    return fleet.parallelism.gpus > servers.gpus_per_server


def pattern(fleet: UniformFleet, sent_bytes: float, servers: Servers) -> tuple[GpuFlows, Ints]:
    """Return the flows inside a fleet's instances, and the instance of each flow. Each GPU (under AFD, each GPU of the
    smaller side) sends `sent_bytes`."""
    p = fleet.parallelism
    if p.afd:
        each = sent_bytes * min(p.attention_gpus, p.ffn_gpus) / (p.attention_gpus * p.ffn_gpus)
        both_ways = [
            m2n(src, dst, each, servers).flows
            for attention, ffn in zip(fleet.attention, fleet.ffn, strict=True)
            for src, dst in ((attention, ffn), (ffn, attention))
        ]
        flows = GpuFlows.joined(both_ways)
    elif p.dp > 1:
        src, dst = np.repeat(fleet.gpus, p.gpus, axis=1), np.tile(fleet.gpus, (1, p.gpus))
        other = src[0] != dst[0]  # the same ranks in each instance
        flows = _alike(src[:, other], dst[:, other], sent_bytes / (p.gpus - 1))
    else:
        flows = _rings(fleet.gpus, servers.gpus_per_server, sent_bytes)
    return flows, np.repeat(np.arange(len(fleet)), len(flows) // max(1, len(fleet)))


def _alike(src: Ints, dst: Ints, bytes: float) -> GpuFlows:
    return GpuFlows(src.reshape(-1), dst.reshape(-1), np.full(src.size, bytes))


def _rings(members: Ints, apart: int, given: float) -> GpuFlows:
    """Return flows in rings. Each member of a ring sends `given` bytes to the member that is `apart` positions further
    along. `members` is indexed by [ring, member]."""
    return _alike(members, np.roll(members, -apart, axis=1), given)


def gen_period(fleet: UniformFleet, servers: Servers, name: str) -> Period:
    """Return the communication period of generation with this fleet."""
    demand = pattern(fleet, SENT_BYTES, servers)[0] if leaves_servers(fleet, servers) else GpuFlows.none()
    return Period.of(f"gen {name}", FabricStage.GEN, demand)


def exchange(fleet: UniformFleet, fabric: SimulatedFabric, name: str) -> TokenExchange:
    """Measure the exchange of activations inside the fleet's instances, on the fabric as configured for this fleet
    alone."""
    servers = fabric.servers
    network = fabric.network(gen_period(fleet, servers, name))
    flows, instance = pattern(fleet, SENT_BYTES, servers)
    routes = network.routes(flows)
    wire_s, latency_s = np.zeros(len(fleet)), routes.latency_s
    np.maximum.at(wire_s, instance, finish_s(network, flows, routes))
    nearest_s = 2 * servers.propagation_s + servers.processing_s
    return TokenExchange(SENT_BYTES / float(wire_s.mean()), max(0.0, float(latency_s.max()) - nearest_s))


def token_flows(fleet: UniformFleet, model: Model, servers: Servers) -> GpuFlows:
    """Return the flows that one processed token causes, as the mean over a fleet with equally loaded instances."""
    p = fleet.parallelism
    vector = model.layers * model.hidden * ACTIVATION_BYTES
    parts = _all_reduces(fleet, (1.0 if p.afd else 2.0) * vector, servers)
    if p.afd or (p.dp > 1 and model.moe):
        copies = float(model.experts_per_token if model.moe else 1)
        if p.afd:
            copies = min(copies, p.ffn_gpus)
        else:
            copies *= (p.gpus - p.tp) / p.gpus  # the remaining copies stay on the token's own GPUs
        flows, _ = pattern(fleet, 1.0, servers)
        parts.append(flows.times(2.0 * vector * copies / float(flows.bytes.sum())))
    return GpuFlows.joined(parts)


def _all_reduces(fleet: UniformFleet, size: float, servers: Servers) -> list[GpuFlows]:
    """Return the all-reduce flows of one token within an attention replica, in rings inside servers and along rails."""
    tp, each = fleet.parallelism.tp, servers.gpus_per_server
    if tp == 1:
        return []
    inside = min(tp, each)
    replicas = fleet.attention.reshape(-1, tp)
    given = 2.0 * (inside - 1) / inside * size / len(replicas)
    found = [_rings(replicas.reshape(-1, inside), 1, given)] if inside > 1 else []
    if tp > each:
        nodes = tp // each
        found.append(_rings(replicas, each, 2.0 * (nodes - 1) / nodes / each * size / len(replicas)))
    return found


@dataclass(frozen=True, slots=True)
class Hardware:
    """The model (in the precision of its checkpoint), the GPU type and the engine type that are used for generation."""

    model: Model
    gpu: GpuModel
    engine: EngineModel


def on_fabric(hardware: Hardware, layouts: Sequence[Parallelism], where: range, fabric: SimulatedFabric) -> Profile:
    """Return the profile of all `layouts` that fit into GPU memory and of which at least one instance fits on the GPUs
    `where`. Raises ValueError if no layout fits."""
    configurations = []
    nominal = replace(hardware.gpu, nic_bytes_per_s=fabric.servers.nic_bytes_per_s)
    for parallelism in layouts:
        fleet = deployed(parallelism, where, fabric.servers, fabric.pods)
        if not len(fleet):
            continue
        gpu = nominal
        if leaves_servers(fleet, fabric.servers):
            got = exchange(fleet, fabric, identifier(parallelism))
            latency_s = nominal.inter_node_latency_s + got.extra_hop_s
            gpu = replace(nominal, nic_bytes_per_s=got.bytes_per_s, inter_node_latency_s=latency_s)
        try:
            configurations.append(predict(hardware.model, gpu, parallelism, hardware.engine))
        except DoesNotFit:
            continue
    if not configurations:
        raise ValueError(f"no configuration of {hardware.model.name} fits {len(where)} GPUs of {hardware.gpu.name}")
    moves = move_costs(hardware.model, nominal, hardware.engine)
    return Profile(hardware.model.name, hardware.gpu.name, hardware.engine.name, tuple(configurations), moves)


# Rounds in which instances may switch to recomputation, which frees bandwidth for the others. Each round computes
# circuits and times anew. The times of the last round are final.
MOST_ROUNDS = 3
Place = tuple[Parallelism, tuple[GpuId, ...]]  # an instance; under AFD attention GPUs before FFN GPUs


@dataclass(frozen=True, slots=True)
class Leaving:
    """A running request that moves to another engine."""

    request: RequestId
    source: Place
    destination: Place
    prefill_tokens_per_s: float  # of the destination
    context_tokens: int


@dataclass(frozen=True, slots=True)
class KvOutcome:
    """The result of KV transfers. For each destination that receives KV over the network, `ready_s` maps the
    destination's GPUs to the time at which all of its KV has arrived. Requests not in `transferred` are recomputed.
    `seconds` is the time until all transfers and recomputations have ended."""

    ready_s: Mapping[tuple[GpuId, ...], float]
    transferred: frozenset[RequestId]
    seconds: float
    tier_bytes: TierBytes


@dataclass(frozen=True)
class OverFabric:
    """A simulator of KV transfers over a fabric. `first_gpu` is the number, in the cluster, of the engines' first GPU.
    The fabric's circuits, if it has any, are set for the transfers while the new engines start."""

    fabric: SimulatedFabric
    first_gpu: int
    kv_bytes_per_token: float

    def __call__(self, leaving: Sequence[Leaving]) -> KvOutcome:
        """Simulate the transfers. If recomputation would make an instance's KV available sooner, the instance
        recomputes the KV and does not use the network, whose bandwidth is then free for other instances."""
        places = list(dict.fromkeys(each.destination for each in leaving))
        at = np.array([places.index(each.destination) for each in leaving], np.int64)
        again_s = np.bincount(
            at, [each.context_tokens / each.prefill_tokens_per_s for each in leaving], len(places)
        ).astype(np.float64)
        by_network, (shares, request) = np.ones(len(places), np.bool_), self.shares(leaving)
        ready_s = again_s
        sent: TierBytes = {}
        for _ in range(MOST_ROUNDS):
            going = by_network[at][request]
            flows, of = shares.only(going).merged()
            if not len(flows):
                ready_s, sent = np.where(by_network, 0.0, again_s), {}
                break
            network = self.fabric.network(Period.of("KV", FabricStage.GEN, flows))
            arrived_s = _arrived_s(network, flows, of, at[request[going]], len(places))
            later = by_network & (arrived_s > again_s)
            by_network = by_network & ~later
            ready_s = np.where(by_network, arrived_s, again_s)
            sent = tier_bytes(network, shares.only(by_network[at][request]).merged()[0])
            if not later.any():
                break
        return KvOutcome(
            {gpus: float(ready_s[number]) for number, (_, gpus) in enumerate(places) if by_network[number]},
            frozenset(each.request for each, place in zip(leaving, at, strict=True) if by_network[place]),
            float(ready_s.max(initial=0.0)),
            sent,
        )

    def sent(self, leaving: Sequence[Leaving]) -> TierBytes:
        """Return the number of bytes, by tier, that KV transfers send if they run in the background, on the circuits
        that the fabric has outside any communication period."""
        return tier_bytes(self.fabric.network(None), self.shares(leaving)[0].merged()[0])

    def shares(self, leaving: Sequence[Leaving]) -> tuple[GpuFlows, Ints]:
        """Return the flows between GPUs, and the index in `leaving` of each flow's request. Requests are assigned
        round-robin to the attention replicas of the source and of the destination."""
        gone, come = Counter[Place](), Counter[Place]()
        rows: list[tuple[int, int, float]] = []
        request: list[int] = []
        for number, each in enumerate(leaving):
            source = self._replica(each.source, gone[each.source])
            destination = self._replica(each.destination, come[each.destination])
            gone[each.source] += 1
            come[each.destination] += 1
            kv_bytes = each.context_tokens * self.kv_bytes_per_token
            for src, dst, share in _overlaps(source, destination):
                if src != dst:
                    rows.append((src, dst, share * kv_bytes))
                    request.append(number)
        return GpuFlows.of(rows), np.array(request, np.int64)

    def _replica(self, place: Place, turn: int) -> Ints:
        """Return the GPUs of one attention replica at `place`, in the order of ranks. Consecutive values of `turn`
        select the replicas round-robin."""
        parallelism, gpus = place
        held = gpus[: parallelism.attention_gpus] if parallelism.afd else gpus
        replicas = np.array(held).reshape(-1, parallelism.tp) + self.first_gpu
        return np.asarray(replicas[turn % len(replicas)])


def _overlaps(source: Ints, destination: Ints) -> list[tuple[int, int, float]]:
    """Return tuples (source GPU, destination GPU, fraction of the KV) for heads spread evenly over the GPUs of both
    sides. The fractions add up to 1."""
    a, b = len(source), len(destination)
    cuts = sorted({*(i * b for i in range(a + 1)), *(j * a for j in range(b + 1))})  # in parts of 1 / (a * b)
    return [
        (int(source[first // b]), int(destination[first // a]), (last - first) / (a * b))
        for first, last in itertools.pairwise(cuts)
    ]


def _arrived_s(network: LinkNetwork, flows: GpuFlows, of: Ints, destination: Ints, places: int) -> Floats:
    """Return the arrival time, in seconds, of the last flow at each of `places` destinations, as an array indexed by
    destination. For each part of a request's KV, `of` contains the flow that transfers the part, and `destination` its
    destination."""
    arrived_s, routes = np.zeros(places), network.routes(flows)
    ends_s = finish_s(network, flows, routes) + routes.latency_s
    np.maximum.at(arrived_s, destination, ends_s[of])
    return arrived_s
