"""Order the removals of cross-connects so that as few pairs and endpoints as possible fall below their floors (minimum
circuit counts). Has no side effects.

The order is independent of the number of moves per stage. Any sequence of stages can be split into single removals,
each followed by the additions whose ports are free. In the resulting order, no pair or endpoint ever has fewer circuits
than it has at its lowest point in the stages.
"""

import heapq
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from planner.fabric.transition_moves import TransitionMoves

TRIES_STEPS = 60_000  # removals ordered in total during the search for a cheaper order


@dataclass(frozen=True, slots=True)
class RemovalOrder:
    """An order of all removals, and the floors that it misses at some point. Removals and floors are given by index."""

    removals: tuple[int, ...]
    missed: frozenset[int]

    def cost(self, moves: TransitionMoves) -> tuple[int, int]:
        """Return the number of pairs that go dark and the number of endpoints that become thin. The first number takes
        precedence when costs are compared."""
        pairs = sum(moves.floors[floor].is_pair for floor in self.missed)
        return pairs, len(self.missed) - pairs


class TransitionReplay:
    """The state of a transition after some removals, each followed by the additions that it enables."""

    def __init__(self, moves: TransitionMoves) -> None:
        self.moves = moves
        self.room = [floor.room for floor in moves.floors]
        self.left = [len(floor.removals) for floor in moves.floors]  # remaining removals
        self.waiting = [len(needed) for needed in moves.blockers]
        self.down: list[int] = []
        self.is_down = bytearray(len(moves.removals))
        self.missed: set[int] = set()
        for addition, count in enumerate(self.waiting):
            if count == 0:
                self._add(addition)

    def remove(self, removal: int) -> list[int]:
        """Apply a removal and the additions that it enables. Return these additions."""
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
        """Return the additions that the removal would enable if it came next."""
        return [addition for addition in self.moves.opens[removal] if self.waiting[addition] == 1]

    def loses(self, removal: int) -> list[int]:
        """Return the floors whose room the removal would reduce, except floors that can no longer be missed."""
        given = {floor for addition in self.opens(removal) for floor in self.moves.addition_floors[addition]}
        return [
            floor
            for floor in self.moves.removal_floors[removal]
            if self.left[floor] > self.room[floor] and floor not in given
        ]

    def barred(self, removal: int) -> list[int]:
        """Return the floors that would be missed if the removal came next."""
        return [floor for floor in self.moves.removal_floors[removal] if self.room[floor] < 1]

    def order(self) -> RemovalOrder:
        return RemovalOrder(tuple(self.down), frozenset(self.missed))


def replayed(moves: TransitionMoves, removals: Iterable[int]) -> RemovalOrder:
    replay = TransitionReplay(moves)
    for removal in removals:
        replay.remove(removal)
    return replay.order()


def doomed(moves: TransitionMoves) -> frozenset[int]:
    """Return the floors that every order misses. A floor is missed by every order if it has no room before the first
    removal and each of its additions must wait for one of its removals."""
    missed = set()
    for number, floor in enumerate(moves.floors):
        own = set(floor.removals)
        if floor.room + sum(own.isdisjoint(moves.blockers[addition]) for addition in floor.additions) == 0:
            missed.add(number)
    return frozenset(missed)


def harmless(moves: TransitionMoves, abandoned: frozenset[int]) -> TransitionReplay:
    """Apply removals as long as some removal leaves every floor, except those in `abandoned`, at least as much room as
    before. Return the resulting state. No order gets worse by beginning with these removals, because an earlier removal
    never delays an addition."""
    return _Walk(moves, abandoned, range(len(moves.removals))).run(harmless_only=True)


def postponed(moves: TransitionMoves, start: TransitionReplay) -> list[int]:
    """Return the removals that may come after all other removals, in an order that does no harm.

    These removals enable no addition for a floor that can still be missed. Once they are set aside, fewer floors can be
    missed, so the rule is applied repeatedly.
    """
    left, late = list(start.left), list[int]()
    pending = [removal for removal, down in enumerate(start.is_down) if not down]
    while True:
        awaited = {
            addition
            for number, floor in enumerate(moves.floors)
            if left[number] > start.room[number]
            for addition in floor.additions
        }
        idle = [removal for removal in pending if awaited.isdisjoint(moves.opens[removal])]
        if not idle:
            return late[::-1]
        for removal in idle:
            late.append(removal)
            for floor in moves.removal_floors[removal]:
                left[floor] -= 1
        gone = set(idle)
        pending = [removal for removal in pending if removal not in gone]


def short_order(
    moves: TransitionMoves, abandoned: frozenset[int] = frozenset(), turn: Sequence[int] = ()
) -> RemovalOrder:
    """Find a good order quickly, by following chains of removals and additions as far as possible.

    The floors in `abandoned` are ignored. Ties are resolved by the order of removals in `turn`.
    """
    return _Walk(moves, doomed(moves) | abandoned, turn or range(len(moves.removals))).run().order()


def kept_order(moves: TransitionMoves, known: RemovalOrder) -> RemovalOrder:
    """Return an order that follows `known` as far as the floors allow, ignoring the floors that `known` misses."""
    return _Walk(moves, doomed(moves) | known.missed, known.removals, strict=True).run().order()


def tried_again(moves: TransitionMoves, best: RemovalOrder, at_least: tuple[int, int]) -> RemovalOrder:
    """Return the best of `best` and many random orders. Some random orders ignore only the floors that every order
    misses. Others ignore all but one of the floors that `best` misses. The search stops when the cost `at_least` is
    reached or enough orders have been tried."""
    hopeless, numbers = doomed(moves), list(range(len(moves.removals)))
    draw, steps = random.Random(0), 0
    while best.cost(moves) > at_least and steps < TRIES_STEPS:
        for dropped in [*(best.missed - {spared} for spared in sorted(best.missed - hopeless)), hopeless]:
            draw.shuffle(numbers)
            tried = _Walk(moves, hopeless | dropped, numbers).run().order()
            steps += len(numbers)
            if tried.cost(moves) < best.cost(moves):
                best = tried
                break
            if steps >= TRIES_STEPS:
                break
    return best


class _Walk:
    """Applies one removal after another, the least harmful first. If every remaining removal would miss a floor, some
    floors are abandoned."""

    def __init__(
        self, moves: TransitionMoves, abandoned: frozenset[int], ties: Sequence[int], strict: bool = False
    ) -> None:
        self._moves = moves
        self._strict = strict  # only `ties` decides the order
        self._abandoned = set(abandoned)
        self._replay = TransitionReplay(moves)
        self._rank = [0] * len(moves.removals)
        for place, removal in enumerate(ties):
            self._rank[removal] = place
        self._heap: list[tuple[int, int, int, int, int]] = []
        self._parked: dict[int, set[int]] = {}  # floor -> removals that it blocks

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
        for addition in self._moves.opens[removal]:  # the next removal in the chain may now enable it
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
        """Abandon the floors that one of the remaining removals would miss. The removal is chosen that misses the
        fewest floors of pairs and, among equals, the fewest floors of endpoints. If removals are still equal, the
        floors that permit the most removals are abandoned."""
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
