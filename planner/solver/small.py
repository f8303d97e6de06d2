"""Few GPUs and few requests: every fleet is looked at, the promising ones closely."""

from collections.abc import Callable

from planner.solver.columns import ProblemColumns
from planner.solver.evaluate import FleetPlacement, SolverFleet
from planner.solver.fleets import fleets
from planner.solver.search import AdmissionOrders, PlacementSearch, SearchBudget

MOST_FLEETS = 3000
CELLS = 40_000  # requests times GPUs up to which a problem is small
LOOKED_AT, CLOSELY = 32, 6
TRIALS = 5
FEW = 16  # requests up to which every fleet is improved before the promising are chosen
ENOUGH = 5e-4  # gap that is none


def is_small(columns: ProblemColumns) -> bool:
    return columns.problem.gpus_count <= 16 and columns.count * columns.problem.gpus_count <= CELLS


def best_of_all(
    columns: ProblemColumns, starts: list[FleetPlacement], bound_s: float, work: SearchBudget, stop: Callable[[], bool]
) -> list[FleetPlacement]:
    """The best placements found; `starts` are improved as well."""
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
    """Fleets whose kinds of instances do best, by a first filling of one of them."""
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
    """The fleet filled evenly, and with long requests together as soon as that works."""
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
