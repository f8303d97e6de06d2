"""Improve the placement on one fleet by local search: move requests away from the instance that finishes last.

The search is deterministic: random moves out of a local optimum use a fixed seed, and its budget is a number of
operations, not a time.
"""

import copy
import math
import random
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from planner.solver.admission_order import ENOUGH, admit, least, orders
from planner.solver.columns import Ints, ProblemColumns
from planner.solver.evaluate import FleetPlacement, SolverFleet, evaluate, moves_s

ALL_ORDERS = 6  # number of requests up to which every order of admission is tried


@dataclass(slots=True)
class SearchBudget:
    """The remaining budget of a search. The unit is the evaluation of one request on one instance."""

    left: int

    def spend(self, amount: int) -> bool:
        self.left -= amount
        return self.left > 0


class AdmissionOrders:
    """Finds and caches orders of admission that need few iterations, for requests that do not all run at once."""

    def __init__(self, columns: ProblemColumns, work: SearchBudget) -> None:
        self.work = work
        self.remaining: list[int] = columns.remaining.tolist()
        self.footprint: list[int] = columns.footprint.tolist()
        self.capacity: list[int] = columns.capacity.tolist()
        self.slots: list[int] = columns.slots.tolist()
        self._known: dict[tuple[int, tuple[int, ...]], tuple[float, tuple[int, ...]]] = {}

    def best(self, configuration: int, requests: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        """Return the fewest iterations found, and the order of admission that needs them. `requests` must be sorted
        longest first."""
        key = (configuration, requests)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._search(configuration, requests)
        return known

    def _search(self, configuration: int, requests: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        capacity, slots = self.capacity[configuration], self.slots[configuration]
        lefts, rooms = self.remaining, self.footprint
        floor = least([lefts[each] for each in requests], [rooms[each] for each in requests], capacity, slots)
        best, best_order = math.inf, requests
        for order in self._orders(configuration, requests):
            self.work.spend(3 * len(order))  # simulating the admission takes longer than a sum
            found = admit([lefts[each] for each in order], [rooms[each] for each in order], capacity, slots)
            if found < best:
                best, best_order = found, order
            if best <= floor * (1.0 if len(requests) <= ALL_ORDERS else ENOUGH):
                break
        return best, best_order

    def _orders(self, configuration: int, requests: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yield the orders to try: all orders if there are few requests, otherwise the order by descending length and
        one improved order."""
        lefts, rooms = self.remaining, self.footprint
        if len(requests) <= ALL_ORDERS:
            yield from permutations(requests)
            return
        yield requests
        held = [rooms[each] for each in requests]
        if max(held) > self.capacity[configuration]:
            return
        if sum(held) <= self.capacity[configuration]:
            return  # only slots are short, so no request blocks others
        tries = orders(
            [lefts[each] for each in requests], held, self.capacity[configuration], self.slots[configuration]
        )
        _, places = next(tries)
        self.work.spend(12 * len(requests))
        yield tuple(requests[place] for place in places)


@dataclass(slots=True)
class _Load:
    """Totals over the requests of one instance.

    `tokens` is the sum of the remaining tokens, `longest` is their maximum, and `room` is the KV footprint in tokens.
    """

    count: int = 0
    longest: int = 0
    tokens: int = 0
    room: int = 0
    area: int = 0  # tokens times room
    work_s: float = 0.0

    def add(self, left: int, room: int, cost_s: float) -> None:
        self.count += 1
        self.longest = max(self.longest, left)
        self.tokens += left
        self.room += room
        self.area += left * room
        self.work_s += cost_s


class PlacementSearch:
    """A local search over the placements of all requests on the instances of one fleet."""

    def __init__(self, columns: ProblemColumns, fleet: SolverFleet, orders: AdmissionOrders) -> None:
        self.columns, self.fleet, self.orders, self.work = columns, fleet, orders, orders.work
        everything = np.arange(columns.count)
        self.configuration: list[int] = fleet.configuration.tolist()
        self.cost_s: list[list[float]] = [  # [instance][request]
            (
                columns.work_s[configuration] + moves_s(columns, fleet, everything, np.full(columns.count, instance))
            ).tolist()
            for instance, configuration in enumerate(self.configuration)
        ]
        self.alpha_s: list[float] = columns.alpha_s[fleet.configuration].tolist()
        self.switch_s: list[float] = np.where(fleet.current >= 0, 0.0, columns.switch_s[fleet.configuration]).tolist()
        self.capacity = columns.capacity[fleet.configuration].tolist()
        self.slots = columns.slots[fleet.configuration].tolist()
        self.ranks: list[int] = np.argsort(columns.longest_first).tolist()
        self.by_length = columns.longest_first.tolist()
        self.gpus = columns.gpus[fleet.configuration].tolist()
        self.held: list[list[int]] = [[] for _ in self.configuration]  # longest first
        self.finish_s: list[float] = [0.0] * len(self.configuration)

    # --- one instance

    def time_s(self, instance: int, requests: list[int]) -> float:
        """Return the time in seconds until the instance has served `requests`, which must be sorted longest first."""
        if not requests:
            return 0.0
        costs, rooms = self.cost_s[instance], self.orders.footprint
        total_s, held = self.switch_s[instance], 0
        for request in requests:
            total_s += costs[request]
            held += rooms[request]
        if held <= self.capacity[instance] and len(requests) <= self.slots[instance]:
            return total_s + self.alpha_s[instance] * self.orders.remaining[requests[0]]
        iterations = self.orders.best(self.configuration[instance], tuple(requests))[0]
        return total_s + self.alpha_s[instance] * iterations if iterations < math.inf else math.inf

    def _with(self, requests: list[int], request: int) -> list[int]:
        at = bisect_left(requests, self.ranks[request], key=self.ranks.__getitem__)
        return [*requests[:at], request, *requests[at:]]

    def copy(self) -> "PlacementSearch":
        """Return a copy whose placement is independent and whose caches and budget are shared."""
        other = copy.copy(self)
        other.held, other.finish_s = list(self.held), list(self.finish_s)
        return other

    # --- starts

    def take(self, assigned: Ints) -> None:
        self.held = [[] for _ in self.configuration]
        at = assigned.tolist()
        for request in self.by_length:
            self.held[at[request]].append(request)
        self.finish_s = [self.time_s(instance, requests) for instance, requests in enumerate(self.held)]

    def insert(self, until_s: float | None = None) -> bool:
        """Place all requests, longest first, each on the instance that finishes earliest with it.

        If `until_s` is given, each request is placed on the instance on which it takes the fewest GPU-seconds, among
        the instances that then finish by `until_s`. If a request cannot be placed, return False and change nothing.
        """
        count = len(self.configuration)
        held: list[list[int]] = [[] for _ in range(count)]
        loads = [_Load() for _ in range(count)]
        ends = [0.0] * count
        for request in self.by_length:
            best, best_value, best_s = -1, math.inf, 0.0
            seen: set[tuple[int, float]] = set()
            for instance in range(count):
                if not held[instance] and self.fleet.current[instance] < 0:  # equivalent instances
                    alike = (self.configuration[instance], self.cost_s[instance][request])
                    if alike in seen:
                        continue
                    seen.add(alike)
                end_s = self._quick_s(instance, loads[instance], ends[instance], request)
                if until_s is None:
                    value = end_s
                else:
                    if end_s > until_s:
                        continue
                    value = (end_s - ends[instance]) * self.gpus[instance]
                if value < best_value:
                    best, best_value, best_s = instance, value, end_s
            self.work.spend(count)
            if best < 0:
                return False
            held[best].append(request)
            loads[best].add(self.orders.remaining[request], self.orders.footprint[request], self.cost_s[best][request])
            ends[best] = best_s
        self.held = held
        self.finish_s = [self.time_s(instance, requests) for instance, requests in enumerate(held)]
        return True

    def _quick_s(self, instance: int, load: _Load, so_far_s: float, request: int) -> float:
        """Return the time in seconds at which the instance finishes if `request` is added to it.

        `load` has the totals of the requests already on the instance, which then finishes at `so_far_s`. None of them
        may be shorter than `request`. If the requests do not all run at once, the result is a lower bound.
        """
        room, left = self.orders.footprint[request], self.orders.remaining[request]
        capacity, slots = self.capacity[instance], self.slots[instance]
        if room > capacity:
            return math.inf
        cost_s = self.cost_s[instance][request]
        if not load.count:
            return self.switch_s[instance] + cost_s + self.alpha_s[instance] * left
        if load.room + room <= capacity and load.count < slots:
            return so_far_s + cost_s
        iterations: float = max(load.longest, (load.area + left * room) / capacity, (load.tokens + left) / slots)
        end_s: float = self.switch_s[instance] + load.work_s + cost_s + self.alpha_s[instance] * iterations
        return end_s

    # --- moves

    @property
    def makespan_s(self) -> float:
        return max(self.finish_s, default=0.0)

    def improve(self) -> None:
        """Move requests away from the instance that finishes last until no move shortens the makespan or the budget is
        spent."""
        while self.work.left > 0 and self._relocate():
            pass

    def _last(self) -> int:
        return self.finish_s.index(max(self.finish_s))

    def _relocate(self) -> bool:
        last = self._last()
        limit_s = self.finish_s[last]
        best: tuple[float, int, int] | None = None
        best_s = limit_s
        mine = self.held[last]
        order = sorted(range(len(self.finish_s)), key=self.finish_s.__getitem__)
        for place, request in enumerate(mine):
            without_s = self.time_s(last, mine[:place] + mine[place + 1 :])
            if not self.work.spend(len(mine)):
                return False
            if without_s >= best_s:
                continue
            for instance in order:
                floor_s = self.finish_s[instance] + self.cost_s[instance][request]
                if floor_s >= best_s or instance == last:
                    continue
                end_s = self.time_s(instance, self._with(self.held[instance], request))
                self.work.spend(len(self.held[instance]))
                if max(end_s, without_s) < best_s:
                    best, best_s = (max(end_s, without_s), request, instance), max(end_s, without_s)
        if best is None or not best_s < limit_s * (1 - 1e-12):
            return False
        self._move(best[1], last, best[2])
        return True

    def _move(self, request: int, source: int, destination: int) -> None:
        self.held[source] = [each for each in self.held[source] if each != request]
        self.held[destination] = self._with(self.held[destination], request)
        for instance in (source, destination):
            self.finish_s[instance] = self.time_s(instance, self.held[instance])

    def shake(self, rounds: int, seed: int = 0, enough_s: float = 0.0) -> None:
        """Try to leave local optima by groups of random moves, each followed by `improve`.

        A group of moves that lengthens the makespan is undone. The search ends after `rounds` groups, when the budget
        is spent, or at a makespan of at most `enough_s`.
        """
        rng = random.Random(seed)
        count = len(self.finish_s)
        for _ in range(rounds if count > 1 else 0):
            if self.work.left <= 0 or self.makespan_s <= enough_s:
                return
            before = (list(self.held), list(self.finish_s), self.makespan_s)
            for _ in range(rng.choice((1, 2, 3))):
                source = self._last() if rng.random() < 0.5 else rng.randrange(count)
                if not self.held[source]:
                    continue
                destination = rng.randrange(count)
                if destination != source:
                    self._move(rng.choice(self.held[source]), source, destination)
            self.improve()
            if self.makespan_s > before[2]:
                self.held, self.finish_s = before[0], before[1]

    def placement(self) -> FleetPlacement:
        """Return the placement, with each instance's requests in the best order of admission found."""
        order: list[int] = []
        for instance, requests in enumerate(self.held):
            rooms = sum(self.orders.footprint[request] for request in requests)
            if rooms <= self.capacity[instance] and len(requests) <= self.slots[instance]:
                order += requests
            else:
                order += self.orders.best(self.configuration[instance], tuple(requests))[1]
        starts = np.concatenate(([0], np.cumsum([len(requests) for requests in self.held])))
        return evaluate(self.columns, self.fleet, np.array(order, dtype=np.int64), starts.astype(np.int64))
