"""Fill waves: choose the pieces that are sent at once, and their crossings between pods (phase A). Has no side effects.

A wave is filled one piece and one pod at a time, as long as its delivery rate does not drop. A group consists of the
receivers of a pod that miss the same pieces. The next piece goes to the group that has received the least in this wave.
If several groups have received equally little, it goes to the group that misses the most. A piece enters each pod once,
at one endpoint (the seed). The piece comes from a holder or from another pod that has it, so that a pod's circuits are
used in both directions. A piece waits for a later wave if no circuit is free, or if all its senders would prolong the
wave. `edges.py` sets the rates.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.sync_tree.edges import EdgeLaying, equalise
from planner.sync_tree.model import Ints, SyncProblem, Unreachable, Wave
from planner.sync_tree.pieces import PodCrossing, ShardPiece, WaveDraft, by_pod, cut_to

_LESS = 1 - 1e-9  # tolerance for rounding
_LOOK_AHEAD = 16  # pieces that a pod may choose from


@dataclass(frozen=True, slots=True)
class BroadcastStrategy:
    """One way to cut shards and fill waves; the planner tries several and uses the fastest."""

    piece_bytes: int  # maximum size of the equal pieces that shards are cut into
    crossing: float  # average number of pieces that enter a pod at once; further circuits are for relaying
    stripes: int  # trees per piece inside a pod, each for an equal part
    together: int  # pieces that an endpoint receives at once, if circuits suffice


@dataclass(slots=True)
class PieceGroup:
    """The pieces that the same set of receivers in a pod lacks, in the order in which they are sent."""

    pod: int
    receivers: Ints
    pieces: list[ShardPiece] = field(default_factory=list)
    left: float = 0.0  # bytes


def waves(problem: SyncProblem, style: BroadcastStrategy) -> Iterator[Wave]:
    """Yield the waves that deliver all shards. Raises Unreachable if no wave can bring the missing pieces."""
    filling = _Filling(problem, style)
    while filling.left:
        yield filling.wave()


class _Filling:
    def __init__(self, problem: SyncProblem, style: BroadcastStrategy) -> None:
        self._problem = problem
        self._style = style
        self._laying = EdgeLaying(problem, style.stripes)
        self._groups = _grouped(problem, style)
        lengths = [len(group.receivers) for group in self._groups]
        self._starts = np.cumsum([0, *lengths[:-1]])
        self._everyone = np.concatenate([group.receivers for group in self._groups] or [np.zeros(0, dtype=np.int64)])
        self._group_gbps = [float(problem.nic_gbps[group.receivers].sum()) for group in self._groups]
        # Gbps of the fastest circuit into each pod.
        self._into_gbps = problem.fastest_gbps.tolist()
        self._turn = 0
        self._waves = 0

    @property
    def left(self) -> bool:
        return any(group.pieces for group in self._groups)

    def wave(self) -> Wave:
        making = self._draft(self._style.crossing)
        self._fill(making)
        if not making.filled:  # each pod waits for something and reserves its circuits for that
            making = self._draft(0.0)
            self._fill(making)
        self._waves += 1
        if not making.filled:
            raise Unreachable(
                "no circuit leads to the PoDs that need shards:"
                f" {', '.join(sorted({self._problem.pods[group.pod] for group in self._groups if group.pieces}))}"
            )
        equalise(self._problem, making.crossings, making.circuits, making.between)
        wave = self._laying.wave(making)
        for pod, pieces in making.filled.items():
            for piece in pieces:
                receivers = piece.missing.pop(pod)
                old = piece.sources.get(pod)
                piece.sources[pod] = receivers if old is None else np.concatenate([old, receivers])
        for group in self._groups:
            group.pieces = [piece for piece in group.pieces if group.pod in piece.missing]
            group.left = sum(piece.bytes for piece in group.pieces)
        return wave

    def _draft(self, average: float) -> WaveDraft:
        """Return an empty wave. `average` is the average number of circuits that a pod reserves for receiving."""
        problem = self._problem
        wanting = np.zeros(len(problem.pods), dtype=np.int64)
        for group in self._groups:
            missing = sum(group.pod not in piece.sources for piece in group.pieces)
            wanting[group.pod] += min(missing, self._style.together)
        # Pods alternate in reserving one more if the average is not an integer.
        turns = np.arange(len(wanting)) + self._waves
        kept = np.floor((turns + 1) * average) - np.floor(turns * average)
        reserved = np.minimum(wanting, kept.astype(np.int64))
        ends, tors = len(problem.endpoints), len(problem.tors)
        circuits = problem.boundary_circuits.copy()
        relaying = np.maximum(0, circuits - reserved)
        return WaveDraft(
            sent_s=np.zeros(ends),
            received_s=np.zeros(ends),
            seeded_s=np.zeros(ends),
            group_sent=np.zeros(len(self._groups)),
            tor_out_s=np.zeros(tors),
            tor_in_s=np.zeros(tors),
            circuits=circuits,
            between=None if problem.pairs is None else problem.pairs.circuits.copy(),
            relaying=relaying,
            least={},
            changes=[0] * len(problem.pods),
        )

    def _fill(self, making: WaveDraft) -> None:
        most_roots = self._most_roots(making)
        refused = np.array([not group.pieces for group in self._groups])
        taken: list[set[int]] = [set() for _ in self._groups]  # pieces of each group that are in the wave
        while not refused.all():
            number = self._next_group(making, refused)
            group = self._groups[number]
            candidates = [piece for piece in group.pieces if id(piece) not in taken[number]][:_LOOK_AHEAD]
            piece = self._take(making, group, candidates, most_roots)
            if piece is None:
                refused[number] = True
            else:
                taken[number].add(id(piece))
                self._turn += 1

    def _most_roots(self, making: WaveDraft) -> tuple[int, int]:
        """Return how many crossings may start in one wave in pods that need no shard: the maximum per piece, and the
        maximum per family of pieces with the same receivers."""
        needed = {group.pod for group in self._groups if group.pieces}
        free = [pod for pod in range(len(self._problem.pods)) if pod not in needed]
        circuits = int(making.circuits[free].sum())
        families = {piece.family for group in self._groups for piece in group.pieces[:1]}
        return max(1, int(circuits / self._style.crossing)), max(1, circuits // max(1, len(families)))

    def _next_group(self, making: WaveDraft, refused: "np.typing.NDArray[np.bool_]") -> int:
        most_s = np.maximum.reduceat(making.received_s[self._everyone], self._starts)
        most_s[refused] = np.inf
        least = np.flatnonzero(most_s <= most_s.min() / _LESS)
        return int(max(least, key=lambda number: (self._groups[number].left, -number)))

    def _take(
        self, making: WaveDraft, group: PieceGroup, candidates: Sequence[ShardPiece], most_roots: tuple[int, int]
    ) -> ShardPiece | None:
        """Add to the wave the candidate that delays it least, and return the candidate. Return None if no candidate
        fits."""
        best: tuple[tuple[float, ...], ShardPiece, int, int, float] | None = None
        for order, piece in enumerate(candidates):
            floor_s = self._floor_s(making, group, piece)
            amount = piece.bytes * len(group.receivers)
            if (making.delivered + amount) * making.floor_s < making.delivered * floor_s * _LESS:
                continue
            if making.delivered and not self._can_spread(making, group, piece, floor_s):
                continue
            if group.pod in piece.sources:
                return self._booked(making, group, piece, floor_s)
            if making.circuits[group.pod] <= 0:
                continue
            for rank, sender, above in self._ways(making, piece, group.pod, floor_s, most_roots):
                if rank[0] > 0 and making.delivered:
                    continue
                if best is None or (*rank, order) < best[0]:
                    best = (*rank, order), piece, sender, above, floor_s
        if best is None:
            return None
        _, piece, sender, above, floor_s = best
        self._cross(making, group, piece, sender, above)
        floor_s = max(floor_s, piece.gigabits / self._problem.circuit_gbps(self._pod(sender), group.pod))
        return self._booked(making, group, piece, floor_s)

    def _floor_s(self, making: WaveDraft, group: PieceGroup, piece: ShardPiece) -> float:
        nic_gbps = self._problem.nic_gbps[group.receivers]
        own_s = float((making.received_s[group.receivers] + piece.gigabits / nic_gbps).max())
        if not making.delivered:
            own_s *= self._style.together
        if group.pod not in piece.sources:  # over one circuit, if NICs are faster
            own_s = max(own_s, piece.gigabits / self._into_gbps[group.pod])
        return max(making.floor_s, own_s)

    def _can_spread(self, making: WaveDraft, group: PieceGroup, piece: ShardPiece, floor_s: float) -> bool:
        """Return whether the group's receivers can send the piece to each other within `floor_s` seconds, in addition
        to the pieces that they already send in the wave."""
        number = piece.groups[group.pod]
        inside = self._sent_inside(group, piece) * piece.gigabits
        return not inside or making.group_sent[number] + inside <= floor_s * self._group_gbps[number] / _LESS

    def _sent_inside(self, group: PieceGroup, piece: ShardPiece) -> int:
        return len(group.receivers) - (group.pod not in piece.sources)

    def _booked(self, making: WaveDraft, group: PieceGroup, piece: ShardPiece, floor_s: float) -> ShardPiece:
        problem, pod = self._problem, group.pod
        making.received_s[group.receivers] += piece.gigabits / problem.nic_gbps[group.receivers]
        there = set(problem.tor[piece.sources[pod]].tolist()) if pod in piece.sources else set()
        for tor in set(problem.tor[group.receivers].tolist()) - there:
            if problem.tor_gbps[tor] > 0:
                making.tor_in_s[tor] += piece.gigabits / problem.tor_gbps[tor]
        making.floor_s = max(floor_s, float(making.tor_in_s.max(initial=0.0)))
        making.delivered += piece.bytes * len(group.receivers)
        making.group_sent[piece.groups[pod]] += self._sent_inside(group, piece) * piece.gigabits
        making.filled.setdefault(pod, []).append(piece)
        return piece

    def _ways(
        self, making: WaveDraft, piece: ShardPiece, into: int, floor_s: float, most_roots: tuple[int, int]
    ) -> Iterator[tuple[tuple[float, ...], int, int]]:
        """Yield the possible senders of the piece into pod `into`, each as (rank, endpoint, number of pods above). The
        sender with the lowest rank is the best. `floor_s` is the duration of the wave with the piece, unless the sender
        prolongs it, and `most_roots` is the result of `_most_roots`."""
        most, most_of_family = most_roots
        is_rooted = making.roots[id(piece)] >= most or making.family_roots[piece.family] >= most_of_family
        for pod, ends in piece.sources.items():
            if self._may_send(making, pod, into):
                if is_rooted and pod not in piece.groups:
                    continue
                yield self._rank(making, piece, self._least_busy(making, piece, ends, pod), into, 0, floor_s)
        for pod, (seed, above) in making.seeds.get(id(piece), {}).items():
            if self._may_send(making, pod, into):
                yield self._rank(making, piece, seed, into, above, floor_s)
                if self._style.stripes > 1:
                    continue  # other endpoints receive it in parts, none of which arrives fast enough
                # An endpoint that gets it from the seed is later, but the seed may be busy with its own pod.
                other = self._least_busy(making, piece, piece.missing[pod], pod)
                yield self._rank(making, piece, other, into, above + 1, floor_s)

    def _may_send(self, making: WaveDraft, pod: int, into: int) -> bool:
        if making.between is not None and making.between[pod, into] <= 0:
            return False
        return bool(making.relaying[pod] > 0 and making.circuits[pod] > 0)

    def _rank(
        self, making: WaveDraft, piece: ShardPiece, sender: int, into: int, above: int, floor_s: float
    ) -> tuple[tuple[float, ...], int, int]:
        after_s = self._after_sending_s(making, piece, sender)
        if making.between is not None:
            after_s = max(after_s, piece.gigabits / self._problem.circuit_gbps(self._pod(sender), into))
        return (
            (max(0.0, after_s - floor_s / _LESS), above, -int(making.relaying[self._pod(sender)]), after_s),
            sender,
            above,
        )

    def _cross(self, making: WaveDraft, group: PieceGroup, piece: ShardPiece, sender: int, above: int) -> None:
        problem, src_pod, pod = self._problem, self._pod(sender), group.pod
        seed = self._least_busy(making, piece, group.receivers, pod)
        making.sent_s[sender] += piece.gigabits / problem.nic_gbps[sender]
        making.tor_out_s[problem.tor[sender]] += piece.gigabits / problem.tor_gbps[problem.tor[sender]]
        making.seeded_s[seed] += piece.gigabits / problem.nic_gbps[seed]
        if (number := piece.groups.get(src_pod)) is not None:
            making.group_sent[number] += piece.gigabits
        else:
            making.roots[id(piece)] += 1
            making.family_roots[piece.family] += 1
        making.circuits[[src_pod, pod]] -= 1
        if making.between is not None:
            making.between[src_pod, pod] -= 1
        making.relaying[src_pod] -= 1
        making.relaying[pod] = min(making.relaying[pod], making.circuits[pod])
        making.changes[src_pod] += 1
        making.changes[pod] += 1
        making.crossings.append(PodCrossing(piece, sender, seed))
        making.seeds.setdefault(id(piece), {})[pod] = seed, above + 1

    def _least_busy(self, making: WaveDraft, piece: ShardPiece, ends: Ints, pod: int) -> int:
        """Return the least busy of the endpoints `ends` of a pod, by the load of the endpoints and their ToRs. Equally
        busy endpoints are chosen alternately."""
        key = id(ends), piece.bytes
        known = making.least.get(key)
        if known is None or known[0] != making.changes[pod]:
            known = making.least[key] = making.changes[pod], self._least(making, piece, ends)
        return int(known[1][self._turn % len(known[1])])

    def _least(self, making: WaveDraft, piece: ShardPiece, ends: Ints) -> Ints:
        problem = self._problem
        tors = problem.tor[ends]
        sent_s = making.sent_s[ends] + making.seeded_s[ends]
        busy_s = np.maximum(sent_s, making.tor_out_s[tors])
        busy_s = np.where(problem.tor_gbps[tors] > 0, busy_s + piece.gigabits / problem.nic_gbps[ends], np.inf)
        least = np.flatnonzero(busy_s <= busy_s.min() / _LESS)
        # Among equals, prefer one whose neighbours below the same ToR send little, so that a tree can continue there.
        beside_s = np.bincount(tors, weights=sent_s)[tors[least]]
        freest: Ints = ends[least[beside_s <= beside_s.min() / _LESS]]
        return freest

    def _after_sending_s(self, making: WaveDraft, piece: ShardPiece, sender: int) -> float:
        problem = self._problem
        tor, group = problem.tor[sender], piece.groups.get(self._pod(sender))
        if problem.tor_gbps[tor] <= 0:
            return float("inf")
        after_s = max(
            float(making.sent_s[sender] + making.seeded_s[sender] + piece.gigabits / problem.nic_gbps[sender]),
            float(making.tor_out_s[tor] + piece.gigabits / problem.tor_gbps[tor]),
        )
        if group is None:
            return after_s
        return max(after_s, float(making.group_sent[group] + piece.gigabits) / self._group_gbps[group])

    def _pod(self, endpoint: int) -> int:
        return int(self._problem.pod[endpoint])


def _grouped(problem: SyncProblem, style: BroadcastStrategy) -> list[PieceGroup]:
    groups: list[PieceGroup] = []
    number_of: dict[tuple[int, tuple[int, ...]], int] = {}
    families: dict[tuple[int, ...], int] = {}
    same: dict[tuple[int, ...], Ints] = {}  # one array per set of endpoints, so that cached values are shared
    for number in _in_turn(problem):
        shard = problem.shards[number]
        missing, held = _by_pod(problem, shard.receivers, same), _by_pod(problem, shard.holders, same)
        own: dict[int, int] = {}
        for pod, receivers in missing.items():
            key = pod, tuple(receivers.tolist())
            if key not in number_of:
                number_of[key] = len(groups)
                groups.append(PieceGroup(pod, receivers))
            own[pod] = number_of[key]
        family = families.setdefault(tuple(sorted(shard.receivers)), len(families))
        pieces = [
            ShardPiece(number, offset, size, dict(missing), own, family, dict(held))
            for offset, size in cut_to(shard.bytes, style.piece_bytes)
        ]
        for place in own.values():
            groups[place].pieces += pieces
            groups[place].left += shard.bytes
    return groups


def _in_turn(problem: SyncProblem) -> list[int]:
    """Return the indices of the shards that have receivers. Shards held in different pods alternate, so that all
    holders keep sending."""
    counts: Counter[frozenset[int]] = Counter()
    order: list[tuple[int, int]] = []
    for number, shard in enumerate(problem.shards):
        if shard.receivers:
            held = frozenset(problem.pod[list(shard.holders)].tolist())
            order.append((counts[held], number))
            counts[held] += 1
    return [number for _, number in sorted(order)]


def _by_pod(problem: SyncProblem, endpoints: Sequence[int], same: dict[tuple[int, ...], Ints]) -> dict[int, Ints]:
    return {pod: same.setdefault(tuple(ends.tolist()), ends) for pod, ends in by_pod(problem, endpoints).items()}
