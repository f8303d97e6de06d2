"""The moves of a transition, the ports that each removal frees for additions, and the circuits that must stay up. Has
no side effects.

A removal takes one circuit from its pair and from both endpoints; an addition adds one circuit to each. An addition
waits for at most two removals, which hold its ports. An addition never does harm, because no other addition uses its
ports and no circuit count falls. Therefore, the order of the removals alone determines which pairs and endpoints have
too few circuits.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from planner.fabric.model import Cabling, EndpointId, Pair, PortPair

Subject = Pair | EndpointId  # suffers if too few circuits are left


@dataclass(frozen=True, slots=True)
class CircuitFloor:
    """A limit for a pair or an endpoint: its number of circuits should never be more than `room` below the initial
    number. `removals` and `additions` are the indices of the moves that affect the pair or endpoint."""

    of: Subject
    room: int
    removals: tuple[int, ...]
    additions: tuple[int, ...]

    @property
    def is_pair(self) -> bool:
        return isinstance(self.of, tuple)


@dataclass(frozen=True, slots=True)
class TransitionMoves:
    """The cross-connects that a transition removes and adds, in sorted order, and the floors (minimum numbers of
    circuits) that it could violate. All other fields refer to these by index. `removal_floors` and `addition_floors`
    list, for each removal and each addition, the floors that it affects."""

    removals: tuple[PortPair, ...]
    additions: tuple[PortPair, ...]
    blockers: tuple[tuple[int, ...], ...]  # per addition: the removals that free its ports
    opens: tuple[tuple[int, ...], ...]  # per removal: the additions on its ports
    floors: tuple[CircuitFloor, ...]
    removal_floors: tuple[tuple[int, ...], ...]
    addition_floors: tuple[tuple[int, ...], ...]

    @property
    def count(self) -> int:
        return len(self.removals) + len(self.additions)

    def of_pairs_only(self) -> "TransitionMoves":
        """Return the same moves with the floors of pairs only."""
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
    """Return the minimum number of circuits that each pair and endpoint should keep throughout the transition. Pairs
    and endpoints with a minimum of 0 are omitted."""
    before, after = circuits(cabling, current), circuits(cabling, target)
    floors: dict[Subject, int] = {}
    for subject in before.keys() & after.keys():
        fewest = 1 if isinstance(subject, tuple) else _share(min_fraction, min(before[subject], after[subject]))
        if fewest > 0:
            floors[subject] = fewest
    return floors


def _share(fraction: float, of: int) -> int:
    """Return `fraction` of `of`, rounded down and corrected for rounding errors. For example, 0.29 of 100 is 29,
    although the floating-point product is slightly less."""
    return math.floor(fraction * of * (1 + 4 * math.ulp(1.0)))


def circuits(cabling: Cabling, cross_connects: Iterable[PortPair]) -> dict[Subject, int]:
    """Return the number of circuits of each pair and endpoint. Raises ValueError if a cross-connect does not connect
    two endpoints."""
    counts: dict[Subject, int] = defaultdict(int)
    for cross_connect in cross_connects:
        for subject in subjects(cabling, cross_connect):
            counts[subject] += 1
    return dict(counts)


def subjects(cabling: Cabling, cross_connect: PortPair) -> tuple[Subject, Subject, Subject]:
    """Return the pair that the cross-connect connects, and its two endpoints. Raises ValueError if the cross-connect
    does not connect two endpoints."""
    pair = cabling.ends(cross_connect)
    if pair is None:
        raise ValueError(f"cross-connect {cross_connect} must connect two endpoints")
    return (pair, *pair)


def moves_between(
    cabling: Cabling, current: frozenset[PortPair], target: frozenset[PortPair], min_fraction: float
) -> TransitionMoves:
    removals, additions = tuple(sorted(current - target)), tuple(sorted(target - current))
    holder = {port: number for number, removal in enumerate(removals) for port in removal.sides}
    blockers = tuple(
        tuple(sorted({holder[port] for port in addition.sides if port in holder})) for addition in additions
    )
    opens: list[list[int]] = [[] for _ in removals]
    for addition, needed in enumerate(blockers):
        for removal in needed:
            opens[removal].append(addition)
    floors = _floors(cabling, current, removals, additions, lit_floors(cabling, current, target, min_fraction))
    return TransitionMoves(removals, additions, blockers, tuple(map(tuple, opens)), (), (), ()).with_floors(
        tuple(floors)
    )


def _floors(
    cabling: Cabling,
    current: frozenset[PortPair],
    removals: tuple[PortPair, ...],
    additions: tuple[PortPair, ...],
    fewest: Mapping[Subject, int],
) -> Iterator[CircuitFloor]:
    """Yield the floors of pairs in sorted order, then the floors of endpoints in sorted order. Pairs and endpoints that
    could lose all their removals at once without falling below their minimum (`fewest`) are omitted."""
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
    """Return, for each number from 0 to `count` - 1, the indices of the tuples in `members` that contain the number."""
    places: list[list[int]] = [[] for _ in range(count)]
    for place, numbers in enumerate(members):
        for number in numbers:
            places[number].append(place)
    return tuple(map(tuple, places))
