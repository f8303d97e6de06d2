"""Build packed fleets: find the shortest makespan for which the requests can be cut into blocks for instances, and
place the instances on GPUs."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from planner.solver.columns import Ints, ProblemColumns
from planner.solver.cut import RequestCut, RequestCutter
from planner.solver.evaluate import FleetPlacement, place
from planner.solver.layout import lay_out

SAMPLE = 4096  # requests that suffice for a rough search
LEAST_GPUS = 128  # minimum number of GPUs of a sample
GAIN = 0.996  # ratio of makespans at which fewer configurations are preferred


def soonest_cut(columns: ProblemColumns, low_s: float, high_s: float) -> list[RequestCut] | None:
    """Return the cuts, one per instance, with the shortest makespan found between `low_s` and `high_s`, or None if none
    is found.

    Subsets of the configurations are tried as well, because a subset sometimes gives a better result: configurations
    are chosen for one block of requests after another, not for all blocks together.
    """
    whole = RequestCutter(columns)
    every = min(columns.count // SAMPLE, columns.problem.gpus_count // LEAST_GPUS)
    sampled = RequestCutter(columns, every) if every > 1 else whole
    best, only = _bisect(sampled, low_s * 1.002, high_s * 1.02, 0.004, None, 10), None
    placeable = np.flatnonzero(columns.placeable).tolist()
    for some in _subsets(placeable):
        limit_s = best[0] * GAIN if best else high_s
        if limit_s <= low_s:
            break
        if sampled.cut(limit_s, some) is not None:
            best, only = _bisect(sampled, limit_s * GAIN, limit_s, 0.004, some, 6) or best, some
    if sampled is not whole:
        trial_s = (best[0] if best else high_s) * 1.001
        best = _bisect(whole, min(trial_s, high_s), high_s, 0.004, only, 4 if every < 16 else 2)
    return best[1] if best else None


def _subsets(placeable: list[int]) -> list[frozenset[int]]:
    """Return the subsets of one configuration, of two configurations, and of all configurations except one."""
    sizes = {1, 2, len(placeable) - 1} - {0, len(placeable)}
    return [frozenset(some) for size in sorted(sizes) for some in combinations(placeable, size)]


def _bisect(
    cutter: RequestCutter, trial_s: float, high_s: float, step: float, only: frozenset[int] | None, rounds: int
) -> tuple[float, list[RequestCut]] | None:
    """Return the shortest feasible makespan found and its cuts, or None if no makespan up to `high_s` is found to be
    feasible.

    The search starts at `trial_s`, moves up or down in growing steps until it brackets the result, and then bisects.
    `step` is the first relative step. Only the configurations in `only` are used, unless it is None.
    """
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


def packed(columns: ProblemColumns, cuts: Sequence[RequestCut]) -> FleetPlacement | None:
    """Return the cuts as a placement that keeps current instances where possible. Return None if the new instances do
    not fit on the GPUs."""
    to = match(columns, cuts, _kept(columns, cuts))
    kept = {instance: place for place, instance in enumerate(to) if instance >= 0}
    fresh = [place for place in range(len(cuts)) if to[place] < 0]
    fleet = lay_out(columns, kept, [cuts[place].configuration for place in fresh])
    if fleet is None:
        return None
    # The fleet has the kept instances first, ascending, then the new ones in order.
    instance_of = np.empty(len(cuts), dtype=np.int64)
    instance_of[[*(kept[instance] for instance in sorted(kept)), *fresh]] = np.arange(len(cuts))
    return place(columns, fleet, instance_of[_cut_of_requests(columns, cuts)])


def match(columns: ProblemColumns, cuts: Sequence[RequestCut], kept: Sequence[int]) -> list[int]:
    """Return, for each cut, the current instance of `kept` that serves it, or -1 if a new instance serves it.

    Pairs of cut and instance are matched in descending order of the time saved by not moving requests.
    """
    to = [-1] * len(cuts)
    if not kept:
        return to
    cut_of = _cut_of_requests(columns, cuts)
    configuration_of = np.array([cut.configuration for cut in cuts], dtype=np.int64)
    wanted = np.array([cut.kept for cut in cuts])
    free = np.zeros(len(columns.current_configuration) + 1, dtype=bool)
    free[list(kept)] = True
    source = columns.source
    held = np.flatnonzero(
        free[source] & wanted[cut_of] & (columns.current_configuration[source] == configuration_of[cut_of])
    )
    keys, inverse = np.unique(source[held] * len(cuts) + cut_of[held], return_inverse=True)
    weights = np.bincount(inverse, weights=columns.moved_s[configuration_of[cut_of[held]], held], minlength=len(keys))
    left = dict.fromkeys(kept, True)
    for key in keys[np.argsort(-weights, kind="stable")].tolist():
        instance, place = divmod(key, len(cuts))
        if to[place] < 0 and left.pop(instance, False):
            to[place] = instance
    spare: dict[int, list[int]] = {}
    for instance in left:
        spare.setdefault(int(columns.current_configuration[instance]), []).append(instance)
    for pool in spare.values():
        pool.reverse()
    for place, cut in enumerate(cuts):
        if cut.kept and to[place] < 0 and spare.get(cut.configuration):
            to[place] = spare[cut.configuration].pop()
    return to


def _cut_of_requests(columns: ProblemColumns, cuts: Sequence[RequestCut]) -> Ints:
    """Return, for each request, the index of the cut that contains it."""
    blocks = sorted((first, end, place) for place, cut in enumerate(cuts) for first, end in cut.blocks)
    places = np.array([place for _, _, place in blocks], dtype=np.int64)
    cut_of = np.empty(columns.count, dtype=np.int64)
    cut_of[columns.longest_first] = np.repeat(places, [end - first for first, end, _ in blocks])
    return cut_of


def _kept(columns: ProblemColumns, cuts: Sequence[RequestCut]) -> list[int]:
    """Return the current instances to keep. For each configuration, at most as many instances are kept as there are
    cuts that were made for kept instances."""
    wanted = np.bincount([cut.configuration for cut in cuts if cut.kept], minlength=len(columns.gpus))
    kept: list[int] = []
    for configuration in np.flatnonzero(wanted).tolist():
        kept += np.flatnonzero(columns.current_configuration == configuration)[: wanted[configuration]].tolist()
    return kept
