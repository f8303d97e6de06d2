"""Weights as steps of flows, and the steady flows that training and generation send beside them. Pure.

The tree hands shards from server to server over all of their NICs, and each server passes on to its own GPUs over
NVLink what comes in, chunk by chunk. `naive`: every GPU straight from a holder, all at once. `two_stage` (figure 4 of
the OrchestrRL paper): to the first engine of each PoD, and from there along a chain of the PoD's servers.

Beside them bursts are taken to be spread evenly: a flow wishes in each second what it sends in the mean. What stays
inside a server is left out, for NVLink carries many times what NICs bring.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from orchestrrl.lab.sim.net.fabrics.base import FabricStage
from orchestrrl.lab.sim.net.model import Floats, GpuFlows, Ints, LinkNetwork, Servers
from orchestrrl.lab.sim.rl.generation_fleet import UniformFleet, token_flows
from orchestrrl.lab.sim.rl.training import Recipe, training_flows
from orchestrrl.lab.sim.rl.weight_sync_shards import ServerShard, SyncSite
from orchestrrl.lab.sim.train.model import MEGATRON, TrainConstants, TrainJob
from planner.cost.models import Model
from planner.sync_tree.model import SyncPlan

Row = tuple[int, int, float]


@dataclass(frozen=True, slots=True)
class FlowStep:
    """Flows that begin together, once those of the step before are through. `above`: of each flow, how many chunks it
    waits for, one of each flow above it."""

    flows: GpuFlows
    crosses: NDArray[np.bool_]  # [flow], from PoD to PoD
    above: Ints  # [flow]


def tree_steps(plan: SyncPlan, shards: Sequence[ServerShard], gpus_per_server: int) -> list[FlowStep]:
    """One for each wave."""
    steps: list[FlowStep] = []
    for wave in plan.waves:
        edges, size = wave.edges, wave.edges.bytes.astype(np.float64)
        sent = spread(edges.src, edges.dst, size, gpus_per_server)
        crosses, above = np.repeat(edges.circuits > 0, gpus_per_server), np.repeat(edges.above, gpus_per_server)
        inside = _passed_on(shards, edges.shard, edges.dst, size, gpus_per_server)
        steps.append(_with_last_hop(sent, crosses, above, inside))
    return steps


def naive_steps(shards: Sequence[ServerShard], site: SyncSite, gpus_per_server: int) -> list[FlowStep]:
    """Holders in turn."""
    rows: list[Row] = []
    crosses: list[bool] = []
    for shard in shards:
        for turn, (server, needs) in enumerate(zip(shard.receivers, shard.needs.tolist(), strict=True)):
            holder = shard.holders[turn % len(shard.holders)]
            for place, size in enumerate(needs):
                if size:
                    rows.append((holder * gpus_per_server + place, server * gpus_per_server + place, size))
                    crosses.append(bool(site.pod[holder] != site.pod[server]))
    return [FlowStep(GpuFlows.of(rows), np.array(crosses, np.bool_), np.zeros(len(rows), np.int64))]


def two_stage_steps(shards: Sequence[ServerShard], site: SyncSite, gpus_per_server: int) -> list[FlowStep]:
    first: list[Row] = []
    crosses: list[bool] = []
    chains: list[tuple[int, int, float, int]] = []  # server, server, bytes, how far down
    at: list[tuple[int, int, float]] = []  # shard, server, bytes that come there
    for number, shard in enumerate(shards):
        for turn, servers in enumerate(_by_pod(shard, site)):
            holder, seed = shard.holders[turn % len(shard.holders)], servers[0]
            for place in _first_engine(shard, seed):
                size = shard.bytes / len(_first_engine(shard, seed))
                first.append((holder * gpus_per_server + place, seed * gpus_per_server + place, size))
                crosses.append(bool(site.pod[holder] != site.pod[seed]))
            chains += [(servers[k], servers[k + 1], shard.bytes, k) for k in range(len(servers) - 1)]
            at += [(number, server, shard.bytes) for server in servers]
    steps = [FlowStep(GpuFlows.of(first), np.array(crosses, np.bool_), np.zeros(len(first), np.int64))]
    of, server, came = (np.array(each) for each in zip(*at, strict=True))
    inside = _passed_on(shards, of, server, came.astype(np.float64), gpus_per_server)
    chain, depth = GpuFlows.none(), np.empty(0, np.int64)
    if chains:
        src, dst, along, depth = (np.array(each) for each in zip(*chains, strict=True))
        chain = spread(src, dst, along.astype(np.float64), gpus_per_server)
    down = np.repeat(depth, gpus_per_server)
    steps.append(_with_last_hop(chain, np.zeros(len(chain), np.bool_), down, inside))
    return steps


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


def _with_last_hop(sent: GpuFlows, crosses: NDArray[np.bool_], above: Ints, inside: GpuFlows) -> FlowStep:
    """What goes on inside a server does so chunk by chunk, as the last of those below the others."""
    last = int(above.max(initial=0)) + 1
    return FlowStep(
        GpuFlows.joined([sent, inside]),
        np.concatenate([crosses, np.zeros(len(inside), np.bool_)]),
        np.concatenate([above, np.full(len(inside), last, np.int64)]),
    )


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


def training_beside(
    job: TrainJob, recipe: Recipe, seconds: float, servers: Servers, constants: TrainConstants = MEGATRON
) -> Beside:
    """Of a training step that takes so long. All its GPUs wait for each other."""
    flows = training_flows(job, recipe, servers, constants).times(1 / seconds)
    return Beside.of(FabricStage.TRAIN, flows, np.zeros(len(flows), np.int64), servers)


def generation_beside(fleet: UniformFleet, model: Model, tokens_per_s: float, servers: Servers) -> Beside:
    """Of engines that pass so many tokens together. None of them waits for another."""
    flows = token_flows(fleet, model, servers).times(tokens_per_s)
    engine = np.zeros(servers.gpus, np.int64)
    engine[fleet.gpus] = np.arange(len(fleet))[:, None]
    return Beside.of(FabricStage.GEN, flows, engine[flows.src], servers)
