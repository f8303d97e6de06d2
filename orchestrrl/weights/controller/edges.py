"""Plans as edges that peers are given: which way each goes, and how fast it may. Pure."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from orchestrrl.core.config.weights import WeightSettings
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.weights.controller.network import ShardSegment, SyncNetwork
from orchestrrl.weights.model import Peer, PeerId
from orchestrrl.weights.orders import CarryEdge
from planner.sync_tree.model import SyncPlan, SyncProblem, edge_seconds


def edges_of(
    problem: SyncProblem,
    plan: SyncPlan,
    segments: Sequence[ShardSegment],
    known: Mapping[PeerId, Peer],
    network: SyncNetwork,
    settings: WeightSettings,
    attempt: int,
) -> tuple[tuple[CarryEdge, ...], dict[str, float]]:
    """In order of waves, and the seconds of each by the plan's model. Raises ProblemFaults where two have no transport
    in common."""
    flows = _flows(problem, plan, segments)
    ways = _transports({(flow.src, flow.dst) for flow in flows}, known, settings)
    is_held_back = settings.rate_share < 1 or bool(network.boundary_circuits or network.tor_circuits)
    is_held_back |= network.pairs is not None
    edges = tuple(
        CarryEdge(
            id=f"{attempt}.{number}",
            shard=flow.shard,
            offset=flow.offset,
            bytes=flow.bytes,
            src=flow.src,
            dst=flow.dst,
            transport=ways[flow.src, flow.dst],
            address=known[flow.dst].transports[ways[flow.src, flow.dst]],
            wave=flow.wave,
            phase=flow.phase,
            rate_gbps=flow.rate_gbps if is_held_back else 0.0,
        )
        for number, flow in enumerate(flows)
    )
    return edges, {edge.id: flow.seconds for edge, flow in zip(edges, flows, strict=True)}


@dataclass(frozen=True, slots=True)
class _Flow:
    """An edge before it is known how it goes."""

    wave: int
    shard: str
    offset: int
    bytes: int
    src: PeerId
    dst: PeerId
    phase: Literal["A", "B"]
    rate_gbps: float
    seconds: float


def _flows(problem: SyncProblem, plan: SyncPlan, segments: Sequence[ShardSegment]) -> list[_Flow]:
    """In order of waves. Pieces of one shard that are next to each other and go the same way at once are one."""
    flows: list[_Flow] = []
    ids = [PeerId(name) for name in problem.endpoints]
    for number, wave in enumerate(plan.waves):
        edges = wave.edges
        columns = (edges.shard, edges.offset, edges.bytes, edges.src, edges.dst, edges.circuits, edges.rate_gbps)
        rows = zip(*(column.tolist() for column in (*columns, edge_seconds(problem, edges))), strict=True)
        ways: dict[tuple[str, PeerId, PeerId], list[_Flow]] = defaultdict(list)
        for segment, offset, size, src, dst, circuits, rate_gbps, seconds in rows:
            of = segments[segment]
            phase: Literal["A", "B"] = "A" if circuits else "B"
            flow = _Flow(number, of.shard, of.offset + offset, size, ids[src], ids[dst], phase, rate_gbps, seconds)
            ways[flow.shard, flow.src, flow.dst].append(flow)
        for way in ways.values():
            flows += _joined(way)
    return flows


def _joined(way: list[_Flow]) -> Iterator[_Flow]:
    way.sort(key=lambda flow: flow.offset)
    start = 0
    for place, flow in enumerate(way):
        if place + 1 < len(way) and way[place + 1].offset == flow.offset + flow.bytes:
            continue
        own, start = way[start : place + 1], place + 1
        yield _Flow(
            flow.wave,
            flow.shard,
            own[0].offset,
            sum(each.bytes for each in own),
            flow.src,
            flow.dst,
            flow.phase,
            math.fsum(each.rate_gbps for each in own),
            max(each.seconds for each in own),
        )


def _transports(
    pairs: Iterable[tuple[PeerId, PeerId]], known: Mapping[PeerId, Peer], settings: WeightSettings
) -> dict[tuple[PeerId, PeerId], str]:
    found: dict[tuple[PeerId, PeerId], str] = {}
    faults = []
    for src, dst in sorted(pairs):
        both = [each for each in settings.transports if each in known[src].transports and each in known[dst].transports]
        if both:
            found[src, dst] = both[0]
        else:
            faults.append(
                f"peers.{dst}.transports: has none of {', '.join(settings.transports)} in common with {src},"
                f" got {', '.join(sorted(known[dst].transports)) or 'none'} and"
                f" {', '.join(sorted(known[src].transports)) or 'none'}"
            )
    if faults:
        raise ProblemFaults(faults)
    return found
