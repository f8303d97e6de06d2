"""Convert a weight sync into a `SyncProblem`, plan the flows between peers, and compute the NIC capacity left for KV
moves. Has no side effects.

The balancer uses the remaining share of the hosts' NICs to estimate the cost of moves. Pods and ToRs without a limit on
their circuits get a limit that is never reached.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from planner.model import PeerId
from planner.sync_tree.model import Shard, SyncPlan, SyncProblem, edge_seconds, pairs_of
from planner.sync_tree.plan import make_plan
from planner.sync_tree.ranges import PeerFlow, Range, is_within

_NO_LIMIT = 2**16  # circuits
_WAVE_HOPS = 2  # per wave: connecting its edges, and receiving the first chunk

TimedFlow = tuple[PeerFlow, float]  # with its seconds in the plan


class SyncSettings(Protocol):
    """The settings for planning a weight sync, from the section `weights` of the configuration."""

    rate_share: float
    chunk_bytes: int
    hop_latency_s: float


@dataclass(frozen=True, slots=True)
class NetworkStation:
    """The position of a peer in the network, and the rate of its NIC."""

    pod: str
    tor: str
    nic_gbps: float


@dataclass(frozen=True, slots=True)
class PairLink:
    """A direct connection between two PoDs: the number of circuits and the rate of each circuit, per direction."""

    circuits: int
    gbps: float


@dataclass(frozen=True, slots=True)
class SyncNetwork:
    """The network that a sync may use. Pods and ToRs without an entry have no limit on their circuits."""

    link_gbps: float
    stations: Mapping[PeerId, NetworkStation]
    boundary_circuits: Mapping[str, int] = field(default_factory=dict)  # by pod, circuits that can cross its boundary
    tor_circuits: Mapping[str, int] = field(default_factory=dict)  # by ToR, circuits upwards
    # by pair of pods, sorted by name: fixed connections; None: any that the boundaries allow.
    pairs: Mapping[tuple[str, str], PairLink] | None = None


@dataclass(frozen=True, slots=True)
class ShardSegment:
    """A range of a shard whose bytes all have the same holders and receivers."""

    shard: str
    offset: int
    bytes: int
    holders: tuple[PeerId, ...]
    receivers: tuple[PeerId, ...]


def sync_problem(
    segments: Sequence[ShardSegment], ids: Sequence[PeerId], network: SyncNetwork, settings: SyncSettings
) -> SyncProblem:
    """Return the `SyncProblem` of sending `segments` between the peers `ids`."""
    place = {peer: number for number, peer in enumerate(ids)}
    stations = [network.stations[peer] for peer in ids]
    pods = sorted({station.pod for station in stations})
    tors = sorted({(station.pod, station.tor) for station in stations})
    link_gbps = network.link_gbps * settings.rate_share
    nic_gbps = [station.nic_gbps * settings.rate_share for station in stations]
    # A ToR without an entry gets more than the NICs below it can use.
    tor_gbps = [
        network.tor_circuits[tor] * link_gbps if tor in network.tor_circuits else 2 * sum(nic_gbps) for _, tor in tors
    ]
    links = None
    if network.pairs is not None:  # only between pods that take part
        own = [(ends, each) for ends, each in sorted(network.pairs.items()) if {*ends} <= {*pods}]
        links = [(*ends, each.circuits, each.gbps * settings.rate_share) for ends, each in own]
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
        chunk_bytes=settings.chunk_bytes,
        hop_latency_s=settings.hop_latency_s,
        pairs=None if links is None else pairs_of({pod: number for number, pod in enumerate(pods)}, links),
    )


def shard_segments(
    shard: str, shard_bytes: int, wanted: Mapping[PeerId, Sequence[Range]], there: Mapping[PeerId, Sequence[Range]]
) -> list[ShardSegment]:
    """Return the segments of a shard of `shard_bytes` bytes that peers lack.

    `wanted` maps each receiver to the ranges that it lacks. `there` maps each holder to the ranges that it lacks.
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
    """Return, for each shard, the holder that computes its checksum: the holder with the fewest bytes assigned so
    far."""
    bytes_of: dict[PeerId, int] = defaultdict(int)
    found: dict[str, PeerId] = {}
    for each in segments:
        if each.holders:
            found[each.shard] = min(each.holders, key=lambda peer: (bytes_of[peer], peer))
            bytes_of[found[each.shard]] += each.bytes
    return found


def plan_flows(
    segments: Sequence[ShardSegment], network: SyncNetwork, settings: SyncSettings
) -> tuple[list[TimedFlow], SyncPlan]:
    """Return all flows in the order of their waves, each with its duration in seconds, and the plan. Raises Unreachable
    if a receiver cannot be reached."""
    ids = sorted({peer for each in segments for peer in (*each.holders, *each.receivers)})
    problem = sync_problem(segments, ids, network, settings)
    plan = make_plan(problem, wave_s=_WAVE_HOPS * settings.hop_latency_s)
    return _flows(problem, plan, segments, ids), plan


def _flows(
    problem: SyncProblem, plan: SyncPlan, segments: Sequence[ShardSegment], ids: Sequence[PeerId]
) -> list[TimedFlow]:
    """Convert the plan's edges into flows. Adjacent pieces of a shard with the same ends in the same wave are
    joined."""
    flows: list[TimedFlow] = []
    for number, wave in enumerate(plan.waves):
        edges = wave.edges
        columns = (edges.shard, edges.offset, edges.bytes, edges.src, edges.dst, edges.circuits, edges.rate_gbps)
        rows = zip(*(column.tolist() for column in (*columns, edge_seconds(problem, edges))), strict=True)
        ways: dict[tuple[str, int, int], list[TimedFlow]] = defaultdict(list)
        for segment, offset, size, src, dst, circuits, rate_gbps, seconds in rows:
            of, ends = segments[segment], (ids[src], ids[dst])
            flow = PeerFlow(of.shard, of.offset + offset, size, *ends, number, "A" if circuits else "B", rate_gbps)
            ways[of.shard, src, dst].append((flow, seconds))
        for way in ways.values():
            flows += _joined(way)
    return flows


def _joined(way: list[TimedFlow]) -> Iterator[TimedFlow]:
    way.sort(key=lambda each: each[0].offset)
    start = 0
    for place, (last, _) in enumerate(way):
        end = last.offset + last.bytes
        if place + 1 < len(way) and way[place + 1][0].offset == end:
            continue
        own, start = way[start : place + 1], place + 1
        first, rate_gbps = own[0][0], math.fsum(flow.rate_gbps for flow, _ in own)
        yield replace(first, bytes=end - first.offset, rate_gbps=rate_gbps), max(seconds for _, seconds in own)


@dataclass(frozen=True, slots=True)
class LeftForMoves:
    """The share of the most loaded NIC that remains for a KV move, and the names of the activities that also use the
    NICs."""

    share: float = 1.0
    taken_by: tuple[str, ...] = ()


def left_for_moves(
    running: Iterable[tuple[PeerId, PeerId, float]],
    stations: Mapping[PeerId, NetworkStation],
    among: Collection[PeerId],
) -> LeftForMoves:
    """Return the NIC share that `running` edges leave to KV moves between the hosts of the peers `among`.

    An edge is (source, destination, Gb/s). A rate of 0 means that the edge is not limited and can use the full capacity
    of its ends. In each direction, a NIC is shared evenly among the flows that would fill it.
    """
    wished: defaultdict[tuple[PeerId, str], float] = defaultdict(float)
    for src, dst, rate_gbps in running:
        ends = [stations[end].nic_gbps for end in (src, dst) if end in stations]
        wish_gbps = min([rate_gbps or math.inf, *ends])
        wished[src, "out"] += wish_gbps
        wished[dst, "in"] += wish_gbps
    most = max(
        (gbps / stations[peer].nic_gbps for (peer, _), gbps in wished.items() if peer in among and peer in stations),
        default=0.0,
    )
    return LeftForMoves(1 / (1 + most), ("weight sync",)) if most > 0 else LeftForMoves()
