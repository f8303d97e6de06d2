"""Longest first onto the least loaded: the best that a static fleet does, and the start of every search."""

from heapq import heapify, heappop, heappush

import numpy as np

from planner.solver.columns import Columns, Ints


def least_loaded(columns: Columns, configuration: int, instances: int, taken_s: list[float]) -> Ints:
    """[request] its place among equal instances, of which place j is busy for `taken_s[j]` already."""
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
