"""Place requests, longest first, on the least loaded instance. The results are used for static fleets and as starting
points of searches."""

from collections.abc import Sequence
from heapq import heapreplace

import numpy as np

from planner.solver.columns import Floats, Ints, ProblemColumns

MANY = 1 << 15  # number of requests above which they are placed in rounds
USUAL = 3  # usual measures of load: work, tokens, requests


def loads(columns: ProblemColumns, configuration: int) -> list[tuple[Floats, bool]]:
    """Return several measures of the load that each request adds, each with a flag. The last USUAL measures are the
    common ones: work, tokens and the number of requests.

    If the flag is True, the first (longest) request of an instance also adds the instance's alpha for each iteration
    that the request takes.
    """
    work_s, alpha_s = columns.work_s[configuration], columns.alpha_s[configuration]
    share = np.maximum(columns.footprint / columns.capacity[configuration], 1 / columns.slots[configuration])
    area_s = work_s + alpha_s * columns.remaining * share
    tokens = columns.remaining.astype(np.float64)
    return [(work_s, True), (area_s, False), (work_s, False), (tokens, False), (np.ones(columns.count), False)]


def least_s(columns: ProblemColumns, configuration: int, instances: int) -> float:
    """Return a lower bound of the makespan, in seconds, for any distribution of the requests over equal instances."""
    instances = min(instances, max(1, columns.count))
    remaining = columns.remaining.astype(np.float64)
    iterations = max(
        float(remaining[columns.longest_first[:instances]].sum()),
        float(remaining.sum()) / float(columns.slots[configuration]),
        float((remaining * columns.footprint).sum()) / float(columns.capacity[configuration]),
    )
    return float(columns.alpha_s[configuration] * iterations + columns.work_s[configuration].sum()) / instances


def orders(columns: ProblemColumns) -> list[Ints]:
    """Return the orders in which to try placing the requests. All orders are longest first. In the first order,
    requests of equal length are in input order. A second order, in which they are sorted by id, is added if it differs
    from the first and there are not too many requests."""
    ids = columns.problem.requests.ids
    if columns.count > 4 * MANY or len(np.unique(columns.remaining)) == columns.count:
        return [columns.longest_first]
    by_id = np.array(sorted(range(columns.count), key=ids.__getitem__), dtype=np.int64)
    by_id = by_id[np.argsort(-columns.remaining[by_id], kind="stable")]
    return [columns.longest_first] if (by_id == columns.longest_first).all() else [columns.longest_first, by_id]


def least_loaded(columns: ProblemColumns, configuration: int, instances: int, load: Floats, first: bool) -> Ints:
    """Place requests, longest first, on the least loaded of equal instances; return the instance of each request.

    `load` and `first` are a measure and its flag from `loads`. If there are many requests, they are placed in rounds.
    """
    if columns.count > MANY:
        return _in_rounds(columns, configuration, instances, load, first)
    return one_by_one(columns, configuration, instances, load, first, columns.longest_first)


def one_by_one(
    columns: ProblemColumns, configuration: int, instances: int, load: Floats, first: bool, order: Ints
) -> Ints:
    """Place requests in `order` on the least loaded of equal instances; return the instance of each request.

    `load` and `first` are a measure and its flag from `loads`. The lowest index breaks ties.
    """
    assigned = np.empty(len(order), dtype=np.int64)
    if not first and len(load) and (load == load[0]).all() and load[0] > 0:
        assigned[order] = np.arange(len(order)) % instances
        return assigned
    alpha_s = float(columns.alpha_s[configuration]) if first else 0.0
    alone_s = (alpha_s * columns.remaining[order]).tolist()
    assigned[order] = onto_least_loaded(instances, load[order].tolist(), alone_s)
    return assigned


def onto_least_loaded(instances: int, loads: Sequence[float], alone: Sequence[float]) -> list[int]:
    """Place requests in the given order on the least loaded of equal instances; return the instance of each request.

    The lowest index breaks ties. Requests are given longest first, so the first request on an instance is its longest.
    That request adds its entry in `alone`, the time of its iterations in seconds, in addition to its entry in `loads`.
    """
    heap = [(0.0, place) for place in range(instances)]
    empty = [True] * instances
    places = []
    for more, first in zip(loads, alone, strict=True):
        so_far, place = heap[0]
        if empty[place]:
            empty[place] = False
            so_far += first
        places.append(place)
        heapreplace(heap, (so_far + more, place))
    return places


def _in_rounds(columns: ProblemColumns, configuration: int, instances: int, load: Floats, first: bool) -> Ints:
    """Return the instance of each request, placing a group of requests at a time.

    The result is almost the same as that of `one_by_one`, but much faster to compute.
    """
    order = columns.longest_first
    ordered, alpha_s = load[order], columns.alpha_s[configuration] if first else 0.0
    so_far = np.zeros(instances)
    empty = np.ones(instances, dtype=bool)
    assigned = np.empty(len(order), dtype=np.int64)
    step = max(1, instances // 4)
    for start in range(0, len(order), step):
        part = order[start : start + step]
        places = np.argpartition(so_far, step - 1)[:step] if step < instances else np.arange(instances)
        places = places[np.lexsort((places, so_far[places]))][: len(part)]
        assigned[part] = places
        alone_s = alpha_s * columns.remaining[part]
        so_far[places] += ordered[start : start + step] + np.where(empty[places], alone_s, 0.0)
        empty[places] = False
    return assigned
