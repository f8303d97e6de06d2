"""Calculate a proven lower bound on the makespan, under the cost model of evaluate.py.

An instance of configuration y with longest request L that ends by T has `T - switch - alpha * L` seconds for the work
of its requests. A request i no longer than L takes at least the share `work(i) / (T - switch - alpha * r(i))` of this
time, where r(i) is its length, and the same share of the instance's GPUs. If the cheapest shares of all requests add up
to more GPUs than exist, T cannot be met. This is the dual of the linear program over (configuration, longest request)
in closed form, so no solver is needed. If T is refused in this way, no choice of instances can finish by T.
"""

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from planner.solver.columns import Floats, Ints, ProblemColumns

SAFETY = 1e-9  # relative margin for rounding: sums in another order differ in the last digits
PRECISION = 5e-5
ROUNDS = 60
MOST_PARTS = 8  # maximum number of parts into which KV room is divided
WORTH = 1.02  # minimum ratio of the total share with division to that without


def lower_bound_s(columns: ProblemColumns) -> float:
    if columns.count == 0:
        return 0.0
    options = options_of(columns, np.arange(columns.count))
    remaining = columns.remaining.astype(np.float64)
    low_s = alone_s = float(np.min([option.alone_s(remaining) for option in options], axis=0).max())
    high_s, refused = max(low_s, 1e-9), partial(_refused, options, remaining, units(columns))
    while refused(high_s):
        low_s, high_s = high_s, high_s * 2
    return max(highest_refused(refused, low_s, high_s, PRECISION), alone_s) * (1 - SAFETY)


def highest_refused(refused: Callable[[float], bool], low_s: float, high_s: float, precision: float) -> float:
    """Return the highest time between `low_s` and `high_s` for which `refused` returns True.

    The time is found by bisection, with the relative error `precision`. `high_s` must not be refused; `low_s` is
    returned if no higher time is refused.
    """
    for _ in range(ROUNDS):
        if high_s - low_s <= precision * high_s:
            break
        middle_s = (low_s + high_s) / 2
        if refused(middle_s):
            low_s = middle_s
        else:
            high_s = middle_s
    return low_s


class InstanceOption:
    """The costs of the requests on one kind of instance. The kind is a configuration, together with whether the
    instance is new or kept."""

    def __init__(self, configuration: int, price: float, alpha_s: float, switch_s: float, cost_s: Floats) -> None:
        self.configuration = configuration
        self.price = price  # in units of GPUs, see `units`
        self.alpha_s = alpha_s
        self.switch_s = switch_s
        self.cost_s = cost_s  # [request], work and minimum cost of its move; infinite if it does not fit

    def alone_s(self, remaining: Floats) -> Floats:
        return self.switch_s + self.alpha_s * remaining + self.cost_s

    def share(self, remaining: Floats, makespan_s: float) -> Floats:
        room_s = makespan_s - self.switch_s - self.alpha_s * remaining
        with np.errstate(divide="ignore", invalid="ignore"):
            share = self.price * self.cost_s / room_s
        share[room_s < 0] = math.inf
        share[(room_s == 0) & (self.cost_s == 0)] = 0.0
        return share


def _refused(options: list[InstanceOption], remaining: Floats, allowed: float, makespan_s: float) -> bool:
    shares = options[0].share(remaining, makespan_s)
    for option in options[1:]:
        np.minimum(shares, option.share(remaining, makespan_s), out=shares)
    return float(shares.sum()) > allowed * (1 + SAFETY)


def options_of(columns: ProblemColumns, requests: Ints) -> list[InstanceOption]:
    """Return the costs of the given requests on each kind of instance."""
    options = []
    for configuration in np.flatnonzero(columns.placeable).tolist():
        cost = price(columns, configuration)
        alpha_s = float(columns.alpha_s[configuration])
        moved_s = least_move_s(columns, configuration, requests)
        work_s = np.where(columns.fits(configuration), columns.work_s[configuration], math.inf)[requests]
        switch_s = float(columns.switch_s[configuration])
        options.append(InstanceOption(configuration, cost, alpha_s, switch_s, work_s + moved_s))
        if (columns.current_configuration == configuration).any():
            stays = columns.current_configuration[np.maximum(columns.source[requests], 0)] == configuration
            options.append(InstanceOption(configuration, cost, alpha_s, 0.0, work_s + np.where(stays, 0.0, moved_s)))
    return options


def least_move_s(columns: ProblemColumns, configuration: int, requests: Ints) -> Floats:
    """Return the minimum time, in seconds, for moving each request to another instance of the configuration, in any
    node."""
    least_s: Floats = columns.moved_s[configuration, requests]
    running = np.flatnonzero(columns.source[requests] >= 0)
    if len(running) and columns.gpus[configuration] <= columns.problem.per_node:
        beside = columns.current_node[columns.source[requests[running]]]
        beside_s = columns.move_s(requests[running], configuration, beside)
        least_s[running] = np.minimum(least_s[running], beside_s)
    return least_s


def _unit(columns: ProblemColumns) -> int:
    """Return the number of GPUs in a unit: the greatest common divisor of the sizes of instances that fit in a node."""
    small = columns.gpus[(columns.placeable > 0) & (columns.gpus <= columns.problem.per_node)]
    return int(np.gcd.reduce(small)) if len(small) else columns.problem.per_node


def price(columns: ProblemColumns, configuration: int) -> float:
    """Return the number of GPU units that an instance of the configuration takes."""
    gpus, per_node, unit = int(columns.gpus[configuration]), columns.problem.per_node, _unit(columns)
    return gpus / unit if gpus <= per_node else gpus / per_node * (per_node // unit)


def units(columns: ProblemColumns) -> int:
    """Return the number of GPU units that all nodes provide."""
    nodes, rest = divmod(columns.problem.gpus_count, columns.problem.per_node)
    unit = _unit(columns)
    return nodes * (columns.problem.per_node // unit) + rest // unit


def room_shares(columns: ProblemColumns, configuration: int, requests: Ints) -> list[Floats]:
    """Return arrays with each request's share of the KV room. The shares of requests that run at once sum to at most 1.

    The first array is footprint over capacity. The second is the result of a dual feasible function (Fekete and
    Schepers 2001). A function of this kind may, for example, assign all of the room to a request that is larger than
    half of it. The function with the largest total, weighted by remaining tokens, is chosen. The second array is
    omitted if its total is not clearly larger than that of the first.
    """
    capacity = int(columns.capacity[configuration])
    footprint = columns.footprint[requests]
    remaining = columns.remaining[requests]
    plain: Floats = footprint / capacity
    best, most = plain, float((remaining * plain).sum()) * WORTH
    for parts in range(2, MOST_PARTS + 1):
        whole, rest = np.divmod(np.minimum(footprint, capacity) * parts, capacity)
        shares = np.where(rest == 0, plain, whole / (parts - 1))
        total = float((remaining * shares).sum())
        if total > most:
            best, most = shares, total
    return [plain] if best is plain else [plain, best]
