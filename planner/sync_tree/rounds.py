"""Plan waves for small pieces, in which no endpoint forwards a piece in the wave in which it receives the piece. Has no
side effects.

If edges follow each other in one wave, a piece waits for a whole chunk at each edge. A piece of a few chunks arrives
sooner without these waits. In each wave, endpoints that have a piece send it to endpoints of their pod that lack it.
Larger pieces are sent first; among pieces of similar size, the piece that entered the pod first is preferred. Free
circuits bring further pieces into the pods.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from planner.sync_tree.edges import EdgeRow, wave_of
from planner.sync_tree.model import BITS, Floats, Ints, SyncProblem, Unreachable, Wave
from planner.sync_tree.pieces import by_pod, cut_to

_LESS = 1 - 1e-9  # tolerance for rounding
_LOOK_AHEAD = 16  # pieces that a pod may choose from


@dataclass(frozen=True, slots=True)
class _Piece:
    number: int
    shard: int
    offset: int
    bytes: int

    @property
    def gigabits(self) -> float:
        return self.bytes * BITS


@dataclass(slots=True)
class _Group:
    """The pieces, largest first, that the same receivers of a pod miss and that no endpoint of the pod has."""

    pod: int
    receivers: Ints
    least_gbps: float  # of the receivers' NICs
    waiting: list[_Piece] = field(default_factory=list)


@dataclass(slots=True)
class _Budget:
    """The remaining capacity of a wave, in gigabits and circuits."""

    sent: Floats  # [endpoint]
    received: Floats  # [endpoint]
    tor_out: Floats  # [ToR]
    tor_in: Floats  # [ToR]
    circuits: Ints  # [pod]
    between: Ints | None  # [pod, pod]; None: any pods can be connected


def rounds(problem: SyncProblem, piece_bytes: int) -> Iterator[Wave]:
    """Yield the waves that deliver all shards, cut into about equal pieces of at most `piece_bytes`. Raises Unreachable
    if no wave can bring the missing pieces."""
    making = _Rounds(problem, piece_bytes)
    while making.left:
        yield making.wave()


class _Rounds:
    def __init__(self, problem: SyncProblem, piece_bytes: int) -> None:
        self._problem = problem
        self._members = [np.flatnonzero(problem.pod == pod) for pod in range(len(problem.pods))]
        below = np.bincount(problem.tor, weights=problem.nic_gbps, minlength=len(problem.tors))
        self._is_ample = bool((problem.tor_gbps >= below).all())  # no ToR can be a bottleneck
        self._pieces = _pieces(problem, piece_bytes)
        self._has = np.zeros((len(self._pieces), len(problem.endpoints)), dtype=bool)  # at the start of the wave
        self._missing = np.zeros_like(self._has)
        self._sources: list[list[int]] = []  # [piece], pods
        # [piece, pod], oldest first: some endpoints there have it, others do not
        self._inside: dict[tuple[int, int], None] = {}
        self._needing: list[set[int]] = []  # [piece], pods
        # By endpoint, the pieces that it has and others in its pod lack.
        self._busy = np.zeros(len(problem.endpoints), dtype=np.int64)
        groups: dict[tuple[int, tuple[int, ...]], _Group] = {}
        for piece in self._pieces:
            shard = problem.shards[piece.shard]
            self._has[piece.number, list(shard.holders)] = True
            self._missing[piece.number, list(shard.receivers)] = True
            held = np.unique(problem.pod[list(shard.holders)]).tolist()
            self._sources.append(held)
            missing = by_pod(problem, shard.receivers)
            self._needing.append(set(missing))
            for pod, ends in missing.items():
                if pod in held:
                    self._inside[piece.number, pod] = None
                    self._busy[self._members[pod]] += self._has[piece.number, self._members[pod]]
                else:
                    group = _Group(pod, ends, float(problem.nic_gbps[ends].min()))
                    groups.setdefault((pod, tuple(ends.tolist())), group).waiting.append(piece)
        self._groups = list(groups.values())
        self._unseen = {piece.number for group in self._groups for piece in group.waiting}
        self._unseen -= {number for number, _ in self._inside}
        needing = set().union(*self._needing)
        self._roots = [pod for pod in range(len(problem.pods)) if pod not in needing]
        used = self._has.any(axis=0) | self._missing.any(axis=0)
        positive = problem.tor_gbps[problem.tor_gbps > 0]
        pairs = problem.pairs
        self._slowest_gbps = min(
            problem.link_gbps if pairs is None else float(pairs.gbps[pairs.circuits > 0].min(initial=np.inf)),
            float(problem.nic_gbps[used].min(initial=np.inf)),
            float(positive.min(initial=np.inf)),
        )
        self._rows: list[tuple[_Piece, Ints, Ints, int]] = []  # per piece: sources, destinations, circuits

    @property
    def left(self) -> bool:
        return bool(self._inside) or any(group.waiting for group in self._groups)

    def wave(self) -> Wave:
        largest = max(
            [self._pieces[number].bytes for number, _ in self._inside]
            + [group.waiting[0].bytes for group in self._groups if group.waiting]
        )
        seconds = largest * BITS / self._slowest_gbps
        problem = self._problem
        budget = _Budget(
            sent=seconds * problem.nic_gbps,
            received=seconds * problem.nic_gbps,
            tor_out=seconds * problem.tor_gbps,
            tor_in=seconds * problem.tor_gbps,
            circuits=problem.boundary_circuits.copy(),
            between=None if problem.pairs is None else problem.pairs.circuits.copy(),
        )
        self._rows = []
        # Largest first; smaller pieces fill the capacity that remains.
        for number, pod in sorted(self._inside, key=lambda each: -self._pieces[each[0]].bytes.bit_length()):
            self._spread(budget, self._pieces[number], self._members[pod])
        taken = [0.0] * len(self._groups)
        for least_bytes in (largest // 2, 0):
            self._enter(budget, seconds, least_bytes, taken)
        if not self._rows:
            raise Unreachable(
                "no circuit leads to the PoDs that need shards:"
                f" {', '.join(sorted({problem.pods[group.pod] for group in self._groups if group.waiting}))}"
            )
        return self._finished()

    def _spread(self, budget: _Budget, piece: _Piece, ends: Ints) -> None:
        """Send the piece inside a pod, from free endpoints that have it to free endpoints that lack it."""
        size = piece.gigabits * _LESS
        sources = ends[self._has[piece.number, ends] & (budget.sent[ends] >= size)]
        missing = ends[self._missing[piece.number, ends] & (budget.received[ends] >= size)]
        # Endpoints with the least to forward come first, because an endpoint that sends one piece cannot send another.
        missing = missing[np.argsort(self._busy[missing], kind="stable")]
        while len(sources) and len(missing):
            if self._is_ample:
                pairs = min(len(sources), len(missing))
                src, dst = sources[:pairs], missing[:pairs]
            else:
                src, dst = self._through_tors(budget, size, sources, missing)
                if not len(src):
                    return
            self._send(budget, piece, src, dst, 0)
            sources = sources[budget.sent[sources] >= size]
            missing = missing[self._missing[piece.number, missing]]

    def _through_tors(self, budget: _Budget, size: float, sources: Ints, missing: Ints) -> tuple[Ints, Ints]:
        """Return pairs of a source and a destination, as two arrays. The endpoints of a pair are below the same ToR if
        possible, otherwise below ToRs that both have free capacity."""
        tor = self._problem.tor
        out, into = budget.tor_out.copy(), budget.tor_in.copy()
        lacking = missing.tolist()
        pairs: list[tuple[int, int]] = []
        for source in sources.tolist():
            own = tor[source]
            near = next((end for end in lacking if tor[end] == own), None)
            if near is None and out[own] >= size:
                near = next((end for end in lacking if into[tor[end]] >= size), None)
            if near is None:
                continue
            lacking.remove(near)
            pairs.append((source, near))
            if tor[near] != own:
                out[own] -= size
                into[tor[near]] -= size
        columns = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        return columns[0], columns[1]

    def _enter(self, budget: _Budget, seconds: float, least_bytes: int, taken: list[float]) -> None:
        """Send pieces of at least `least_bytes` into pods from other pods. Each group is sent at most as many pieces as
        a single receiver can receive in a wave of `seconds`. `taken` has the gigabits already sent to each group in the
        wave."""
        order = sorted(
            (number for number, group in enumerate(self._groups) if group.waiting),
            key=lambda number: -sum(piece.bytes for piece in self._groups[number].waiting),
        )
        while order:
            again = []
            for number in order:
                group = self._groups[number]
                most = seconds * group.least_gbps / _LESS
                if not group.waiting or taken[number] + group.waiting[-1].gigabits > most:
                    continue
                piece = self._cross(budget, group, least_bytes) if budget.circuits[group.pod] > 0 else None
                if piece is not None:
                    taken[number] += piece.gigabits
                    again.append(number)
            order = again

    def _cross(self, budget: _Budget, group: _Group, least_bytes: int) -> _Piece | None:
        """Send one piece into the group's pod and return it. Return None if no piece can be sent. Sources in pods that
        do not need the piece are preferred, and so are pieces that no other pod has received yet. A source in a pod
        that also needs the piece is the last choice, because the crossing then uses circuits of two pods that receive
        pieces."""
        best: tuple[int, _Piece, int, int] | None = None
        seeds: dict[int, int | None] = {}  # [bytes]
        least = 2 if not budget.circuits[self._roots].any() else 0 if self._unseen else 1  # lowest possible rank
        for piece in group.waiting[:_LOOK_AHEAD]:
            if piece.bytes < least_bytes:
                break
            if piece.bytes not in seeds:
                seeds[piece.bytes] = self._freest(budget.received, budget.tor_in, piece, group.receivers)
            seed = seeds[piece.bytes]
            if seed is None:
                continue
            needing, sources = self._needing[piece.number], self._sources[piece.number]
            root_rank = int(any(pod in needing for pod in sources))
            pods = [
                (2 if pod in needing else root_rank, -int(budget.circuits[pod]), pod)
                for pod in sources
                if budget.circuits[pod] > 0 and (budget.between is None or budget.between[pod, group.pod] > 0)
            ]
            for rank, _, pod in sorted(pods):
                if best is not None and rank >= best[0]:
                    break
                ends = self._members[pod]
                sender = self._freest(budget.sent, budget.tor_out, piece, ends[self._has[piece.number, ends]])
                if sender is not None:
                    best = rank, piece, sender, seed
            if best is not None and best[0] <= least:
                break
        if best is None:
            return None
        _, piece, sender, seed = best
        self._send(budget, piece, np.array([sender]), np.array([seed]), 1)
        budget.circuits[[self._problem.pod[sender], group.pod]] -= 1
        if budget.between is not None:
            budget.between[self._problem.pod[sender], group.pod] -= 1
        group.waiting.remove(piece)
        self._unseen.discard(piece.number)
        return piece

    def _freest(self, budget: Floats, tor_budget: Floats, piece: _Piece, ends: Ints) -> int | None:
        size = piece.gigabits * _LESS
        free = ends[(budget[ends] >= size) & (tor_budget[self._problem.tor[ends]] >= size)]
        return int(free[np.argmin(self._busy[free])]) if len(free) else None

    def _send(self, budget: _Budget, piece: _Piece, src: Ints, dst: Ints, circuits: int) -> None:
        """Record transfers of the piece. Neither `src` nor `dst` may contain an endpoint twice."""
        budget.sent[src] -= piece.gigabits
        budget.received[dst] -= piece.gigabits
        tor = self._problem.tor
        between = tor[src] != tor[dst]
        np.subtract.at(budget.tor_out, tor[src[between]], piece.gigabits)
        np.subtract.at(budget.tor_in, tor[dst[between]], piece.gigabits)
        self._missing[piece.number, dst] = False
        self._busy[dst] += 1
        self._rows.append((piece, src, dst, circuits))

    def _finished(self) -> Wave:
        for piece, _, dst, circuits in self._rows:
            self._has[piece.number, dst] = True
            if circuits:
                pod = int(self._problem.pod[dst[0]])
                self._sources[piece.number].append(pod)
                self._inside[piece.number, pod] = None
        done = [key for key in self._inside if not self._missing[key[0], self._members[key[1]]].any()]
        for number, pod in done:
            self._busy[self._members[pod]] -= self._has[number, self._members[pod]]
            del self._inside[number, pod]
        rows = [
            EdgeRow(piece.shard, piece.offset, piece.bytes, piece.offset, circuits, src, dst, np.zeros_like(src))
            for piece, src, dst, circuits in self._rows
        ]
        return wave_of(self._problem, rows)


def _pieces(problem: SyncProblem, piece_bytes: int) -> list[_Piece]:
    """Return the pieces, largest first, so that the pieces of a wave are of similar size. Among pieces of equal size,
    those with different holders or receivers alternate."""
    counts: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
    order: list[tuple[int, int, int, int, int]] = []
    for number, shard in enumerate(problem.shards):
        for offset, size in cut_to(shard.bytes, piece_bytes) if shard.receivers else ():
            key = shard.holders, shard.receivers
            order.append((-size, counts[key], number, offset, size))
            counts[key] += 1
    return [_Piece(place, each[2], each[3], each[4]) for place, each in enumerate(sorted(order))]
