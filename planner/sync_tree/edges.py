"""Turn a filled wave into edges with rates: the crossings between pods (phase A), and trees inside pods below the
crossings (phase B). Has no side effects.

All edges of a wave end at the same time, except for delays from the edges above them. Inside a pod, each piece is sent
along a tree. A tree enters each ToR once, at one endpoint (the head), and spreads below the ToR from there. An endpoint
that has used its sending time in the wave gets no more children, so that the trees of one wave have different inner
nodes and all endpoints share the sending. Within that limit, trees are as shallow as possible.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from planner.sync_tree.model import BITS, Ints, SyncProblem, Wave, WaveEdges, edge_seconds, seconds_together
from planner.sync_tree.pieces import PodCrossing, ShardPiece, WaveDraft, cut

_LESS = 1 - 1e-6  # tolerance for rounding


@dataclass(frozen=True, slots=True)
class LocalPiece:
    """A piece inside one pod. Endpoints are numbered within the pod."""

    gigabits: float
    sources: tuple[int, ...]
    receivers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LocalPod:
    """One pod of a wave. `sent_s` and `tor_sent_s` are the sending times, in seconds, that phase A has already used."""

    nic_gbps: tuple[float, ...]  # [endpoint]
    tor: tuple[int, ...]  # [endpoint]
    tor_gbps: tuple[float, ...]  # [ToR]
    sent_s: tuple[float, ...]  # [endpoint]
    tor_sent_s: tuple[float, ...]  # [ToR]
    pieces: tuple[LocalPiece, ...]
    floor_s: float  # duration of the wave in any case; sending less than this saves nothing


@lru_cache(maxsize=4096)  # regular sites repeat the same input for every pod and wave
def spread(pod: LocalPod) -> tuple[Ints, ...]:
    """Return a tree for each piece, as an array with three rows and a column per edge: the edge's parent, its child,
    and the number of edges above it. Receivers below unreachable ToRs are omitted."""
    budget, _ = _budgets(pod)
    only = [_only_ways(pod, piece, budget) for piece in pod.pieces]
    overrun_s, trees = _spread(pod, only)
    if overrun_s > pod.floor_s * (1 - _LESS):
        others_s, others = _spread(pod, [(ends, set()) for ends, _ in only])
        trees = others if others_s < overrun_s else trees
    return trees


def _budgets(pod: LocalPod) -> tuple[list[float], list[float]]:
    """Return the gigabits that each endpoint can still send in the wave, and those that each ToR can still send to
    other ToRs."""
    ends, tors = zip(pod.sent_s, pod.nic_gbps, strict=True), zip(pod.tor_sent_s, pod.tor_gbps, strict=True)
    budget, tor_budget = ([max(0.0, pod.floor_s - sent_s) * gbps for sent_s, gbps in each] for each in (ends, tors))
    return budget, tor_budget


def _spread(pod: LocalPod, only: Sequence[tuple[set[int], set[int]]]) -> tuple[float, tuple[Ints, ...]]:
    """Build the trees. Return the longest time, in seconds, by which an endpoint or a ToR exceeds its time budget, and
    a tree for each piece. `only` holds two sets for each tree: the endpoint and the ToR that alone can start the tree,
    if any. Such an endpoint or ToR keeps enough time free to send to one child until the tree is started."""
    budget, tor_budget = _budgets(pod)
    for piece, (ends, tors) in zip(pod.pieces, only, strict=True):
        _spend(budget, ends, piece.gigabits)
        _spend(tor_budget, tors, piece.gigabits)
    trees = []
    for piece, (ends, tors) in zip(pod.pieces, only, strict=True):
        _spend(budget, ends, -piece.gigabits)
        _spend(tor_budget, tors, -piece.gigabits)
        trees.append(_Tree(pod, piece, budget, tor_budget).grown())
    left = [*zip(budget, pod.nic_gbps, strict=True), *zip(tor_budget, pod.tor_gbps, strict=True)]
    return max(-gigabits / gbps for gigabits, gbps in left if gbps > 0), tuple(trees)


def _only_ways(pod: LocalPod, piece: LocalPiece, budget: list[float]) -> tuple[set[int], set[int]]:
    """Return two sets: the only endpoint with time to send the piece, and the only ToR from which the piece can be sent
    to other ToRs. A set is empty if no such endpoint or ToR exists, or if several exist."""
    able = {source for source in piece.sources if budget[source] >= piece.gigabits * _LESS and piece.receivers}
    here = {pod.tor[source] for source in piece.sources}
    leaves = any(pod.tor[receiver] not in here for receiver in piece.receivers)
    tors = {pod.tor[source] for source in able if leaves}
    return able if len(able) == 1 else set(), tors if len(tors) == 1 else set()


def _spend(budget: list[float], places: set[int], gigabits: float) -> None:
    for place in places:
        budget[place] -= gigabits


class _Tree:
    """Grows the tree of one piece. Each new edge is deducted from the budgets, which all trees of the pod share."""

    def __init__(self, pod: LocalPod, piece: LocalPiece, budget: list[float], tor_budget: list[float]) -> None:
        self._pod, self._gigabits = pod, piece.gigabits
        self._budget, self._tor_budget = budget, tor_budget
        self._missing: dict[int, list[int]] = {}  # [ToR]
        self._depth: dict[int, int] = {}  # of endpoints that have the piece
        self._queue: list[tuple[int, float, int]] = []
        self._edges: list[tuple[int, int, int]] = []
        for receiver in sorted(piece.receivers, key=lambda each: (budget[each], -each)):
            # the one with most budget is last, and taken first
            self._missing.setdefault(pod.tor[receiver], []).append(receiver)
        there = {pod.tor[source] for source in piece.sources}
        away = [tor for tor in self._missing if tor not in there and pod.tor_gbps[tor] > 0]
        # ToRs not entered yet; the one whose receivers can send most is last, and entered first.
        self._away = sorted(away, key=lambda tor: (sum(budget[each] for each in self._missing[tor]), -tor))
        for source in piece.sources:
            self._enter(source, 0)

    def grown(self) -> Ints:
        while (edge := self._next() or self._over()) is not None:
            self._add(*edge)
        return np.array(self._edges, dtype=np.int64).reshape(-1, 3).T

    def _enter(self, endpoint: int, depth: int) -> None:
        self._depth[endpoint] = depth
        heapq.heappush(self._queue, (depth, -self._budget[endpoint], endpoint))

    def _next(self) -> tuple[int, int] | None:
        """Return the parent closest to the root that has time for a child, and the child's ToR. Return None if no
        parent has time. A ToR that the tree has not entered yet is preferred, if the parent has time to serve its own
        ToR as well."""
        size = self._gigabits * _LESS
        while self._queue:
            depth, _, parent = self._queue[0]
            if self._budget[parent] >= size:
                if self._away and (leaving := self._freest_leaving(depth)) is not None:
                    return leaving, self._away[-1]
                if self._missing.get(self._pod.tor[parent]):
                    return parent, self._pod.tor[parent]
            heapq.heappop(self._queue)
        return None

    def _freest_leaving(self, depth: int) -> int | None:
        """Return the endpoint at this depth that should send to another ToR. Endpoints whose ToR has the most time left
        are preferred, then endpoints with the most time left. Return None if no endpoint can send to another ToR."""
        pod, size, best = self._pod, self._gigabits * _LESS, None
        for _, _, end in (each for each in self._queue if each[0] == depth):
            tor, budget = pod.tor[end], self._budget[end]
            if budget >= size * (2 if self._missing.get(tor) else 1) and self._tor_budget[tor] >= size:
                rank = self._tor_budget[tor] / pod.tor_gbps[tor], budget / pod.nic_gbps[end], -end
                best = max(best or rank, rank)
        return None if best is None else -best[2]

    def _over(self) -> tuple[int, int] | None:
        """Return the parent that exceeds its sending time the least by sending to one more child, and the child's ToR.
        Return None if no receiver can be served."""
        pod, best = self._pod, None
        for tor in (tor for tor, missing in self._missing.items() if missing):
            for parent, depth in self._depth.items():
                own, nic_gbps = pod.tor[parent], pod.nic_gbps[parent]
                after_s = (self._gigabits - self._budget[parent]) / nic_gbps
                if own != tor:
                    if pod.tor_gbps[own] <= 0 or pod.tor_gbps[tor] <= 0:
                        continue
                    after_s = max(after_s, (self._gigabits - self._tor_budget[own]) / pod.tor_gbps[own])
                rank = max(after_s, 0.0), own != tor, depth, parent, tor
                best = min(best or rank, rank)
        return None if best is None else best[3:]

    def _add(self, parent: int, tor: int) -> None:
        child = self._missing[tor].pop()
        self._edges.append((parent, child, self._depth[parent]))
        self._budget[parent] -= self._gigabits
        if tor != self._pod.tor[parent]:
            self._tor_budget[self._pod.tor[parent]] -= self._gigabits
        if tor in self._away:
            self._away.remove(tor)
        self._enter(child, self._depth[parent] + 1)


class EdgeLaying:
    """Builds the edges of a site's waves. `stripes` is the number of trees per piece inside a pod. Each tree carries an
    equal part of the piece."""

    def __init__(self, problem: SyncProblem, stripes: int) -> None:
        self._problem = problem
        self._stripes = stripes
        self._members = [np.flatnonzero(problem.pod == pod) for pod in range(len(problem.pods))]
        self._place = np.zeros(len(problem.endpoints), dtype=np.int64)  # [endpoint], inside its pod
        for members in self._members:
            self._place[members] = np.arange(len(members))

    def wave(self, wave: WaveDraft) -> Wave:
        """Return the finished wave: the edges of phase A and phase B with their rates."""
        crossings, filled = wave.crossings, wave.filled
        floor_s = float(max(wave.received_s.max(initial=0.0), wave.tor_in_s.max(initial=0.0)))
        for crossing in crossings:
            circuit_gbps = self._problem.circuit_gbps(self._pod(crossing.src), self._pod(crossing.dst))
            floor_s = max(floor_s, crossing.piece.gigabits / (crossing.circuits * circuit_gbps))
        seeds = {(id(each.piece), self._pod(each.dst)): each.dst for each in crossings}
        trees: dict[tuple[int, int], list[Ints]] = {}
        for pod, pieces in sorted(filled.items()):
            found = iter(spread(self._local(wave, pod, pieces, seeds, floor_s)))
            for piece in pieces:
                trees[id(piece), pod] = [next(found) for _ in self._parts(piece)]
        rows: list[EdgeRow] = []
        above = self._above(crossings, trees)
        for crossing in crossings:
            piece, depth = crossing.piece, above[id(crossing.piece), self._pod(crossing.dst)] - 1
            ends = np.array([[crossing.src], [crossing.dst], [depth]])
            rows.append(EdgeRow(piece.shard, piece.offset, piece.bytes, piece.offset, crossing.circuits, *ends))
        for pod, pieces in sorted(filled.items()):
            members = self._members[pod]
            for piece in pieces:
                base = above.get((id(piece), pod), 0)  # edges above the sources
                for (offset, size), (src, dst, depths) in zip(self._parts(piece), trees[id(piece), pod], strict=True):
                    same = piece.shard, offset, size, piece.offset, 0
                    rows.append(EdgeRow(*same, members[src], members[dst], depths + base))
        return wave_of(self._problem, rows)

    def _above(
        self, crossings: Sequence[PodCrossing], trees: dict[tuple[int, int], list[Ints]]
    ) -> dict[tuple[int, int], int]:
        """Return, for each crossing, the number of edges above its seed, including the crossing. The keys are (id of
        the piece, pod that the piece enters)."""
        above: dict[tuple[int, int], int] = {}
        into = {(id(each.piece), self._pod(each.dst)): each for each in crossings}

        def find(key: tuple[int, int]) -> int:
            if key not in above:
                crossing = into[key]
                source = key[0], self._pod(crossing.src)
                if source in into:  # it comes from a pod that receives it in this wave: from the seed, or further down
                    place = self._place[crossing.src]
                    deep = max(int(depths[dst == place].max(initial=-1)) + 1 for _, dst, depths in trees[source])
                    above[key] = find(source) + deep + 1
                else:
                    above[key] = 1
            return above[key]

        for key in into:
            find(key)
        return above

    def _parts(self, piece: ShardPiece) -> list[tuple[int, int]]:
        """Return the stripes of the piece as (offset in the shard, number of bytes)."""
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


class EdgeRow(NamedTuple):
    """The edges of one piece, or of one stripe of it, in a wave. `src`, `dst` and `above` have one entry per edge. An
    entry of `above` is the number of edges above that edge in the wave."""

    shard: int
    offset: int
    bytes: int
    piece: int  # offset of the whole piece in the shard
    circuits: int
    src: Ints
    dst: Ints
    above: Ints


def wave_of(problem: SyncProblem, rows: Sequence[EdgeRow]) -> Wave:
    """Return the wave of the edges in `rows`, with rates at which all edges end together."""
    same = np.array([row[:5] for row in rows], dtype=np.int64)
    shard, offset, size, whole, circuits = np.repeat(same, [len(row.src) for row in rows], axis=0).T
    src, dst = np.concatenate([row.src for row in rows]), np.concatenate([row.dst for row in rows])
    above = np.concatenate([row.above for row in rows])
    most = size
    if above.any():
        # All edges of a piece are given time for the chunks that the last one waits for, so that none gets slower.
        _, piece = np.unique(np.stack([shard, whole]), axis=1, return_inverse=True)
        deepest = np.zeros(int(piece.max()) + 1, dtype=np.int64)
        np.maximum.at(deepest, piece, above)
        most = size + deepest[piece] * problem.chunk_bytes
    gigabits = np.asarray(most * BITS, dtype=np.float64)
    rate_gbps = gigabits / seconds_together(problem, src, dst, circuits, gigabits)
    edges = WaveEdges(shard, offset, size, src, dst, circuits, rate_gbps, above)
    return Wave(float(edge_seconds(problem, edges).max()), edges)


def equalise(problem: SyncProblem, crossings: Sequence[PodCrossing], left: Ints, between: Ints | None) -> None:
    """Assign spare circuits one at a time. Each goes to the crossing that currently takes longest among those whose
    pods both have a spare circuit and whose endpoints' NICs are not yet saturated. `left` has the number of spare
    circuits of each pod. `between` has the number of spare circuits of each pair of pods, or is None if any two pods
    can be connected. Both arrays are updated in place."""
    gbps = [problem.circuit_gbps(int(problem.pod[each.src]), int(problem.pod[each.dst])) for each in crossings]
    queue = [(-each.piece.gigabits / gbps[number], number) for number, each in enumerate(crossings)]
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
        heapq.heappush(queue, (-each.piece.gigabits / gbps[number] / each.circuits, number))
