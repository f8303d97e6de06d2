"""Choose the engines to run and the requests of each engine, so that the last request ends as soon as possible. Has no
side effects."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from planner.model import EngineId
from planner.solver.band import violation
from planner.solver.bound import lower_bound_s as _lower_bound_s
from planner.solver.choose import chosen
from planner.solver.columns import ProblemColumns, columns
from planner.solver.dual import tightened_s
from planner.solver.evaluate import FleetPlacement, SolverFleet, place, with_idle
from planner.solver.layout import in_a_row
from planner.solver.packed import packed, soonest_cut
from planner.solver.problem import NOWHERE, RUNNING, Infeasible, MakespanProblem, Migration, PlacedInstance, Solution
from planner.solver.search import SearchBudget
from planner.solver.small import ENOUGH, best_of_all, is_small
from planner.solver.spread import MANY, USUAL, least_loaded, least_s, loads, one_by_one, orders
from planner.solver.waves import sooner
from planner.solver.whole import raised_s

__all__ = ["Infeasible", "lower_bound", "solve"]


CLOSE, NEAR = 0.002, 0.01  # relative gaps up to which the bound is not raised by raised_s and by tightened_s
CLOSEST = 2  # configurations whose static fleets are filled in all usual ways if there are many requests
PROOF = 200_000  # minimum work budget for raising the bound
WAVES_WORK, WAVES_EACH = 60_000, 2  # default budget for orders of admission: base, and per request
SMALL_WORK = 800_000  # default budget of the local search


# Seconds that overflow a float become infinite.
_never = np.errstate(over="ignore", divide="ignore", invalid="ignore")


@_never
def solve(problem: MakespanProblem, stop: Callable[[], bool] = lambda: False) -> Solution:
    """Return the best fleet and placement found, with its makespan and a proven lower bound.

    `stop` is polled during the search. When it returns True, the best result found so far is returned. This result is
    not reproducible. Raises Infeasible if a request fits on no configuration that can be placed.
    """
    table = columns(problem)
    current = as_placed(table) if problem.current else None
    static = _homogeneous(table)
    found = [*static, current] if current is not None else list(static)
    bound_s = _lower_bound_s(table)
    found += _packed(table, bound_s, _soonest_s(found, 0.0))
    spread = _spread(table, _soonest_s(found))
    found += spread
    bound_s = _raised_s(table, bound_s, _soonest_s(found))
    found += _readmitted(table, found, bound_s)
    if is_small(table):
        found += _searched(table, found, bound_s, stop)
    best = chosen(table, current, [*static, *spread], found)
    if best is not None and (problem.kv_balance is None or (best.fleet.current >= 0).all()):
        best = with_idle(table, best)
    return _solution(table, current, best, bound_s)


def _soonest_s(found: Sequence[FleetPlacement], otherwise_s: float = math.inf) -> float:
    return min((each.makespan_s for each in found), default=otherwise_s)


def _raised_s(table: ProblemColumns, bound_s: float, high_s: float) -> float:
    """Return a lower bound of at least `bound_s`. It is raised only if `high_s`, the best makespan found, is not close
    to `bound_s` and the work budget is sufficient."""
    budget = table.problem.work_budget
    if not np.isfinite(high_s) or high_s <= bound_s * (1 + CLOSE) or (budget is not None and budget < PROOF):
        return bound_s
    tight_s = tightened_s(table, bound_s, high_s) if high_s > bound_s * (1 + NEAR) else bound_s
    return raised_s(table, tight_s, high_s, tight_s > bound_s)


def _readmitted(table: ProblemColumns, candidates: Sequence[FleetPlacement], bound_s: float) -> list[FleetPlacement]:
    """Return the best candidates that admit requests in waves, with improved admission orders and more even loads."""
    budget = table.problem.work_budget
    work = SearchBudget(WAVES_WORK + WAVES_EACH * table.count if budget is None else budget // 2)
    return sooner(table, candidates, bound_s * (1 + ENOUGH), work)


def _searched(
    table: ProblemColumns, candidates: Sequence[FleetPlacement], bound_s: float, stop: Callable[[], bool]
) -> list[FleetPlacement]:
    """Return the results of a local search over the best candidates and all possible fleets.

    The list is empty if a candidate is already close to `bound_s`, or if there are no requests or no budget.
    """
    budget = table.problem.work_budget
    work = SearchBudget(SMALL_WORK if budget is None else budget)
    starts = sorted((each for each in candidates if np.isfinite(each.makespan_s)), key=lambda each: each.makespan_s)
    if not table.count or work.left <= 0 or (starts and starts[0].makespan_s <= bound_s * (1 + ENOUGH)):
        return []
    return best_of_all(table, starts[:6], bound_s, work, stop)


@_never
def lower_bound(problem: MakespanProblem) -> float:
    """Return a lower bound of the makespan in seconds. Raises Infeasible if a request fits on no configuration that can
    be placed."""
    return _lower_bound_s(columns(problem))


def as_placed(table: ProblemColumns) -> FleetPlacement:
    """Return the placement of the current fleet.

    Each instance admits its running requests before its waiting requests. New requests are assigned round robin and
    admitted last.
    """
    requests = table.problem.requests
    assigned = requests.instance.astype(np.int64)
    new = np.flatnonzero(requests.instance == NOWHERE)
    assigned[new] = np.arange(len(new)) % len(table.problem.current)
    ranks = requests.state.astype(np.int64) * table.count + np.arange(table.count)
    return place(table, SolverFleet.of(table, range(len(table.problem.current))), assigned, ranks)


def _packed(table: ProblemColumns, bound_s: float, high_s: float) -> list[FleetPlacement]:
    """Return a list with one placement that packs long requests together, or an empty list if no such placement is
    found."""
    cuts = soonest_cut(table, bound_s, high_s) if table.count else None
    placement = None if cuts is None else packed(table, cuts)
    return [] if placement is None else [placement]


def _homogeneous(table: ProblemColumns) -> list[FleetPlacement]:
    """Return placements on static fleets of one configuration each. Requests are placed longest first, each on the
    least loaded instance."""
    found: list[FleetPlacement] = []
    for index in range(len(table.problem.configurations)):
        fleets = _fleets_of(table, index)
        if fleets and table.fits(index).all():
            load, first = loads(table, index)[0]
            found += [place(table, fleet, least_loaded(table, index, len(fleet), load, first)) for fleet in fleets]
    return found


def _spread(table: ProblemColumns, below_s: float) -> list[FleetPlacement]:
    """Return placements on static fleets, made with the measures of load and orders of requests that `_homogeneous`
    does not use.

    Configurations that cannot finish before `below_s` are omitted.
    """
    kinds = [kind for kind in np.flatnonzero(table.placeable).tolist() if table.count and table.fits(kind).all()]
    least = {kind: least_s(table, kind, int(table.placeable[kind])) for kind in kinds}
    kinds = sorted((kind for kind in kinds if least[kind] < below_s), key=least.__getitem__)
    sequences = orders(table) if kinds else []
    found: list[FleetPlacement] = []
    for kind in kinds if table.count <= MANY else kinds[:CLOSEST]:
        fleets = _fleets_of(table, kind)
        for usual, sequence in enumerate(sequences):
            ranks = np.argsort(sequence) if usual else None
            for load, first in loads(table, kind)[-USUAL if usual or table.count > MANY else 1 :]:
                assigned = one_by_one(table, kind, len(fleets[0]), load, first, sequence)
                found += [place(table, fleet, assigned, ranks) for fleet in fleets if len(fleet) == len(fleets[0])]
    return found


def _fleets_of(table: ProblemColumns, configuration: int) -> list[SolverFleet]:
    """Return fleets with as many instances of a configuration as fit. One fleet ignores the running instances. If
    instances of the configuration are running, another fleet keeps them and adds new instances."""
    count = min(int(table.placeable[configuration]), max(1, table.count))
    if not count:
        return []
    fleet = in_a_row(table, [], configuration, count)
    running = np.flatnonzero(table.current_configuration == configuration).tolist()
    around = in_a_row(table, running, configuration, count - len(running)) if running else fleet
    return [fleet] if around.gpus == fleet.gpus else [fleet, around]


def _solution(
    table: ProblemColumns, current: FleetPlacement | None, best: FleetPlacement | None, bound_s: float
) -> Solution:
    decision, chosen, reason = _decide(table, current, best)
    current_s = None if current is None or not np.isfinite(current.makespan_s) else current.makespan_s
    return Solution(
        decision=decision,
        reason=reason,
        makespan_s=chosen.makespan_s if chosen else 0.0,
        current_makespan_s=current_s,
        lower_bound_s=bound_s,
        kv_balance_violation=violation(table, chosen) if chosen else 0.0,
        instances=_instances(table, chosen) if chosen else (),
        migrations=_migrations(table, chosen) if chosen else (),
    )


def _decide(
    table: ProblemColumns, current: FleetPlacement | None, best: FleetPlacement | None
) -> tuple[str, FleetPlacement | None, str]:
    if current is None:
        return "reconfigure", best, "there is no current fleet: a first deployment"
    epsilon_s = table.problem.epsilon_s
    if best is None or not best.makespan_s < current.makespan_s - epsilon_s:
        found_s = min(current.makespan_s, best.makespan_s) if best else current.makespan_s
        gain_s = current.makespan_s - found_s if np.isfinite(current.makespan_s) else 0.0
        return "keep", current, f"the best change found gains {gain_s:.3f} s, not more than epsilon of {epsilon_s:g} s"
    same = len(best.fleet) == len(current.fleet) and bool((best.fleet.current >= 0).all())
    if np.isfinite(current.makespan_s):
        gain = f"gains {current.makespan_s - best.makespan_s:.3f} s, more than epsilon of {epsilon_s:g} s"
    else:
        gain = "serves a request that does not fit its current instance"
    what = "moving requests between the current instances" if same else "changing instances"
    return ("rebalance" if same else "reconfigure"), best, f"{what} {gain}"


def _instances(table: ProblemColumns, placement: FleetPlacement) -> tuple[PlacedInstance, ...]:
    problem, fleet = table.problem, placement.fleet
    return tuple(
        PlacedInstance(
            id=name,
            configuration=problem.configurations[configuration].id,
            gpus=gpus,
            requests=placement.requests(place),
            kept=current >= 0,
            decode_s=decode_s,
            migration_s=migration_s,
            switch_s=switch_s,
        )
        for place, (name, configuration, gpus, current, decode_s, migration_s, switch_s) in enumerate(
            zip(
                _names(table, placement),
                fleet.configuration.tolist(),
                fleet.gpus,
                fleet.current.tolist(),
                placement.decode_s.tolist(),
                placement.migration_s.tolist(),
                placement.switch_s.tolist(),
                strict=True,
            )
        )
    )


def _names(table: ProblemColumns, placement: FleetPlacement) -> list[EngineId]:
    """Return the instances' ids. Kept instances keep their ids. New instances get a unique name with the number of
    their lowest GPU."""
    taken = {instance.id for instance in table.problem.current}
    names: list[EngineId] = []
    for current, gpus in zip(placement.fleet.current.tolist(), placement.fleet.gpus, strict=True):
        if current >= 0:
            names.append(table.problem.current[current].id)
            continue
        name = EngineId(f"new{gpus[0]}")
        while name in taken:
            name = EngineId(f"{name}+")
        taken.add(name)
        names.append(name)
    return names


def _migrations(table: ProblemColumns, placement: FleetPlacement) -> tuple[Migration, ...]:
    problem, fleet = table.problem, placement.fleet
    if not problem.current:
        return ()
    at = placement.assigned()
    moved = np.flatnonzero((problem.requests.state == RUNNING) & (table.source != fleet.current[at]))
    transfer_s, recompute_s = table.move_ways_s(moved, fleet.configuration[at[moved]], fleet.node[at[moved]])
    costs_s = np.minimum(transfer_s, recompute_s)
    names = _names(table, placement)
    sources = [instance.id for instance in problem.current]
    methods = ("recompute", "transfer")
    rows = zip(
        moved.tolist(),
        map(sources.__getitem__, table.source[moved].tolist()),
        map(names.__getitem__, at[moved].tolist()),
        map(methods.__getitem__, (transfer_s <= recompute_s).tolist()),
        costs_s.tolist(),
        strict=True,
    )
    return tuple(map(partial(tuple.__new__, Migration), rows))  # there may be hundreds of thousands
