"""Group the weights into shards by the servers that hold and need them, and derive the network site for planning a
sync. The functions have no side effects.

Weight elements with the same holding servers and the same receiving servers form one shard, regardless of the number of
ranks on both sides. A shard is sent to a server once, and is then forwarded to the server's GPUs over NVLink.

The site is derived from a network's links. Servers are the endpoints, as in production, where the peer on each host
holds the shards of the host's GPUs. A PoD is a set of servers that are connected without the core. In rail-aligned
fabrics, all ToRs that the same servers share are treated as one ToR.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from orchestrrl.lab.sim.net.model import Floats, Ints, LinkNetwork, LinkTier
from orchestrrl.lab.sim.rl.generation_fleet import UniformFleet
from orchestrrl.lab.sim.train.model import TrainJob
from planner.cost.models import Model
from planner.sync_tree.layout import EngineLayout, TrainerLayout, megatron_stages, vllm_stages
from planner.sync_tree.parameters import ROW, Parameter, TransformerParameters, gate_up
from planner.sync_tree.reshard import ReshardedVersion, reshard

WEIGHT_BYTES = 2  # bytes per parameter on the network
VOCAB_MULTIPLE = 128  # Megatron pads the vocabulary to this times TP (make_vocab_size_divisible_by)


@dataclass(frozen=True, slots=True)
class ServerShard:
    """The weights that have the same holding servers and the same receiving servers."""

    bytes: float
    holders: tuple[int, ...]  # servers
    receivers: tuple[int, ...]  # servers, disjoint from holders
    needs: Floats  # [receiver, GPU of the server], bytes that the GPU needs


def shards_of(job: TrainJob, fleet: UniformFleet, gpus_per_server: int) -> tuple[ServerShard, ...]:
    """Return the shards to send from the trainer to the engines of `fleet`. Raises ValueError if a layout cannot divide
    the model."""
    parameters, trainer = parameters_of(job.model), trainer_layout(job)
    found: list[ReshardedVersion] = []
    for has_experts, engines in zip((False, True), _engines(fleet), strict=True):
        some = [each for each in parameters if each.split.has_experts == has_experts]
        if some and engines:
            found += reshard(some, trainer, engines)
    return _by_servers(found, gpus_per_server)


def parameters_of(model: Model) -> tuple[Parameter, ...]:
    """Return the parameters of a model, which may be dense, a mixture of experts, or a mixture of experts with a dense
    feed-forward part."""
    transformer = TransformerParameters(
        layers=model.layers,
        hidden=model.hidden,
        heads=model.q_heads,
        kv_heads=model.kv_heads,
        head_size=model.head_dim,
        intermediate=model.expert_ffn if model.moe else model.ffn,
        vocab=model.vocab,
        experts=model.experts,
        dtype_bytes=WEIGHT_BYTES,
        is_tied=model.tied_embeddings,
    )
    shared: list[Parameter] = []
    if model.moe and model.ffn:
        for layer in range(model.layers):
            name = f"model.layers.{layer}.mlp.shared_expert"
            up, down = (2 * model.ffn, model.hidden), (model.hidden, model.ffn)
            shared.append(Parameter(f"{name}.gate_up_proj.weight", up, WEIGHT_BYTES, gate_up(model.ffn), layer))
            shared.append(Parameter(f"{name}.down_proj.weight", down, WEIGHT_BYTES, ROW, layer))
    return (*transformer.parameters(), *shared)


def trainer_layout(job: TrainJob) -> TrainerLayout:
    layout, layers = job.layout, job.model.layers
    stages: tuple[int, ...] = ()
    if layout.pp > 1:
        even = layers % (layout.pp * layout.vpp) == 0
        stages = megatron_stages(layers, layout.pp, layout.vpp) if even else vllm_stages(layers, layout.pp)
    return TrainerLayout(
        endpoints=tuple(range(job.first_gpu, job.first_gpu + layout.gpus)),
        tp=layout.tp,
        pp=layout.pp,
        replicas=layout.cp * layout.dp,
        ep=layout.ep,
        vocab_multiple=VOCAB_MULTIPLE * layout.tp,
        stage_of_layer=stages,
    )


def _engines(fleet: UniformFleet) -> tuple[list[EngineLayout], list[EngineLayout]]:
    """Return the engine layouts that receive dense parameters and the layouts that receive experts. Under AFD,
    attention GPUs receive dense parameters and FFN GPUs receive experts. Otherwise, the same engines receive both."""
    p = fleet.parallelism
    if not p.afd:
        whole = [
            EngineLayout(tuple(gpus), tp=p.tp, dp=p.dp, has_expert_parallel=p.ep > 1) for gpus in fleet.gpus.tolist()
        ]
        return whole, whole
    attention = [EngineLayout(tuple(gpus), tp=p.tp, dp=len(gpus) // p.tp) for gpus in fleet.attention.tolist()]
    return attention, [EngineLayout(tuple(gpus), dp=len(gpus), has_expert_parallel=True) for gpus in fleet.ffn.tolist()]


def _by_servers(found: Sequence[ReshardedVersion], gpus_per_server: int) -> tuple[ServerShard, ...]:
    parts: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[float, Floats]] = {}
    for each in found:
        holders = tuple(np.unique(np.array(each.shard.holders) // gpus_per_server).tolist())
        receiving = np.array(each.shard.receivers, np.int64)
        servers = np.setdiff1d(receiving // gpus_per_server, np.array(holders))
        if not len(servers):
            continue
        needs = np.zeros((len(servers), gpus_per_server))
        server, place = np.divmod(receiving[np.isin(receiving // gpus_per_server, servers)], gpus_per_server)
        needs[np.searchsorted(servers, server), place] = each.shard.bytes
        key = holders, tuple(servers.tolist())
        size, others = parts.get(key, (0.0, np.zeros_like(needs)))
        parts[key] = size + each.shard.bytes, others + needs
    return tuple(ServerShard(parts[key][0], *key, parts[key][1]) for key in sorted(parts))


@dataclass(frozen=True, slots=True)
class SyncSite:
    """The PoDs, ToRs and bandwidths of a cluster, for planning a sync."""

    pod: Ints  # [server]
    tor: Ints  # [server]
    nic_bytes_per_s: Floats  # [server], outbound over all its NICs
    tor_bytes_per_s: Floats  # [tor], upwards
    pod_bytes_per_s: Floats  # [pod], outbound
    has_switches: bool = True  # False: servers are connected directly

    @property
    def pods(self) -> int:
        return len(self.pod_bytes_per_s)


def site_of(network: LinkNetwork) -> SyncSite:
    """Derive the PoDs, ToRs and bandwidths from a network's links. Raises ValueError if the network does not contain
    the endpoints of its links."""
    if network.ends is None:
        raise ValueError(f"{network.name or 'the network'}: ends must contain the endpoints of each link, got None")
    servers, (tail, head), capacity = network.servers, network.ends.T, network.capacity_bytes_per_s
    core = np.array([tier is LinkTier.CORE for tier in network.tier])
    nodes = max(int(network.ends.max(initial=0)) + 1, servers.nics)
    owner = _owners(network, nodes)
    hosts = owner[tail] >= 0
    leaves = hosts & (owner[head] != owner[tail])
    inner = coo_array((np.ones(int((~core).sum())), (tail[~core], head[~core])), (nodes, nodes))
    piece = connected_components(inner, directed=False)[1]
    pods, pod = np.unique(piece[: servers.nics : servers.nics_per_server], return_inverse=True)
    tors, tor = _tors(owner[tail], head, leaves & (owner[head] < 0), servers.count)
    upwards = np.bincount(tail, np.where(owner[head] < 0, capacity, 0.0), minlength=nodes)
    nic_bytes_per_s = np.bincount(owner[tail[leaves]], capacity[leaves], minlength=servers.count).astype(np.float64)
    above = np.array([sum(upwards[node] for node in each) for each in tors])
    below = np.bincount(tor, nic_bytes_per_s, minlength=len(tors))
    out = core & np.isin(piece[tail], pods)
    leaving = np.bincount(np.searchsorted(pods, piece[tail[out]]), capacity[out], minlength=len(pods))
    return SyncSite(
        pod=pod.reshape(-1).astype(np.int64),
        tor=tor,
        nic_bytes_per_s=nic_bytes_per_s,
        tor_bytes_per_s=np.where(above > 0, above, below),  # for directly connected hosts, or a ToR without uplinks
        pod_bytes_per_s=leaving.astype(np.float64),
        has_switches=any(tors),
    )


def _owners(network: LinkNetwork, nodes: int) -> Ints:
    """Return the server of each NIC and NVLink switch, as an array indexed by node. Other nodes have the value -1."""
    assert network.ends is not None
    servers, owner = network.servers, np.full(nodes, -1, np.int64)
    owner[: servers.nics] = np.arange(servers.nics) // servers.nics_per_server
    inside = np.array([tier is LinkTier.NVLINK for tier in network.tier])
    tail, head = network.ends[inside].T
    owner[head[tail < servers.nics]] = owner[tail[tail < servers.nics]]
    return owner


def _tors(server: Ints, node: Ints, links: NDArray[np.bool_], servers: int) -> tuple[list[tuple[int, ...]], Ints]:
    """Return the distinct sets of switches to which the NICs of a server connect, and the index of each server's set. A
    server without switches has its own empty set."""
    found = [set[int]() for _ in range(servers)]
    for one, other in zip(server[links].tolist(), node[links].tolist(), strict=True):
        found[one].add(other)
    keys = [tuple(sorted(switches)) or (-1 - place,) for place, switches in enumerate(found)]
    number = {key: tor for tor, key in enumerate(dict.fromkeys(keys))}
    tors = [tuple(switch for switch in key if switch >= 0) for key in number]
    return tors, np.array([number[key] for key in keys], np.int64)
