"""The plan of a weight version: waves of pieces over trees, beside what nothing can beat and what is naive. Pure.

Several ways to cut shards and to fill waves are planned in full, and the one whose model time is least is taken.
"""

from collections.abc import Iterator

from planner.sync_tree.bounds import lower_bound_s, naive_s
from planner.sync_tree.model import SyncPlan, SyncProblem, Wave
from planner.sync_tree.waves import Style, waves

MOST_EDGES = 1_500_000  # of all ways that are tried together
# Pieces that an endpoint receives at once, stripes of each, parts of the largest shard; the usual best ones first.
_TRIED = ((4, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 1), (8, 1, 1), (1, 4, 1), (4, 1, 2), (1, 2, 4), (4, 1, 4), (1, 1, 8))


def make_plan(problem: SyncProblem) -> SyncPlan:
    """Raises Unreachable where no plan exists."""
    bound_s = lower_bound_s(problem)
    best: tuple[Wave, ...] = ()
    best_s = float("inf")
    for style in _styles(problem):
        found = tuple(waves(problem, style))
        seconds = sum(wave.seconds for wave in found)
        if seconds < best_s:
            best, best_s = found, seconds
    return SyncPlan(best, best_s if best else 0.0, bound_s, naive_s(problem))


def _styles(problem: SyncProblem) -> Iterator[Style]:
    needed = [shard for shard in problem.shards if shard.receivers]
    if not needed:
        return
    edges = 0
    largest = max(shard.bytes for shard in needed)
    crossing = _crossing(problem)
    for together, stripes, parts in _TRIED:
        size = max(1, -(-largest // parts))
        more = sum(len(shard.receivers) * -(-shard.bytes // size) for shard in needed) * stripes
        if edges and edges + more > MOST_EDGES:
            continue
        edges += more
        yield Style(size, crossing, stripes, together)


def _crossing(problem: SyncProblem) -> int:
    """Pieces that can enter every pod at once, with all circuits in use at both ends of each way."""
    entered, useful = set(), set()
    for shard in problem.shards:
        pods = set(problem.pod[list(shard.receivers)].tolist())
        held = set(problem.pod[list(shard.holders)].tolist())
        entered |= pods - held
        useful |= pods | held
    if not entered:
        return 1
    circuits = int(problem.boundary_circuits[sorted(useful)].sum())
    least = int(problem.boundary_circuits[sorted(entered)].min())
    return max(1, min(circuits // (2 * len(entered)), least))
