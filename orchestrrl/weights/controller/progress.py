"""Track which bytes of a version each peer has while edges end and break. Also find the missing bytes that no live edge
transfers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from orchestrrl.weights.controller.planning import PlannedSync
from orchestrrl.weights.controller.reports import EdgeTime
from orchestrrl.weights.model import HeldVersion, Range
from orchestrrl.weights.orders import CarryEdge, EdgeEvent
from planner.model import PeerId
from planner.sync_tree.ranges import ByteRanges


@dataclass(slots=True)
class _Run:
    edge: CarryEdge
    planned_s: float
    seconds: float = 0.0
    bytes: int = 0

    @property
    def done(self) -> bool:
        return self.bytes == self.edge.bytes


class SyncProgress:
    """The progress of one plan's edges and of the edges that replace broken edges."""

    def __init__(self, planned: PlannedSync) -> None:
        self.runs: dict[str, _Run] = {}
        self.mended = 0
        self.missing: dict[PeerId, dict[str, ByteRanges]] = {}  # by receiver and shard
        self._shards = {peer: tuple(s.id for s in opened.map.shards) for peer, opened in planned.opens.items()}
        self._held = planned.held
        self.peers = {*self._shards, *self._held}  # peers that have a part of the version or are to receive it
        self._blamed: dict[PeerId, set[PeerId]] = {}
        # Indexes, because there are thousands of edges and frequent reports about them.
        self._live: dict[str, CarryEdge] = {}
        self._into: dict[tuple[PeerId, str], dict[str, CarryEdge]] = {}  # live edges by receiver and shard
        self._live_in_a = 0
        self._rates_gbps: dict[tuple[PeerId, str], float] = {}
        self.lacking_peers: set[PeerId] = set()
        self.doubtful: set[PeerId] = set()  # receivers that may lack bytes that no live edge brings
        self.add(planned.edges, planned.planned_s)
        for edge in planned.edges:
            self._lacks(edge.dst, edge.shard, [(edge.offset, edge.bytes)])
        self.doubtful.clear()  # the plan brings all bytes

    @property
    def live(self) -> list[CarryEdge]:
        return list(self._live.values())

    @property
    def broken_off(self) -> list[CarryEdge]:
        """Return the edges that ended before all of their bytes had arrived."""
        return [run.edge for id, run in self.runs.items() if id not in self._live and not run.done]

    @property
    def receivers(self) -> list[PeerId]:
        return sorted(self.missing)

    @property
    def carried_bytes(self) -> int:
        return sum(run.bytes for run in self.runs.values())

    def add(self, edges: Iterable[CarryEdge], planned_s: Mapping[str, float]) -> None:
        for edge in edges:
            self.runs[edge.id] = _Run(edge, planned_s.get(edge.id, 0.0))
            self._live[edge.id] = edge
            self._into.setdefault((edge.dst, edge.shard), {})[edge.id] = edge
            self._live_in_a += edge.phase == "A"
            if edge.rate_gbps:
                self._rates_gbps.setdefault((edge.dst, edge.shard), edge.rate_gbps)

    def rate_gbps(self, peer: PeerId, shard: str) -> float:
        """Return the rate limit of the first edge that carries this shard to this peer, in Gbit/s. Replacement edges
        use the same limit. The value 0 means that there is no limit."""
        return self._rates_gbps.get((peer, shard), 0.0)

    def live_of(self, peer: PeerId) -> tuple[CarryEdge, ...]:
        return tuple(edge for edge in self._live.values() if peer in (edge.src, edge.dst))

    def is_in_phase_a(self) -> bool:
        return self._live_in_a > 0

    def done(self, event: EdgeEvent) -> None:
        """Record that an edge is done, as its receiver reports."""
        if event.edge in self._live:
            edge = self._over(event.edge, self._live[event.edge].bytes)
            self.runs[edge.id].seconds = max(0.0, event.ended_s - event.began_s)

    def broken(self, edge_id: str, arrived_bytes: int) -> CarryEdge | None:
        """Record that an edge broke after `arrived_bytes` of its bytes had arrived. Return the edge, or None if it had
        already ended."""
        if edge_id not in self._live:
            return None
        edge = self._over(edge_id, min(arrived_bytes, self._live[edge_id].bytes - 1))
        self.doubtful.add(edge.dst)
        self._blamed.setdefault(edge.dst, set()).add(edge.src)
        return edge

    def on_held(self, peer: PeerId, held: HeldVersion | None) -> None:
        """Update the missing bytes of a peer that has attached again. `held` is None if the peer stores no bytes of the
        version."""
        if peer not in self.missing:
            return
        if held is None:
            for run in self.runs.values():
                if run.edge.dst == peer:
                    self._lacks(peer, run.edge.shard, [(run.edge.offset, run.edge.bytes)])
        else:
            for shard, ranges in held.missing.items():
                self._lacks(peer, shard, ranges)

    def corrupt(self, peer: PeerId, missing: Mapping[str, Iterable[Range]]) -> None:
        """Mark ranges with wrong checksums as missing. Also mark the peers that sent these ranges, so that replacement
        edges avoid these peers."""
        for shard, ranges in missing.items():
            ranges = list(ranges)
            self._lacks(peer, shard, ranges)
            for run in self.runs.values():
                edge = run.edge
                end = edge.offset + edge.bytes
                if (edge.dst, edge.shard) == (peer, shard) and any(a < end and edge.offset < a + n for a, n in ranges):
                    self._blamed.setdefault(peer, set()).add(edge.src)

    def lacks(self, peer: PeerId) -> bool:
        return not all(lacking.is_empty for lacking in self.missing.get(peer, {}).values())

    def uncovered(self, peer: PeerId) -> dict[str, tuple[Range, ...]]:
        """Return the peer's missing ranges that no live edge transfers, keyed by shard."""
        found = {}
        for shard, lacking in self.missing.get(peer, {}).items():
            left = ByteRanges(lacking.ranges)
            for edge in self._into.get((peer, shard), {}).values() if not lacking.is_empty else ():
                left.remove(edge.offset, edge.bytes)
            if not left.is_empty:
                found[shard] = left.ranges
        return found

    def blamed(self, peer: PeerId) -> frozenset[PeerId]:
        return frozenset(self._blamed.get(peer, ()))

    def lacking(self, peer: PeerId) -> dict[str, tuple[Range, ...]]:
        """Return the peer's missing ranges, keyed by shard. Each shard that the peer stores or receives has an entry,
        which is empty if no range of the shard is missing."""
        if peer in self._shards:
            own = self.missing.get(peer, {})
            return {shard: own[shard].ranges if shard in own else () for shard in self._shards[peer]}
        held = self._held.get(peer)
        return {} if held is None else {shard: tuple(held.missing.get(shard, ())) for shard in held.shards}

    def slowest(self, count: int) -> tuple[EdgeTime, ...]:
        over = [run for run in self.runs.values() if run.done]
        over.sort(key=lambda run: (-run.seconds, run.edge.id))
        ends = ((run, run.edge) for run in over[:count])
        return tuple(EdgeTime(e.src, e.dst, e.phase, e.bytes, run.seconds, run.planned_s) for run, e in ends)

    def _over(self, edge_id: str, arrived_bytes: int) -> CarryEdge:
        """Record that an edge ended after `arrived_bytes` of its bytes had arrived; return the edge."""
        edge = self._live.pop(edge_id)
        self.runs[edge_id].bytes = arrived_bytes
        del self._into[edge.dst, edge.shard][edge_id]
        self._live_in_a -= edge.phase == "A"
        own = self.missing.get(edge.dst, {})
        if edge.shard in own:
            own[edge.shard].remove(edge.offset, arrived_bytes)
            if not self.lacks(edge.dst):
                self.lacking_peers.discard(edge.dst)
        return edge

    def _lacks(self, peer: PeerId, shard: str, ranges: Iterable[Range]) -> None:
        own = self.missing.setdefault(peer, {}).setdefault(shard, ByteRanges())
        for offset, size in ranges:
            own.add(offset, size)
        if not own.is_empty:
            self.lacking_peers.add(peer)
            self.doubtful.add(peer)
