"""Calculate the time that a placement takes for decoding, migrations and redeployment.

The cost model is that of `orchestrrl plan solve`.

For any order of admission, the decoding time of an instance is alpha (the fixed time of an iteration) times its number
of iterations, plus the work of its requests. The order of admission only affects the number of iterations, and only if
the requests do not all fit at once.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.model import GpuId
from planner.solver.admission_order import admit
from planner.solver.columns import Floats, Ints, ProblemColumns, node_of

FleetSlot = tuple[int, tuple[GpuId, ...]]  # a configuration and its GPUs


@dataclass(frozen=True, slots=True)
class SolverFleet:
    """The instances of a fleet, each either a kept current instance or a new one."""

    configuration: Ints  # [instance]
    current: Ints  # [instance], index of the current instance that is kept, -1 for a new one
    node: Ints  # [instance], SEVERAL if it spans several nodes
    gpus: tuple[tuple[GpuId, ...], ...]  # [instance]

    def __len__(self) -> int:
        return len(self.gpus)

    @classmethod
    def of(cls, columns: ProblemColumns, kept: Iterable[int], new: Iterable[FleetSlot] = ()) -> "SolverFleet":
        """Build a fleet of the current instances with the indices `kept` and of the instances `new`.

        If a new instance has the configuration and the GPUs of a current instance, the current instance is kept
        instead.
        """
        per_node = columns.problem.per_node
        gpus_of_current = [instance.gpus for instance in columns.problem.current]
        current = [*zip(columns.current_configuration.tolist(), gpus_of_current, strict=True)]
        running = {slot: index for index, slot in enumerate(current)}
        slots = [*(current[index] for index in kept), *new]
        return cls(
            np.array([configuration for configuration, _ in slots], dtype=np.int64),
            np.array([running.get(slot, -1) for slot in slots], dtype=np.int64),
            np.array([node_of(gpus, per_node) for _, gpus in slots], dtype=np.int64),
            tuple(gpus for _, gpus in slots),
        )


@dataclass(frozen=True, slots=True)
class FleetPlacement:
    """A fleet with its requests. Instance j has the requests `order[starts[j]:starts[j + 1]]`, in order of
    admission."""

    fleet: SolverFleet
    order: Ints  # [request]
    starts: Ints  # [instance + 1]
    decode_s: Floats  # [instance]
    migration_s: Floats  # [instance]
    switch_s: Floats  # [instance]

    @property
    def finish_s(self) -> Floats:
        return self.decode_s + self.migration_s + self.switch_s

    @property
    def makespan_s(self) -> float:
        return float(self.finish_s.max(initial=0.0))

    def requests(self, instance: int) -> Ints:
        return self.order[self.starts[instance] : self.starts[instance + 1]]

    def assigned(self) -> Ints:
        """Return the index of each request's instance, as an array indexed by request."""
        assigned = np.empty(len(self.order), dtype=np.int64)
        assigned[self.order] = np.repeat(np.arange(len(self.fleet)), np.diff(self.starts))
        return assigned


class InstanceLoads:
    """The loads and the capacities of instances, as arrays with one entry per instance.

    `here` is the number of an instance's requests, `held` is their KV footprint in tokens, and `longest` is the maximum
    of their remaining tokens.
    """

    def __init__(self, columns: ProblemColumns, fleet: SolverFleet, at: Ints) -> None:
        """Compute the load of each instance of `fleet`. `at` is the index of each request's instance."""
        self.here = np.bincount(at, minlength=len(fleet))
        self.held = np.bincount(at, weights=columns.footprint, minlength=len(fleet))
        self.longest = np.zeros(len(fleet), dtype=np.int64)
        np.maximum.at(self.longest, at, columns.remaining)
        self.capacity, self.slots = columns.capacity[fleet.configuration], columns.slots[fleet.configuration]

    @property
    def at_once(self) -> NDArray[np.bool_]:
        """An array that is True for each instance whose requests all fit at once."""
        at_once: NDArray[np.bool_] = (self.held <= self.capacity) & (self.here <= self.slots)
        return at_once


def with_idle(columns: ProblemColumns, placement: FleetPlacement) -> FleetPlacement:
    """Return the placement plus the current instances that it does not use and whose GPUs it leaves free. Stopping
    these instances would gain nothing."""
    fleet, current = placement.fleet, columns.problem.current
    taken = {gpu for gpus in fleet.gpus for gpu in gpus}
    idle = [index for index, instance in enumerate(current) if taken.isdisjoint(instance.gpus)]
    if not idle:
        return placement
    slots = [*zip(fleet.configuration.tolist(), fleet.gpus, strict=True)]
    slots += [(int(columns.current_configuration[index]), current[index].gpus) for index in idle]
    starts = np.concatenate((placement.starts, np.full(len(idle), placement.starts[-1])))
    return evaluate(columns, SolverFleet.of(columns, (), slots), placement.order, starts)


def place(columns: ProblemColumns, fleet: SolverFleet, assigned: Ints, ranks: Ints | None = None) -> FleetPlacement:
    """Return the placement of requests on their `assigned` instances, admitted in ascending order of `ranks`.

    If `ranks` is None, the longest requests are admitted first.
    """
    if ranks is None:
        order = columns.longest_first[np.argsort(assigned[columns.longest_first], kind="stable")]
    else:
        order = np.lexsort((ranks, assigned))
    starts = np.concatenate(([0], np.cumsum(np.bincount(assigned, minlength=len(fleet)))))
    return evaluate(columns, fleet, order, starts)


def evaluate(columns: ProblemColumns, fleet: SolverFleet, order: Ints, starts: Ints) -> FleetPlacement:
    """Return the placement of the requests on `fleet`, with the times of each instance.

    Instance j has the requests `order[starts[j]:starts[j + 1]]`. New instances without requests are omitted, because
    they are never started.
    """
    used = (np.diff(starts) > 0) | (fleet.current >= 0)
    if not used.all():
        fleet = SolverFleet(
            fleet.configuration[used],
            fleet.current[used],
            fleet.node[used],
            tuple(gpus for gpus, stays in zip(fleet.gpus, used.tolist(), strict=True) if stays),
        )
        starts = np.concatenate(([0], starts[1:][used]))
    at = np.repeat(np.arange(len(fleet)), np.diff(starts))
    configuration = fleet.configuration[at]
    work_s = np.bincount(at, weights=columns.work_s[configuration, order], minlength=len(fleet))
    iterations = _iterations(columns, fleet, order, starts, at)
    return FleetPlacement(
        fleet,
        order,
        starts,
        _alpha_s(columns.alpha_s[fleet.configuration], iterations) + work_s,
        np.bincount(at, weights=moves_s(columns, fleet, order, at), minlength=len(fleet)).astype(np.float64),
        np.where(fleet.current >= 0, 0.0, columns.switch_s[fleet.configuration]),
    )


def _alpha_s(alpha_s: Floats, iterations: Floats) -> Floats:
    """Return `alpha_s` times `iterations`. The result is infinite for infinite iterations, even if `alpha_s` is 0."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isfinite(iterations), alpha_s * iterations, np.inf)


def moves_s(columns: ProblemColumns, fleet: SolverFleet, requests: Ints, at: Ints) -> Floats:
    """Return the time in seconds to move each of `requests` to its new instance. `at` has the indices of these
    instances in `fleet`. The time is 0 for requests that stay or are not running."""
    costs_s = np.zeros(len(requests))
    moving = np.flatnonzero((columns.source[requests] >= 0) & (columns.source[requests] != fleet.current[at]))
    if len(moving):
        to = at[moving]
        costs_s[moving] = columns.move_s(requests[moving], fleet.configuration[to], fleet.node[to])
    return costs_s


def _iterations(columns: ProblemColumns, fleet: SolverFleet, order: Ints, starts: Ints, at: Ints) -> Floats:
    """Return the number of iterations of each instance. It is infinite if a request does not fit on its instance."""
    footprint, remaining = columns.footprint[order], columns.remaining[order]
    counts = np.diff(starts)
    iterations = np.zeros(len(fleet))
    filled = np.flatnonzero(counts)
    if not len(filled):
        return iterations
    iterations[filled] = np.maximum.reduceat(remaining, starts[filled])
    held = np.bincount(at, weights=footprint, minlength=len(fleet))
    capacity, slots = columns.capacity[fleet.configuration], columns.slots[fleet.configuration]
    for instance in np.flatnonzero((counts > slots) | (held > capacity)).tolist():
        part = slice(starts[instance], starts[instance + 1])
        iterations[instance] = admit(
            remaining[part].tolist(), footprint[part].tolist(), int(capacity[instance]), int(slots[instance])
        )
    return iterations
