"""Tighten the lower bound of the makespan for small numbers of GPUs, by allowing only whole instances.

Give each request a weight. An instance that ends by T and whose longest request has L tokens serves only requests of at
most L tokens, and their work must fit in T minus the fixed time of L iterations. The maximum weight that such an
instance can serve is found by filling a fractional knapsack in order of weight per second. Sort the instances of a
placement by descending L. All requests longer than the L of an instance are served by the instances before it.
Therefore, the more weight the earlier instances serve, the smaller L may be, and the more weight the instance itself
can serve. The maximum weight that u GPUs serve is found by dynamic programming over the last instance. If it is less
than the weight of all requests, T cannot be met. This holds for any weights, but some weights give higher bounds than
others.
"""

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate

import numpy as np

from planner.solver.bound import SAFETY, InstanceOption, highest_refused, options_of, room_shares, units
from planner.solver.columns import Floats, Ints, ProblemColumns

MOST_REQUESTS, MOST_UNITS = 4096, 512
CELLS = 1 << 16  # requests times classes of lengths
SINGLE = 16  # longest requests that each form a class
PRECISION = 1e-4
STEP = 0.002  # first relative increase of a bound


def raised_s(columns: ProblemColumns, bound_s: float, high_s: float, tight: bool) -> float:
    """Return a lower bound of the makespan, at least `bound_s`. `high_s` is the makespan of the best known placement.

    `tight` states whether KV room or slots limit the number of requests that run at once.
    """
    if not 0 < columns.count <= MOST_REQUESTS or units(columns) > MOST_UNITS:
        return bound_s
    raised = bound_s
    for weights in _weights(columns, tight):
        if raised >= high_s * (1 - PRECISION):
            break
        stairs = _Stairs(columns, weights)
        low_s, step = raised, STEP
        while low_s < high_s and stairs.refused(min(low_s * (1 + step), high_s)):
            low_s, step = min(low_s * (1 + step), high_s), step * 2
        if low_s == raised and step == STEP and not stairs.refused(low_s * (1 + PRECISION)):
            continue
        raised = highest_refused(stairs.refused, low_s, min(low_s * (1 + step), high_s), PRECISION)
    return raised * (1 - SAFETY) if raised > bound_s else bound_s


def _weights(columns: ProblemColumns, tight: bool) -> Iterator[Floats]:
    """Yield arrays of request weights, one for each configuration and measure. A weight is the instance time, in
    seconds, that the request uses by that measure."""
    kinds = np.flatnonzero(columns.placeable).tolist()
    for kind in kinds:
        yield columns.work_s[kind]
    if tight:
        for kind in kinds:
            iterations_s = columns.alpha_s[kind] * columns.remaining
            yield columns.work_s[kind] + iterations_s / columns.slots[kind]
            for shares in room_shares(columns, kind, np.arange(columns.count)):
                yield columns.work_s[kind] + iterations_s * shares


class _Stairs:
    """The weighted requests, longest first, prepared for checking whether they can all end within a given makespan."""

    def __init__(self, columns: ProblemColumns, weights: Floats) -> None:
        order = columns.longest_first
        count = len(order)
        self.units = units(columns)
        self.options = options_of(columns, order)
        remaining = columns.remaining[order].astype(np.float64)
        weights = weights[order]
        starts = _starts(remaining, min(96, max(16, CELLS // count)))
        ends = np.concatenate((starts[1:], [count]))
        self.shortest = remaining[ends - 1]  # [class]
        self.level = np.repeat(np.arange(len(starts)), ends - starts).tolist()  # [request] its class
        self.before = [0.0, *np.cumsum(weights).tolist()]  # [request + 1] total weight of all longer requests
        # [option][class] cumulative seconds and weights. `rooms` has the same over all requests by KV room and by
        # slots, without time reserved for the longest request.
        self.works = [_knapsacks(option.cost_s, weights, starts) for option in self.options]
        self.rooms: list[list[tuple[Floats, Floats]]] = []
        for option in self.options:
            iterations_s = option.alpha_s * remaining
            shares = [*room_shares(columns, option.configuration, order)]
            shares.append(np.full(count, 1 / float(columns.slots[option.configuration])))
            limits = [option.cost_s + iterations_s * share for share in shares]
            self.rooms.append([_knapsacks(limit, weights, starts[:1])[0] for limit in limits])

    def refused(self, makespan_s: float) -> bool:
        served = [self._served(place, option, makespan_s) for place, option in enumerate(self.options)]
        prices = [round(option.price) for option in self.options]
        level, last = self.level, len(self.level) - 1
        enough: float = self.before[-1] * (1 - SAFETY)
        most = [0.0]  # [units] maximum weight served
        for used in range(1, self.units + 1):
            best = most[-1]
            for price, serves in zip(prices, served, strict=True):
                if price > used:
                    continue
                by_others = most[used - price]
                position = min(bisect_right(self.before, by_others * (1 + SAFETY)) - 1, last)
                best = max(best, by_others + serves[level[position]])
            if best >= enough:
                return False
            most.append(best)
        return most[-1] < enough

    def _served(self, place: int, option: InstanceOption, makespan_s: float) -> list[float]:
        """Return, for each class of lengths, the maximum weight that an instance of `option` can serve within the
        makespan if its longest request is in this class or in a class of longer requests. `place` is the index of
        `option`."""
        free_s = makespan_s - option.switch_s
        limit = min(_filled(*knapsack, free_s) for knapsack in self.rooms[place])
        rooms_s = (free_s - option.alpha_s * self.shortest).tolist()
        works = zip(self.works[place], rooms_s, strict=True)
        return list(accumulate((min(limit, _filled(*knapsack, room_s)) for knapsack, room_s in works), max))


def _knapsacks(cost_s: Floats, weights: Floats, starts: Ints) -> list[tuple[Floats, Floats]]:
    """Return, for each start, the cumulative times in seconds and the cumulative weights of the requests from that
    start on.

    The requests are sorted by descending weight per second.
    """
    fits = np.isfinite(cost_s)
    with np.errstate(divide="ignore", invalid="ignore"):
        worth = np.where(fits, weights / cost_s, -1.0)
    worth[fits & (cost_s == 0)] = np.inf
    order = np.argsort(-worth, kind="stable")[: int(fits.sum())]
    costs, gains = cost_s[order], weights[order]
    found = []
    for start in starts.tolist():
        here = order >= start
        found.append((np.concatenate(([0.0], np.cumsum(costs[here]))), np.concatenate(([0.0], np.cumsum(gains[here])))))
    return found


def _filled(costs_s: Floats, gains: Floats, room_s: float) -> float:
    """Return the maximum weight served within `room_s` seconds. The last request may be served in part.

    `costs_s` and `gains` are the cumulative times and weights of a knapsack from `_knapsacks`.
    """
    if room_s < 0:
        return 0.0
    room_s *= 1 + SAFETY
    end = int(costs_s.searchsorted(room_s, side="right"))
    if end == len(costs_s):
        return float(gains[-1])
    part = (room_s - costs_s[end - 1]) / (costs_s[end] - costs_s[end - 1])
    return float(gains[end - 1] + part * (gains[end] - gains[end - 1]))


def _starts(remaining: Floats, classes: int) -> Ints:
    """Return the start indices of length classes with about equal numbers of tokens. Each of the SINGLE longest
    requests forms a class of its own."""
    share = np.cumsum(remaining) / remaining.sum()
    cuts = np.searchsorted(share, np.linspace(0, 1, classes + 1)[1:-1])
    starts: Ints = np.unique(np.concatenate((np.arange(min(len(remaining), SINGLE)), cuts)))
    return starts[starts < len(remaining)]
