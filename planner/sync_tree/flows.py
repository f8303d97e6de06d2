"""The plan of a weight version between peers: which bytes flow from whom to whom in each wave. Pure."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from planner.model import PeerId
from planner.sync_tree.model import SyncPlan, SyncProblem, edge_seconds
from planner.sync_tree.network import ShardSegment, SyncNetwork, SyncSettings, sync_problem
from planner.sync_tree.plan import make_plan

_WAVE_HOPS = 2  # that the edges of a wave take to be joined, and their first chunk to come


@dataclass(frozen=True, slots=True)
class PeerFlow:
    """Bytes of a shard from one peer to another in one wave, with the rate and the time that the plan gives them."""

    wave: int
    shard: str
    offset: int
    bytes: int
    src: PeerId
    dst: PeerId
    phase: Literal["A", "B"]
    rate_gbps: float
    seconds: float


def plan_flows(
    segments: Sequence[ShardSegment], network: SyncNetwork, settings: SyncSettings
) -> tuple[list[PeerFlow], SyncPlan]:
    """Return all flows in order of waves, and their plan. Raises Unreachable where no way leads to a receiver."""
    ids = sorted({peer for each in segments for peer in (*each.holders, *each.receivers)})
    problem = sync_problem(segments, ids, network, settings)
    plan = make_plan(problem, wave_s=_WAVE_HOPS * settings.hop_latency_s)
    return _flows(problem, plan, segments), plan


def _flows(problem: SyncProblem, plan: SyncPlan, segments: Sequence[ShardSegment]) -> list[PeerFlow]:
    """In order of waves. Pieces of one shard that are next to each other and go the same way at once are one."""
    flows: list[PeerFlow] = []
    ids = [PeerId(name) for name in problem.endpoints]
    for number, wave in enumerate(plan.waves):
        edges = wave.edges
        columns = (edges.shard, edges.offset, edges.bytes, edges.src, edges.dst, edges.circuits, edges.rate_gbps)
        rows = zip(*(column.tolist() for column in (*columns, edge_seconds(problem, edges))), strict=True)
        ways: dict[tuple[str, PeerId, PeerId], list[PeerFlow]] = defaultdict(list)
        for segment, offset, size, src, dst, circuits, rate_gbps, seconds in rows:
            of = segments[segment]
            phase: Literal["A", "B"] = "A" if circuits else "B"
            flow = PeerFlow(number, of.shard, of.offset + offset, size, ids[src], ids[dst], phase, rate_gbps, seconds)
            ways[flow.shard, flow.src, flow.dst].append(flow)
        for way in ways.values():
            flows += _joined(way)
    return flows


def _joined(way: list[PeerFlow]) -> Iterator[PeerFlow]:
    way.sort(key=lambda flow: flow.offset)
    start = 0
    for place, flow in enumerate(way):
        if place + 1 < len(way) and way[place + 1].offset == flow.offset + flow.bytes:
            continue
        own, start = way[start : place + 1], place + 1
        yield PeerFlow(
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
