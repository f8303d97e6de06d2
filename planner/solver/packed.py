"""Packed fleets: cut, lay out, fill, and look for the soonest time at which that works."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from planner.solver.columns import Ints, ProblemColumns
from planner.solver.cut import RequestCut, RequestCutter
from planner.solver.evaluate import FleetPlacement, place
from planner.solver.fill import cut_of_requests, fill, match
from planner.solver.layout import lay_out

SAMPLE = 4096  # requests that are enough to find roughly when cuts fit
LEAST_GPUS = 128  # of a sample
GAIN = 0.996  # what it takes to prefer fewer configurations


def soonest_cut(
    columns: ProblemColumns, low_s: float, high_s: float, staying: float = 0.0
) -> tuple[float, list[RequestCut]] | None:
    """The soonest time found between `low_s` (that may be too soon) and `high_s` at which the cuts fit.

    With fewer configurations to choose from, a choice made block by block is sometimes better.
    """
    whole = RequestCutter(columns, staying)
    every = min(columns.count // SAMPLE, columns.problem.gpus_count // LEAST_GPUS)
    sampled = RequestCutter(columns, staying, every) if every > 1 else whole
    best, only = _bisect(sampled, low_s * 1.002, high_s * 1.02, 0.004, None, 10), None
    placeable = np.flatnonzero(columns.placeable).tolist()
    for some in _subsets(placeable):
        limit_s = best[0] * GAIN if best else high_s
        if limit_s <= low_s:
            break
        if sampled.cut(limit_s, some) is not None:
            best, only = _bisect(sampled, limit_s * GAIN, limit_s, 0.004, some, 6) or best, some
    if sampled is whole:
        return best
    trial_s = (best[0] if best else high_s) * 1.001
    return _bisect(whole, min(trial_s, high_s), high_s, 0.004, only, 4 if every < 16 else 2)


def _subsets(placeable: list[int]) -> list[frozenset[int]]:
    """Each configuration, each pair, and all but one."""
    sizes = {1, 2, len(placeable) - 1} - {0, len(placeable)}
    return [frozenset(some) for size in sorted(sizes) for some in combinations(placeable, size)]


def _bisect(
    cutter: RequestCutter, trial_s: float, high_s: float, step: float, only: frozenset[int] | None, rounds: int
) -> tuple[float, list[RequestCut]] | None:
    """Up and down from `trial_s` in growing steps until it lies between one that works and one that does not."""
    low_s, best_s, first_s = 0.0, high_s, trial_s
    best: list[RequestCut] | None = None
    while best is None or rounds > 0:
        rounds -= 1
        cuts = cutter.cut(trial_s, only)
        if cuts is None:
            low_s = trial_s
        else:
            best_s, best = trial_s, cuts
        if best is not None and best_s - low_s <= 0.0015 * best_s:
            break
        if best is None:
            if trial_s >= high_s:
                break
            trial_s = min(high_s, trial_s * (1 + step))
            step *= 2.5
        elif low_s > 0:
            trial_s = (low_s + best_s) / 2
        elif trial_s <= first_s * 0.98:
            break
        else:
            trial_s *= 1 - step
            step *= 2.5
    return (best_s, best) if best is not None else None


def packed(columns: ProblemColumns, found: tuple[float, list[RequestCut]], trials: int) -> list[FleetPlacement]:
    """Placements of the cuts: as they are, and with what may stay where it is."""
    makespan_s, cuts = found
    to = match(columns, cuts, _kept(columns, cuts))
    kept = [instance for instance in to if instance >= 0]
    fresh = [place for place in range(len(cuts)) if to[place] < 0]
    fleet = lay_out(columns, kept, [cuts[place].configuration for place in fresh])
    if fleet is None:
        return []
    # The fleet has the kept instances first, ascending, then the new ones in order.
    cut_at = [*_inverse(to, kept), *fresh]
    instance_of = np.empty(len(cuts), dtype=np.int64)
    instance_of[cut_at] = np.arange(len(cuts))
    whole = place(columns, fleet, instance_of[cut_of_requests(columns, cuts)])
    opened = columns.remaining[columns.longest_first[[cuts[place].blocks[0][0] for place in cut_at]]]
    filled = _filled(columns, whole, opened, makespan_s, trials)
    return [whole, filled] if filled else [whole]


def _filled(
    columns: ProblemColumns, whole: FleetPlacement, opened: Ints, makespan_s: float, trials: int
) -> FleetPlacement | None:
    best: FleetPlacement | None = None
    low_s, high_s, trial_s = makespan_s * 0.96, makespan_s * 1.02, makespan_s
    for _ in range(trials):
        assigned = fill(columns, whole.fleet, opened, trial_s)
        if assigned is None:
            low_s = trial_s
        else:
            placement = place(columns, whole.fleet, assigned)
            if best is None or placement.makespan_s < best.makespan_s:
                best = placement
            if placement.makespan_s <= trial_s * (1 + 1e-9):
                high_s = trial_s
            else:
                low_s = trial_s
        trial_s = (low_s + high_s) / 2
    return best


def _inverse(to: Sequence[int], kept: Sequence[int]) -> list[int]:
    cut_of = {instance: place for place, instance in enumerate(to) if instance >= 0}
    return [cut_of[instance] for instance in sorted(kept)]


def _kept(columns: ProblemColumns, cuts: Sequence[RequestCut]) -> list[int]:
    """Current instances that may be kept: as many of each configuration as cuts want."""
    wanted = np.bincount([cut.configuration for cut in cuts if cut.kept], minlength=len(columns.gpus))
    kept: list[int] = []
    for configuration in np.flatnonzero(wanted).tolist():
        kept += np.flatnonzero(columns.current_configuration == configuration)[: wanted[configuration]].tolist()
    return kept
