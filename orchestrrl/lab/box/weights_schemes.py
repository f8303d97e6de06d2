"""Ways to bring weights to engines that a tree is compared with, as edges of the same kind. Pure.

`naive`: every receiver straight from a holder. `two_stage`: figure 4 of the paper: those that train send everything
once to the first replica of each PoD, which then broadcasts to the others there; the broadcast is a chain along which
chunks are forwarded as they come, as collective libraries do it, ToR by ToR.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal

from orchestrrl.weights.controller.planning import PlannedSync
from orchestrrl.weights.model import Peer, PeerRole, ShardMap
from orchestrrl.weights.orders import CarryEdge
from planner.model import PeerId
from planner.sync_tree.network import NetworkStation

Stages = tuple[tuple[CarryEdge, ...], ...]  # each begins when all of the one before is over, everywhere


def tree(planned: PlannedSync) -> Stages:
    return (planned.edges,)


def naive(planned: PlannedSync, peers: Mapping[PeerId, Peer], stations: Mapping[PeerId, NetworkStation]) -> Stages:
    made = _Making(peers, stations)
    for shard in planned.map.shards:
        for receiver in _receivers(peers, stations):
            made.edge(shard, planned.summed_by[shard.id], receiver)
    return (tuple(made.edges),)


def two_stage(planned: PlannedSync, peers: Mapping[PeerId, Peer], stations: Mapping[PeerId, NetworkStation]) -> Stages:
    made = _Making(peers, stations)
    chains: dict[str, list[PeerId]] = {}
    for receiver in _receivers(peers, stations):
        chains.setdefault(stations[receiver].pod, []).append(receiver)
    for shard in planned.map.shards:
        for chain in chains.values():
            made.edge(shard, planned.summed_by[shard.id], chain[0])
    across, made.edges = tuple(made.edges), []
    for shard in planned.map.shards:
        for chain in chains.values():
            for one, other in pairwise(chain):
                made.edge(shard, one, other)
    return across, tuple(made.edges)


def crossing_bytes(stages: Stages, stations: Mapping[PeerId, NetworkStation]) -> int:
    """That pass from one PoD into another."""
    return sum(edge.bytes for stage in stages for edge in stage if stations[edge.src].pod != stations[edge.dst].pod)


def _receivers(peers: Mapping[PeerId, Peer], stations: Mapping[PeerId, NetworkStation]) -> Sequence[PeerId]:
    """ToR by ToR."""
    engines = (id for id, peer in peers.items() if peer.role is PeerRole.ENGINE)
    return sorted(engines, key=lambda id: (stations[id].pod, stations[id].tor, id))


class _Making:
    def __init__(self, peers: Mapping[PeerId, Peer], stations: Mapping[PeerId, NetworkStation]) -> None:
        self._peers = peers
        self._stations = stations
        self._number = 0
        self.edges: list[CarryEdge] = []

    def edge(self, shard: ShardMap, src: PeerId, dst: PeerId) -> None:
        (transport, address), *_ = self._peers[dst].transports.items()
        phase: Literal["A", "B"] = "B" if self._stations[src].pod == self._stations[dst].pod else "A"
        self.edges.append(
            CarryEdge(f"x{self._number}", shard.id, 0, shard.bytes, src, dst, transport, address, phase=phase)
        )
        self._number += 1
