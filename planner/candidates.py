"""Fleets that a plan may propose, with their requests dealt, and what each takes over sampled lengths. Pure.

A candidate is fixed before the samples are looked at: who draws a long answer is not known when requests are placed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np
from numpy.typing import NDArray

from planner.live import LiveFleet
from planner.model import Configuration, ConfigurationId, EngineId, GpuId, PlanId
from planner.problem import NOWHERE, RUNNING, Instance, Migration, Problem, Requests, Solution

Indices = NDArray[np.int64]
Seconds = NDArray[np.float64]


class Unusable(ValueError):
    """A fleet that cannot be proposed, and why."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A fleet and who decodes what on it. Requests are indices into the problem's."""

    name: str
    instances: tuple[Instance, ...]
    limits: tuple[Configuration, ...]  # [instance], step time and room of each
    kept: NDArray[np.bool_]  # [instance]
    order: Indices  # [request], instance after instance, each in order of admission
    starts: Indices  # [instance + 1], where each instance's requests begin
    migration_s: Seconds  # [instance]
    switch_s: Seconds  # [instance]
    moved: Indices  # requests that change engine, running ones first

    @property
    def configurations(self) -> list[ConfigurationId]:
        return [instance.configuration for instance in self.instances]

    @property
    def decision(self) -> str:
        """What it takes: engines that change, requests that move, or nothing."""
        if not self.kept.all():
            return "reconfigure"
        return "rebalance" if len(self.moved) else "keep"

    def requests_of(self, instance: int) -> Indices:
        return self.order[self.starts[instance] : self.starts[instance + 1]]


def candidate(
    name: str, problem: Problem, fleet: LiveFleet, instances: Sequence[Instance], dealt: Sequence[Indices]
) -> Candidate:
    """`instances` of the problem's configurations with `dealt[i]` requests on the i-th, each in order of admission.

    Those that are current ones keep the engine's own limits. Raises Unusable where a request would have to move that
    cannot, or where an engine would be stopped although nobody wants to change it.
    """
    current = {instance.id: place for place, instance in enumerate(problem.current)}
    known = {configuration.id: configuration for configuration in problem.configurations}
    kept = np.array([_same(problem, current, instance) for instance in instances], dtype=np.bool_)
    limits = tuple(
        fleet.limits[current[instance.id]] if stays else known[instance.configuration]
        for instance, stays in zip(instances, kept, strict=True)
    )
    dealt = _with_immovable(name, problem, fleet, instances, kept, dealt)
    order = np.concatenate([np.empty(0, dtype=np.int64), *dealt]).astype(np.int64)
    starts = np.concatenate([[0], np.cumsum([len(held) for held in dealt])]).astype(np.int64)
    at = np.repeat(np.arange(len(instances)), np.diff(starts))
    costs_s, moved = _moves(problem, instances, kept, order, at)
    migration_s = np.bincount(at, weights=costs_s, minlength=len(instances))
    switch_s = np.array([0.0 if stays else limit.switch_s for limit, stays in zip(limits, kept, strict=True)])
    return Candidate(
        name, tuple(instances), limits, kept, order, starts, migration_s.astype(np.float64), switch_s, moved
    )


def solved(name: str, problem: Problem, fleet: LiveFleet, solution: Solution) -> Candidate:
    """The solver's fleet."""
    instances = [Instance(placed.id, placed.configuration, placed.gpus) for placed in solution.instances]
    return candidate(name, problem, fleet, instances, [placed.requests for placed in solution.instances])


def as_it_stands(problem: Problem, fleet: LiveFleet) -> Candidate:
    """Every request where it is, the running before the waiting; those on no engine dealt to whoever has fewest."""
    at, state = problem.requests.instance, problem.requests.state
    dealt = [np.flatnonzero(at == place) for place in range(len(problem.current))]
    dealt = [held[np.argsort(state[held] != RUNNING, kind="stable")] for held in dealt]
    homeless = np.flatnonzero(at == NOWHERE)
    if len(homeless):
        queue = [(len(held), place) for place, held in enumerate(dealt)]
        heapify(queue)
        taken: list[list[int]] = [[] for _ in dealt]
        for request in homeless.tolist():
            count, place = queue[0]
            taken[place].append(request)
            heapreplace(queue, (count + 1, place))
        dealt = [np.concatenate([held, new]).astype(np.int64) for held, new in zip(dealt, taken, strict=True)]
    return candidate("as it stands", problem, fleet, problem.current, dealt)


def rebalanced(problem: Problem, fleet: LiveFleet) -> Candidate:
    """The current engines, longest request first onto the one that would be through with it first, the move paid for:
    most requests stay where they are."""
    requests, limits = problem.requests, fleet.limits
    count = len(limits)
    remaining, context = requests.remaining_tokens, requests.context_tokens
    running = np.flatnonzero(requests.state == RUNNING)
    everywhere = np.arange(len(remaining))
    work_s: dict[ConfigurationId, list[float]] = {}
    for limit in limits:
        if limit.id not in work_s:
            work_s[limit.id] = _work_s(limit.beta_s, limit.gamma_s, context, remaining).tolist()
    move_s = np.zeros(len(remaining))
    slowest = np.array([min(limit.prefill_tokens_per_s for limit in limits)])
    move_s[running] = context[running] / slowest
    loads, longest = [0.0] * count, [0.0] * count
    queue = [(0.0, place) for place in range(count)]
    dealt: list[list[int]] = [[] for _ in range(count)]
    left, moves, homes = remaining.tolist(), move_s.tolist(), requests.instance.tolist()
    for request in everywhere[np.argsort(-remaining, kind="stable")].tolist():
        while queue[0][0] != loads[queue[0][1]]:  # it has grown since
            heapreplace(queue, (loads[queue[0][1]], queue[0][1]))
        away, home = queue[0][1], homes[request]
        place, cost_s = away, moves[request]
        if home != NOWHERE:
            there_s = _with(limits[home], loads[home], longest[home], left[request], work_s[limits[home].id][request])
            else_s = _with(limits[away], loads[away], longest[away], left[request], work_s[limits[away].id][request])
            if there_s <= else_s + cost_s:
                place, cost_s = home, 0.0
        limit = limits[place]
        loads[place] = cost_s + _with(limit, loads[place], longest[place], left[request], work_s[limit.id][request])
        longest[place] = max(longest[place], limit.alpha_s * left[request])
        dealt[place].append(request)
    return candidate("rebalanced", problem, fleet, problem.current, _running_first(problem, dealt))


def _with(limit: Configuration, load_s: float, longest_s: float, remaining: int, work_s: float) -> float:
    """Seconds that an instance of this load takes with one request more."""
    return load_s + max(0.0, limit.alpha_s * remaining - longest_s) + work_s


def longest_first(problem: Problem, fleet: LiveFleet, configuration: Configuration) -> Candidate:
    """A whole fleet of one configuration, longest request first onto the least loaded instance; engines that are of
    this configuration already stay. Raises Unusable where none fits."""
    instances = homogeneous(problem, configuration)
    if not instances:
        raise Unusable(_why_none_fits(configuration, problem))
    requests = problem.requests
    remaining, context = requests.remaining_tokens, requests.context_tokens
    if len(remaining) and int((remaining + context).max()) > configuration.kv_capacity_tokens:
        footprint = int((remaining + context).max())
        raise Unusable(
            f"a request of {footprint} tokens does not fit into a KV cache of {configuration.kv_capacity_tokens}"
        )
    work_s = _work_s(configuration.beta_s, configuration.gamma_s, context, remaining)
    loads = [(0.0, place) for place in range(len(instances))]
    dealt: list[list[int]] = [[] for _ in instances]
    for request in np.argsort(-remaining, kind="stable").tolist():
        load_s, place = loads[0]
        if not dealt[place]:  # the first request on an instance is its longest, and pays for the iterations of all
            load_s += configuration.alpha_s * int(remaining[request])
        dealt[place].append(request)
        heapreplace(loads, (load_s + float(work_s[request]), place))
    return candidate(f"{configuration.id} spread", problem, fleet, instances, _running_first(problem, dealt))


def _running_first(problem: Problem, dealt: Sequence[Sequence[int]]) -> list[Indices]:
    waits = problem.requests.state != RUNNING
    held = (np.array(requests, dtype=np.int64) for requests in dealt)
    return [requests[np.argsort(waits[requests], kind="stable")] for requests in held]


def homogeneous(problem: Problem, configuration: Configuration) -> tuple[Instance, ...]:
    """As many instances of one configuration as fit, around those that run already."""
    kept = [instance for instance in problem.current if instance.configuration == configuration.id]
    used = {gpu for instance in kept for gpu in instance.gpus}
    per_node, need = problem.per_node, configuration.gpus
    groups: list[tuple[GpuId, ...]] = []
    row: list[GpuId] = []  # whole nodes in a row, for instances larger than one
    for first in range(0, problem.gpus_count, per_node):
        last = min(first + per_node, problem.gpus_count)
        free = [GpuId(gpu) for gpu in range(first, last) if gpu not in used]
        if need <= per_node:
            groups += [tuple(free[i : i + need]) for i in range(0, len(free) - need + 1, need)]
        elif need % per_node == 0 and len(free) == per_node:
            row += free
            if len(row) == need:
                groups.append(tuple(row))
                row = []
    names = _fresh_names({instance.id for instance in problem.current}, configuration.id)
    new = [Instance(next(names), configuration.id, gpus) for gpus in groups]
    return (*kept, *new)


def decode_s(
    fleet: Candidate, context_tokens: NDArray[np.int64], remaining_tokens: NDArray[np.int64], *, roughly: bool = False
) -> NDArray[np.float64]:
    """[sample, instance], seconds until each instance's last request ends, by the step times of its configuration.

    `remaining_tokens` is [sample, request]. A request is admitted strictly in order, when a slot is free and its whole
    footprint fits; one that is larger than the KV cache runs alone. `roughly`: where they do not all fit at once, as
    many iterations as slots and room would take if they were never left unused, in a fraction of the time.
    """
    starts, order = fleet.starts, fleet.order
    sizes = np.diff(starts)
    filled = np.flatnonzero(sizes)
    ends_s = np.zeros((len(remaining_tokens), len(sizes)))
    if not len(filled):
        return ends_s
    alpha_s, beta_s, gamma_s = (
        np.array([getattr(limit, name) for limit in fleet.limits]) for name in ("alpha_s", "beta_s", "gamma_s")
    )
    slots = np.array([limit.max_sequences for limit in fleet.limits])
    room = np.array([limit.kv_capacity_tokens for limit in fleet.limits])
    at = np.repeat(np.arange(len(sizes)), sizes)
    context, beta, gamma = context_tokens[order], beta_s[at], gamma_s[at]
    cuts = starts[filled]
    for row, sample in zip(ends_s, remaining_tokens, strict=True):
        remaining = sample[order]
        work_s = np.add.reduceat(_work_s(beta, gamma, context, remaining), cuts)
        iterations = np.maximum.reduceat(remaining, cuts)
        held_tokens = np.add.reduceat(context + remaining, cuts)
        if roughly:
            by_slots = np.add.reduceat(remaining, cuts) / slots[filled]
            by_room = np.add.reduceat(remaining * (context + remaining), cuts) / room[filled]
            row[filled] = alpha_s[filled] * np.maximum(iterations, np.maximum(by_slots, by_room)) + work_s
            continue
        for turn in np.flatnonzero((sizes[filled] > slots[filled]) | (held_tokens > room[filled])).tolist():
            place = int(filled[turn])
            span = slice(starts[place], starts[place + 1])
            iterations[turn] = _iterations(
                context[span].tolist(), remaining[span].tolist(), int(slots[place]), int(room[place])
            )
        row[filled] = alpha_s[filled] * iterations + work_s
    return ends_s


def ends_if_later_s(
    fleet: Candidate,
    now: Candidate,
    columns: Requests,
    remaining_tokens: NDArray[np.int64],
    wait_s: float,
    correction: float,
) -> NDArray[np.float64]:
    """[sample], seconds until all have ended if `now` decodes for `wait_s` more, and `fleet` then takes over what is
    left: nobody moves who has ended meanwhile, and the others are longer. Where nobody is left, `wait_s` at most.

    `remaining_tokens` is [sample, request]; `correction` multiplies decoding seconds.
    """
    context_tokens = columns.context_tokens
    grown = np.zeros(len(context_tokens), dtype=np.int64)
    for place, limit in enumerate(now.limits):
        held = now.requests_of(place)
        held = held[columns.state[held] == RUNNING]
        grown[held] = int(wait_s / (limit.step_s(len(held), int(context_tokens[held].sum())) * correction))
    at, instances = np.repeat(np.arange(len(fleet.instances)), np.diff(fleet.starts)), len(fleet.instances)
    before = np.bincount(at, context_tokens[fleet.order], minlength=instances)
    ends_s = np.full(len(remaining_tokens), wait_s)
    for row, sample in enumerate(remaining_tokens):
        left = np.maximum(sample - grown, 0)
        if not left.any():
            continue
        context = np.where(left > 0, context_tokens + grown, 0)
        decoding_s = decode_s(fleet, context, left[None])[0] * correction
        moved = np.bincount(at, context[fleet.order], minlength=instances) / np.maximum(before, 1.0)
        ends_s[row] += float((decoding_s + fleet.migration_s * moved + fleet.switch_s).max())
    return ends_s


def migrations(problem: Problem, fleet: Candidate) -> list[Migration]:
    """The running requests that change engine, each with its cheaper method."""
    place_of = np.empty(len(fleet.order), dtype=np.int64)
    place_of[fleet.order] = np.repeat(np.arange(len(fleet.instances)), np.diff(fleet.starts))
    running = fleet.moved[problem.requests.state[fleet.moved] == RUNNING]
    to = place_of[running]
    transfer_s, recompute_s = _move_s(problem, fleet.instances, running, to)
    return [
        Migration(
            request=int(request),
            source=problem.current[int(problem.requests.instance[request])].id,
            destination=fleet.instances[int(place)].id,
            method="transfer" if by_transfer_s < by_recompute_s else "recompute",
            cost_s=float(min(by_transfer_s, by_recompute_s)),
        )
        for request, place, by_transfer_s, by_recompute_s in zip(running, to, transfer_s, recompute_s, strict=True)
    ]


# --- inside


def _work_s(
    beta_s: float | Seconds, gamma_s: float | Seconds, context: NDArray[np.int64], remaining: NDArray[np.int64]
) -> Seconds:
    """Seconds that each request adds to its instance, whatever runs beside it: all but the share of alpha."""
    tokens = remaining.astype(np.float64)
    result: Seconds = tokens * (beta_s + gamma_s * (context + (tokens - 1.0) * 0.5))
    return result


def _iterations(context: Sequence[int], remaining: Sequence[int], slots: int, room: int) -> int:
    """Decode iterations until all have ended: a walk over admissions and completions."""
    ends: list[tuple[int, int]] = []  # heap of (iteration at which it ends, footprint)
    now = last = 0
    free_tokens = room
    for held, left in zip(context, remaining, strict=True):
        footprint = min(held + left, room)
        while len(ends) >= slots or footprint > free_tokens:
            now, freed = heappop(ends)
            free_tokens += freed
        heappush(ends, (now + left, footprint))
        free_tokens -= footprint
        last = max(last, now + left)
    return last


def _same(problem: Problem, current: dict[EngineId, int], instance: Instance) -> bool:
    place = current.get(instance.id)
    return place is not None and problem.current[place] == instance


def _with_immovable(
    name: str,
    problem: Problem,
    fleet: LiveFleet,
    instances: Sequence[Instance],
    kept: NDArray[np.bool_],
    dealt: Sequence[Indices],
) -> list[Indices]:
    """`dealt`, with requests that must stay back where they are, ahead of the others."""
    at = problem.requests.instance
    may_move = fleet.may_rebalance if bool(kept.all()) else fleet.may_leave
    stuck = ~may_move & (at != NOWHERE)
    if not stuck.any():
        return [np.asarray(held, dtype=np.int64) for held in dealt]
    place_of = {instance.id: place for place, instance in enumerate(instances) if kept[place]}
    homes = np.array([place_of.get(instance.id, NOWHERE) for instance in problem.current], dtype=np.int64)
    leaving = int((homes[at[stuck]] == NOWHERE).sum())
    if leaving:
        raise Unusable(f"{leaving} requests would have to move that cannot")
    staying = [np.flatnonzero(stuck & (at >= 0) & (homes[at] == place)) for place in range(len(instances))]
    return [
        np.concatenate([stays, held[~stuck[held]]]).astype(np.int64) for stays, held in zip(staying, dealt, strict=True)
    ]


def _moves(
    problem: Problem, instances: Sequence[Instance], kept: NDArray[np.bool_], order: Indices, at: Indices
) -> tuple[Seconds, Indices]:
    """Seconds that each place of `order` costs its instance, and which requests change engine."""
    place_of = {instance.id: place for place, instance in enumerate(instances) if kept[place]}
    homes = np.array([place_of.get(instance.id, NOWHERE) for instance in problem.current], dtype=np.int64)
    source = problem.requests.instance[order]
    moves = source != NOWHERE
    moves[moves] = homes[source[moves]] != at[moves]
    running = moves & (problem.requests.state[order] == RUNNING)
    costs_s = np.zeros(len(order))
    costs_s[running] = np.minimum(*_move_s(problem, instances, order[running], at[running]))
    return costs_s, np.concatenate([order[running], order[moves & ~running]])


def _move_s(problem: Problem, instances: Sequence[Instance], requests: Indices, to: Indices) -> tuple[Seconds, Seconds]:
    """Seconds to bring each of `requests` from where it is to instance `to`: by transfer, by recompute."""
    context = problem.requests.context_tokens[requests].astype(np.float64)
    source = problem.requests.instance[requests]
    known = {configuration.id: configuration.prefill_tokens_per_s for configuration in problem.configurations}
    prefill = np.array([known[instance.configuration] for instance in instances])
    links, homes = _shape(problem.current, problem.per_node), _shape(instances, problem.per_node)
    gpus = np.minimum(links[source, 0], homes[to, 0])
    inside = (links[source, 1] == homes[to, 1]) & (links[source, 1] >= 0)
    transfer = problem.transfer
    rate_gbps = gpus * np.where(inside, transfer.intra_node_gbps_per_gpu, transfer.inter_node_gbps_per_gpu)
    with np.errstate(divide="ignore", invalid="ignore"):
        wire_s = context * problem.kv_bytes_per_token * 8 / (rate_gbps * 1e9)
    return np.where(rate_gbps > 0, wire_s, np.inf) + transfer.latency_s, context / prefill[to]


def _shape(instances: Sequence[Instance], per_node: int) -> Indices:
    """[instance, 2]: GPUs, and the node, or -1 where there are several."""
    return np.array(
        [
            (len(i.gpus), i.gpus[0] // per_node if i.gpus[0] // per_node == i.gpus[-1] // per_node else -1)
            for i in instances
        ],
        dtype=np.int64,
    ).reshape(-1, 2)


def _why_none_fits(configuration: Configuration, problem: Problem) -> str:
    per_node = problem.per_node
    if configuration.gpus > per_node and configuration.gpus % per_node:
        return f"an instance of {configuration.gpus} GPUs is neither inside a node of {per_node} nor whole nodes"
    return f"an instance takes {configuration.gpus} GPUs; there are {problem.gpus_count} in nodes of {per_node}"


def _fresh_names(taken: set[EngineId], prefix: str) -> Iterator[EngineId]:
    number = 0
    while True:
        name = EngineId(f"{prefix}-{number}")
        number += 1
        if name not in taken:
            yield name


def with_fresh_names(fleet: Candidate, plan: PlanId) -> Candidate:
    """New instances named after the plan, so that no engine of another plan ever has the same id."""
    instances = [
        instance if stays else replace(instance, id=EngineId(f"{plan}.{place}"))
        for place, (instance, stays) in enumerate(zip(fleet.instances, fleet.kept, strict=True))
    ]
    return replace(fleet, instances=tuple(instances))
