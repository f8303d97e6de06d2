"""Every fleet worth looking at, where there are few: what each node may keep and hold besides."""

from collections.abc import Iterator
from functools import cache
from itertools import combinations, islice, product

import numpy as np

from planner.model import GpuId
from planner.solver.columns import ProblemColumns
from planner.solver.evaluate import SolverFleet

ANY_KEPT = 3  # instances of a node of which every subset is looked at
SPANS = 10  # sets of nodes that are looked at for an instance of several

Part = tuple[int, int, tuple[GpuId, ...]]  # configuration, current or -1, GPUs


def fleets(columns: ProblemColumns, most: int) -> Iterator[SolverFleet]:
    """At most that many, without those that leave room for another instance."""
    for parts in islice(_Walk(columns).fleets(), most):
        yield SolverFleet.of(columns, parts)


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
        """`chosen`: for nodes of a size on which nothing runs, which are all alike, the choice of the last."""
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
        """What a node may hold."""
        options = []
        for kept in self._kept(mine):
            dropped = {part[0] for part in mine if part not in kept}
            left = [gpu for gpu in gpus if all(gpu not in part[2] for part in kept)]
            for added in self._multisets(len(left)):
                if not dropped & set(added):  # one that runs is better than the same anew
                    parts, start = list(kept), 0
                    for configuration in added:
                        end = start + self.sizes[configuration]
                        parts.append((configuration, -1, tuple(GpuId(gpu) for gpu in left[start:end])))
                        start = end
                    options.append(parts)
        return options

    def _kept(self, mine: tuple[Part, ...]) -> Iterator[tuple[Part, ...]]:
        """Which to keep: any; or where there are many, of each configuration those that cost most to leave."""
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
