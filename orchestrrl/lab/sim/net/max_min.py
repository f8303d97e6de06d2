"""Max-min fair rates: all flows' rates are raised alike, and those over a link that is full stay (progressive filling;
Bertsekas and Gallager, Data Networks, section 6.5.2). Pure."""

import heapq

import numpy as np
from numba import njit

from orchestrrl.lab.sim.net.model import Floats, GpuFlows, Ints, LinkNetwork
from orchestrrl.lab.sim.net.problem import FlowProblem, problem_of, routes_of


def rates(network: LinkNetwork, flows: GpuFlows, *, weight: Floats | None = None, cap: Floats | None = None) -> Floats:
    """[flow], bytes/s, all being under way: 0 over a link without capacity, inf over no link at all. `weight` [flow]:
    rates are raised in proportion to it; `cap` [flow], bytes/s: no flow takes more."""
    level = levels(problem_of(network, routes_of(network, flows), weight, cap))
    return level if weight is None else level * weight


def levels(problem: FlowProblem) -> Floats:
    """[row]. One filling takes less than finding rows that are alike; that pays where flows end one after the other."""
    return np.asarray(filled(problem.capacity, problem.begin, problem.link, problem.load, np.arange(problem.rows)))


@njit(cache=True)
def filled(capacity: Floats, begin: Ints, link: Ints, load: Floats, rows: Ints) -> Floats:
    """Levels [row of `rows`] of those alone. The link that is full first is taken from a heap; links' levels only rise
    as rows are settled, so that one that is out of date goes back with its new level."""
    links = len(capacity)
    count, weight = np.zeros(links + 1, np.int64), np.zeros(links)
    for r in rows:
        for e in range(begin[r], begin[r + 1]):
            count[link[e] + 1] += 1
            weight[link[e]] += load[e]
    start = np.cumsum(count)
    at, row_of, load_of = start[:-1].copy(), np.empty(start[-1], np.int64), np.empty(start[-1])
    for i in range(len(rows)):
        for e in range(begin[rows[i]], begin[rows[i] + 1]):
            row_of[at[link[e]]], load_of[at[link[e]]] = i, load[e]
            at[link[e]] += 1
    left, open_rows = capacity.copy(), count[1:]
    level = np.full(len(rows), np.inf)
    heap = [(left[i] / weight[i], i) for i in range(links) if open_rows[i] > 0 and weight[i] > 0]
    heapq.heapify(heap)
    reached = 0.0
    while len(heap) > 0:
        at_level, i = heapq.heappop(heap)
        if open_rows[i] == 0:
            continue
        now = max(left[i], 0.0) / weight[i] if weight[i] > 0 else at_level
        if now > at_level and len(heap) > 0 and now > heap[0][0]:
            heapq.heappush(heap, (now, i))
            continue
        reached = max(reached, _exact(capacity[i], start[i], start[i + 1], row_of, load_of, level))
        for k in range(start[i], start[i + 1]):
            r = row_of[k]
            if level[r] == np.inf:
                level[r] = reached
                for e in range(begin[rows[r]], begin[rows[r] + 1]):
                    left[link[e]] -= load[e] * reached
                    weight[link[e]] -= load[e]
                    open_rows[link[e]] -= 1
    return level


@njit(cache=True)
def _exact(capacity: float, start: int, end: int, row_of: Ints, load_of: Floats, level: Floats) -> float:
    """The level at which a link is full, summed anew: what was kept by subtraction has lost digits."""
    used, weight = 0.0, 0.0
    for k in range(start, end):
        if level[row_of[k]] == np.inf:
            weight += load_of[k]
        else:
            used += load_of[k] * level[row_of[k]]
    return max(capacity - used, 0.0) / weight
