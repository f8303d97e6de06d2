"""The network that a sync goes over, as the planner has it, and the bytes that peers have and lack. Pure.

All rates are shares of what is there; circuits and ToRs without a limit get one that is never felt.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from planner.model import PeerId
from planner.sync_tree.model import Shard, ShardPairs, SyncProblem, pairs_of
from planner.sync_tree.ranges import Range, is_within

_NO_LIMIT = 2**16  # circuits


class SyncSettings(Protocol):
    """The values of the configuration's section `weights` that planning reads."""

    rate_share: float
    seeds_per_pod: int
    chunk_bytes: int
    hop_latency_s: float


@dataclass(frozen=True, slots=True)
class NetworkStation:
    """Where a peer is in the network."""

    pod: str
    tor: str
    nic_gbps: float


@dataclass(frozen=True, slots=True)
class PairLink:
    """What joins two PoDs directly: so many circuits, each of this rate, in each direction."""

    circuits: int
    gbps: float


@dataclass(frozen=True, slots=True)
class SyncNetwork:
    """What a sync may use. Circuits of a pod or a ToR that is not named are no limit."""

    link_gbps: float
    stations: Mapping[PeerId, NetworkStation]
    boundary_circuits: Mapping[str, int] = field(default_factory=dict)  # by pod: that can cross its boundary
    tor_circuits: Mapping[str, int] = field(default_factory=dict)  # by ToR: upwards
    # Between pods, in order of their names, as they are; None: any that the boundaries allow can be made.
    pairs: Mapping[tuple[str, str], PairLink] | None = None


@dataclass(frozen=True, slots=True)
class ShardSegment:
    """Bytes of a shard that the same peers have, and the same lack."""

    shard: str
    offset: int
    bytes: int
    holders: tuple[PeerId, ...]
    receivers: tuple[PeerId, ...]


def sync_problem(
    segments: Sequence[ShardSegment], ids: Sequence[PeerId], network: SyncNetwork, settings: SyncSettings
) -> SyncProblem:
    """Return the problem of carrying `segments` between the peers `ids`."""
    place = {peer: number for number, peer in enumerate(ids)}
    stations = [network.stations[peer] for peer in ids]
    pods = sorted({station.pod for station in stations})
    tors = sorted({(station.pod, station.tor) for station in stations})
    link_gbps = network.link_gbps * settings.rate_share
    nic_gbps = [station.nic_gbps * settings.rate_share for station in stations]
    # Of a ToR that is not named: more than can ever come together below it.
    tor_gbps = [
        network.tor_circuits[tor] * link_gbps if tor in network.tor_circuits else 2 * sum(nic_gbps) for _, tor in tors
    ]
    return SyncProblem(
        link_gbps=link_gbps,
        pods=tuple(pods),
        boundary_circuits=np.array([network.boundary_circuits.get(pod, _NO_LIMIT) for pod in pods], dtype=np.int64),
        tors=tuple("/".join(tor) for tor in tors),
        tor_gbps=np.array(tor_gbps, dtype=np.float64),
        endpoints=tuple(ids),
        pod=np.array([pods.index(station.pod) for station in stations], dtype=np.int64),
        tor=np.array([tors.index((station.pod, station.tor)) for station in stations], dtype=np.int64),
        nic_gbps=np.array(nic_gbps, dtype=np.float64),
        shards=tuple(
            Shard(
                f"{each.shard}+{each.offset}",
                each.bytes,
                tuple(place[peer] for peer in each.holders),
                tuple(place[peer] for peer in each.receivers),
            )
            for each in segments
        ),
        seeds_per_pod=settings.seeds_per_pod,
        chunk_bytes=settings.chunk_bytes,
        hop_latency_s=settings.hop_latency_s,
        pairs=None if network.pairs is None else _pairs(network.pairs, pods, settings.rate_share),
    )


def _pairs(links: Mapping[tuple[str, str], PairLink], pods: Sequence[str], share: float) -> ShardPairs:
    """Of those pods that have to do with it."""
    place = {pod: number for number, pod in enumerate(pods)}
    own = [(a, b, each.circuits, each.gbps * share) for (a, b), each in sorted(links.items()) if {a, b} <= set(pods)]
    return pairs_of(place, own)


def shard_segments(
    shard: str, shard_bytes: int, wanted: Mapping[PeerId, Sequence[Range]], there: Mapping[PeerId, Sequence[Range]]
) -> list[ShardSegment]:
    """Return the segments of a shard of `shard_bytes` bytes that peers lack.

    `wanted` has the ranges that receivers lack; `there`, those that holders lack.
    """
    points = {
        at for ranges in (*wanted.values(), *there.values()) for first, size in ranges for at in (first, first + size)
    }
    found: list[ShardSegment] = []
    for first, last in itertools.pairwise(sorted({0, shard_bytes, *points})):
        receivers = tuple(peer for peer, ranges in sorted(wanted.items()) if is_within(first, ranges))
        holders = tuple(peer for peer, ranges in sorted(there.items()) if not is_within(first, ranges))
        before = found[-1] if found else None
        if before and (before.offset + before.bytes, before.holders, before.receivers) == (first, holders, receivers):
            found[-1] = ShardSegment(shard, before.offset, last - before.offset, holders, receivers)
        elif receivers:
            found.append(ShardSegment(shard, first, last - first, holders, receivers))
    return found


def summed_by(segments: Iterable[ShardSegment]) -> dict[str, PeerId]:
    """Return for each shard the holder that has least to sum already."""
    bytes_of: dict[PeerId, int] = defaultdict(int)
    found: dict[str, PeerId] = {}
    for each in segments:
        if each.holders:
            found[each.shard] = min(each.holders, key=lambda peer: (bytes_of[peer], peer))
            bytes_of[found[each.shard]] += each.bytes
    return found
