"""When flows end that begin together: those that are done leave their room to the others, and rates are max-min fair at
every moment. Beside them others may go on all the while, that want so much a second and no more. Pure."""

from dataclasses import dataclass

import numpy as np
from numba import njit

from orchestrrl.lab.sim.net.max_min import filled, rates
from orchestrrl.lab.sim.net.model import Floats, FlowRoutes, GpuFlows, Ints, LinkNetwork
from orchestrrl.lab.sim.net.problem import problem_of, reduced, routes_of

TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, eq=False)  # arrays have no one answer to ==
class Shared:
    """`behind_s`: bytes of a steady flow that did not pass while the others took its room, over the rate that it has
    without them."""

    end_s: Floats  # [flow], of those that end
    behind_s: Floats  # [steady flow]


def finish_s(network: LinkNetwork, flows: GpuFlows, *, tolerance: float = TOLERANCE) -> Floats:
    """[flow], seconds; all begin at 0, and those that are done leave their room to others. inf: over a link without
    capacity. Flows that end within `tolerance` of the time since the beginning of each other are taken in one go, so
    that a link stays at most that share of its bytes behind."""
    return finish_routed_s(network, flows, routes_of(network, flows), tolerance=tolerance)


def finish_routed_s(
    network: LinkNetwork, flows: GpuFlows, routes: FlowRoutes, *, tolerance: float = TOLERANCE
) -> Floats:
    """`finish_s` for who has the flows' routes already."""
    if not len(flows):
        return np.empty(0)
    small = reduced(problem_of(network, routes), flows.bytes)
    each, size = small.problem, flows.bytes[small.first]
    end_s, _ = _finish(each.capacity, each.begin, each.link, each.load, size, np.zeros_like(size), tolerance)
    return np.asarray(end_s[small.of])


def finish_beside(
    network: LinkNetwork, flows: GpuFlows, routes: FlowRoutes, steady: GpuFlows, *, tolerance: float = TOLERANCE
) -> Shared:
    """`finish_routed_s` beside flows that never end and want no more than `steady.bytes` bytes/s each. With others that
    pass other links such a flow may be quicker for a while: it is behind by what it is at the end."""
    count = len(flows)
    size = np.concatenate((flows.bytes, np.full(len(steady), np.inf)))
    cap = np.concatenate((np.full(count, np.inf), steady.bytes))
    alone = np.concatenate((np.zeros(count), rates(network, steady, cap=steady.bytes)))
    small = reduced(problem_of(network, _joined(routes, routes_of(network, steady)), cap=cap), size)
    each, of = small.problem, small.first
    end_s, missed = _finish(each.capacity, each.begin, each.link, each.load, size[of], alone[of], tolerance)
    behind, alone = missed[small.of][count:], alone[count:]
    behind_s = np.divide(behind, alone, out=np.zeros_like(alone), where=alone > 0)
    return Shared(np.asarray(end_s[small.of][:count]), np.maximum(behind_s, 0.0))


def _joined(first: FlowRoutes, then: FlowRoutes) -> FlowRoutes:
    return FlowRoutes(
        np.concatenate((first.begin, first.begin[-1] + then.begin[1:])),
        np.concatenate((first.link, then.link)),
        np.concatenate((first.share, then.share)),
        np.concatenate((first.latency_s, then.latency_s)),
    )


@njit(cache=True)
def _finish(
    capacity: Floats, begin: Ints, link: Ints, load: Floats, size: Floats, alone: Floats, tolerance: float
) -> tuple[Floats, Floats]:
    """[row], when it ends, and the bytes that it is behind `alone` [row], bytes/s, when the last one near it does."""
    end_s, behind = np.zeros(len(size)), np.zeros(len(size))
    part, parts = _parts(len(capacity), begin, link)
    order = np.argsort(part, kind="mergesort")
    name = np.full(len(capacity), -1, np.int64)
    at = 0
    for p in range(parts):
        first = at
        while at < len(order) and part[order[at]] == p:
            at += 1
        rows = order[first:at]
        my_begin, my_link, my_load, links = _alone(begin, link, load, rows, name)
        end_s[rows], behind[rows] = _drained(
            capacity[links], my_begin, my_link, my_load, size[rows], alone[rows], tolerance
        )
    return end_s, behind


@njit(cache=True)
def _parts(links: int, begin: Ints, link: Ints) -> tuple[Ints, int]:
    """[row], its part: those of different parts share no link, neither do those between them."""
    up = np.arange(links)
    for r in range(len(begin) - 1):
        for e in range(begin[r] + 1, begin[r + 1]):
            a, b = _root(up, link[begin[r]]), _root(up, link[e])
            up[max(a, b)] = min(a, b)
    number = np.full(links, -1, np.int64)
    part, parts = np.empty(len(begin) - 1, np.int64), 0
    for r in range(len(begin) - 1):
        if begin[r] == begin[r + 1]:
            part[r] = -1
            continue
        root = _root(up, link[begin[r]])
        if number[root] < 0:
            number[root] = parts
            parts += 1
        part[r] = number[root]
    for r in range(len(begin) - 1):
        if part[r] < 0:
            part[r] = parts  # behind all: they take no time
    return part, parts


@njit(cache=True)
def _root(up: Ints, i: int) -> int:
    while up[i] != i:
        up[i] = up[up[i]]
        i = up[i]
    return i


@njit(cache=True)
def _alone(begin: Ints, link: Ints, load: Floats, rows: Ints, name: Ints) -> tuple[Ints, Ints, Floats, Ints]:
    """Entries of some rows, with links numbered anew, and the links: a small part shall not pay for all of the network.
    `name` [link] is room to work in, -1 for those that no part has named yet."""
    row_begin = np.zeros(len(rows) + 1, np.int64)
    for i in range(len(rows)):
        row_begin[i + 1] = row_begin[i] + begin[rows[i] + 1] - begin[rows[i]]
    my_link, my_load = np.empty(row_begin[-1], np.int64), np.empty(row_begin[-1])
    links = np.empty(row_begin[-1], np.int64)
    known = 0
    for i in range(len(rows)):
        for k in range(row_begin[i + 1] - row_begin[i]):
            e = begin[rows[i]] + k
            if name[link[e]] < 0:
                name[link[e]] = known
                links[known] = link[e]
                known += 1
            my_link[row_begin[i] + k], my_load[row_begin[i] + k] = name[link[e]], load[e]
    return row_begin, my_link, my_load, links[:known]


@njit(cache=True)
def _drained(
    capacity: Floats, begin: Ints, link: Ints, load: Floats, size: Floats, alone: Floats, tolerance: float
) -> tuple[Floats, Floats]:
    """`_finish` of rows that are joined by links."""
    end_s, behind, left, now_s = np.zeros(len(size)), np.zeros(len(size)), size.copy(), 0.0
    active = np.flatnonzero(left > 0)
    while len(active) > 0:
        rate = filled(capacity, begin, link, load, active)
        ends = np.full(len(active), np.inf)
        for i in range(len(active)):
            if rate[i] > 0:
                ends[i] = now_s + left[active[i]] / rate[i]
        end_s[active] = ends
        limit = ends.min() * (1.0 + tolerance)
        if limit == np.inf:
            break
        until_s = ends[ends <= limit].max()
        left[active] -= rate * (until_s - now_s)
        behind[active] += (alone[active] - rate) * (until_s - now_s)
        active = active[ends > limit]
        now_s = until_s
    return end_s, behind
