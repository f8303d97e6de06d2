"""A filled wave as edges: trees inside pods below the crossings (phase B below phase A), and all rates. Pure.

All edges of a wave end together, but for what edges above them delay.
"""

import heapq
from collections.abc import Mapping, Sequence

import numpy as np

from planner.sync_tree.fanout import LocalPiece, LocalPod, LocalTree, spread
from planner.sync_tree.model import BITS, Ints, SyncProblem, WaveEdges
from planner.sync_tree.pieces import PodCrossing, ShardPiece, WaveLoad, cut
from planner.sync_tree.rates import seconds_together


class EdgeLaying:
    """Of one site. `stripes`: trees that each piece has inside a pod, for equal parts of it."""

    def __init__(self, problem: SyncProblem, stripes: int) -> None:
        self._problem = problem
        self._stripes = stripes
        self._members = [np.flatnonzero(problem.pod == pod) for pod in range(len(problem.pods))]
        self._place = np.zeros(len(problem.endpoints), dtype=np.int64)  # [endpoint], inside its pod
        for members in self._members:
            self._place[members] = np.arange(len(members))

    def edges(
        self, load: WaveLoad, crossings: Sequence[PodCrossing], filled: Mapping[int, Sequence[ShardPiece]]
    ) -> WaveEdges:
        """Phase A and phase B with their rates."""
        floor_s = _floor_s(load)
        for crossing in crossings:
            circuit_gbps = self._problem.circuit_gbps(self._pod(crossing.src), self._pod(crossing.dst))
            floor_s = max(floor_s, crossing.piece.gigabits / (crossing.circuits * circuit_gbps))
        seeds = {(id(each.piece), self._pod(each.dst)): each.dst for each in crossings}
        trees: dict[tuple[int, int], list[LocalTree]] = {}
        for pod, pieces in sorted(filled.items()):
            found = iter(spread(self._local(load, pod, pieces, seeds, floor_s)))
            for piece in pieces:
                trees[id(piece), pod] = [next(found) for _ in self._parts(piece)]
        columns = _Columns()
        above = self._above(crossings, trees)
        for crossing in crossings:
            columns.add_one(crossing, above[id(crossing.piece), self._pod(crossing.dst)] - 1)
        for pod, pieces in sorted(filled.items()):
            for piece in pieces:
                base = above.get((id(piece), pod), 0)
                for (offset, size), tree in zip(self._parts(piece), trees[id(piece), pod], strict=True):
                    columns.add_tree(piece, offset, size, self._members[pod], tree, base)
        return columns.edges(self._problem)

    def _above(
        self, crossings: Sequence[PodCrossing], trees: dict[tuple[int, int], list[LocalTree]]
    ) -> dict[tuple[int, int], int]:
        """Edges above the seed of each piece in each pod that it crosses into, its own one included."""
        above: dict[tuple[int, int], int] = {}
        into = {(id(each.piece), self._pod(each.dst)): each for each in crossings}

        def find(key: tuple[int, int]) -> int:
            if key not in above:
                crossing = into[key]
                source = key[0], self._pod(crossing.src)
                if source in into:  # it comes from a pod that has it in this wave: from the seed, or further down
                    deep = max(tree.depth_of(int(self._place[crossing.src])) for tree in trees[source])
                    above[key] = find(source) + deep + 1
                else:
                    above[key] = 1
            return above[key]

        for key in into:
            find(key)
        return above

    def _parts(self, piece: ShardPiece) -> list[tuple[int, int]]:
        """Its stripes: offset in the shard, bytes."""
        stripes = cut(piece.bytes, min(self._stripes, piece.bytes))
        return [(piece.offset + offset, size) for offset, size in stripes]

    def _local(
        self, load: WaveLoad, pod: int, pieces: Sequence[ShardPiece], seeds: dict[tuple[int, int], int], floor_s: float
    ) -> LocalPod:
        problem = self._problem
        members = self._members[pod]
        tors, tor = np.unique(problem.tor[members], return_inverse=True)
        local: list[LocalPiece] = []
        for piece in pieces:
            sources = piece.sources[pod].tolist() if pod in piece.sources else [seeds[id(piece), pod]]
            receivers = [end for end in piece.missing[pod].tolist() if end not in sources]
            here = tuple(self._place[sources].tolist()), tuple(self._place[receivers].tolist())
            local += [LocalPiece(size * BITS, *here) for _, size in self._parts(piece)]
        return LocalPod(
            nic_gbps=tuple(problem.nic_gbps[members].tolist()),
            tor=tuple(tor.tolist()),
            tor_gbps=tuple(problem.tor_gbps[tors].tolist()),
            sent_s=tuple(load.sent_s[members].tolist()),
            tor_sent_s=tuple(load.tor_out_s[tors].tolist()),
            pieces=tuple(local),
            floor_s=floor_s,
        )

    def _pod(self, endpoint: int) -> int:
        return int(self._problem.pod[endpoint])


class _Columns:
    """Edges of a wave as they come."""

    def __init__(self) -> None:
        self._parts: list[tuple[Ints, ...]] = []

    def add_one(self, crossing: PodCrossing, above: int) -> None:
        piece = crossing.piece
        row = (piece.shard, piece.offset, piece.bytes, crossing.src, crossing.dst, crossing.circuits, above)
        self._parts.append(tuple(np.array([value]) for value in (*row, piece.offset)))

    def add_tree(self, piece: ShardPiece, offset: int, size: int, members: Ints, tree: LocalTree, base: int) -> None:
        """`base`: edges above its sources."""
        same = np.ones(len(tree.parents), dtype=np.int64)
        src, dst = members[tree.parents], members[tree.children]
        columns = (same * piece.shard, same * offset, same * size, src, dst, same * 0, tree.above + base)
        self._parts.append((*columns, same * piece.offset))

    def edges(self, problem: SyncProblem) -> WaveEdges:
        columns = [np.concatenate(column) for column in zip(*self._parts, strict=True)]
        shard, offset, size, src, dst, circuits, above, whole = columns
        # All edges that a piece runs over are given time for the chunks that the last one waits for: none gets slower.
        _, piece = np.unique(np.stack([shard, whole]), axis=1, return_inverse=True)
        deepest = np.zeros(int(piece.max()) + 1, dtype=np.int64)
        np.maximum.at(deepest, piece, above)
        gigabits = np.asarray((size + deepest[piece] * problem.chunk_bytes) * BITS, dtype=np.float64)
        rate_gbps = gigabits / seconds_together(problem, src, dst, circuits, gigabits)
        return WaveEdges(shard, offset, size, src, dst, circuits, rate_gbps, above)


def equalise(problem: SyncProblem, crossings: Sequence[PodCrossing], left: Ints, between: Ints | None) -> None:
    """Circuits left over go one by one to the edge that would take longest, where both of its pods have one. `between`:
    of those, where only some lead to each other."""
    gbps = [problem.circuit_gbps(int(problem.pod[each.src]), int(problem.pod[each.dst])) for each in crossings]
    scale = [each / problem.link_gbps for each in gbps]
    queue = [(-each.piece.gigabits / scale[number], number) for number, each in enumerate(crossings)]
    heapq.heapify(queue)
    while queue:
        _, number = heapq.heappop(queue)
        each = crossings[number]
        ends = [int(problem.pod[each.src]), int(problem.pod[each.dst])]
        if left[ends].min() <= 0 or each.circuits * gbps[number] >= problem.nic_gbps[[each.src, each.dst]].min():
            continue
        if between is not None:
            if between[ends[0], ends[1]] <= 0:
                continue
            between[ends[0], ends[1]] -= 1
        left[ends] -= 1
        each.circuits += 1
        heapq.heappush(queue, (-each.piece.gigabits / scale[number] / each.circuits, number))


def _floor_s(load: WaveLoad) -> float:
    return float(max(load.received_s.max(initial=0.0), load.tor_in_s.max(initial=0.0)))
