"""Which of the placements found it is to be: of those that end about as soon, the one that changes least."""

import math
from collections.abc import Sequence

import numpy as np

from planner.solver.band import balanced, violation
from planner.solver.columns import ProblemColumns
from planner.solver.evaluate import FleetPlacement
from planner.solver.settle import moves, settled

STEADY = 0.002  # share of the makespan, but no more than epsilon, that may be lost where less changes for it
NEAREST = 4  # placements that are looked at closely
FEW = 20_000  # requests up to which it is so many, and moves are saved in several ways


def chosen(
    table: ProblemColumns,
    current: FleetPlacement | None,
    static: Sequence[FleetPlacement],
    found: Sequence[FleetPlacement],
) -> FleetPlacement | None:
    """Of what ends about as soon as the best: what misses equation 2 by least, or else what changes least."""
    best = min(found, key=lambda placement: placement.makespan_s, default=None)
    epsilon_s = table.problem.epsilon_s
    if best is None or not np.isfinite(best.makespan_s):
        return best
    if current is not None and not best.makespan_s < current.makespan_s - epsilon_s:
        return best  # and the current one is kept
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
