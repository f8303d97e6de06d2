"""Compute max-min fair rates of flows, the end times of flows that start together, and durations of collectives. The
functions have no side effects.

All rates rise equally, and a flow's rate is fixed when one of the flow's links is full (progressive filling; Bertsekas
and Gallager, Data Networks, section 6.5.2). Finished flows release their bandwidth, so that rates are max-min fair at
every moment. Steady flows, each with a maximum rate, may run throughout.
"""

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numba import njit

from orchestrrl.lab.sim.net.model import Floats, FlowRoutes, GpuFlows, Ints, LinkNetwork, LinkTier, MessageTransfer


@dataclass(frozen=True, slots=True)
class FlowProblem:
    """A max-min fairness problem in compressed rows. The entries of row r are `begin[r]` to `begin[r + 1] - 1`. Each
    byte/s of the row's rate puts `load` bytes/s on the link of each entry."""

    capacity: Floats  # [link], bytes/s
    begin: Ints  # [row + 1]
    link: Ints  # [entry]
    load: Floats  # [entry]

    @classmethod
    def of(cls, network: LinkNetwork, routes: FlowRoutes, cap: Floats | None = None) -> "FlowProblem":
        """Build a problem with one row per flow. `cap` is the maximum rate of each flow in bytes/s; a flow with a
        finite maximum gets a private link of that capacity. Links on which the flow has a share of 0 are dropped, so
        that they do not limit the flow."""
        taken = routes.share > 0
        begin, link, load = (
            np.concatenate(([0], np.cumsum(taken)))[routes.begin],
            routes.link[taken],
            routes.share[taken],
        )
        if cap is None:
            return cls(network.capacity_bytes_per_s, begin, link, load)
        is_capped = np.isfinite(cap)
        ends, own = begin[1:][is_capped], len(network.capacity_bytes_per_s) + np.arange(is_capped.sum())
        return cls(
            np.concatenate((network.capacity_bytes_per_s, cap[is_capped])),
            begin + np.concatenate(([0], np.cumsum(is_capped))),
            np.insert(link, ends, own),
            np.insert(load, ends, 1.0),
        )

    @property
    def levels(self) -> Floats:
        """The max-min fair rate of each row, as an array indexed by row."""
        return np.asarray(filled(self.capacity, self.begin, self.link, self.load, np.arange(len(self.begin) - 1)))


def rates(network: LinkNetwork, flows: GpuFlows, *, cap: Floats | None = None) -> Floats:
    """Return the rate of each flow in bytes/s if all flows run at once. The rate is 0 for a flow over a link without
    capacity, and inf for a flow over no link. `cap` is the maximum rate of each flow in bytes/s."""
    return FlowProblem.of(network, network.routes(flows), cap).levels


@njit(cache=True)
def filled(capacity: Floats, begin: Ints, link: Ints, load: Floats, rows: Ints) -> Floats:
    """Return the max-min fair rate of each of `rows`, as if the problem had no other rows. A heap yields the link that
    fills first. The level of a link only rises as the rates of rows are fixed, so that a stale entry is pushed back
    with its new level."""
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
    """Return the level at which a link is full. The level is computed anew from all rows of the link, because the
    running difference has lost precision."""
    used, weight = 0.0, 0.0
    for k in range(start, end):
        if level[row_of[k]] == np.inf:
            weight += load_of[k]
        else:
            used += load_of[k] * level[row_of[k]]
    return max(capacity - used, 0.0) / weight


TOLERANCE = 1e-3


def finish_s(
    network: LinkNetwork, flows: GpuFlows, routes: FlowRoutes | None = None, *, tolerance: float = TOLERANCE
) -> Floats:
    """Return the end time of each flow in seconds if all flows start at 0. The end time is inf for a flow over a link
    without capacity. Finished flows release their bandwidth. Flows whose end times differ by at most the fraction
    `tolerance` are ended in one step, so that a link falls behind by at most that fraction of its bytes. `routes` are
    the flows' routes, if they are already computed."""
    problem = FlowProblem.of(network, network.routes(flows) if routes is None else routes)
    return _finish(problem, flows.bytes, np.zeros(len(flows)), tolerance)[0]


def finish_beside(
    network: LinkNetwork, flows: GpuFlows, routes: FlowRoutes, steady: GpuFlows, *, tolerance: float = TOLERANCE
) -> tuple[Floats, Floats]:
    """Return the end times of `flows` as `finish_s` does, and the delay of each steady flow in seconds. The `steady`
    flows, which never end, use at most `steady.bytes` bytes/s each. The delay is the number of bytes that the steady
    flow lost to `flows`, divided by its rate without `flows`. A steady flow may gain bytes for a while if its
    competitors are slowed on other links. Only the net loss at the end counts, and the delay is at least 0."""
    count = len(flows)
    size = np.concatenate((flows.bytes, np.full(len(steady), np.inf)))
    cap = np.concatenate((np.full(count, np.inf), steady.bytes))
    alone = np.concatenate((np.zeros(count), rates(network, steady, cap=steady.bytes)))
    problem = FlowProblem.of(network, _joined(routes, network.routes(steady)), cap)
    end_s, missed = _finish(problem, size, alone, tolerance)
    behind_s = np.divide(missed[count:], alone[count:], out=np.zeros(len(steady)), where=alone[count:] > 0)
    return end_s[:count], np.maximum(behind_s, 0.0)


def _joined(first: FlowRoutes, then: FlowRoutes) -> FlowRoutes:
    return FlowRoutes(
        np.concatenate((first.begin, first.begin[-1] + then.begin[1:])),
        np.concatenate((first.link, then.link)),
        np.concatenate((first.share, then.share)),
        np.concatenate((first.latency_s, then.latency_s)),
    )


def _finish(problem: FlowProblem, size: Floats, alone: Floats, tolerance: float) -> tuple[Floats, Floats]:
    """Return two arrays indexed by row: the end time in seconds, and the deficit in bytes when the last row ends,
    compared with a transfer at the row's rate `alone` (bytes/s). Rows without a link take no time."""
    left = np.where(np.diff(problem.begin) > 0, size, 0.0)
    return _drained(problem.capacity, problem.begin, problem.link, problem.load, left, alone, tolerance)


@njit(cache=True)
def _drained(
    capacity: Floats, begin: Ints, link: Ints, load: Floats, size: Floats, alone: Floats, tolerance: float
) -> tuple[Floats, Floats]:
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


def seconds(network: LinkNetwork, transfer: MessageTransfer) -> float:
    """Return the duration, in seconds, of a transfer that runs alone: the time until its last flow ends, plus the
    latency of its rounds. A single round has the latency of the slowest flow. Several rounds pass over every flow
    between servers, one flow after another, so that each round has the mean latency of these flows."""
    flows = transfer.flows
    if not len(flows):
        return transfer.overhead_s
    routes = network.routes(flows)
    latency_s = float(routes.latency_s.max())
    if transfer.rounds > 1:
        leaves = flows.cross(network.servers)
        latency_s = float(routes.latency_s[leaves if leaves.any() else ...].mean())
    return transfer.overhead_s + (float(finish_s(network, flows, routes).max()) + latency_s * transfer.rounds)


TierBytes = Mapping[str, float]  # by a LinkTier's value


def tier_bytes(network: LinkNetwork, flows: GpuFlows, routes: FlowRoutes | None = None) -> TierBytes:
    """Return the number of bytes over the links of each tier. A flow through a switch counts twice: on the link up to
    the switch and on the link down from it. `routes` are the flows' routes, if they are already computed."""
    routes = network.routes(flows) if routes is None else routes
    of_entry = np.repeat(flows.bytes, np.diff(routes.begin)) * routes.share
    by_link = np.bincount(routes.link, of_entry, len(network.tier))
    known = list(LinkTier)
    tiers = np.array([known.index(each) for each in network.tier], np.int64)
    total = np.bincount(tiers, by_link, len(known))
    return {tier.value: float(total[i]) for i, tier in enumerate(known) if total[i] > 0}


def summed(parts: Iterable[TierBytes]) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in parts:
        for tier, size in part.items():
            found[tier] = found.get(tier, 0.0) + size
    return found
