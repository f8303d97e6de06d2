"""Pack the moves of a transition into few stages by list scheduling that follows a feasible order of removals. Has no
side effects."""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable

from planner.fabric.transition_moves import TransitionMoves
from planner.fabric.transition_order import RemovalOrder, TransitionReplay

CHAIN = 100  # length up to which chains of removals are followed

StageOf = list[int]  # [move]: its stage from 0; removals first, then additions


def packed(moves: TransitionMoves, order: RemovalOrder, max_moves: int, *, by_chains: bool) -> StageOf:
    """Return the stage of each move. Each stage takes additions whose ports are free, then removals that the floors
    permit. Removals are considered in the given order. If `by_chains` is True, removals that the longest chains of
    moves wait for come first.

    No stage can reach a dead end, because the remaining order stays feasible throughout. A removal is moved forward
    only if every floor allows it at each point that it passes.
    """
    return _Packing(moves, order, max_moves, by_chains).run()


class _Packing:
    def __init__(self, moves: TransitionMoves, order: RemovalOrder, max_moves: int, by_chains: bool) -> None:
        self._moves, self._order, self._max_moves = moves, order, max_moves
        self._room = [floor.room for floor in moves.floors]  # with everything taken so far
        self._stage_room = list(self._room)  # without this stage's additions
        self._waiting = [len(needed) for needed in moves.blockers]
        self._ready = [addition for addition, count in enumerate(self._waiting) if count == 0]
        self._pending = list(order.removals)
        if by_chains:
            behind = _behind(moves, order)
            self._pending.sort(key=lambda removal: -behind[removal])
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
        """Add to the current stage the additions whose ports are free, up to the stage's limit of moves."""
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
        """Return whether the floor allows `removal` to be made before all pending moves that precede it in the
        order."""
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
    """Return, for each removal, the number of stages that must follow it. Another removal may have to wait for an
    addition that this removal enables, and may itself enable an addition that a further removal has to wait for."""
    behind = [0] * len(moves.removals)
    bare = [floor for number, floor in enumerate(moves.floors) if floor.room == 0 and number not in order.missed]
    for _ in range(CHAIN):
        changed = False
        for floor in bare:
            if len(floor.additions) > 1:
                continue  # another addition may suffice
            waiting = 1 + max(behind[removal] for removal in floor.removals)
            for addition in floor.additions:
                for removal in moves.blockers[addition]:
                    changed |= waiting > behind[removal]
                    behind[removal] = max(behind[removal], waiting)
        if not changed:
            break
    return behind


def _events(moves: TransitionMoves, order: RemovalOrder) -> list[list[int]]:
    """Return, for each floor, the moves that affect it, in order. Each addition comes as soon as its ports are free."""
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
    """Return an assignment of the moves to the same number of stages, with additions as early and removals as late as
    the limits on moves and the ports allow. At every point, each pair and endpoint has at least as many circuits as
    with the assignment `stage_of`."""
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


def stages_at_least(moves: TransitionMoves, max_moves: int, missed: frozenset[int]) -> int:
    """Return a lower bound on the number of stages of a transition that keeps every floor except those in `missed`. The
    bound follows from the number of moves, the circuits that each floor can spare at once, and chains of dependent
    moves."""
    floors = [number for number in range(len(moves.floors)) if number not in missed]
    down, up = _earliest(moves, floors)
    bound = max([math.ceil(moves.count / max_moves), *(_rounds(moves, number) for number in floors)])
    stages = sorted([*down, *up], reverse=True)
    for number, stage in enumerate(stages, start=1):  # this many moves cannot begin before `stage`
        bound = max(bound, stage + math.ceil(number / max_moves))
    return max([bound, *(_last(moves, number, up) for number in floors)])


def _rounds(moves: TransitionMoves, number: int) -> int:
    """Return a lower bound on the number of stages for the removals of floor `number`. The bound assumes that each
    stage removes as many circuits as the floor can spare, and that the removals that enable the most additions come
    first."""
    floor = moves.floors[number]
    own, additions = set(floor.removals), set(floor.additions)
    free = sum(own.isdisjoint(moves.blockers[addition]) for addition in floor.additions)
    gains = sorted((len(additions.intersection(moves.opens[removal])) for removal in floor.removals), reverse=True)
    opened = list(itertools.accumulate(gains, initial=free))  # [removals]: maximum of additions whose ports they free
    down, up, stages = 0, 0, 0
    while down < len(floor.removals):
        lower, stages = min(floor.room + up, len(floor.removals)), stages + 1
        if lower == down and stages > 1:
            break  # no further progress is possible
        down, up = lower, min(len(floor.additions), opened[lower])
    return stages


def _last(moves: TransitionMoves, number: int, up: list[int]) -> int:
    floor = moves.floors[number]
    short = len(floor.removals) - floor.room
    return sorted(up[addition] for addition in floor.additions)[short - 1] + 2 if short <= len(floor.additions) else 0


def _earliest(moves: TransitionMoves, floors: list[int]) -> tuple[list[int], list[int]]:
    """Return the earliest possible stage of each removal and of each addition, counted from 0. If one of the `floors`
    can spare no circuit, each of its removals waits for one of its additions."""
    down, up = [0] * len(moves.removals), [0] * len(moves.additions)
    bare = [moves.floors[number] for number in floors if moves.floors[number].room == 0]
    for _ in range(moves.count):
        changed = False
        for addition, needed in enumerate(moves.blockers):
            earliest = max((down[removal] for removal in needed), default=0)
            changed |= earliest > up[addition]
            up[addition] = max(up[addition], earliest)
        for floor in bare:
            first = 1 + min((up[addition] for addition in floor.additions), default=0)
            for removal in floor.removals:
                changed |= first > down[removal]
                down[removal] = max(down[removal], first)
        if not changed:
            break
    return down, up
