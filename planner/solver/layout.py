"""Assign GPUs to new instances, inside one node or on whole nodes. Kept instances stay where they are."""

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice

from planner.model import GpuId
from planner.solver.columns import ProblemColumns
from planner.solver.evaluate import SolverFleet


def lay_out(columns: ProblemColumns, kept: Iterable[int], new: Sequence[int]) -> SolverFleet | None:
    """Return a fleet of the current instances `kept` and one new instance of each configuration in `new`.

    The largest instances are placed first. An instance larger than a node takes whole free nodes. Any other instance is
    placed on the node that has the fewest free GPUs among the nodes with enough free GPUs. Return None if the new
    instances do not fit.
    """
    problem = columns.problem
    kept = sorted(kept)
    per_node = problem.per_node
    taken = {gpu for index in kept for gpu in problem.current[index].gpus}
    nodes = -(-problem.gpus_count // per_node)
    free: list[list[int]] = [
        [gpu for gpu in range(node * per_node, min((node + 1) * per_node, problem.gpus_count)) if gpu not in taken]
        for node in range(nodes)
    ]
    rooms: list[list[int]] = [[] for _ in range(per_node + 1)]  # nodes by number of free GPUs, the lowest node last
    for node in reversed(range(nodes)):
        rooms[len(free[node])].append(node)
    placed: list[tuple[GpuId, ...] | None] = [None] * len(new)
    for place in sorted(range(len(new)), key=lambda place: (-columns.gpus[new[place]], place)):
        gpus = _take(free, rooms, int(columns.gpus[new[place]]), per_node)
        if gpus is None:
            return None
        placed[place] = gpus
    return SolverFleet.of(columns, kept, [(new[place], gpus) for place, gpus in enumerate(placed) if gpus is not None])


def in_a_row(columns: ProblemColumns, kept: Iterable[int], configuration: int, most: int) -> SolverFleet:
    """Return a fleet of the current instances `kept` and at most `most` new instances of one configuration.

    New instances take the free GPUs with the lowest numbers.
    """
    problem = columns.problem
    kept = sorted(kept)
    taken = {gpu for index in kept for gpu in problem.current[index].gpus}
    fresh = free_groups(problem.gpus_count, problem.per_node, taken, int(columns.gpus[configuration]))
    return SolverFleet.of(columns, kept, [(configuration, gpus) for gpus in islice(fresh, max(0, most))])


def free_groups(gpus_count: int, per_node: int, taken: AbstractSet[GpuId], size: int) -> Iterator[tuple[GpuId, ...]]:
    """Yield groups of `size` free GPUs, the lowest numbers first, each inside one node or on consecutive free nodes."""
    whole: list[int] = []  # GPUs of consecutive free nodes, for an instance that is larger than a node
    for first in range(0, gpus_count, per_node):
        free = [gpu for gpu in range(first, min(first + per_node, gpus_count)) if gpu not in taken]
        if size > per_node:
            whole += free if len(free) == per_node else []
            free, whole = (whole, []) if len(whole) == size else ([], whole)
        for at in range(0, len(free) - size + 1, size):
            yield tuple(map(GpuId, free[at : at + size]))


def _take(free: list[list[int]], rooms: list[list[int]], gpus: int, per_node: int) -> tuple[GpuId, ...] | None:
    if gpus > per_node:
        whole, rest = divmod(gpus, per_node)
        if rest or len(rooms[per_node]) < whole:
            return None
        nodes = [rooms[per_node].pop() for _ in range(whole)]
        taken = [gpu for node in nodes for gpu in free[node]]
        for node in nodes:
            free[node] = []
        return tuple(GpuId(gpu) for gpu in sorted(taken))
    for room in range(gpus, per_node + 1):
        if rooms[room]:
            node = rooms[room].pop()
            mine, free[node] = free[node][:gpus], free[node][gpus:]
            rooms[room - gpus].append(node)
            return tuple(GpuId(gpu) for gpu in mine)
    return None
