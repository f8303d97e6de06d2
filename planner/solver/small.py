"""Solve small problems by enumerating all fleets, node by node, and searching the most promising ones closely."""

from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations, islice, product

import numpy as np

from planner.model import GpuId
from planner.solver.columns import ProblemColumns
from planner.solver.evaluate import FleetPlacement, SolverFleet
from planner.solver.search import AdmissionOrders, PlacementSearch, SearchBudget

MOST_FLEETS = 3000  # maximum number of fleets enumerated
CELLS = 40_000  # requests times GPUs up to which a problem is small
LOOKED_AT, CLOSELY = 32, 6  # fleets that are filled, and placements that are searched closely
TRIALS = 5  # bisection steps of the packed filling
FEW = 16  # requests up to which every fleet is improved before the promising ones are selected
ENOUGH = 5e-4  # relative gap that counts as optimal
ANY_KEPT = 3  # instances of a node up to which every subset may be kept
SPANS = 10  # sets of nodes tried for an instance that spans several

Part = tuple[int, int, tuple[GpuId, ...]]  # configuration, current or -1, GPUs


def is_small(columns: ProblemColumns) -> bool:
    return columns.problem.gpus_count <= 16 and columns.count * columns.problem.gpus_count <= CELLS


def best_of_all(
    columns: ProblemColumns, starts: list[FleetPlacement], bound_s: float, work: SearchBudget, stop: Callable[[], bool]
) -> list[FleetPlacement]:
    """Return the best placements found by enumerating fleets and by improving `starts`.

    The search ends when `stop` returns True, when `work` is spent, or when the best makespan is close to `bound_s`.
    """
    orders = AdmissionOrders(columns, work)
    least = work.left // 2
    closely = [_taken(columns, start, orders) for start in starts]
    for fleet in _promising(columns, orders):
        if work.left <= least or stop():
            break
        closely += _filled(columns, fleet, orders, bound_s)
    closely.sort(key=lambda search: search.makespan_s)
    best: list[PlacementSearch] = []
    for search in closely[: 2 * CLOSELY]:
        if stop():
            break
        search.improve()
        best.append(search)
    best.sort(key=lambda search: search.makespan_s)
    for search in best[:CLOSELY]:
        if stop() or best[0].makespan_s <= bound_s * (1 + ENOUGH):
            break
        search.shake(12 + 600 // (1 + columns.count), enough_s=bound_s * (1 + ENOUGH))
    best.sort(key=lambda search: search.makespan_s)
    return [search.placement() for search in best[:CLOSELY]]


def _taken(columns: ProblemColumns, start: FleetPlacement, orders: AdmissionOrders) -> PlacementSearch:
    search = PlacementSearch(columns, start.fleet, orders)
    search.take(start.assigned())
    return search


def _promising(columns: ProblemColumns, orders: AdmissionOrders) -> list[SolverFleet]:
    """Return the fleets of the most promising combinations of instance kinds. A kind is a configuration, new or kept.
    To compare the combinations, one fleet of each is filled with requests."""
    alike: dict[tuple[tuple[int, bool], ...], list[SolverFleet]] = {}
    for fleet in fleets(columns, MOST_FLEETS):
        kinds = zip(fleet.configuration.tolist(), (fleet.current >= 0).tolist(), strict=True)
        alike.setdefault(tuple(sorted(kinds)), []).append(fleet)
    scored = []
    least = orders.work.left * 2 // 3
    for place, members in enumerate(alike.values()):
        if orders.work.left <= least:
            break
        search = PlacementSearch(columns, members[0], orders)
        if search.insert():
            if columns.count <= FEW:
                search.improve()
            scored.append((search.makespan_s, place))
    pools = list(alike.values())
    found: list[SolverFleet] = []
    for _, place in sorted(scored):
        found += pools[place][:8]
        if len(found) >= LOOKED_AT:
            break
    return found[:LOOKED_AT]


def _filled(
    columns: ProblemColumns, fleet: SolverFleet, orders: AdmissionOrders, bound_s: float
) -> list[PlacementSearch]:
    """Return up to two placements on the fleet: one filled evenly and, if found, one with long requests packed
    together.

    The list is empty if the fleet cannot serve all requests.
    """
    even = PlacementSearch(columns, fleet, orders)
    if not even.insert():
        return []
    packed = PlacementSearch(columns, fleet, orders)
    low_s, high_s = bound_s, even.makespan_s
    found: list[PlacementSearch] = []
    for _ in range(TRIALS):
        trial_s = (low_s + high_s) / 2
        if packed.insert(trial_s):
            high_s = trial_s
            if not found or packed.makespan_s < found[0].makespan_s:
                found = [packed.copy()]
        else:
            low_s = trial_s
    return [even, *found]


def fleets(columns: ProblemColumns, most: int) -> Iterator[SolverFleet]:
    """Yield at most `most` fleets. Fleets that have room for another instance are omitted."""
    for parts in islice(_Walk(columns).fleets(), most):
        yield SolverFleet.of(columns, (), [(configuration, gpus) for configuration, _, gpus in parts])


class _Walk:
    def __init__(self, columns: ProblemColumns) -> None:
        self.columns = columns
        problem = columns.problem
        self.per_node = problem.per_node
        held_s = np.zeros(len(problem.current))
        running = np.flatnonzero(columns.source >= 0)
        at = columns.source[running]
        np.add.at(held_s, at, columns.moved_s[columns.current_configuration[at], running])
        self.held_s = held_s.tolist()
        self.nodes = [
            tuple(range(first, min(first + problem.per_node, problem.gpus_count)))
            for first in range(0, problem.gpus_count, problem.per_node)
        ]
        placeable = [index for index, count in enumerate(columns.placeable.tolist()) if count]
        self.sizes = columns.gpus.tolist()
        self.small = [index for index in placeable if self.sizes[index] <= self.per_node]
        self.wide = [index for index in placeable if self.sizes[index] > self.per_node]
        self.running = [
            (int(columns.current_configuration[index]), index, instance.gpus)
            for index, instance in enumerate(problem.current)
        ]

    def fleets(self) -> Iterator[list[Part]]:
        wide = [part for part in self.running if self.sizes[part[0]] > self.per_node]
        for size in range(len(wide), -1, -1):
            for kept in combinations(wide, size):
                taken = {gpu for part in kept for gpu in part[2]}
                yield from self._nodes(0, list(kept), taken, {})

    def _nodes(self, node: int, parts: list[Part], taken: set[GpuId], chosen: dict[int, int]) -> Iterator[list[Part]]:
        """Yield all fleets that extend `parts` with instances on `node` and later nodes.

        Idle nodes of equal size are equivalent, so only ascending combinations of their options are enumerated. For
        this, `chosen` maps each size to the option of the last idle node of that size.
        """
        if node == len(self.nodes):
            yield parts
            return
        if GpuId(self.nodes[node][0]) in taken:
            yield from self._nodes(node + 1, parts, taken, chosen)
            return
        gpus = self.nodes[node]
        mine = [part for part in self.running if part[2][0] in gpus and self.sizes[part[0]] <= self.per_node]
        for place, option in enumerate(self._options(gpus, tuple(mine))):
            if not mine:
                if place < chosen.get(len(gpus), 0):
                    continue
                yield from self._nodes(node + 1, [*parts, *option], taken, {**chosen, len(gpus): place})
            else:
                yield from self._nodes(node + 1, [*parts, *option], taken, chosen)
        for configuration in self.wide:
            free = [
                other
                for other in range(node, len(self.nodes))
                if len(self.nodes[other]) == self.per_node and GpuId(self.nodes[other][0]) not in taken
            ]
            wanted = self.sizes[configuration] // self.per_node
            if len(free) < wanted or free[0] != node:
                continue
            for others in islice(combinations(free[1:], wanted - 1), SPANS if self.running else 1):
                part = tuple(GpuId(gpu) for other in (node, *others) for gpu in self.nodes[other])
                yield from self._nodes(node + 1, [*parts, (configuration, -1, part)], taken | set(part), chosen)

    def _options(self, gpus: tuple[int, ...], mine: tuple[Part, ...]) -> list[list[Part]]:
        """Return the combinations of kept and new instances that fit on a node. `mine` are the node's current
        instances."""
        options = []
        for kept in self._kept(mine):
            dropped = {part[0] for part in mine if part not in kept}
            left = [gpu for gpu in gpus if all(gpu not in part[2] for part in kept)]
            for added in self._multisets(len(left)):
                if not dropped & set(added):  # keeping an instance is better than starting an equal one
                    parts, start = list(kept), 0
                    for configuration in added:
                        end = start + self.sizes[configuration]
                        parts.append((configuration, -1, tuple(GpuId(gpu) for gpu in left[start:end])))
                        start = end
                    options.append(parts)
        return options

    def _kept(self, mine: tuple[Part, ...]) -> Iterator[tuple[Part, ...]]:
        """Yield sets of instances to keep. If there are at most ANY_KEPT instances, all subsets are yielded. Otherwise,
        each set contains, per configuration, only the instances whose requests are the most expensive to move."""
        if len(mine) <= ANY_KEPT:
            for size in range(len(mine), -1, -1):
                yield from combinations(mine, size)
            return
        kinds: dict[int, list[Part]] = {}
        for part in sorted(mine, key=lambda part: (-self.held_s[part[1]], part[1])):
            kinds.setdefault(part[0], []).append(part)
        for sizes in product(*(range(len(parts), -1, -1) for parts in kinds.values())):
            chosen = [part for size, parts in zip(sizes, kinds.values(), strict=True) for part in parts[:size]]
            yield tuple(sorted(chosen))

    def _multisets(self, room: int) -> list[tuple[int, ...]]:
        @cache
        def below(room: int, first: int) -> list[tuple[int, ...]]:
            found: list[tuple[int, ...]] = []
            for place in range(first, len(self.small)):
                configuration = self.small[place]
                if self.sizes[configuration] <= room:
                    found += [(configuration, *rest) for rest in below(room - self.sizes[configuration], place)]
            return found or [()]

        least = min((self.sizes[each] for each in self.small), default=room + 1)
        return [each for each in below(room, 0) if room - sum(self.sizes[one] for one in each) < least]
