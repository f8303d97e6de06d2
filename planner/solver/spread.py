"""Longest first onto the least loaded: the best that a static fleet does, and the start of every search."""

from heapq import heapify, heappop, heappush

import numpy as np

from planner.solver.columns import Columns, Ints

MANY = 1 << 15  # requests from which on they are dealt in rounds


def least_loaded(columns: Columns, configuration: int, instances: int, taken_s: list[float]) -> Ints:
    """[request] its place among equal instances, of which place j is busy for `taken_s[j]` already."""
    if columns.count > MANY:
        return _in_rounds(columns, configuration, instances, taken_s)
    alpha_s = float(columns.alpha_s[configuration])
    order = columns.longest_first
    loads = [(taken_s[place], place) for place in range(instances)]
    heapify(loads)
    empty = [True] * instances
    places = []
    for work_s, left in zip(
        columns.work_s[configuration][order].tolist(), columns.remaining[order].tolist(), strict=True
    ):
        load_s, place = heappop(loads)
        if empty[place]:  # the first is the longest, and pays for the iterations of all
            empty[place] = False
            load_s += alpha_s * left
        places.append(place)
        heappush(loads, (load_s + work_s, place))
    assigned = np.empty(len(order), dtype=np.int64)
    assigned[order] = places
    return assigned


def _in_rounds(columns: Columns, configuration: int, instances: int, taken_s: list[float]) -> Ints:
    """Some requests at a time, longest to least loaded: almost the same, and quick."""
    order = columns.longest_first
    work_s = columns.work_s[configuration][order]
    loads = np.array(taken_s)
    empty = np.ones(instances, dtype=bool)
    assigned = np.empty(len(order), dtype=np.int64)
    step = max(1, instances // 8)
    for first in range(0, len(order), step):
        part = order[first : first + step]
        places = np.argpartition(loads, step - 1)[:step] if step < instances else np.arange(instances)
        places = places[np.lexsort((places, loads[places]))][: len(part)]
        assigned[part] = places
        alone_s = columns.alpha_s[configuration] * columns.remaining[part]
        loads[places] += work_s[first : first + step] + np.where(empty[places], alone_s, 0.0)
        empty[places] = False
    return assigned
