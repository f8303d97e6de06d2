"""A filled wave as edges: trees inside pods below the crossings (phase B below phase A), and all rates. Pure.

All edges of a wave end together, but for what edges above them delay. Inside a pod each piece gets a tree. A tree
enters each ToR once, at a head, and spreads below the ToR from there. An endpoint that has sent as much as the wave has
time for gets no more children, so that the trees of one wave have different inner nodes, and what is sent is shared by
all; within that, trees are as shallow as can be.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from planner.sync_tree.model import BITS, Ints, SyncProblem, WaveEdges, seconds_together
from planner.sync_tree.pieces import PodCrossing, ShardPiece, WaveLoad, cut

_LESS = 1 - 1e-6  # what rounding may cost


@dataclass(frozen=True, slots=True)
class LocalPiece:
    """Endpoints are numbered inside the pod. Depth counts from the sources."""

    gigabits: float
    sources: tuple[int, ...]
    receivers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LocalPod:
    """One pod of a wave. Loads are seconds that phase A has taken already."""

    nic_gbps: tuple[float, ...]  # [endpoint]
    tor: tuple[int, ...]  # [endpoint]
    tor_gbps: tuple[float, ...]  # [ToR]
    sent_s: tuple[float, ...]  # [endpoint]
    tor_sent_s: tuple[float, ...]  # [ToR]
    pieces: tuple[LocalPiece, ...]
    floor_s: float  # what the wave takes anyhow: nobody is spared below that


@dataclass(frozen=True, slots=True)
class LocalTree:
    """One edge at each place: to `children`, from `parents`, with `above` edges above it."""

    parents: Ints
    children: Ints
    above: Ints

    def depth_of(self, endpoint: int) -> int:
        """Edges between the sources and it; 0 for a source."""
        found = self.above[self.children == endpoint]
        return int(found[0]) + 1 if len(found) else 0


@lru_cache(maxsize=4096)  # regular sites ask the same for every pod and wave
def spread(pod: LocalPod) -> tuple[LocalTree, ...]:
    """A tree for each piece. Receivers in ToRs without any way in stay without: they are left out."""
    return _Spreading(pod).trees()


class _Spreading:
    """Budgets are gigabits: what each endpoint, and each ToR upwards, can still send in the wave."""

    def __init__(self, pod: LocalPod) -> None:
        self._pod = pod
        spare_s = [max(0.0, pod.floor_s - sent_s) for sent_s in pod.sent_s]
        self._budget = [each_s * nic_gbps for each_s, nic_gbps in zip(spare_s, pod.nic_gbps, strict=True)]
        self._tor_budget = [
            max(0.0, pod.floor_s - sent_s) * gbps for sent_s, gbps in zip(pod.tor_sent_s, pod.tor_gbps, strict=True)
        ]
        # Pieces are of one kind that have the same receivers. Of each kind and ToR: what these can still send, and what
        # of that the edges inside the ToR will take, so that an edge to another ToR must leave it.
        tors = len(pod.tor_gbps)
        kinds = {receivers: kind for kind, receivers in enumerate(dict.fromkeys(each.receivers for each in pod.pieces))}
        self._kind = [kinds[piece.receivers] for piece in pod.pieces]
        self._kinds_of: list[list[int]] = [[] for _ in pod.tor]
        self._together = [[0.0] * tors for _ in kinds]
        self._inside = [[0.0] * tors for _ in kinds]
        for receivers, kind in kinds.items():
            for receiver in receivers:
                self._kinds_of[receiver].append(kind)
                self._together[kind][pod.tor[receiver]] += self._budget[receiver]
        for piece, kind in zip(pod.pieces, self._kind, strict=True):
            there = {pod.tor[source] for source in piece.sources}
            for receiver in piece.receivers:
                self._inside[kind][pod.tor[receiver]] += piece.gigabits
            for tor in {pod.tor[receiver] for receiver in piece.receivers} - there:
                self._inside[kind][tor] -= piece.gigabits

        for piece in pod.pieces:  # a tree that begins at one endpoint finds it with time for at least one child
            if len(piece.sources) == 1 and piece.receivers:
                self._budget[piece.sources[0]] -= piece.gigabits

    def trees(self) -> tuple[LocalTree, ...]:
        return tuple(self._tree(piece, kind) for piece, kind in zip(self._pod.pieces, self._kind, strict=True))

    def _tree(self, piece: LocalPiece, kind: int) -> LocalTree:
        growing = _Growing(piece.gigabits, kind)
        tor_of = self._pod.tor
        if len(piece.sources) == 1 and piece.receivers:
            self._budget[piece.sources[0]] += piece.gigabits
        for receiver in sorted(piece.receivers, key=lambda each: (self._budget[each], -each)):
            growing.missing.setdefault(tor_of[receiver], []).append(receiver)  # the freest last, and taken first
        there = {tor_of[source] for source in piece.sources}
        away = [tor for tor in growing.missing if tor not in there and self._pod.tor_gbps[tor] > 0]
        growing.away = sorted(away, key=lambda tor: (self._spare(kind, tor), -tor))
        for source in piece.sources:
            self._enter(growing, source, 0)
        while (edge := self._next(growing)) is not None:
            self._add(growing, *edge)
        columns = np.array(growing.edges, dtype=np.int64).reshape(-1, 3).T
        return LocalTree(columns[0], columns[1], columns[2])

    def _enter(self, growing: "_Growing", endpoint: int, depth: int) -> None:
        growing.depth[endpoint] = depth
        growing.below.setdefault(self._pod.tor[endpoint], []).append(endpoint)
        heapq.heappush(growing.queue, (depth, -self._budget[endpoint], endpoint))

    def _next(self, growing: "_Growing") -> tuple[int, int, bool] | None:
        """Parent, its ToR or the one to enter, and whether it is another one; None: all is done, or nothing can be."""
        size = growing.gigabits * _LESS
        while growing.queue:
            parent = growing.queue[0][2]
            tor = self._pod.tor[parent]
            if self._budget[parent] < size:
                heapq.heappop(growing.queue)
                continue
            is_missing = bool(growing.missing.get(tor))
            if growing.away and self._may_leave(growing, parent, size):
                return parent, growing.away[-1], True
            if is_missing:
                return parent, tor, False
            heapq.heappop(growing.queue)
        return self._over(growing)

    def _may_leave(self, growing: "_Growing", parent: int, size: float) -> bool:
        """Whether another ToR can be entered from here, and those that wait below this one still be served."""
        tor = self._pod.tor[parent]
        if self._tor_budget[tor] < size or self._spare(growing.kind, tor) < size:
            return False
        is_free = not growing.missing.get(tor) or self._budget[parent] >= 2 * size
        return is_free or self._others_can(growing, parent, size)

    def _spare(self, kind: int, tor: int) -> float:
        return self._together[kind][tor] - self._inside[kind][tor]

    def _others_can(self, growing: "_Growing", parent: int, size: float) -> bool:
        others = growing.below[self._pod.tor[parent]]
        return any(self._budget[other] >= size for other in others if other != parent)

    def _over(self, growing: "_Growing") -> tuple[int, int, bool] | None:
        """Into a ToR once more where somebody elsewhere has time left; else whoever is busied least by it."""
        size = growing.gigabits * _LESS
        stuck = [tor for tor, missing in growing.missing.items() if missing and tor in growing.below]
        if stuck:
            able = [
                (depth, parent)
                for parent, depth in growing.depth.items()
                if self._budget[parent] >= size and self._tor_budget[self._pod.tor[parent]] >= size
            ]
            if able:
                return min(able)[1], stuck[0], True
        best: tuple[float, int, int, bool] | None = None
        for tor, missing in growing.missing.items():
            for parent in growing.below.get(tor, ()) if missing else ():
                after_s = (growing.gigabits - self._budget[parent]) / self._pod.nic_gbps[parent]
                best = min(best or (after_s, parent, tor, False), (after_s, parent, tor, False))
        if best is None and growing.away:
            for tor, parents in growing.below.items():
                for parent in parents if self._pod.tor_gbps[tor] > 0 else ():
                    after_s = max(
                        (growing.gigabits - self._budget[parent]) / self._pod.nic_gbps[parent],
                        (growing.gigabits - self._tor_budget[tor]) / self._pod.tor_gbps[tor],
                    )
                    found = (after_s, parent, growing.away[-1], True)
                    best = min(best or found, found)
        return None if best is None else best[1:]

    def _add(self, growing: "_Growing", parent: int, tor: int, is_between: bool) -> None:
        child = growing.missing[tor].pop()
        growing.edges.append((parent, child, growing.depth[parent]))
        own = self._pod.tor[parent]
        self._budget[parent] -= growing.gigabits
        for kind in self._kinds_of[parent]:
            self._together[kind][own] -= growing.gigabits
        if is_between:
            if growing.away and growing.away[-1] == tor:
                growing.away.pop()
            self._tor_budget[own] -= growing.gigabits
        else:
            self._inside[growing.kind][own] -= growing.gigabits
        self._enter(growing, child, growing.depth[parent] + 1)


@dataclass(slots=True)
class _Growing:
    """A tree as it grows."""

    gigabits: float
    kind: int
    missing: dict[int, list[int]] = field(default_factory=dict)  # [ToR]
    away: list[int] = field(default_factory=list)  # ToRs that it has not entered
    depth: dict[int, int] = field(default_factory=dict)  # of who has it
    below: dict[int, list[int]] = field(default_factory=dict)  # [ToR], who has it
    queue: list[tuple[int, float, int]] = field(default_factory=list)
    edges: list[tuple[int, int, int]] = field(default_factory=list)


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
