"""Seconds below which no placement can end, proven for the contract's model.

An instance of configuration y with longest request L that ends by T has `T - switch - alpha * L` seconds for the work
of its requests, so that a request i of at most L takes at least the share `work(i) / (T - switch - alpha * r(i))` of
it, and that share of its GPUs. Where the cheapest shares of all requests add up to more GPUs than there are, T cannot
be met. This is the dual of the linear program over (configuration, longest request) in closed form: no solver is
needed, and every T that it refuses is refused whatever the instances are.
"""

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from planner.solver.columns import Floats, Ints, ProblemColumns

SAFETY = 1e-9  # sums in another order than a makespan's own may differ in the last places
PRECISION = 5e-5
ROUNDS = 60
MOST_PARTS = 8  # into which KV room is cut
WORTH = 1.02  # times as much room as without cutting it, from which on that is looked at


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
    """Return the highest time that is refused, but for that share of it. Between `low_s`, which is returned where none
    above it is, and `high_s`, which is not."""
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
    """Requests on one kind of instance: a configuration, new or kept."""

    def __init__(self, configuration: int, price: float, alpha_s: float, switch_s: float, cost_s: Floats) -> None:
        self.configuration = configuration
        self.price = price  # units of GPUs
        self.alpha_s = alpha_s
        self.switch_s = switch_s
        self.cost_s = cost_s  # [request], work and what the move costs at least; infinite where it does not fit

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
    """What the requests given take on each kind of instance."""
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
    """[request] what moving each to another instance of the configuration costs at least, wherever that lies."""
    least_s: Floats = columns.moved_s[configuration, requests]
    running = np.flatnonzero(columns.source[requests] >= 0)
    if len(running) and columns.gpus[configuration] <= columns.problem.per_node:
        beside = columns.current_node[columns.source[requests[running]]]
        beside_s = columns.move_s(requests[running], configuration, beside)
        least_s[running] = np.minimum(least_s[running], beside_s)
    return least_s


def _unit(columns: ProblemColumns) -> int:
    """GPUs that are only ever taken together inside a node."""
    small = columns.gpus[(columns.placeable > 0) & (columns.gpus <= columns.problem.per_node)]
    return int(np.gcd.reduce(small)) if len(small) else columns.problem.per_node


def price(columns: ProblemColumns, configuration: int) -> float:
    """Units that an instance takes."""
    gpus, per_node, unit = int(columns.gpus[configuration]), columns.problem.per_node, _unit(columns)
    return gpus / unit if gpus <= per_node else gpus / per_node * (per_node // unit)


def units(columns: ProblemColumns) -> int:
    """Units that the nodes have."""
    nodes, rest = divmod(columns.problem.gpus_count, columns.problem.per_node)
    unit = _unit(columns)
    return nodes * (columns.problem.per_node // unit) + rest // unit


def room_shares(columns: ProblemColumns, configuration: int, requests: Ints) -> list[Floats]:
    """[request] shares of the instance's KV room such that those of requests that run at once are at most 1 together.

    Of footprint over capacity this holds, which comes first, and of what dual feasible functions make of it (Fekete
    and Schepers 2001): of two requests larger than half of the room, say, each takes all. Of these the one comes
    second that the requests take most by, if it is more.
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
