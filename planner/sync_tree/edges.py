"""A filled wave as edges: trees inside pods below the crossings (phase B below phase A), and all rates. Pure.

All edges of a wave end together, but for what edges above them delay. Inside a pod each piece gets a tree. A tree
enters each ToR once, at a head, and spreads below the ToR from there. An endpoint that has sent as much as the wave has
time for gets no more children, so that the trees of one wave have different inner nodes, and what is sent is shared by
all; within that, trees are as shallow as can be.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from planner.sync_tree.model import BITS, Ints, SyncProblem, WaveEdges, seconds_together
from planner.sync_tree.pieces import PodCrossing, ShardPiece, WaveDraft, cut

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
    spreading = _Spreading(pod)
    return tuple(spreading.tree(piece) for piece in pod.pieces)


class _Spreading:
    """Budgets are gigabits: what each endpoint, and each ToR upwards, can still send in the wave."""

    def __init__(self, pod: LocalPod) -> None:
        self._pod = pod
        spare_s = [max(0.0, pod.floor_s - sent_s) for sent_s in pod.sent_s]
        self._budget = [each_s * nic_gbps for each_s, nic_gbps in zip(spare_s, pod.nic_gbps, strict=True)]
        self._tor_budget = [
            max(0.0, pod.floor_s - sent_s) * gbps for sent_s, gbps in zip(pod.tor_sent_s, pod.tor_gbps, strict=True)
        ]
        for piece in pod.pieces:  # a tree that begins at one endpoint finds it with time for at least one child
            if len(piece.sources) == 1 and piece.receivers:
                self._budget[piece.sources[0]] -= piece.gigabits

    def tree(self, piece: LocalPiece) -> LocalTree:
        if len(piece.sources) == 1 and piece.receivers:
            self._budget[piece.sources[0]] += piece.gigabits
        tor_of = self._pod.tor
        growing = _Growing(piece.gigabits)
        for receiver in sorted(piece.receivers, key=lambda each: (self._budget[each], -each)):
            growing.missing.setdefault(tor_of[receiver], []).append(receiver)  # the freest last, and taken first
        there = {tor_of[source] for source in piece.sources}
        away = [tor for tor in growing.missing if tor not in there and self._pod.tor_gbps[tor] > 0]
        # The ToR whose receivers can send most on is entered first.
        growing.away = sorted(away, key=lambda tor: (sum(self._budget[each] for each in growing.missing[tor]), -tor))
        for source in piece.sources:
            self._enter(growing, source, 0)
        while (edge := self._next(growing) or self._over(growing)) is not None:
            self._add(growing, *edge)
        columns = np.array(growing.edges, dtype=np.int64).reshape(-1, 3).T
        return LocalTree(columns[0], columns[1], columns[2])

    def _enter(self, growing: "_Growing", endpoint: int, depth: int) -> None:
        growing.depth[endpoint] = depth
        heapq.heappush(growing.queue, (depth, -self._budget[endpoint], endpoint))

    def _next(self, growing: "_Growing") -> tuple[int, int] | None:
        """Return a parent that has time for a child, the highest first, and the ToR of the child: another one where
        some are to be entered and the parent can serve its own beside it."""
        size = growing.gigabits * _LESS
        while growing.queue:
            parent = growing.queue[0][2]
            tor = self._pod.tor[parent]
            if self._budget[parent] >= size:
                is_free = not growing.missing.get(tor) or self._budget[parent] >= 2 * size
                if growing.away and is_free and self._tor_budget[tor] >= size:
                    return parent, growing.away[-1]
                if growing.missing.get(tor):
                    return parent, tor
            heapq.heappop(growing.queue)
        return None

    def _over(self, growing: "_Growing") -> tuple[int, int] | None:
        """Return the parent that is over its time by least, and the ToR of the child; None: nothing more can be."""
        pod, best = self._pod, None
        for tor in (tor for tor, missing in growing.missing.items() if missing):
            for parent, depth in growing.depth.items():
                own, nic_gbps = pod.tor[parent], pod.nic_gbps[parent]
                after_s = (growing.gigabits - self._budget[parent]) / nic_gbps
                if own != tor:
                    if pod.tor_gbps[own] <= 0 or pod.tor_gbps[tor] <= 0:
                        continue
                    after_s = max(after_s, (growing.gigabits - self._tor_budget[own]) / pod.tor_gbps[own])
                rank = max(after_s, 0.0), own != tor, depth, parent, tor
                best = min(best or rank, rank)
        return None if best is None else best[3:]

    def _add(self, growing: "_Growing", parent: int, tor: int) -> None:
        child = growing.missing[tor].pop()
        growing.edges.append((parent, child, growing.depth[parent]))
        self._budget[parent] -= growing.gigabits
        if tor != self._pod.tor[parent]:
            self._tor_budget[self._pod.tor[parent]] -= growing.gigabits
        if tor in growing.away:
            growing.away.remove(tor)
        self._enter(growing, child, growing.depth[parent] + 1)


@dataclass(slots=True)
class _Growing:
    """A tree as it grows."""

    gigabits: float
    missing: dict[int, list[int]] = field(default_factory=dict)  # [ToR]
    away: list[int] = field(default_factory=list)  # ToRs that it has not entered
    depth: dict[int, int] = field(default_factory=dict)  # of who has it
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

    def edges(self, wave: WaveDraft) -> WaveEdges:
        """Phase A and phase B with their rates."""
        crossings, filled = wave.crossings, wave.filled
        floor_s = float(max(wave.received_s.max(initial=0.0), wave.tor_in_s.max(initial=0.0)))
        for crossing in crossings:
            circuit_gbps = self._problem.circuit_gbps(self._pod(crossing.src), self._pod(crossing.dst))
            floor_s = max(floor_s, crossing.piece.gigabits / (crossing.circuits * circuit_gbps))
        seeds = {(id(each.piece), self._pod(each.dst)): each.dst for each in crossings}
        trees: dict[tuple[int, int], list[LocalTree]] = {}
        for pod, pieces in sorted(filled.items()):
            found = iter(spread(self._local(wave, pod, pieces, seeds, floor_s)))
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
        self, wave: WaveDraft, pod: int, pieces: Sequence[ShardPiece], seeds: dict[tuple[int, int], int], floor_s: float
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
            sent_s=tuple(wave.sent_s[members].tolist()),
            tor_sent_s=tuple(wave.tor_out_s[tors].tolist()),
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
