"""Solve two problems of a transition with CP-SAT: which floors (minimum circuit counts) must be missed, and how few
stages suffice. Has no side effects.

One worker and a limit in deterministic time give the same result on every machine. The solver is loaded only when
needed, because loading takes longer than planning most transitions.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from planner.fabric.transition_moves import TransitionMoves
from planner.fabric.transition_order import (
    RemovalOrder,
    TransitionReplay,
    doomed,
    harmless,
    kept_order,
    postponed,
    replayed,
    short_order,
    tried_again,
)

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

ORDER_WORK = 2.0  # deterministic seconds for all parts of a transition together, about equal to CPU seconds
STAGES_WORK = 2.0
MOST_ORDER_VARIABLES = 8_000
MOST_STAGE_VARIABLES = 12_000  # over all stage counts that are tried


def fewest_missed(moves: TransitionMoves) -> tuple[RemovalOrder, bool]:
    """Return an order of removals that misses as few floors as possible, and whether it is proven that no order misses
    fewer.

    Pairs take precedence over endpoints, so the problem is first solved for pairs alone. The resulting number of dark
    pairs is also a lower bound if endpoints are included. The search that includes endpoints starts from the order
    found for pairs.
    """
    hopeless = doomed(moves)
    pairs = moves.of_pairs_only()
    doomed_pairs = sum(moves.floors[number].is_pair for number in hopeless)
    order, proven = _fewest(pairs, short_order(pairs), (doomed_pairs, 0))
    if len(pairs.floors) == len(moves.floors):
        return order, proven
    at_least = (order.cost(pairs)[0] if proven else doomed_pairs, len(hopeless) - doomed_pairs)
    # Pairs come first among the floors, so their numbers are equal.
    known = min(
        short_order(moves, order.missed, order.removals), kept_order(moves, order), key=lambda order: order.cost(moves)
    )
    return _fewest(moves, known, at_least)


def _fewest(moves: TransitionMoves, known: RemovalOrder, at_least: tuple[int, int]) -> tuple[RemovalOrder, bool]:
    """Return an order that is no worse than `known`, and whether it is proven optimal. No order costs less than
    `at_least`.

    The model excludes harmless removals, which come first, and removals that no floor waits for, which come last. The
    remaining removals are split into parts that share no floor, port or addition. The removals of each part are
    assigned to rounds. No order needs more rounds than there are removals.
    """
    if known.cost(moves) == at_least:
        return known, True
    start = harmless(moves, doomed(moves))
    removals, proven, work = list(start.down), True, ORDER_WORK
    late = postponed(moves, start)
    for part in _parts(moves, start, set(range(len(moves.removals))) - {*start.down, *late}):
        own = set(part)
        hint = [removal for removal in known.removals if removal in own]
        found, spent, sure = _order_of(moves, start, hint, work)
        removals += found
        proven, work = proven and sure, max(0.0, work - spent)
    best = min(known, replayed(moves, [*removals, *late]), key=lambda order: order.cost(moves))
    if not proven:
        best = tried_again(moves, best, at_least)
    return best, proven or best.cost(moves) == at_least


def _parts(moves: TransitionMoves, start: TransitionReplay, undecided: set[int]) -> Iterator[list[int]]:
    """Yield the undecided removals in independent groups, the smallest group first."""
    parent = list(range(len(moves.removals)))

    def root(removal: int) -> int:
        while parent[removal] != removal:
            parent[removal] = removal = parent[parent[removal]]
        return removal

    groups = [list(needed) for needed in moves.blockers]
    for floor, room in zip(moves.floors, start.room, strict=True):
        if room < len(undecided.intersection(floor.removals)):
            needed = [removal for addition in floor.additions for removal in moves.blockers[addition]]
            groups.append([*floor.removals, *needed])
    for group in groups:
        pending = [removal for removal in group if removal in undecided]
        for one, other in itertools.pairwise(pending):
            parent[root(one)] = root(other)
    members: dict[int, list[int]] = defaultdict(list)
    for removal in sorted(undecided):
        members[root(removal)].append(removal)
    return iter(sorted(members.values(), key=lambda part: (len(part), part)))


def _order_of(
    moves: TransitionMoves, start: TransitionReplay, hint: list[int], work: float
) -> tuple[list[int], float, bool]:
    """Return the best order found for the removals in `hint`, the work used, and whether the order is proven optimal.
    Work is in deterministic seconds, of which at most `work` are used."""
    rounds = len(hint)
    if rounds == 1:
        return hint, 0.0, True
    if rounds * rounds > MOST_ORDER_VARIABLES or work <= 0:
        return hint, 0.0, False
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    down: dict[int, list[Any]] = {}
    for place, removal in enumerate(hint):
        down[removal] = [model.new_bool_var("") for _ in range(rounds)] + [1]  # down[r][k]: in round k or before
        for number, var in enumerate(down[removal][:-1]):
            model.add_hint(var, number >= place)
        for earlier, later in zip(down[removal][:-1], down[removal][1:-1], strict=False):
            model.add_implication(earlier, later)
        model.add(down[removal][rounds - 1] == 1)
    up: dict[int, list[Any]] = {}
    for addition in sorted({addition for removal in hint for addition in moves.opens[removal]}):
        pending = [removal for removal in moves.blockers[addition] if not start.is_down[removal]]
        if not down.keys() >= set(pending):
            continue  # it waits for a removal that comes last, and no open floor depends on it
        needed = [down[removal] for removal in pending]
        up[addition] = [_both(model, [each[number] for each in needed]) for number in range(rounds)]
    missed: list[tuple[int, Any]] = []
    for number, floor in enumerate(moves.floors):
        own = [down[removal] for removal in floor.removals if removal in down]
        if start.room[number] >= len(own):
            continue
        given = [up[addition] for addition in floor.additions if addition in up]
        misses = model.new_bool_var("")
        missed.append((number, misses))
        deepest = len(own) - start.room[number]
        for k in range(rounds):
            gone = sum(each[k] for each in own)
            back = sum(each[k - 1] for each in given) if k else 0
            model.add(gone - back <= start.room[number] + deepest * misses)
    endpoints = 1 + sum(not moves.floors[number].is_pair for number, _ in missed)
    model.minimize(sum((endpoints if moves.floors[number].is_pair else 1) * misses for number, misses in missed))
    solver = _solver(work)
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return hint, work, False
    rank = {removal: sum(not solver.value(var) for var in variables[:-1]) for removal, variables in down.items()}
    order = sorted(hint, key=lambda removal: (rank[removal], removal))
    return order, solver.response_proto.deterministic_time, status == cp_model.OPTIMAL


def _both(model: "cp_model.CpModel", needed: list[Any]) -> Any:
    """Return a variable that can be true only if all variables of `needed` are true."""
    if len(needed) == 1:
        return needed[0]
    both = model.new_bool_var("")
    for each in needed:
        model.add_implication(both, each)
    return both


def fewest_stages(
    moves: TransitionMoves, max_moves: int, cost: tuple[int, int], at_least: int, known: Sequence[int], known_count: int
) -> tuple[list[int] | None, int]:
    """Search for a transition with fewer stages than `known_count` that misses the floors of no more pairs and
    endpoints than `cost`.

    Returns the stage of each move, numbered from 0, and a proven lower bound on the number of stages. Removals are
    listed before additions. The first value is None if no such transition is found. `known` is the transition from
    which the search starts, in the same form. `at_least` is the lower bound known so far.
    """
    work, count, variables = STAGES_WORK, at_least, moves.count * at_least
    while count < known_count and variables <= MOST_STAGE_VARIABLES and work > 0:
        # Half of the remaining work, so that larger stage counts, which are easier, are tried too.
        found, spent, sure = _in_stages(moves, max_moves, cost, count, known, work / 2)
        work -= spent
        if found is not None:
            return found, at_least
        at_least += sure and count == at_least
        count += 1
        variables += moves.count * count
    return None, at_least


def _in_stages(
    moves: TransitionMoves, max_moves: int, cost: tuple[int, int], count: int, known: Sequence[int], work: float
) -> tuple[list[int] | None, float, bool]:
    """Return the stage of each move for a transition in `count` stages (None if none is found), the work used in
    deterministic seconds, and whether it is proven that there is no such transition."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    done: list[list[Any]] = []  # [move][stage]: in this stage or before
    for move in range(moves.count):
        done.append([*(model.new_bool_var("") for _ in range(count - 1)), 1])
        for stage, var in enumerate(done[move][:-1]):
            model.add_hint(var, stage >= known[move])
        for earlier, later in zip(done[move][:-2], done[move][1:-1], strict=True):
            model.add_implication(earlier, later)
    down, up = done[: len(moves.removals)], done[len(moves.removals) :]
    for addition, needed in enumerate(moves.blockers):
        for removal in needed:
            for stage in range(count - 1):
                model.add_implication(up[addition][stage], down[removal][stage])
    for stage in range(count):
        before = sum(each[stage - 1] for each in done) if stage else 0
        model.add(sum(each[stage] for each in done) - before <= max_moves)
    missed: tuple[list[Any], list[Any]] = ([], [])
    for floor in moves.floors:
        misses: Any = 0
        if cost[not floor.is_pair]:
            misses = model.new_bool_var("")
            missed[not floor.is_pair].append(misses)
        deepest = len(floor.removals) - floor.room
        for stage in range(count):
            gone = sum(down[removal][stage] for removal in floor.removals)
            back = sum(up[addition][stage - 1] for addition in floor.additions) if stage else 0
            model.add(gone - back <= floor.room + deepest * misses)
    for sufferers, most in zip(missed, cost, strict=True):
        model.add(sum(sufferers) <= most)
    solver = _solver(work)
    status = solver.solve(model)
    spent = solver.response_proto.deterministic_time
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None, spent, status == cp_model.INFEASIBLE
    return [sum(not solver.value(var) for var in each[:-1]) for each in done], spent, False


def _solver(work: float) -> "cp_model.CpSolver":
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = work
    return solver
