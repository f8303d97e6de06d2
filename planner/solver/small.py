"""Few GPUs and few requests: every fleet is looked at, the promising ones closely. With more, only what was found is
improved."""

from collections.abc import Callable

from planner.solver.columns import Columns
from planner.solver.evaluate import Fleet, Placement
from planner.solver.fleets import fleets
from planner.solver.search import Orders, Search, Work

MOST_FLEETS = 3000
CELLS = 40_000  # requests times GPUs up to which a problem is small
LOOKED_AT, CLOSELY = 32, 6
TRIALS = 5
FEW = 16  # requests up to which every fleet is improved before the promising are chosen
ENOUGH = 5e-4  # gap that is none


POLISHED = 500_000  # requests times instances up to which a placement is improved


def polished(columns: Columns, starts: list[Placement], work: Work, stop: Callable[[], bool]) -> list[Placement]:
    """`starts`, each improved where it is not too large for that."""
    orders = Orders(columns, work)
    found = []
    for start in starts:
        if stop() or work.left <= 0:
            break
        if len(start.fleet) * columns.count <= POLISHED:
            search = _taken(columns, start, orders)
            search.improve()
            found.append(search.placement())
    return found


def is_small(columns: Columns) -> bool:
    return columns.problem.gpus_count <= 16 and columns.count * columns.problem.gpus_count <= CELLS


def best_of_all(
    columns: Columns, starts: list[Placement], bound_s: float, work: Work, stop: Callable[[], bool]
) -> list[Placement]:
    """The best placements found; `starts` are improved as well."""
    orders = Orders(columns, work)
    least = work.left // 2
    closely = [_taken(columns, start, orders) for start in starts]
    for fleet in _promising(columns, orders):
        if work.left <= least or stop():
            break
        closely += _filled(columns, fleet, orders, bound_s)
    closely.sort(key=lambda search: search.makespan_s)
    best: list[Search] = []
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


def _taken(columns: Columns, start: Placement, orders: Orders) -> Search:
    search = Search(columns, start.fleet, orders)
    search.take(start.assigned())
    return search


def _promising(columns: Columns, orders: Orders) -> list[Fleet]:
    """Fleets whose kinds of instances do best, by a first filling of one of them."""
    alike: dict[tuple[tuple[int, bool], ...], list[Fleet]] = {}
    for fleet in fleets(columns, MOST_FLEETS):
        kinds = zip(fleet.configuration.tolist(), (fleet.current >= 0).tolist(), strict=True)
        alike.setdefault(tuple(sorted(kinds)), []).append(fleet)
    scored = []
    least = orders.work.left * 2 // 3
    for place, members in enumerate(alike.values()):
        if orders.work.left <= least:
            break
        search = Search(columns, members[0], orders)
        if search.insert():
            if columns.count <= FEW:
                search.improve()
            scored.append((search.makespan_s, place))
    pools = list(alike.values())
    found: list[Fleet] = []
    for _, place in sorted(scored):
        found += pools[place][:8]
        if len(found) >= LOOKED_AT:
            break
    return found[:LOOKED_AT]


def _filled(columns: Columns, fleet: Fleet, orders: Orders, bound_s: float) -> list[Search]:
    """The fleet filled evenly, and with long requests together as soon as that works."""
    even = Search(columns, fleet, orders)
    if not even.insert():
        return []
    packed = Search(columns, fleet, orders)
    low_s, high_s = bound_s, even.makespan_s
    found: list[Search] = []
    for _ in range(TRIALS):
        trial_s = (low_s + high_s) / 2
        if packed.insert(trial_s):
            high_s = trial_s
            if not found or packed.makespan_s < found[0].makespan_s:
                found = [packed.copy()]
        else:
            low_s = trial_s
    return [even, *found]
