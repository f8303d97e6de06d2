"""Tighten the lower bound if KV room or sequence slots are short, with prices from a linear program.

An instance that ends by T and whose longest request has L tokens meets three limits. The work of its requests leaves
time for L iterations. It leaves time for the iterations that their KV footprints require, which are the remaining
tokens times the share of the room (see `room_shares`). It also leaves time for the iterations that the slots require,
which are the remaining tokens over max_sequences. Any weights of these limits determine a price for each request's
share of the instance, as in `bound.py`. The linear program, over configurations and classes of lengths, finds the
weights that give the highest bound. The bound itself is computed from the requests, so it does not depend on the
program's rounding or classes.
"""

import numpy as np

from planner.solver.bound import SAFETY, InstanceOption, highest_refused, options_of, room_shares, units
from planner.solver.columns import Floats, Ints, ProblemColumns

CLASSES = 16  # classes of lengths, with about equal numbers of tokens
ROUNDS = 6
CLOSE = 0.003  # relative precision of the search
SAMPLE = 2048  # requests used by the program
STEPS = (0.0005, 0.0015, 0.003, 0.006, 0.01, 0.02)  # reductions of the sample's bound tried for all requests, in order

Weights = dict[tuple[int, int], tuple[float, ...]]  # (option, class) -> weight of each limit


class _Shares:
    """The requests, shortest first, and how much of each limit of an instance every request uses."""

    def __init__(self, columns: ProblemColumns, every: int) -> None:
        order = columns.longest_first[every // 2 :: every][::-1]
        self.remaining = columns.remaining[order].astype(np.float64)
        self.units = units(columns) * len(order) / columns.count
        self.options: list[InstanceOption] = options_of(columns, order)
        self.more_s: list[list[Floats]] = []  # [option][limit - 1], usage in addition to work
        for each in self.options:
            plain, *cut = room_shares(columns, each.configuration, order)
            slot = np.full(len(order), 1 / float(columns.slots[each.configuration]))
            iterations_s = each.alpha_s * self.remaining
            self.more_s.append([iterations_s * share for share in (plain, slot, *cut)])

    def refused(self, makespan_s: float, weights: Weights, edges: Floats) -> bool:
        """Return whether the requests need more than the available GPUs to finish by `makespan_s`.

        `weights` contains the weight of each limit, by option and length class. Length class k contains the lengths up
        to `edges[k]` that are in no earlier class.
        """
        ends = np.searchsorted(self.remaining, edges, side="right")
        starts = np.concatenate(([0], ends[:-1]))
        shares = np.full(len(self.remaining), np.inf)
        for place, option in enumerate(self.options):
            free_s = makespan_s - option.switch_s
            if free_s <= 0:
                continue
            work_s = option.cost_s
            for level, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
                if start == end:
                    continue
                least_s = free_s - option.alpha_s * self.remaining[start]
                if least_s <= 0:
                    continue
                work, *others = weights.get((place, level), (1.0,))
                share = work_s[:end] * (option.price * (work / least_s + sum(others) / free_s))
                for weight, more_s in zip(others, self.more_s[place], strict=False):
                    if weight:
                        share += more_s[:end] * (option.price * weight / free_s)
                if work:
                    left_s = free_s - option.alpha_s * self.remaining[start:end]
                    with np.errstate(divide="ignore", invalid="ignore"):
                        own = work_s[start:end] * (option.price * work) * (1 / left_s - 1 / least_s)
                        share[start:] = np.where(left_s > 0, share[start:] + own, np.inf)
                np.minimum(shares[:end], share, out=shares[:end])
        return float(shares.sum()) > self.units * (1 + SAFETY)


def tightened_s(columns: ProblemColumns, bound_s: float, high_s: float) -> float:
    """Return a lower bound of at least `bound_s`. `high_s` is the makespan of the best known placement."""
    every = max(1, columns.count // SAMPLE)
    sample = _Shares(columns, every)
    edges = _edges(sample.remaining)
    low_s = bound_s
    best: Weights = {}
    for limit in ((0.0, 1.0), (0.0, 0.0, 1.0), (0.0, 0.0, 0.0, 1.0)):
        weights: Weights = {
            (place, level): limit for place in range(len(sample.options)) for level in range(len(edges))
        }
        found_s = _highest(sample, weights, edges, low_s, high_s)
        if found_s > low_s:
            low_s, best = found_s, weights
    # Weights are most effective near the makespan that they were found for, and sometimes slightly above it.
    above_s = high_s
    for _ in range(ROUNDS):
        if above_s <= low_s * (1 + CLOSE):
            break
        trial_s = (low_s + above_s) / 2
        weights = _weights(sample, trial_s, edges)
        found_s = _highest(sample, weights, edges, low_s, high_s)
        if found_s > low_s:
            low_s, best = found_s, weights
        if found_s < trial_s:
            above_s = trial_s
    if best:
        weights = _weights(sample, low_s * (1 + CLOSE / 2), edges)
        found_s = _highest(sample, weights, edges, low_s, high_s)
        if found_s > low_s:
            low_s, best = found_s, weights
    if not best or low_s < bound_s * 1.002:
        return bound_s
    if every == 1:
        return low_s * (1 - SAFETY)
    whole = _Shares(columns, 1)
    for step in STEPS:
        trial_s = low_s * (1 - step)
        if trial_s <= bound_s:
            break
        if whole.refused(trial_s, best, edges):
            return trial_s * (1 - SAFETY)
    return bound_s


def _highest(shares: _Shares, weights: Weights, edges: Floats, low_s: float, high_s: float) -> float:
    """Return the highest time between `low_s` and `high_s` that is proven too short for the requests of `shares`;
    `low_s` if no such time is found."""
    if not shares.refused(low_s, weights, edges):
        return low_s
    return highest_refused(lambda trial_s: shares.refused(trial_s, weights, edges), low_s, high_s, 2e-4)


def _edges(remaining: Floats) -> Floats:
    """Return the upper limits of length classes, chosen so that each class has about the same number of remaining
    tokens."""
    share = np.cumsum(remaining) / remaining.sum()
    places = np.searchsorted(share, np.linspace(0, 1, CLASSES + 1)[1:])
    edges: Floats = np.unique(remaining[np.minimum(places, len(remaining) - 1)])
    edges[-1] = np.inf  # longer requests outside the sample belong to the last class
    return edges


def _weights(shares: _Shares, makespan_s: float, edges: Floats) -> Weights:
    """Return the linear program's prices of the limits by option and class, as fractions of the instance's price. The
    result is empty if the program cannot be solved."""
    from ortools.linear_solver import pywraplp  # imported here because it loads slowly and is rarely needed

    solver = pywraplp.Solver.CreateSolver("GLOP")
    infinity = solver.infinity()
    level_of: Ints = np.searchsorted(edges, shares.remaining)
    count = len(edges)
    covered = [solver.Constraint(1.0, infinity) for _ in range(count)]
    objective = solver.Objective()
    limits = {}
    for place, option in enumerate(shares.options):
        fits = np.isfinite(option.cost_s)
        work_s, *others_s = (
            np.bincount(level_of[fits], weights=each[fits], minlength=count)
            for each in (option.cost_s, *shares.more_s[place])
        )
        takes_s = [work_s.tolist(), *((work_s + other_s).tolist() for other_s in others_s)]  # [limit][class]
        for level in range(count):
            free_s = makespan_s - option.switch_s
            least_s = free_s - option.alpha_s * float(shares.remaining[level_of == level].min(initial=np.inf))
            if least_s <= 0:
                continue
            instances = solver.NumVar(0, infinity, "")
            objective.SetCoefficient(instances, option.price)
            available = [least_s, *(free_s for _ in others_s)]
            rows = [solver.Constraint(-infinity, 0.0) for _ in available]
            for row, available_s in zip(rows, available, strict=True):
                row.SetCoefficient(instances, -available_s)
            for each in range(level + 1):
                part = solver.NumVar(0, infinity, "")
                covered[each].SetCoefficient(part, 1.0)
                for row, taken_s in zip(rows, takes_s, strict=True):
                    row.SetCoefficient(part, taken_s[each])
            limits[place, level] = (rows, available, option.price)
    objective.SetMinimization()
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        return {}
    weights: Weights = {}
    for key, (rows, available, price) in limits.items():
        prices = [max(0.0, -row.dual_value()) * each / price for row, each in zip(rows, available, strict=True)]
        total = sum(prices)
        if total > 0:
            weights[key] = tuple(each / total for each in prices)
    return weights
