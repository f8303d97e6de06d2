"""From one set of cross-connects to another in stages, without a pair or an endpoint going without light. Pure.

A stage's removals come down before its additions go up. Cross-connects of both sets are never touched, and none that is
in neither is used. What is least, in this order: pairs that go dark, endpoints that grow thin, stages. Carrying a stage
out, drained and verified, is `orchestrrl/fabric/stage_commit.py`.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from planner.fabric.model import Cabling, EndpointId, Pair, PortPair
from planner.fabric.transition_exact import StageOf, fewest_missed, fewest_stages
from planner.fabric.transition_order import (
    RemovalOrder,
    Subject,
    TransitionMoves,
    TransitionReplay,
    circuits,
    lit_floors,
    moves_between,
    subjects,
)

CHAIN = 100  # links of a chain of removals that are looked at

PointKind = Literal["start", "removed", "added"]


@dataclass(frozen=True, slots=True)
class TransitionProblem:
    """`min_fraction` of an endpoint's circuits before or after, whichever are fewer, stays up: rounded down."""

    cabling: Cabling
    current: frozenset[PortPair]
    target: frozenset[PortPair]
    max_moves_per_stage: int  # removals plus additions
    min_fraction: float

    def __post_init__(self) -> None:
        if self.max_moves_per_stage < 1:
            raise ValueError(f"max_moves_per_stage must be >= 1, got {self.max_moves_per_stage}")
        if not 0 <= self.min_fraction <= 1:
            raise ValueError(f"min_fraction must be in 0..1, got {self.min_fraction}")
        for name, cross_connects in (("current", self.current), ("target", self.target)):
            circuits(self.cabling, cross_connects)
            if twice := _used_twice(cross_connects):
                raise ValueError(f"{name} must use a port once, got {', '.join(twice)}")


@dataclass(frozen=True, slots=True)
class TransitionStage:
    """What comes down, then what goes up."""

    remove: tuple[PortPair, ...]
    add: tuple[PortPair, ...]


@dataclass(frozen=True, slots=True)
class Transition:
    """Stages, and whom they fail: `dark_pairs` have circuits before and after and none at some point between,
    `thin_endpoints` have fewer than their floor at some point.

    No transition has fewer than `stages_at_least` stages, unless more suffer. `fewest_suffer`: it is proven that no
    order makes fewer pairs dark, and with as few dark ones fewer endpoints thin.
    """

    stages: tuple[TransitionStage, ...]
    dark_pairs: tuple[Pair, ...]
    thin_endpoints: tuple[EndpointId, ...]
    stages_at_least: int
    fewest_suffer: bool


@dataclass(frozen=True, slots=True)
class CircuitsUp:
    """Circuits at one point, of the pairs and endpoints that have any before or after."""

    stage: int
    kind: PointKind
    pairs: Mapping[Pair, int]
    endpoints: Mapping[EndpointId, int]


def transition(problem: TransitionProblem) -> Transition:
    """The fewest that suffer and the fewest stages, proven where the problem is small enough, else close to that.

    The same problem has the same answer.
    """
    moves = moves_between(problem.cabling, problem.current, problem.target, problem.min_fraction)
    order, proven = fewest_missed(moves)
    max_moves = problem.max_moves_per_stage
    stage_of, at_least = packed(moves, order, max_moves), math.ceil(moves.count / max_moves)
    if (count := max(stage_of, default=-1) + 1) > at_least:
        staged = fewest_stages(moves, max_moves, order.cost(moves), at_least, stage_of, count)
        at_least, stage_of = staged.at_least, staged.stage_of or stage_of
    return _transition(problem, moves, smoothed(moves, stage_of, max_moves), at_least, proven)


def _transition(
    problem: TransitionProblem, moves: TransitionMoves, stage_of: StageOf, at_least: int, proven: bool
) -> Transition:
    count = max(stage_of, default=-1) + 1
    remove: list[list[PortPair]] = [[] for _ in range(count)]
    add: list[list[PortPair]] = [[] for _ in range(count)]
    for stage, removal in zip(stage_of, moves.removals, strict=False):
        remove[stage].append(removal)
    for stage, addition in zip(stage_of[len(moves.removals) :], moves.additions, strict=True):
        add[stage].append(addition)
    stages = tuple(TransitionStage(tuple(down), tuple(up)) for down, up in zip(remove, add, strict=True))
    fewest = lit_floors(problem.cabling, problem.current, problem.target, problem.min_fraction)
    suffer = {each for _, _, up, lost in _counted(problem, stages) for each in lost if up[each] < fewest.get(each, 0)}
    dark = tuple(sorted(subject for subject in suffer if isinstance(subject, tuple)))
    thin = tuple(sorted(subject for subject in suffer if isinstance(subject, str)))
    return Transition(stages, dark, thin, at_least, proven)


def circuits_up(problem: TransitionProblem, planned: Transition) -> tuple[CircuitsUp, ...]:
    """The circuits that pairs and endpoints have at each point."""
    known = {*circuits(problem.cabling, problem.current), *circuits(problem.cabling, problem.target)}
    pairs = sorted(subject for subject in known if isinstance(subject, tuple))
    endpoints = sorted(subject for subject in known if isinstance(subject, str))
    return tuple(
        CircuitsUp(stage, kind, {pair: up[pair] for pair in pairs}, {endpoint: up[endpoint] for endpoint in endpoints})
        for stage, kind, up, _ in _counted(problem, planned.stages)
    )


def _counted(
    problem: TransitionProblem, stages: tuple[TransitionStage, ...]
) -> Iterator[tuple[int, PointKind, Counter[Subject], Iterable[Subject]]]:
    """At each point: how many circuits each has (the same object, kept up to date), and who has fewer than before."""
    up = Counter(circuits(problem.cabling, problem.current))
    yield 0, "start", up, ()
    for number, stage in enumerate(stages, start=1):
        lost = [subject for each in stage.remove for subject in subjects(problem.cabling, each)]
        up.subtract(lost)
        yield number, "removed", up, lost
        up.update(subject for each in stage.add for subject in subjects(problem.cabling, each))
        yield number, "added", up, ()


def packed(moves: TransitionMoves, order: RemovalOrder, max_moves: int) -> StageOf:
    """Stage by stage: additions whose ports are free, then whatever may come down, those first for which the longest
    chain of others waits.

    What is left of the order stays a way to the end throughout, so that no stage can run into a dead end: a removal is
    brought forward only where every floor bears it at each point that it overtakes.
    """
    return _Packing(moves, order, max_moves).run()


class _Packing:
    def __init__(self, moves: TransitionMoves, order: RemovalOrder, max_moves: int) -> None:
        self._moves, self._order, self._max_moves = moves, order, max_moves
        self._room = [floor.room for floor in moves.floors]  # with all that is taken so far
        self._stage_room = list(self._room)  # without this stage's additions
        self._waiting = [len(needed) for needed in moves.blockers]
        self._ready = [addition for addition, count in enumerate(self._waiting) if count == 0]
        behind = _behind(moves, order)
        self._pending = sorted(order.removals, key=lambda removal: -behind[removal])
        self._events = _events(moves, order)
        self._stage_of: StageOf = [-1] * moves.count
        self._stage = 0
        self._taken = 0

    def run(self) -> StageOf:
        while self._pending or self._ready:
            self._taken = 0
            self._stage_room = list(self._room)
            self._raise()
            self._lower()
            self._stage += 1
        return self._stage_of

    def _raise(self) -> None:
        """What is ready goes up, as far as the stage has moves left."""
        free = self._max_moves - self._taken
        for addition in self._ready[:free]:
            self._take(len(self._moves.removals) + addition)
            for floor in self._moves.addition_floors[addition]:
                self._room[floor] += 1
        del self._ready[:free]

    def _lower(self) -> None:
        kept = []
        for place, removal in enumerate(self._pending):
            if self._taken == self._max_moves:
                kept += self._pending[place:]
                break
            if self._may_come_down(removal):
                self._remove(removal)
            else:
                kept.append(removal)
        self._pending = kept

    def _remove(self, removal: int) -> None:
        self._take(removal)
        for floor in self._moves.removal_floors[removal]:
            self._room[floor] -= 1
            self._stage_room[floor] -= 1
        for addition in self._moves.opens[removal]:
            self._waiting[addition] -= 1
            if self._waiting[addition] == 0:
                self._ready.append(addition)
        self._raise()

    def _may_come_down(self, removal: int) -> bool:
        floors = [floor for floor in self._moves.removal_floors[removal] if floor not in self._order.missed]
        return all(self._stage_room[floor] >= 1 for floor in floors) and all(
            self._bears(floor, removal) for floor in floors
        )

    def _bears(self, floor: int, removal: int) -> bool:
        """Whether all that stands before `removal` in the order can still take place after it."""
        room = self._room[floor] - 1
        for move in self._events[floor]:
            if move == removal:
                return True
            if self._stage_of[move] < 0:
                if move >= len(self._moves.removals):
                    room += 1
                else:
                    room -= 1
                    if room < 0:
                        return False
        return True

    def _take(self, move: int) -> None:
        self._stage_of[move] = self._stage
        self._taken += 1


def _behind(moves: TransitionMoves, order: RemovalOrder) -> list[int]:
    """How many stages have to follow each removal: an addition that it opens may be what others wait for, and so on."""
    behind = [0] * len(moves.removals)
    bare = [floor for number, floor in enumerate(moves.floors) if floor.room == 0 and number not in order.missed]
    for _ in range(CHAIN):
        changed = False
        for floor in bare:
            if len(floor.additions) > 1:
                continue  # another may do
            waiting = 1 + max(behind[removal] for removal in floor.removals)
            for addition in floor.additions:
                for removal in moves.blockers[addition]:
                    changed |= waiting > behind[removal]
                    behind[removal] = max(behind[removal], waiting)
        if not changed:
            break
    return behind


def _events(moves: TransitionMoves, order: RemovalOrder) -> list[list[int]]:
    """For each floor the moves that touch it, in turn, each addition as soon as its ports are free."""
    events: list[list[int]] = [[] for _ in moves.floors]
    replay = TransitionReplay(moves)
    for addition, needed in enumerate(moves.blockers):
        if not needed:
            for floor in moves.addition_floors[addition]:
                events[floor].append(len(moves.removals) + addition)
    for removal in order.removals:
        for floor in moves.removal_floors[removal]:
            events[floor].append(removal)
        for addition in replay.remove(removal):
            for floor in moves.addition_floors[addition]:
                events[floor].append(len(moves.removals) + addition)
    return events


def smoothed(moves: TransitionMoves, stage_of: StageOf, max_moves: int) -> StageOf:
    """The same stages with more light: additions as early, removals as late as moves and ports allow. No count falls at
    any point."""
    stage_of, removals = list(stage_of), len(moves.removals)
    load: dict[int, int] = defaultdict(int)
    for stage in stage_of:
        load[stage] += 1
    last = max(stage_of, default=-1)

    def move_to(move: int, choices: Iterable[int]) -> None:
        for stage in choices:
            if load[stage] < max_moves:
                load[stage_of[move]] -= 1
                load[stage] += 1
                stage_of[move] = stage
                return

    for addition in sorted(range(len(moves.additions)), key=lambda addition: (stage_of[removals + addition], addition)):
        earliest = max((stage_of[removal] for removal in moves.blockers[addition]), default=0)
        move_to(removals + addition, range(earliest, stage_of[removals + addition]))
    for removal in sorted(range(removals), key=lambda removal: (-stage_of[removal], removal)):
        latest = min((stage_of[removals + addition] for addition in moves.opens[removal]), default=last)
        move_to(removal, range(latest, stage_of[removal], -1))
    return stage_of


def _used_twice(cross_connects: frozenset[PortPair]) -> list[str]:
    times = Counter((each.switch, port) for each in cross_connects for port in each.ports)
    return [f"port {port} of {switch}" for (switch, port), count in sorted(times.items()) if count > 1]
