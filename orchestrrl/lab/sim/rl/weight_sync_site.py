"""PoDs, ToRs and budgets of a network, as the sync planner wants them: read off its links. Pure.

Servers are the endpoints, as in life a peer on each host has its GPUs' shards. A PoD is what hangs together without the
core; a ToR, for rail-aligned fabrics, all ToRs that the same servers share. Budgets are in circuits of a NIC's rate.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from orchestrrl.lab.sim.net.model import Floats, Ints, LinkNetwork, LinkTier


@dataclass(frozen=True, slots=True)
class SyncSite:
    pod: Ints  # [server]
    tor: Ints  # [server]
    nic_bytes_per_s: Floats  # [server], out of all its NICs
    tor_bytes_per_s: Floats  # [tor], upwards
    pod_bytes_per_s: Floats  # [pod], out of it

    @property
    def pods(self) -> int:
        return len(self.pod_bytes_per_s)


def site_of(network: LinkNetwork) -> SyncSite:
    """Raises ValueError where a network does not say where its links end."""
    if network.ends is None:
        raise ValueError(f"{network.name or 'the network'} must say where its links end")
    servers, (tail, head), capacity = network.servers, network.ends.T, network.capacity_bytes_per_s
    core = np.array([tier is LinkTier.CORE for tier in network.tier])
    nodes = max(int(network.ends.max(initial=0)) + 1, servers.nics)
    owner = _owners(network, nodes)
    hosts = owner[tail] >= 0
    leaves = hosts & (owner[head] != owner[tail])
    piece = _components(nodes, tail[~core], head[~core])
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
        tor_bytes_per_s=np.where(above > 0, above, below),  # hosts joined directly, or a ToR with nothing above it
        pod_bytes_per_s=leaving.astype(np.float64),
    )


def _owners(network: LinkNetwork, nodes: int) -> Ints:
    """[node], the server that it is in: NICs, and the switch of their NVLink; -1: none."""
    assert network.ends is not None
    servers, owner = network.servers, np.full(nodes, -1, np.int64)
    owner[: servers.nics] = np.arange(servers.nics) // servers.nics_per_server
    inside = np.array([tier is LinkTier.NVLINK for tier in network.tier])
    tail, head = network.ends[inside].T
    owner[head[tail < servers.nics]] = owner[tail[tail < servers.nics]]
    return owner


def _tors(server: Ints, node: Ints, links: NDArray[np.bool_], servers: int) -> tuple[list[tuple[int, ...]], Ints]:
    """Sets of switches that servers' NICs end at, and which of them is each server's; those that end at none have an
    empty one of their own."""
    found = [set[int]() for _ in range(servers)]
    for one, other in zip(server[links].tolist(), node[links].tolist(), strict=True):
        found[one].add(other)
    number: dict[tuple[int, ...], int] = {}
    tors: list[tuple[int, ...]] = []
    tor = np.zeros(servers, np.int64)
    for place, switches in enumerate(found):
        key = tuple(sorted(switches)) or (-1 - place,)
        if key not in number:
            number[key] = len(tors)
            tors.append(tuple(sorted(switches)))
        tor[place] = number[key]
    return tors, tor


def _components(nodes: int, one: Ints, other: Ints) -> Ints:
    """[node], the least node that hangs together with it."""
    least = np.arange(nodes)
    while True:
        before = least.copy()
        low = np.minimum(least[one], least[other])
        np.minimum.at(least, one, low)
        np.minimum.at(least, other, low)
        least = least[least]
        if (least == before).all():
            return least
