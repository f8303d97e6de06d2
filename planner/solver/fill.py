"""Fill instances by a given time: long requests together, others where they are unless leaving is cheaper.

An instance is opened for requests up to its block's longest. Its own requests up to that length stay while their room
costs less than a move; the rest are taken in descending order by the instances in descending order of what they are
opened for, and the shortest even out what is left.
"""

from bisect import bisect_right
from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace

import numpy as np

from planner.solver.columns import Floats, Ints, ProblemColumns
from planner.solver.cut import RequestCut
from planner.solver.evaluate import SolverFleet


def match(columns: ProblemColumns, cuts: Sequence[RequestCut], kept: Sequence[int]) -> list[int]:
    """[cut] the current instance of `kept` that it goes to, or -1: where its requests cost most to move first."""
    to = [-1] * len(cuts)
    if not kept:
        return to
    cut_of = cut_of_requests(columns, cuts)
    configuration_of = np.array([cut.configuration for cut in cuts], dtype=np.int64)
    wanted = np.array([cut.kept for cut in cuts])
    free = np.zeros(len(columns.current_configuration) + 1, dtype=bool)
    free[list(kept)] = True
    source = columns.source
    held = np.flatnonzero(
        free[source] & wanted[cut_of] & (columns.current_configuration[source] == configuration_of[cut_of])
    )
    keys, inverse = np.unique(source[held] * len(cuts) + cut_of[held], return_inverse=True)
    weights = np.bincount(inverse, weights=columns.moved_s[configuration_of[cut_of[held]], held], minlength=len(keys))
    left = dict.fromkeys(kept, True)
    for key in keys[np.argsort(-weights, kind="stable")].tolist():
        instance, place = divmod(key, len(cuts))
        if to[place] < 0 and left.pop(instance, False):
            to[place] = instance
    spare: dict[int, list[int]] = {}
    for instance in left:
        spare.setdefault(int(columns.current_configuration[instance]), []).append(instance)
    for pool in spare.values():
        pool.reverse()
    for place, cut in enumerate(cuts):
        if cut.kept and to[place] < 0 and spare.get(cut.configuration):
            to[place] = spare[cut.configuration].pop()
    return to


def cut_of_requests(columns: ProblemColumns, cuts: Sequence[RequestCut]) -> Ints:
    """[request] the place of its cut."""
    blocks = sorted((first, end, place) for place, cut in enumerate(cuts) for first, end in cut.blocks)
    places = np.array([place for _, _, place in blocks], dtype=np.int64)
    cut_of = np.empty(columns.count, dtype=np.int64)
    cut_of[columns.longest_first] = np.repeat(places, [end - first for first, end, _ in blocks])
    return cut_of


def fill(
    columns: ProblemColumns, fleet: SolverFleet, opened: Ints, makespan_s: float, filler: float = 0.5
) -> Ints | None:
    """[request] its instance, all at once on each. `opened[instance]`: the longest that it was cut for. None where
    they do not fit in time; the shortest that even out may be late."""
    count = len(fleet)
    alpha_s = columns.alpha_s[fleet.configuration]
    free_s = makespan_s - np.where(fleet.current >= 0, 0.0, columns.switch_s[fleet.configuration])
    slots = columns.slots[fleet.configuration].copy()
    capacity = columns.capacity[fleet.configuration].copy()
    assigned = np.full(columns.count, -1, dtype=np.int64)
    stay = _staying(columns, fleet, opened, free_s)
    used_s = np.zeros(count)
    if len(stay):
        requests, at = stay[:, 0], stay[:, 1]
        assigned[requests] = at
        used_s += np.bincount(at, weights=columns.work_s[fleet.configuration[at], requests], minlength=count)
        slots -= np.bincount(at, minlength=count)
        capacity -= np.bincount(at, weights=columns.footprint[requests], minlength=count).astype(np.int64)
    longest = np.zeros(count, dtype=np.int64)
    np.maximum.at(longest, assigned[stay[:, 0]], columns.remaining[stay[:, 0]])

    order = columns.longest_first[assigned[columns.longest_first] < 0]
    kinds = sorted(set(fleet.configuration.tolist()))
    costs = {kind: (columns.work_s[kind] + columns.moved_s[kind])[order] for kind in kinds}
    spent = {kind: [0.0, *np.cumsum(costs[kind]).tolist()] for kind in kinds}
    room = [0, *np.cumsum(columns.footprint[order]).tolist()]
    remaining = columns.remaining[order]
    left = remaining.tolist()
    last = len(order) - _fillers(costs[kinds[0]], count, filler) if len(order) else 0
    free, alphas, used = free_s.tolist(), alpha_s.tolist(), used_s.tolist()
    most, seats, rooms = longest.tolist(), slots.tolist(), capacity.tolist()
    kind_of = fleet.configuration.tolist()
    position = 0
    places = np.full(len(order), -1, dtype=np.int64)
    sequence = sorted(range(count), key=lambda place: (-max(int(opened[place]), most[place]), place))
    for place in sequence:
        if position >= last:
            break
        top = max(most[place], left[position])
        gap_s = free[place] - alphas[place] * top - used[place]
        if gap_s <= 0:
            continue
        sums = spent[kind_of[place]]
        end = min(bisect_right(sums, sums[position] + gap_s, position) - 1, position + seats[place], last)
        if room[end] - room[position] > rooms[place]:
            end = bisect_right(room, room[position] + rooms[place], position) - 1
        if end <= position:
            continue
        places[position:end] = place
        used[place] += sums[end] - sums[position]
        seats[place] -= end - position
        rooms[place] -= room[end] - room[position]
        most[place] = top
        position = end
    if position < last:
        return None
    gaps_s = [free[place] - alphas[place] * most[place] - used[place] for place in range(count)]
    short = [costs[kind][last:].tolist() for kind in kinds]
    lists = [short[kinds.index(kind)] for kind in kind_of]
    if not _even_out(lists, gaps_s, places[last:], left[last:], alphas, most, seats, rooms, room[last:]):
        return None
    assigned[order] = places
    return assigned


def _fillers(cost_s: Floats, count: int, filler: float) -> int:
    """How many of the shortest requests are kept back to even out the instances."""
    if filler <= 0:
        return 0
    typical_s = float(np.median(cost_s))
    spare = np.searchsorted(np.cumsum(cost_s[::-1]), filler * typical_s * count)
    return min(int(spare), len(cost_s) * 3 // 10)


def _even_out(
    costs: list[list[float]],
    gaps_s: list[float],
    places: Ints,
    left: list[int],
    alphas: list[float],
    most: list[int],
    seats: list[int],
    rooms: list[int],
    room: list[int],
) -> bool:
    """Each request to the instance with the most time left; one without room for it gets no more."""
    heap = [(-gap_s, place) for place, gap_s in enumerate(gaps_s)]
    heapify(heap)
    for request, longest in enumerate(left):
        footprint = room[request + 1] - room[request]
        while heap and (seats[heap[0][1]] < 1 or rooms[heap[0][1]] < footprint):
            heappop(heap)
        if not heap:
            return False
        late_s, place = heap[0]
        late_s += costs[place][request]
        if longest > most[place]:
            late_s += alphas[place] * (longest - most[place])
            most[place] = longest
        seats[place] -= 1
        rooms[place] -= footprint
        places[request] = place
        heapreplace(heap, (late_s, place))
    return True


def _staying(columns: ProblemColumns, fleet: SolverFleet, opened: Ints, free_s: Floats) -> Ints:
    """[..., 2] running requests that stay, and their instances."""
    instance_of = np.full(len(columns.current_configuration) + 1, -1, dtype=np.int64)
    kept = np.flatnonzero(fleet.current >= 0)
    instance_of[fleet.current[kept]] = kept
    instance_of[-1] = -1
    at = instance_of[columns.source]
    candidates = np.flatnonzero(at >= 0)
    candidates = candidates[columns.remaining[candidates] <= opened[at[candidates]]]
    if not len(candidates):
        return np.empty((0, 2), dtype=np.int64)
    at = at[candidates]
    kind = fleet.configuration[at]
    work_s, cost_s = columns.work_s[kind, candidates], np.zeros(len(candidates))
    for configuration in set(kind.tolist()):
        mine = kind == configuration
        cost_s[mine] = columns.moved_s[configuration][candidates[mine]]
    alpha_s = columns.alpha_s[kind]
    room_s = free_s[at] - alpha_s * opened[at]
    own_s = free_s[at] - alpha_s * columns.remaining[candidates]
    worth = (room_s > 0) & (work_s * own_s <= (work_s + cost_s) * room_s)
    ranking = np.flatnonzero(worth)
    ranking = ranking[np.lexsort((-cost_s[ranking] / np.maximum(work_s[ranking], 1e-300), at[ranking]))]
    candidates, at = candidates[ranking], at[ranking]
    work_s, room_s = work_s[ranking], room_s[ranking]
    fits = np.ones(len(at), dtype=bool)
    ones = np.ones(len(at))
    for amount, limit in (
        (work_s, room_s),
        (columns.footprint[candidates], columns.capacity[fleet.configuration[at]]),
        (ones, columns.slots[fleet.configuration[at]]),
    ):
        fits &= running_sum(amount, at) <= limit
    return np.stack([candidates[fits], at[fits]], axis=1)


def running_sum(amount: Floats | Ints, group: Ints) -> Floats:
    """Sum so far within each group; groups lie together."""
    if not len(amount):
        return np.zeros(0)
    total = np.cumsum(amount, dtype=np.float64)
    first = np.flatnonzero(np.concatenate(([True], group[1:] != group[:-1])))
    before = np.concatenate(([0.0], total))[first]
    sums: Floats = total - np.repeat(before, np.diff(np.concatenate((first, [len(group)]))))
    return sums
