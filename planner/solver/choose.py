"""Choose, among the placements whose makespan is close to the best, the one that changes the fleet least.

Then reduce the number of requests that move, without making the makespan much longer. The planned instances of requests
of similar length are exchanged if this lets more of the requests stay on their current instance. A request also returns
to its current instance if it still finishes there in time.
"""

import math
from collections.abc import Sequence

import numpy as np

from planner.solver.band import balanced, violation
from planner.solver.columns import Floats, Ints, ProblemColumns
from planner.solver.evaluate import FleetPlacement, InstanceLoads, place

STEADY = 0.002  # share of the makespan, at most epsilon, that may be lost for fewer changes
NEAREST = 4  # placements examined closely
FEW = 20_000  # requests up to which NEAREST placements are examined and all WIDTHS are tried
LEAST = 0.1  # minimum share of moves away from kept instances for which saving moves is tried
WIDTHS = (0.2, 0.05, 0.01)  # relative length differences that count as equal, tried in this order; then 0


def chosen(
    table: ProblemColumns,
    current: FleetPlacement | None,
    static: Sequence[FleetPlacement],
    found: Sequence[FleetPlacement],
) -> FleetPlacement | None:
    """Return, among the placements `found` with about the best makespan, the one with the fewest changes; None if
    `found` is empty. `static` contains the placements whose fleets have only one configuration.

    If the best placement violates the KV balance (equation 2 of the paper), return the placement that violates it
    least. If the best placement does not end more than epsilon before `current`, return the best placement as it is,
    because the caller then keeps the current one.
    """
    best = min(found, key=lambda placement: placement.makespan_s, default=None)
    epsilon_s = table.problem.epsilon_s
    if best is None or not np.isfinite(best.makespan_s):
        return best
    if current is not None and not best.makespan_s < current.makespan_s - epsilon_s:
        return best  # the caller then keeps the current placement
    most_s = math.inf if current is None else math.nextafter(current.makespan_s - epsilon_s, 0.0)
    if violation(table, best) > 0:
        limit_s = min(most_s, best.makespan_s + epsilon_s)
        near = [each for each in found if each.makespan_s <= limit_s]
        near.sort(key=lambda placement: (violation(table, placement), placement.makespan_s))
        return min(
            (balanced(table, each, limit_s) for each in near[:NEAREST]),
            key=lambda placement: (violation(table, placement), placement.makespan_s),
        )
    if current is None:
        return best
    static_s = min((each.makespan_s for each in static), default=math.inf)
    steady_s = best.makespan_s + min(epsilon_s, STEADY * best.makespan_s)
    limit_s = min(most_s, max(best.makespan_s, min(static_s, steady_s)))
    near = sorted((each for each in found if each.makespan_s <= limit_s), key=lambda each: each.makespan_s)
    few = table.count <= FEW
    return min(
        (
            settled(table, each, limit_s) if few else settled(table, each, limit_s, 1)
            for each in near[: NEAREST if few else 1]
        ),
        key=lambda placement: (
            violation(table, placement),
            int((placement.fleet.current < 0).sum()),
            moves(table, placement),
            placement.makespan_s,
        ),
    )


def settled(
    columns: ProblemColumns, placement: FleetPlacement, limit_s: float, tries: int = len(WIDTHS)
) -> FleetPlacement:
    """Return a placement with fewer moves that finishes by `limit_s`, or the given placement if none is found.

    `WIDTHS` lists the relative differences in length up to which requests count as equal. Only the last `tries` of
    these widths, and then a width of 0, are tried.
    """
    home = _home(columns, placement)
    at = placement.assigned()
    away = moves(columns, placement)
    if int(((home >= 0) & (home != at)).sum()) <= away * LEAST:
        return placement
    for width in (*WIDTHS[len(WIDTHS) - tries :], 0.0):
        swapped = place(columns, placement.fleet, _swapped(columns, at, home, width))
        if len(swapped.fleet) != len(placement.fleet) or swapped.makespan_s > limit_s:
            continue
        undone = _undone(columns, swapped, home, limit_s)
        for found in (undone, swapped):
            if found.makespan_s <= limit_s and moves(columns, found) < away:
                return found
    undone = _undone(columns, placement, home, limit_s)
    return undone if undone.makespan_s <= limit_s and moves(columns, undone) < away else placement


def moves(columns: ProblemColumns, placement: FleetPlacement) -> int:
    """Return the number of running requests that change instance."""
    at = placement.assigned()
    return int(((columns.source >= 0) & (columns.source != placement.fleet.current[at])).sum())


def _home(columns: ProblemColumns, placement: FleetPlacement) -> Ints:
    """Return the instance on which each request is running now, or -1 for a request that is not running on a kept
    instance."""
    instance_of = np.full(len(columns.current_configuration) + 1, -1, dtype=np.int64)
    kept = np.flatnonzero(placement.fleet.current >= 0)
    instance_of[placement.fleet.current[kept]] = kept
    instance_of[-1] = -1
    return instance_of[columns.source]


def _swapped(columns: ProblemColumns, at: Ints, home: Ints, width: float) -> Ints:
    """Return the instance of each request after requests of about equal length have swapped instances.

    Each instance keeps its number of requests of every length class, and as many requests as possible return to or stay
    on the instance on which they are running (`home`).
    """
    lengths = columns.remaining
    classes: Ints = np.floor(np.log(lengths) / np.log1p(width)).astype(np.int64) if width else lengths
    count = int(at.max()) + 1
    places, quotas = np.unique(classes * count + at, return_counts=True)
    wants = np.flatnonzero((home >= 0) & (home < count))
    wanted = classes[wants] * count + home[wants]
    by_place = np.lexsort((at[wants] != home[wants], wanted))  # requests at home first
    wants, wanted = wants[by_place], wanted[by_place]
    found = np.minimum(np.searchsorted(places, wanted), len(places) - 1)
    rank = _running_sum(np.ones(len(wants)), wanted) - 1
    stays = (places[found] == wanted) & (rank < quotas[found])
    assigned = np.full(len(at), -1, dtype=np.int64)
    assigned[wants[stays]] = home[wants[stays]]
    left = quotas - np.bincount(found[stays], minlength=len(places))
    others = np.flatnonzero(assigned < 0)
    others = others[np.lexsort((lengths[others], at[others], classes[others]))]
    assigned[others] = np.repeat(places % count, left)
    return assigned


def _undone(columns: ProblemColumns, placement: FleetPlacement, home: Ints, limit_s: float) -> FleetPlacement:
    """Return the placement after moving requests back to their `home` instances, beginning with the requests with the
    least work.

    A request is moved back only if all requests of its home instance still run at once and that instance still finishes
    by `limit_s`.
    """
    fleet, at = placement.fleet, placement.assigned()
    loads = InstanceLoads(columns, fleet, at)
    at_once = loads.at_once
    back = np.flatnonzero((home >= 0) & (home != at))
    back = back[at_once[home[back]] & at_once[at[back]] & (columns.remaining[back] <= loads.longest[home[back]])]
    work_s: Floats = columns.work_s[fleet.configuration[home[back]], back]
    ranking = np.lexsort((work_s, home[back]))
    back, work_s = back[ranking], work_s[ranking]
    to = home[back]
    fits = np.ones(len(back), dtype=bool)
    for amount, room in (
        (work_s, limit_s - placement.finish_s),
        (columns.footprint[back], loads.capacity - loads.held),
        (np.ones(len(back)), loads.slots - loads.here),
    ):
        fits &= _running_sum(amount, to) <= room[to]
    if not fits.any():
        return placement
    assigned = at.copy()
    assigned[back[fits]] = to[fits]
    return place(columns, fleet, assigned)


def _running_sum(amount: Floats | Ints, group: Ints) -> Floats:
    """Return the cumulative sums of `amount` within each group. The members of a group must be contiguous."""
    if not len(amount):
        return np.zeros(0)
    total = np.cumsum(amount, dtype=np.float64)
    first = np.flatnonzero(np.concatenate(([True], group[1:] != group[:-1])))
    before = np.concatenate(([0.0], total))[first]
    sums: Floats = total - np.repeat(before, np.diff(np.concatenate((first, [len(group)]))))
    return sums
