"""Build the fleets that a plan may propose, with requests placed on their instances. Has no side effects.

A candidate is fixed before it is evaluated on samples, because lengths are unknown when requests are placed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace
from itertools import count

import numpy as np
from numpy.typing import NDArray

from planner.model import Configuration, ConfigurationId, EngineId, PlanId, PlannedMove
from planner.solver.columns import SEVERAL, node_of
from planner.solver.from_snapshot import LiveFleet
from planner.solver.layout import free_groups
from planner.solver.problem import NOWHERE, RUNNING, CurrentInstance, MakespanProblem, Solution
from planner.solver.spread import onto_least_loaded

Indices = NDArray[np.int64]
Seconds = NDArray[np.float64]


class UnusableFleet(ValueError):
    """Raised if a fleet cannot be proposed; the message is the reason."""


@dataclass(frozen=True, slots=True)
class CandidateFleet:
    """A fleet with its requests. Requests are given by their indices in the problem."""

    name: str
    instances: tuple[CurrentInstance, ...]
    limits: tuple[Configuration, ...]  # [instance], with its step time and KV capacity
    kept: NDArray[np.bool_]  # [instance]
    order: Indices  # [request], instance after instance, each in order of admission
    starts: Indices  # [instance + 1], where each instance's requests begin
    migration_s: Seconds  # [instance]
    switch_s: Seconds  # [instance]
    moved: Indices  # requests that change engine, running requests first

    @property
    def configurations(self) -> list[ConfigurationId]:
        return [instance.configuration for instance in self.instances]

    @property
    def decision(self) -> str:
        """The change to this fleet: `reconfigure` if engines change, `rebalance` if only requests move, otherwise
        `keep`."""
        if not self.kept.all():
            return "reconfigure"
        return "rebalance" if len(self.moved) else "keep"

    def requests_of(self, instance: int) -> Indices:
        return self.order[self.starts[instance] : self.starts[instance + 1]]


def candidate(
    name: str, fleet: LiveFleet, instances: Sequence[CurrentInstance], requests: Indices, at: Indices
) -> CandidateFleet:
    """Return a candidate in which the request `requests[k]` is on the instance `instances[at[k]]`.

    `requests` are all requests of the problem, in order of admission on each instance. Current instances keep their
    engine's own limits. Requests that cannot move stay where they are. Raises UnusableFleet if the engine of such a
    request is not kept.
    """
    problem = fleet.problem
    current = {instance.id: place for place, instance in enumerate(problem.current)}
    known = {configuration.id: configuration for configuration in problem.configurations}
    as_now = set(problem.current)
    kept = np.array([instance in as_now for instance in instances], dtype=np.bool_)
    limits = tuple(
        fleet.limits[current[instance.id]] if stays else known[instance.configuration]
        for instance, stays in zip(instances, kept, strict=True)
    )
    homes = _homes(problem, instances, kept)
    requests, at = _with_immovable(fleet, homes, bool(kept.all()), requests, at)
    by_place = np.argsort(at, kind="stable")
    order, at = requests[by_place], at[by_place]
    starts = np.concatenate([[0], np.cumsum(np.bincount(at, minlength=len(instances)))]).astype(np.int64)
    costs_s, moved = _moves(problem, instances, homes, order, at)
    migration_s = np.bincount(at, weights=costs_s, minlength=len(instances))
    switch_s = np.array([0.0 if stays else limit.switch_s for limit, stays in zip(limits, kept, strict=True)])
    return CandidateFleet(
        name, tuple(instances), limits, kept, order, starts, migration_s.astype(np.float64), switch_s, moved
    )


def solved(name: str, fleet: LiveFleet, solution: Solution) -> CandidateFleet:
    """Return the solver's fleet as a candidate."""
    instances = [CurrentInstance(placed.id, placed.configuration, placed.gpus) for placed in solution.instances]
    requests = np.concatenate([np.empty(0, dtype=np.int64), *(placed.requests for placed in solution.instances)])
    at = np.repeat(np.arange(len(instances)), [len(placed.requests) for placed in solution.instances])
    return candidate(name, fleet, instances, requests.astype(np.int64), at)


def as_it_stands(fleet: LiveFleet) -> CandidateFleet:
    """Return the current fleet with every request on its current engine, running requests before waiting requests.

    Requests without an engine are placed on the engine with the fewest requests.
    """
    problem = fleet.problem
    at, state = problem.requests.instance.astype(np.int64), problem.requests.state
    homeless = np.flatnonzero(at == NOWHERE)
    if len(homeless):
        held = np.bincount(at[at != NOWHERE], minlength=len(problem.current)).tolist()
        queue = [(count, place) for place, count in enumerate(held)]
        heapify(queue)
        taken = []
        for _ in homeless:
            count, place = queue[0]
            taken.append(place)
            heapreplace(queue, (count + 1, place))
        at[homeless] = taken
    requests = np.lexsort((state != RUNNING, problem.requests.instance == NOWHERE))
    return candidate("as it stands", fleet, problem.current, requests, at[requests])


def longest(problem: MakespanProblem) -> Indices:
    """Return the indices of the requests, longest first. Requests of equal length stay in input order."""
    return np.argsort(-problem.requests.remaining_tokens, kind="stable")


def rebalanced(fleet: LiveFleet, order: Indices) -> CandidateFleet:
    """Return the current engines with requests placed in `order`, each on the engine that finishes it first.

    The cost of moving the request is included, so most requests stay where they are.
    """
    requests, limits = fleet.problem.requests, fleet.limits
    remaining, context = requests.remaining_tokens[order], requests.context_tokens[order]
    slowest = np.array([min(limit.prefill_tokens_per_s for limit in limits)])
    again_s = fleet.problem.transfer.recompute_s(context.astype(np.float64), slowest)
    move_s = np.where(requests.state[order] == RUNNING, again_s, 0.0)
    kinds = {limit.id: limit for limit in limits}
    work_of = {name: added_s(kind.beta_s, kind.gamma_s, context, remaining).tolist() for name, kind in kinds.items()}
    alpha_s, works_s = [limit.alpha_s for limit in limits], [work_of[limit.id] for limit in limits]
    loads_s, longest_s = [0.0] * len(limits), [0.0] * len(limits)  # longest_s: alpha seconds of the longest request
    queue = [(0.0, place) for place in range(len(limits))]
    places = []
    rows = zip(remaining.tolist(), move_s.tolist(), requests.instance[order].tolist(), strict=True)
    for request, (left, away_s, home) in enumerate(rows):
        load_s, place = queue[0]
        while load_s != loads_s[place]:  # the entry is outdated
            heapreplace(queue, (loads_s[place], place))
            load_s, place = queue[0]
        alone_s = alpha_s[place] * left
        more_s = alone_s - longest_s[place]
        end_s = load_s + (more_s if more_s > 0.0 else 0.0) + works_s[place][request] + away_s
        if home != NOWHERE:
            at_home_s = alpha_s[home] * left
            more_s = at_home_s - longest_s[home]
            home_s = loads_s[home] + (more_s if more_s > 0.0 else 0.0) + works_s[home][request]
            if home_s <= end_s:
                place, end_s, alone_s = home, home_s, at_home_s
        loads_s[place] = end_s
        if alone_s > longest_s[place]:
            longest_s[place] = alone_s
        places.append(place)
    return _dealt("rebalanced", fleet, fleet.problem.current, order, places)


def longest_first(
    fleet: LiveFleet, order: Indices, configuration: Configuration, instances: Sequence[CurrentInstance]
) -> CandidateFleet:
    """Return a fleet of `instances` of one configuration. Requests are placed in `order`, each on the least loaded
    instance.

    Raises UnusableFleet if there are no instances or if a request fits on none of them.
    """
    problem = fleet.problem
    if not instances:
        raise UnusableFleet(_why_none_fits(configuration, problem))
    remaining, context = problem.requests.remaining_tokens[order], problem.requests.context_tokens[order]
    if len(remaining) and int((remaining + context).max()) > configuration.kv_capacity_tokens:
        footprint = int((remaining + context).max())
        raise UnusableFleet(
            f"a request of {footprint} tokens does not fit in a KV cache of {configuration.kv_capacity_tokens} tokens"
        )
    work_s = added_s(configuration.beta_s, configuration.gamma_s, context, remaining)
    places = onto_least_loaded(len(instances), work_s.tolist(), (configuration.alpha_s * remaining).tolist())
    return _dealt(f"{configuration.id} spread", fleet, instances, order, places)


def _dealt(
    name: str, fleet: LiveFleet, instances: Sequence[CurrentInstance], order: Indices, places: Sequence[int]
) -> CandidateFleet:
    """Return a candidate in which the request `order[k]` is on the instance `instances[places[k]]`. Instances admit
    running requests first."""
    running_first = np.argsort(fleet.problem.requests.state[order] != RUNNING, kind="stable")
    at = np.array(places, dtype=np.int64)
    return candidate(name, fleet, instances, order[running_first], at[running_first])


def homogeneous(problem: MakespanProblem, configuration: Configuration) -> tuple[CurrentInstance, ...]:
    """Return as many instances of one configuration as fit on the GPUs. They include the instances of that
    configuration that already run."""
    kept = [instance for instance in problem.current if instance.configuration == configuration.id]
    used = {gpu for instance in kept for gpu in instance.gpus}
    taken = {instance.id for instance in problem.current}
    names = (name for number in count() if (name := EngineId(f"{configuration.id}-{number}")) not in taken)
    groups = free_groups(problem.gpus_count, problem.per_node, used, configuration.gpus)
    new = [CurrentInstance(next(names), configuration.id, gpus) for gpus in groups]
    return (*kept, *new)


def moves_of(problem: MakespanProblem, fleet: CandidateFleet) -> tuple[PlannedMove, ...]:
    """Return the requests that change engine: running requests with their cheaper method, then waiting requests."""
    moved, ids = fleet.moved, problem.requests.ids
    place_of = np.empty(len(fleet.order), dtype=np.int64)
    place_of[fleet.order] = np.repeat(np.arange(len(fleet.instances)), np.diff(fleet.starts))
    to, source = place_of[moved], problem.requests.instance[moved]
    running = int((problem.requests.state[moved] == RUNNING).sum())  # running requests come first
    transfer_s, recompute_s = _move_s(problem, fleet.instances, moved[:running], to[:running])
    costs_s = np.zeros(len(moved))
    costs_s[:running] = np.minimum(transfer_s, recompute_s)
    methods = np.full(len(moved), "queue", dtype=object)
    methods[:running] = np.where(transfer_s < recompute_s, "transfer", "recompute")
    left, reached = [instance.id for instance in problem.current], [instance.id for instance in fleet.instances]
    return tuple(
        PlannedMove(ids[request], left[at], reached[place], method, cost_s)
        for request, at, place, method, cost_s in zip(
            moved.tolist(), source.tolist(), to.tolist(), methods.tolist(), costs_s.tolist(), strict=True
        )
    )


def added_s(
    beta_s: float | Seconds, gamma_s: float | Seconds, context: NDArray[np.int64], remaining: NDArray[np.int64]
) -> Seconds:
    """Return the time, in seconds, that each request adds to its instance, without its share of alpha.

    The time does not depend on the other requests of the instance.
    """
    tokens = remaining.astype(np.float64)
    result: Seconds = tokens * (beta_s + gamma_s * (context + (tokens - 1.0) * 0.5))
    return result


def _homes(problem: MakespanProblem, instances: Sequence[CurrentInstance], kept: NDArray[np.bool_]) -> Indices:
    """Return, for each current instance, its index in `instances`, or NOWHERE if it is not kept."""
    place_of = {instance.id: place for place, instance in enumerate(instances) if kept[place]}
    return np.array([place_of.get(instance.id, NOWHERE) for instance in problem.current], dtype=np.int64)


def _with_immovable(
    fleet: LiveFleet, homes: Indices, all_stay: bool, requests: Indices, at: Indices
) -> tuple[Indices, Indices]:
    """Return `requests` and `at`, with immovable requests first and on their own engines.

    Raises UnusableFleet if the engine of an immovable request is not kept.
    """
    source = fleet.problem.requests.instance
    stuck = ~(fleet.may_rebalance if all_stay else fleet.may_leave) & (source != NOWHERE)
    if not stuck.any():
        return requests, at
    staying = np.flatnonzero(stuck)
    leaving = int((homes[source[staying]] == NOWHERE).sum())
    if leaving:
        raise UnusableFleet(f"{leaving} requests on replaced engines cannot move")
    others = ~stuck[requests]
    return np.concatenate([staying, requests[others]]), np.concatenate([homes[source[staying]], at[others]])


def _moves(
    problem: MakespanProblem, instances: Sequence[CurrentInstance], homes: Indices, order: Indices, at: Indices
) -> tuple[Seconds, Indices]:
    """Return the move cost of each request of `order`, in seconds, and the requests that change engine.

    If several requests move to an instance by the same method, they arrive together, so the fixed part of the cost is
    added for only one of them.
    """
    source = problem.requests.instance[order]
    moves = source != NOWHERE
    moves[moves] = homes[source[moves]] != at[moves]
    running = moves & (problem.requests.state[order] == RUNNING)
    transfer_s, recompute_s = _move_s(problem, instances, order[running], at[running])
    by_transfer = transfer_s < recompute_s
    fixed_s = np.where(by_transfer, problem.transfer.transfer_fixed_s, problem.transfer.recompute_fixed_s)
    _, first = np.unique(2 * at[running] + by_transfer, return_index=True)  # [instance and method]
    fixed_s[first] = 0.0
    costs_s = np.zeros(len(order))
    costs_s[running] = np.minimum(transfer_s, recompute_s) - fixed_s
    return costs_s, np.concatenate([order[running], order[moves & ~running]])


def _move_s(
    problem: MakespanProblem, instances: Sequence[CurrentInstance], requests: Indices, to: Indices
) -> tuple[Seconds, Seconds]:
    """Return the time, in seconds, for moving each request to its instance `to`, first by transfer, then by
    recomputation."""
    context = problem.requests.context_tokens[requests].astype(np.float64)
    source = problem.requests.instance[requests]
    known = {configuration.id: configuration.prefill_tokens_per_s for configuration in problem.configurations}
    prefill = np.array([known[instance.configuration] for instance in instances])
    links, homes = _shape(problem.current, problem.per_node), _shape(instances, problem.per_node)
    gpus = np.minimum(links[source, 0], homes[to, 0])
    inside = (links[source, 1] == homes[to, 1]) & (links[source, 1] != SEVERAL)
    costs = problem.transfer
    transfer_s = costs.transfer_s(context, gpus, inside) + costs.transfer_fixed_s
    return transfer_s, costs.recompute_s(context, prefill[to]) + costs.recompute_fixed_s


def _shape(instances: Sequence[CurrentInstance], per_node: int) -> Indices:
    """Return the number of GPUs and the node of each instance (SEVERAL if it spans nodes), as an [instance, 2]
    array."""
    shapes = [(len(each.gpus), node_of(each.gpus, per_node)) for each in instances]
    return np.array(shapes, dtype=np.int64).reshape(-1, 2)


def _why_none_fits(configuration: Configuration, problem: MakespanProblem) -> str:
    per_node = problem.per_node
    if configuration.gpus > per_node and configuration.gpus % per_node:
        return f"an instance of {configuration.gpus} GPUs neither fits in a node of {per_node} nor fills whole nodes"
    return f"an instance takes {configuration.gpus} GPUs; there are {problem.gpus_count} in nodes of {per_node}"


def with_fresh_names(fleet: CandidateFleet, plan: PlanId) -> CandidateFleet:
    """Return the fleet with new instances named after the plan, so that ids are unique across plans."""
    instances = [
        instance if stays else replace(instance, id=EngineId(f"{plan}.{place}"))
        for place, (instance, stays) in enumerate(zip(fleet.instances, fleet.kept, strict=True))
    ]
    return replace(fleet, instances=tuple(instances))
