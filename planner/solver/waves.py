"""Improve placements whose instances admit requests in several waves, because KV room or slots are scarce.

Better orders of admission are tried on the instance that finishes last, and requests move from it to the instances that
finish first. Only this instance is improved, because it determines the makespan.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from planner.solver.admission_order import ENOUGH, admit, least, orders
from planner.solver.columns import Floats, Ints, ProblemColumns
from planner.solver.evaluate import FleetPlacement, InstanceLoads, evaluate, moves_s
from planner.solver.search import SearchBudget

LOOKED_AT, LEVELLED = 4, 2  # placements for which orders are tried, and for which requests move
FEW = 4096  # requests up to which LOOKED_AT placements are tried, otherwise one
TRIES = 3  # orders of admission tried after a move, for source and destination
TO, WHICH = 3, 3  # destinations, and requests per destination, tried for a move
STEP = 1e-6  # share of the makespan that a move must gain


def sooner(
    columns: ProblemColumns, candidates: Sequence[FleetPlacement], enough_s: float, work: SearchBudget
) -> list[FleetPlacement]:
    """Return the most promising candidates that admit requests in waves, after improving their admission orders and
    loads.

    The improvement ends at a makespan of at most `enough_s`, or when `work` is spent.
    """
    soonest_s = min((each.makespan_s for each in candidates), default=np.inf)
    promising: dict[tuple[int, float], tuple[float, FleetPlacement]] = {}
    for each in candidates:
        ends = (len(each.fleet), each.makespan_s)
        if ends in promising or not np.isfinite(each.makespan_s):
            continue
        loads = InstanceLoads(columns, each.fleet, each.assigned())
        if loads.at_once.all():
            continue
        at_best_s = _at_best_s(columns, each, loads)
        if at_best_s < soonest_s:
            promising[ends] = (at_best_s, each)
    few = columns.count <= FEW
    found: list[Waves] = []
    for _, start in sorted(promising.values(), key=lambda each: each[0])[: LOOKED_AT if few else 1]:
        if work.left <= 0:
            break
        waves = Waves(columns, start, work)
        waves.reorder(enough_s)
        found.append(waves)
    found.sort(key=lambda waves: waves.makespan_s)
    best = found[:LEVELLED]
    left = work.left
    for waves in best:
        waves.work = SearchBudget(left // len(best))
        waves.level(enough_s)
    return [waves.placement() for waves in best]


def _at_best_s(columns: ProblemColumns, placement: FleetPlacement, loads: InstanceLoads) -> float:
    """Return the makespan that the placement would have if each instance needed only the minimum number of
    iterations."""
    kinds, order, count = placement.fleet.configuration, placement.order, len(placement.fleet)
    at, remaining = placement.assigned()[order], columns.remaining[order]
    tokens = np.bincount(at, weights=remaining, minlength=count)
    area = np.bincount(at, weights=remaining * columns.footprint[order], minlength=count)
    iterations = np.maximum.reduce([loads.longest, tokens / loads.slots, area / loads.capacity])
    work_s = np.bincount(at, weights=columns.work_s[kinds[at], order], minlength=count)
    ends_s = columns.alpha_s[kinds] * iterations + work_s + placement.migration_s + placement.switch_s
    return float(ends_s.max())


class Waves:
    """The requests of each instance in the best order of admission found."""

    def __init__(self, columns: ProblemColumns, placement: FleetPlacement, work: SearchBudget) -> None:
        self.columns, self.fleet, self.work = columns, placement.fleet, work
        fleet = placement.fleet
        self.remaining: list[int] = columns.remaining.tolist()
        self.footprint: list[int] = columns.footprint.tolist()
        self.capacity: list[int] = columns.capacity[fleet.configuration].tolist()
        self.slots: list[int] = columns.slots[fleet.configuration].tolist()
        self.alpha_s: list[float] = columns.alpha_s[fleet.configuration].tolist()
        self.order = [placement.requests(instance).tolist() for instance in range(len(fleet))]
        at = np.repeat(np.arange(len(fleet)), np.diff(placement.starts))
        work_s = np.bincount(at, weights=columns.work_s[fleet.configuration[at], placement.order], minlength=len(fleet))
        self.fixed_s: list[float] = (placement.switch_s + placement.migration_s + work_s).tolist()  # all but alpha
        iterations = (placement.decode_s - work_s) / np.maximum(columns.alpha_s[fleet.configuration], 1e-300)
        self.iterations: list[float] = np.rint(iterations).tolist()
        for instance in np.flatnonzero(columns.alpha_s[fleet.configuration] == 0).tolist():
            self.iterations[instance] = self._admitted(instance, self.order[instance])
        self.finish_s: list[float] = placement.finish_s.tolist()
        self._tries: list[Iterator[tuple[float, list[int]]] | None] = [None] * len(fleet)
        self._done = [False] * len(fleet)  # [instance], True if no other order is worth a try

    @property
    def makespan_s(self) -> float:
        return max(self.finish_s, default=0.0)

    def reorder(self, enough_s: float) -> None:
        """Try admission orders on the instance that finishes last, until the makespan is at most `enough_s`, no order
        is left, or the budget is spent."""
        while self.work.left > 0 and self.makespan_s > enough_s and self._reordered(self._last()):
            pass

    def level(self, enough_s: float) -> None:
        """Try orders and moves on the instance that finishes last, until the makespan is at most `enough_s`, no order
        or move helps, or the budget is spent."""
        while self.work.left > 0 and self.makespan_s > enough_s:
            last = self._last()
            if not self._reordered(last) and not self._relieved(last):
                return

    def _last(self) -> int:
        return max(range(len(self.finish_s)), key=self.finish_s.__getitem__)

    def placement(self) -> FleetPlacement:
        starts = np.concatenate(([0], np.cumsum([len(order) for order in self.order]))).astype(np.int64)
        order = np.array([request for order in self.order for request in order], dtype=np.int64)
        return evaluate(self.columns, self.fleet, order, starts)

    # --- one instance

    def _costs_s(self, instance: int, requests: Ints) -> Floats:
        """Return the time in seconds that each request adds to the instance by its work and its move."""
        configuration = int(self.fleet.configuration[instance])
        moved_s = moves_s(self.columns, self.fleet, requests, np.full(len(requests), instance))
        costs_s: Floats = self.columns.work_s[configuration, requests] + moved_s
        return costs_s

    def _admitted(self, instance: int, order: Sequence[int]) -> float:
        remaining, footprint = self._sizes(order)
        if len(order) <= self.slots[instance] and sum(footprint) <= self.capacity[instance]:
            return float(max(remaining, default=0))
        self.work.spend(len(order))
        return admit(remaining, footprint, self.capacity[instance], self.slots[instance])

    def _sizes(self, order: Sequence[int]) -> tuple[list[int], list[int]]:
        return [self.remaining[each] for each in order], [self.footprint[each] for each in order]

    def _longest_first(self, order: Sequence[int]) -> list[int]:
        return sorted(order, key=lambda each: (-self.remaining[each], each))

    def _reordered(self, instance: int) -> bool:
        """Try one more order of admission on the instance; return False if no further order is worth trying."""
        if self._done[instance] or not self.order[instance]:
            return False
        order = self._longest_first(self.order[instance])
        sizes = self._sizes(order)
        if self._tries[instance] is None:
            floor = least(*sizes, self.capacity[instance], self.slots[instance])
            if self.iterations[instance] <= floor * ENOUGH:
                self._done[instance] = True
                return False
            self._tries[instance] = orders(*sizes, self.capacity[instance], self.slots[instance])
        found = next(self._tries[instance] or iter(()), None)
        self.work.spend(2 * len(order))
        if found is None:
            self._done[instance] = True
            return False
        if found[0] < self.iterations[instance]:
            self._take(instance, [order[place] for place in found[1]], found[0], self.fixed_s[instance])
        return True

    def _take(self, instance: int, order: list[int], iterations: float, fixed_s: float) -> None:
        self.order[instance], self.iterations[instance], self.fixed_s[instance] = order, iterations, fixed_s
        self.finish_s[instance] = fixed_s + self.alpha_s[instance] * iterations

    def _quickest(self, instance: int, requests: Sequence[int], limit: float) -> tuple[float, list[int]]:
        """Return the fewest iterations found for `requests`, and the order that needs them. A few orders are tried,
        until one needs at most `limit` iterations."""
        if not requests:
            return 0.0, []
        order = self._longest_first(requests)
        sizes, capacity, slots = self._sizes(order), self.capacity[instance], self.slots[instance]
        best, best_order = self._admitted(instance, order), order
        if (len(order) <= slots and sum(sizes[1]) <= capacity) or least(*sizes, capacity, slots) > limit:
            return best, best_order
        for tried, (iterations, places) in enumerate(orders(*sizes, capacity, slots)):
            if best <= limit or tried == TRIES:
                break
            self.work.spend(2 * len(order))
            if iterations < best:
                best, best_order = iterations, [order[place] for place in places]
        return best, best_order

    # --- two instances

    def _relieved(self, last: int) -> bool:
        """Move one request away from `last`, the instance that finishes last; return False if no move that is tried
        shortens the makespan."""
        by_end = sorted(range(len(self.finish_s)), key=self.finish_s.__getitem__)
        for other in by_end[:TO]:
            if other == last or self.finish_s[other] >= self.finish_s[last] * (1 - STEP):
                break
            for request, cost_s in self._fitting(last, other):
                if self.work.left <= 0:
                    return False
                if self._moved(request, cost_s, last, other):
                    return True
        return False

    def _fitting(self, last: int, other: int) -> list[tuple[int, float]]:
        """Return the requests on `last` that would delay `other` by about half of the gap between the two finish times.
        Each is returned with its cost on `other` in seconds."""
        held = np.array([each for each in self.order[last] if self.footprint[each] <= self.capacity[other]], np.int64)
        if not len(held):
            return []
        columns, kind = self.columns, int(self.fleet.configuration[other])
        share = np.maximum(columns.footprint[held] / columns.capacity[kind], 1 / columns.slots[kind])
        costs_s = self._costs_s(other, held)
        more_s = costs_s + columns.alpha_s[kind] * columns.remaining[held] * share
        apart_s = self.finish_s[last] - self.finish_s[other]
        near = np.argsort(np.abs(more_s - apart_s / 2), kind="stable")[:WHICH]
        near = near[more_s[near] < apart_s]
        return list(zip(held[near].tolist(), costs_s[near].tolist(), strict=True))

    def _moved(self, request: int, cost_s: float, source: int, destination: int) -> bool:
        """Move the request if both instances then finish earlier than the source did before; return whether it was
        moved.

        `cost_s` is the time that the request's work and move take at the destination.
        """
        limit_s = self.finish_s[source] * (1 - STEP)
        rest = [each for each in self.order[source] if each != request]
        more = [*self.order[destination], request]
        saved_s = float(self._costs_s(source, np.array([request]))[0])
        if not rest and self.fleet.current[source] < 0:
            saved_s = self.fixed_s[source]  # the instance is not started at all
        if not self.order[destination] and self.fleet.current[destination] < 0:
            cost_s += float(self.columns.switch_s[self.fleet.configuration[destination]])
        found = []
        for instance, requests, fixed_s in (
            (destination, more, self.fixed_s[destination] + cost_s),
            (source, rest, self.fixed_s[source] - saved_s),
        ):
            limit = (limit_s - fixed_s) / self.alpha_s[instance] if self.alpha_s[instance] > 0 else np.inf
            if limit <= 0:
                return False
            iterations, order = self._quickest(instance, requests, limit)
            if iterations > limit:
                return False
            found.append((instance, order, iterations, fixed_s))
        for each in found:
            self._take(*each)
            self._tries[each[0]], self._done[each[0]] = None, False
        return True
