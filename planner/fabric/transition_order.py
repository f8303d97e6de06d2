"""What a transition has to move, and in which order cross-connects come down so that as few pairs and endpoints as can
be fall below their floors. Pure.

A cross-connect that comes down costs its pair and both endpoints a circuit, one that goes up gives them one. An
addition waits for the at most two removals that hold its ports. Adding never harms: its ports belong to nothing else
that is to come, and no count falls. So what can go wrong is decided by the order of the removals alone.

How many moves a stage takes does not matter here: any stages are also one removal after the other, with every addition
up as soon as its ports are free, and no point of that order is worse than the stages were.
"""

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from planner.fabric.model import Cabling, EndpointId, OcsId, Pair, PortPair

Subject = Pair | EndpointId  # what suffers where too few circuits are left


@dataclass(frozen=True, slots=True)
class CircuitFloor:
    """A pair or an endpoint that may lose no more than `room` circuits beyond those that it is given meanwhile."""

    of: Subject
    room: int
    removals: tuple[int, ...]
    additions: tuple[int, ...]

    @property
    def is_pair(self) -> bool:
        return isinstance(self.of, tuple)


@dataclass(frozen=True, slots=True)
class TransitionMoves:
    """Removals and additions by number, in sorted order, and the floors that could be missed at all."""

    removals: tuple[PortPair, ...]
    additions: tuple[PortPair, ...]
    blockers: tuple[tuple[int, ...], ...]  # of each addition: the removals that free its ports
    opens: tuple[tuple[int, ...], ...]  # of each removal: the additions on its ports
    floors: tuple[CircuitFloor, ...]
    removal_floors: tuple[tuple[int, ...], ...]
    addition_floors: tuple[tuple[int, ...], ...]

    @property
    def count(self) -> int:
        return len(self.removals) + len(self.additions)

    def of_pairs_only(self) -> "TransitionMoves":
        """The same as though endpoints had no floors."""
        return self.with_floors(tuple(floor for floor in self.floors if floor.is_pair))

    def with_floors(self, floors: tuple[CircuitFloor, ...]) -> "TransitionMoves":
        return replace(
            self,
            floors=floors,
            removal_floors=_inverse((floor.removals for floor in floors), len(self.removals)),
            addition_floors=_inverse((floor.additions for floor in floors), len(self.additions)),
        )


def lit_floors(
    cabling: Cabling, current: Iterable[PortPair], target: Iterable[PortPair], min_fraction: float
) -> dict[Subject, int]:
    """The fewest circuits that each pair and endpoint keeps at every point; those that need none are left out."""
    before, after = circuits(cabling, current), circuits(cabling, target)
    floors: dict[Subject, int] = {}
    for subject in before.keys() & after.keys():
        fewest = 1 if isinstance(subject, tuple) else _share(min_fraction, min(before[subject], after[subject]))
        if fewest > 0:
            floors[subject] = fewest
    return floors


def _share(fraction: float, of: int) -> int:
    """Rounded down; but 0.29 of 100 is 29, though the product of the floats is a hair less."""
    return math.floor(fraction * of * (1 + 4 * math.ulp(1.0)))


def circuits(cabling: Cabling, cross_connects: Iterable[PortPair]) -> dict[Subject, int]:
    """How many circuits each pair and each endpoint has. Raises ValueError for what joins no two endpoints."""
    counts: dict[Subject, int] = defaultdict(int)
    for cross_connect in cross_connects:
        for subject in subjects(cabling, cross_connect):
            counts[subject] += 1
    return dict(counts)


def subjects(cabling: Cabling, cross_connect: PortPair) -> tuple[Subject, Subject, Subject]:
    """The pair that it joins, and its two endpoints."""
    pair = cabling.ends(cross_connect)
    if pair is None:
        raise ValueError(f"{cross_connect} must join two endpoints")
    return (pair, *pair)


def moves_between(
    cabling: Cabling, current: frozenset[PortPair], target: frozenset[PortPair], min_fraction: float
) -> TransitionMoves:
    removals, additions = tuple(sorted(current - target)), tuple(sorted(target - current))
    holder = {port: number for number, removal in enumerate(removals) for port in _ports(removal)}
    blockers = tuple(
        tuple(sorted({holder[port] for port in _ports(addition) if port in holder})) for addition in additions
    )
    opens: list[list[int]] = [[] for _ in removals]
    for addition, needed in enumerate(blockers):
        for removal in needed:
            opens[removal].append(addition)
    floors = _floors(cabling, current, removals, additions, lit_floors(cabling, current, target, min_fraction))
    return TransitionMoves(removals, additions, blockers, tuple(map(tuple, opens)), (), (), ()).with_floors(
        tuple(floors)
    )


def _ports(cross_connect: PortPair) -> list[tuple[OcsId, int]]:
    return [(cross_connect.switch, port) for port in cross_connect.ports]


def _floors(
    cabling: Cabling,
    current: frozenset[PortPair],
    removals: tuple[PortPair, ...],
    additions: tuple[PortPair, ...],
    fewest: Mapping[Subject, int],
) -> Iterator[CircuitFloor]:
    """Pairs first, both in sorted order; without those that could lose all that they ever lose at once."""
    before = circuits(cabling, current)
    down, up = _by_subject(cabling, removals), _by_subject(cabling, additions)
    for subject in sorted(fewest, key=lambda subject: (isinstance(subject, str), subject)):
        room = before[subject] - fewest[subject]
        if len(down[subject]) > room:
            yield CircuitFloor(subject, room, tuple(down[subject]), tuple(up[subject]))


def _by_subject(cabling: Cabling, cross_connects: tuple[PortPair, ...]) -> dict[Subject, list[int]]:
    numbers: dict[Subject, list[int]] = defaultdict(list)
    for number, cross_connect in enumerate(cross_connects):
        for subject in subjects(cabling, cross_connect):
            numbers[subject].append(number)
    return numbers


def _inverse(members: Iterable[tuple[int, ...]], count: int) -> tuple[tuple[int, ...], ...]:
    """For each of `count` numbers, the places at which it is a member."""
    places: list[list[int]] = [[] for _ in range(count)]
    for place, numbers in enumerate(members):
        for number in numbers:
            places[number].append(place)
    return tuple(map(tuple, places))


@dataclass(frozen=True, slots=True)
class RemovalOrder:
    """Every removal, and the floors that are missed on the way."""

    removals: tuple[int, ...]
    missed: frozenset[int]

    def cost(self, moves: TransitionMoves) -> tuple[int, int]:
        """Pairs that go dark, then endpoints that grow thin: what is to be least, in this order."""
        pairs = sum(moves.floors[floor].is_pair for floor in self.missed)
        return pairs, len(self.missed) - pairs


class TransitionReplay:
    """The cross-connects after some removals, each followed by the additions that it makes possible."""

    def __init__(self, moves: TransitionMoves) -> None:
        self.moves = moves
        self.room = [floor.room for floor in moves.floors]
        self.left = [len(floor.removals) for floor in moves.floors]  # removals still to come
        self.waiting = [len(needed) for needed in moves.blockers]
        self.down: list[int] = []
        self.is_down = bytearray(len(moves.removals))
        self.missed: set[int] = set()
        for addition, count in enumerate(self.waiting):
            if count == 0:
                self._add(addition)

    def remove(self, removal: int) -> list[int]:
        """Returns the additions that go up."""
        self.down.append(removal)
        self.is_down[removal] = 1
        for floor in self.moves.removal_floors[removal]:
            self.room[floor] -= 1
            self.left[floor] -= 1
            if self.room[floor] < 0:
                self.missed.add(floor)
        opened = []
        for addition in self.moves.opens[removal]:
            self.waiting[addition] -= 1
            if self.waiting[addition] == 0:
                opened.append(addition)
                self._add(addition)
        return opened

    def _add(self, addition: int) -> None:
        for floor in self.moves.addition_floors[addition]:
            self.room[floor] += 1

    def opens(self, removal: int) -> list[int]:
        """The additions that would go up at once."""
        return [addition for addition in self.moves.opens[removal] if self.waiting[addition] == 1]

    def loses(self, removal: int) -> list[int]:
        """The floors that would be nearer than before, of those that may yet be missed."""
        given = {floor for addition in self.opens(removal) for floor in self.moves.addition_floors[addition]}
        return [
            floor
            for floor in self.moves.removal_floors[removal]
            if self.left[floor] > self.room[floor] and floor not in given
        ]

    def barred(self, removal: int) -> list[int]:
        """The floors that it would miss."""
        return [floor for floor in self.moves.removal_floors[removal] if self.room[floor] < 1]

    def order(self) -> RemovalOrder:
        return RemovalOrder(tuple(self.down), frozenset(self.missed))


def replayed(moves: TransitionMoves, removals: Iterable[int]) -> RemovalOrder:
    replay = TransitionReplay(moves)
    for removal in removals:
        replay.remove(removal)
    return replay.order()


def doomed(moves: TransitionMoves) -> frozenset[int]:
    """Floors that every order misses, whatever else may suffer: nothing may be lost before the first removal, and
    nothing of theirs can be added before it."""
    missed = set()
    for number, floor in enumerate(moves.floors):
        own = set(floor.removals)
        if floor.room + sum(own.isdisjoint(moves.blockers[addition]) for addition in floor.additions) == 0:
            missed.add(number)
    return frozenset(missed)


def harmless(moves: TransitionMoves, abandoned: frozenset[int]) -> TransitionReplay:
    """As far as one gets by removals that leave every floor at least as far away as it was: no order is spoilt by
    beginning with them. (Counts are supermodular in what is down: what has come down early opens no less later.)"""
    return _Walk(moves, abandoned, range(len(moves.removals))).run(harmless_only=True)


def short_order(
    moves: TransitionMoves, abandoned: frozenset[int] = frozenset(), turn: Sequence[int] = ()
) -> RemovalOrder:
    """A good order, quickly: by walks along chains of ports, each carried on as long as it can be.

    It does without the floors `abandoned`, and takes the removals in `turn` where nothing else decides.
    """
    return _Walk(moves, doomed(moves) | abandoned, turn or range(len(moves.removals))).run().order()


def kept_order(moves: TransitionMoves, known: RemovalOrder) -> RemovalOrder:
    """The order of `known` as far as the floors allow it, and without those that it misses."""
    return _Walk(moves, doomed(moves) | known.missed, known.removals, strict=True).run().order()


class _Walk:
    """One removal after the other, the least harmful first; where each that is left misses a floor, some give way."""

    def __init__(
        self, moves: TransitionMoves, abandoned: frozenset[int], ties: Sequence[int], strict: bool = False
    ) -> None:
        self._moves = moves
        self._strict = strict  # nothing but the turn decides
        self._abandoned = set(abandoned)
        self._replay = TransitionReplay(moves)
        self._rank = [0] * len(moves.removals)
        for place, removal in enumerate(ties):
            self._rank[removal] = place
        self._heap: list[tuple[int, int, int, int, int]] = []
        self._parked: dict[int, set[int]] = {}  # floor -> removals that it bars

    def run(self, harmless_only: bool = False) -> TransitionReplay:
        replay = self._replay
        for removal in range(len(self._moves.removals)):
            self._push(removal)
        while len(replay.down) < len(self._moves.removals):
            following = self._next(harmless_only)
            if following is not None:
                self._remove(following)
            elif harmless_only:
                break
            else:
                self._abandon_floors()
        return replay

    def _key(self, removal: int) -> tuple[int, int, int, int, int]:
        if self._strict:
            return (0, 0, 0, self._rank[removal], removal)
        lost = [floor for floor in self._replay.loses(removal) if floor not in self._abandoned]
        carries_on = bool(self._replay.opens(removal))
        room = min((self._replay.room[floor] for floor in lost), default=0)
        return (0 if not lost else 1 if carries_on else 2, len(lost), -room, self._rank[removal], removal)

    def _push(self, removal: int) -> None:
        heapq.heappush(self._heap, self._key(removal))

    def _next(self, harmless_only: bool) -> int | None:
        while self._heap:
            key = heapq.heappop(self._heap)
            removal = key[-1]
            if self._replay.is_down[removal]:
                continue
            barred = self._barred(removal)
            if barred:
                self._parked.setdefault(barred[0], set()).add(removal)
                continue
            now = self._key(removal)
            if now > key:
                heapq.heappush(self._heap, now)
            elif now[0] == 0 or not harmless_only:
                return removal
        return None

    def _barred(self, removal: int) -> list[int]:
        return [floor for floor in self._replay.barred(removal) if floor not in self._abandoned]

    def _remove(self, removal: int) -> None:
        opened = self._replay.remove(removal)
        for addition in self._moves.opens[removal]:  # the next in the chain may now open it
            for other in self._moves.blockers[addition]:
                if not self._replay.is_down[other]:
                    self._push(other)
        for addition in opened:
            for floor in self._moves.addition_floors[addition]:
                self._free(floor)

    def _free(self, floor: int) -> None:
        for removal in sorted(self._parked.pop(floor, ())):
            if not self._replay.is_down[removal]:
                self._push(removal)

    def _abandon_floors(self) -> None:
        """The fewest floors that let a removal pass; of those the ones that let most pass."""
        barred = {
            removal: frozenset(self._barred(removal)) for removal, down in enumerate(self._replay.is_down) if not down
        }
        passing = Counter(barred.values())

        def harm(removal: int) -> tuple[int, int, int, int]:
            floors = barred[removal]
            pairs = sum(self._moves.floors[floor].is_pair for floor in floors)
            return pairs, len(floors) - pairs, -passing[floors], self._rank[removal]

        for floor in sorted(barred[min(barred, key=harm)]):
            self._abandoned.add(floor)
            self._free(floor)
