"""Flows over links as rows of numbers, and the same with flows that cannot differ put together.

Flows are put together when no order of filling can tell them apart: the coarsest partition in which every flow of a
class crosses the same classes of links with the same loads, and every link of a class carries the same classes of
flows (colour refinement; McKay and Piperno 2014, section 2). Raising all rates alike then keeps each class together,
so that the rates of one flow of each class over one link of each class are those of all.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from orchestrrl.lab.sim.net.model import Floats, FlowRoutes, GpuFlows, Ints, LinkNetwork

MAX_ROUNDS = 48  # of refining; what is not settled by then is left as it is
WORTH = 0.7  # classes per flow from which on putting together does not pay


@dataclass(frozen=True, slots=True)
class FlowProblem:
    """One byte/s of row r puts `load` bytes/s on the links of entries `begin[r]` to `begin[r + 1]`."""

    capacity: Floats  # [link], bytes/s
    begin: Ints  # [row + 1]
    link: Ints  # [entry]
    load: Floats  # [entry]

    @property
    def rows(self) -> int:
        return len(self.begin) - 1


@dataclass(frozen=True, slots=True)
class ReducedProblem:
    problem: FlowProblem
    of: Ints  # [row before], row after
    first: Ints  # [row after], a row before that it stands for


def routes_of(network: LinkNetwork, flows: GpuFlows) -> FlowRoutes:
    """As the router has them; a flow from a GPU to itself takes no link and no time."""
    moves = flows.src != flows.dst
    if bool(np.all(moves)):
        return network.router(flows.src, flows.dst)
    found = network.router(flows.src[moves], flows.dst[moves])
    length = np.zeros(len(flows), np.int64)
    length[moves] = np.diff(found.begin)
    latency_s = np.zeros(len(flows))
    latency_s[moves] = found.latency_s
    return FlowRoutes(np.concatenate(([0], np.cumsum(length))), found.link, found.share, latency_s)


def problem_of(network: LinkNetwork, routes: FlowRoutes, cap: Floats | None = None) -> FlowProblem:
    """Rows are flows. One that may have `cap` bytes/s (inf: as much as it gets) has a link of its own, of that
    capacity."""
    plain = FlowProblem(network.capacity_bytes_per_s, routes.begin, routes.link, routes.share)
    plain = _taken(plain, routes.share > 0)  # of a link that is full they take nothing, and it shall not hold them up
    return plain if cap is None else _capped(plain, cap)


def _taken(problem: FlowProblem, entries: NDArray[np.bool_]) -> FlowProblem:
    if bool(np.all(entries)):
        return problem
    begin = np.concatenate(([0], np.cumsum(entries)))[problem.begin]
    return FlowProblem(problem.capacity, begin, problem.link[entries], problem.load[entries])


def _capped(problem: FlowProblem, cap: Floats) -> FlowProblem:
    capped = np.flatnonzero(np.isfinite(cap))
    ends = problem.begin[capped + 1]
    return FlowProblem(
        np.concatenate((problem.capacity, cap[capped])),
        problem.begin + np.concatenate(([0], np.cumsum(np.isfinite(cap)))),
        np.insert(problem.link, ends, len(problem.capacity) + np.arange(len(capped))),
        np.insert(problem.load, ends, 1.0),
    )


def bounding(problem: FlowProblem) -> FlowProblem:
    """Without entries of links that can never be full, as a non-blocking fabric's above its NICs."""
    holds = _bounding(problem.capacity, problem.begin, problem.link, problem.load)
    return _taken(problem, holds[problem.link])


def reduced(problem: FlowProblem, key: Floats) -> ReducedProblem:
    """With rows put together that nothing tells apart; `key` [row] tells apart as well."""
    problem = bounding(problem)
    found, of, link_class = _refine(problem.capacity, problem.begin, problem.link, problem.load, key, MAX_ROUNDS, WORTH)
    if found < 0:
        every = np.arange(problem.rows)
        return ReducedProblem(problem, every, every)
    first = _firsts(of, found)
    links = int(link_class.max()) + 1
    first_link = _firsts(link_class, links)
    row = np.repeat(np.arange(problem.rows), np.diff(problem.begin))
    ours = first_link[link_class[problem.link]] == problem.link
    pair = of[row[ours]] * links + link_class[problem.link[ours]]
    pairs, where = np.unique(pair, return_inverse=True)
    load = np.bincount(where, problem.load[ours], len(pairs)).astype(np.float64)
    begin = np.searchsorted(pairs, np.arange(found + 1) * links)
    return ReducedProblem(FlowProblem(problem.capacity[first_link], begin, pairs % links, load), of, first)


def _firsts(classes: Ints, count: int) -> Ints:
    first = np.empty(count, np.int64)
    first[classes[::-1]] = np.arange(len(classes) - 1, -1, -1)
    return first


@njit(cache=True)
def _bounding(capacity: Floats, begin: Ints, link: Ints, load: Floats) -> NDArray[np.bool_]:
    """[link], whether it may be full. Each row's tightest link stays; of another the most that it can get is the sum
    of what its rows' tightest links let through. Rows have two tightest ones where a path begins and ends at NICs
    alike: links going up are seldom full because of the first, those going down because of the last."""
    may = np.zeros(len(capacity), np.bool_)
    first, last = _tightest(capacity, begin, link, load)
    for entries in (first, last):
        for e in entries:
            if e >= 0:
                may[link[e]] = True
    most = np.minimum(_most(capacity, begin, link, load, first), _most(capacity, begin, link, load, last))
    return may | (most > capacity * (1 + 1e-9))


@njit(cache=True)
def _tightest(capacity: Floats, begin: Ints, link: Ints, load: Floats) -> tuple[Ints, Ints]:
    """[row] entries, the first and the last of equals; -1: there are none."""
    first, last = np.full(len(begin) - 1, -1, np.int64), np.full(len(begin) - 1, -1, np.int64)
    for r in range(len(begin) - 1):
        least = np.inf
        for e in range(begin[r], begin[r + 1]):
            level = capacity[link[e]] / load[e]
            if level < least * (1 - 1e-9) or first[r] < 0:
                least = level
                first[r] = e
            if level <= least * (1 + 1e-9):
                last[r] = e
    return first, last


@njit(cache=True)
def _most(capacity: Floats, begin: Ints, link: Ints, load: Floats, tightest: Ints) -> Floats:
    """[link], bytes/s that its rows' tightest links let through to it."""
    rows, links = len(begin) - 1, len(capacity)
    at = np.zeros(links + 1, np.int64)
    for r in range(rows):
        if tightest[r] >= 0:
            at[link[tightest[r]] + 1] += 1
    start = np.cumsum(at)
    at, order = start.copy(), np.empty(start[-1], np.int64)
    for r in range(rows):
        if tightest[r] >= 0:
            order[at[link[tightest[r]]]] = r
            at[link[tightest[r]]] += 1
    most, seen, ratio = np.zeros(links), np.full(links, -1, np.int64), np.zeros(links)
    for r in order:
        through = link[tightest[r]]
        for e in range(begin[r], begin[r + 1]):
            i, here = link[e], load[e] / load[tightest[r]]
            known = ratio[i] if seen[i] == through else 0.0
            if here > known:
                most[i] += capacity[through] * (here - known)
                seen[i], ratio[i] = through, here
    return most


@njit(cache=True)
def _mix(x: np.uint64) -> np.uint64:
    """splitmix64's finaliser."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@njit(cache=True)
def _colours(values: Floats) -> np.ndarray:
    """Values that differ in the last 12 bits alone (1e-12 of themselves) are mostly taken for equal."""
    bits = values.view(np.uint64)
    out = np.empty(len(values), np.uint64)
    for i in range(len(values)):
        out[i] = _mix(((bits[i] + np.uint64(0x800)) >> np.uint64(12)) + np.uint64(0x9E3779B97F4A7C15))
    return out


@njit(cache=True)
def _numbered(colour: np.ndarray, out: Ints) -> int:
    """Colours to 0, 1, ... in the order in which they come; returns how many."""
    size = 16
    while size < 2 * len(colour):
        size *= 2
    table = np.full(size, -1, np.int64)
    count = 0
    for i in range(len(colour)):
        slot = np.int64(colour[i] & np.uint64(size - 1))
        while table[slot] >= 0 and colour[table[slot]] != colour[i]:
            slot = (slot + 1) & (size - 1)
        if table[slot] < 0:
            table[slot] = i
            out[i] = count
            count += 1
        else:
            out[i] = out[table[slot]]
    return count


@njit(cache=True)
def _refine(
    capacity: Floats, begin: Ints, link: Ints, load: Floats, key: Floats, max_rounds: int, worth: float
) -> tuple[int, Ints, Ints]:
    """Classes of rows and of links, and how many of rows; -1 where they are not settled or do not pay."""
    rows = len(begin) - 1
    row_colour, link_colour, of_load = _colours(key), _colours(capacity), _colours(load)
    of, link_class = np.empty(rows, np.int64), np.empty(len(capacity), np.int64)
    count = 0
    for _ in range(max_rounds):
        seen = np.zeros(len(capacity), np.uint64)
        for r in range(rows):
            for e in range(begin[r], begin[r + 1]):
                seen[link[e]] += _mix(row_colour[r] ^ of_load[e])
        for i in range(len(capacity)):
            link_colour[i] = _mix(_mix(link_colour[i]) + seen[i])
        for r in range(rows):
            sum_ = np.uint64(0)
            for e in range(begin[r], begin[r + 1]):
                sum_ += _mix(link_colour[link[e]] ^ of_load[e])
            row_colour[r] = _mix(_mix(row_colour[r]) + sum_)
        before, count = count, _numbered(row_colour, of)
        if count > worth * rows:
            return -1, of, link_class
        if count == before:
            _numbered(link_colour, link_class)
            return count, of, link_class
    return -1, of, link_class
