"""Convert a makespan problem into arrays. These include the costs of serving and of moving each request."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.model import Configuration
from planner.solver.problem import RUNNING, Infeasible, MakespanProblem

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SEVERAL = -1  # node of an instance that spans several nodes


@dataclass(frozen=True, slots=True)
class ProblemColumns:
    """A problem as arrays. Configurations and requests keep their order in the problem."""

    problem: MakespanProblem
    gpus: Ints  # [configuration]
    alpha_s: Floats  # [configuration]
    switch_s: Floats  # [configuration]
    capacity: Ints  # [configuration], KV tokens
    slots: Ints  # [configuration], sequences
    prefill: Floats  # [configuration], tokens per second
    placeable: Ints  # [configuration], maximum number of instances on the GPUs
    remaining: Ints  # [request]
    footprint: Ints  # [request], KV tokens reserved
    work_s: Floats  # [configuration, request], without the share of alpha
    source: Ints  # [request], index of the current instance that holds its KV, -1 if none
    current_configuration: Ints  # [current instance]
    current_node: Ints  # [current instance], SEVERAL if it spans several nodes
    longest_first: Ints  # [request], indices by descending remaining tokens, then input order
    moved_s: Floats  # [configuration, request], cost of moving to an instance in another node

    @property
    def count(self) -> int:
        return len(self.remaining)

    def fits(self, configuration: int) -> NDArray[np.bool_]:
        """Return, for each request, whether it fits on an empty instance of the configuration."""
        fits: NDArray[np.bool_] = self.footprint <= self.capacity[configuration]
        return fits

    def move_s(self, requests: Ints, configuration: int | Ints, node: int | Ints) -> Floats:
        """Return the time, in seconds, for moving each request to a new instance in `node`; 0 for requests that are not
        running."""
        transfer_s, recompute_s = self.move_ways_s(requests, configuration, node)
        return np.where(self.source[requests] >= 0, np.minimum(transfer_s, recompute_s), 0.0)

    def move_ways_s(self, requests: Ints, configuration: int | Ints, node: int | Ints) -> tuple[Floats, Floats]:
        """Return the time, in seconds, for moving each request to a new instance in `node`, first by transfer, then by
        recomputation."""
        source = np.maximum(self.source[requests], 0)
        context = self.problem.requests.context_tokens[requests].astype(np.float64)
        transfer = self.problem.transfer
        recompute_s = transfer.recompute_s(context, self.prefill[np.atleast_1d(configuration)])
        if len(self.current_node) == 0:
            return np.full(len(requests), math.inf), recompute_s
        inside = (self.current_node[source] == node) & (self.current_node[source] != SEVERAL)
        narrow = np.minimum(self.gpus[self.current_configuration[source]], self.gpus[configuration])
        return transfer.transfer_s(context, narrow, inside), recompute_s


def columns(problem: MakespanProblem) -> ProblemColumns:
    """Return the problem as arrays. Raises Infeasible if a request fits no configuration that can be placed."""
    configurations = problem.configurations
    remaining = problem.requests.remaining_tokens.astype(np.int64)
    context = problem.requests.context_tokens.astype(np.int64)
    tokens = remaining.astype(np.float64)
    held = context * tokens + tokens * (tokens - 1) / 2
    order = {configuration.id: index for index, configuration in enumerate(configurations)}
    made = ProblemColumns(
        moved_s=np.zeros((len(configurations), len(remaining))),
        problem=problem,
        gpus=np.array([each.gpus for each in configurations], dtype=np.int64),
        alpha_s=np.array([each.alpha_s for each in configurations], dtype=np.float64),
        switch_s=np.array([each.switch_s for each in configurations], dtype=np.float64),
        capacity=np.array([each.kv_capacity_tokens for each in configurations], dtype=np.int64),
        slots=np.array([each.max_sequences for each in configurations], dtype=np.int64),
        prefill=np.array([each.prefill_tokens_per_s for each in configurations], dtype=np.float64),
        placeable=np.array(
            [most_instances(each, problem.gpus_count, problem.per_node) for each in configurations], dtype=np.int64
        ),
        remaining=remaining,
        footprint=context + remaining,
        work_s=np.array([each.beta_s * tokens + each.gamma_s * held for each in configurations]).reshape(
            len(configurations), len(remaining)
        ),
        source=np.where(problem.requests.state == RUNNING, problem.requests.instance, -1).astype(np.int64),
        current_configuration=np.array([order[each.configuration] for each in problem.current], dtype=np.int64),
        current_node=np.array([node_of(each.gpus, problem.per_node) for each in problem.current], dtype=np.int64),
        longest_first=np.argsort(-remaining, kind="stable"),
    )
    _check(made)
    running = np.flatnonzero(made.source >= 0)
    for configuration in range(len(configurations)):
        made.moved_s[configuration, running] = made.move_s(running, configuration, SEVERAL)
    return made


def most_instances(configuration: Configuration, gpus_count: int, per_node: int) -> int:
    """Return the maximum number of instances of the configuration that fit on the GPUs.

    An instance of at most a node's GPUs stays inside one node; a larger instance takes whole nodes.
    """
    nodes, rest = divmod(gpus_count, per_node)
    if configuration.gpus <= per_node:
        return nodes * (per_node // configuration.gpus) + rest // configuration.gpus
    nodes_each, odd = divmod(configuration.gpus, per_node)
    return 0 if odd else nodes // nodes_each


def node_of(gpus: tuple[int, ...], per_node: int) -> int:
    """Return the node that contains all of `gpus`; SEVERAL if they are in several nodes."""
    first = gpus[0] // per_node
    return first if all(gpu // per_node == first for gpu in gpus) else SEVERAL


def _check(columns: ProblemColumns) -> None:
    """Raise Infeasible if no configuration can be placed, or the largest request fits on no placeable configuration.

    A single instance can serve all requests one after the other, so only the largest KV capacity matters.
    """
    if columns.count == 0:
        return
    problem = columns.problem
    if not columns.placeable.any():
        if not len(columns.gpus):
            raise Infeasible("at least one configuration is required", 1, 0, "configurations")
        raise min(
            (_unplaceable(problem, each) for each in problem.configurations), key=lambda why: why.needed - why.available
        )
    roomiest = int(columns.capacity[columns.placeable > 0].max())
    worst = int(columns.footprint.argmax())
    if columns.footprint[worst] > roomiest:
        raise Infeasible(
            f"kv_capacity_tokens: request {problem.requests.ids[worst]} does not fit in any configuration that can be"
            " placed",
            int(columns.footprint[worst]),
            roomiest,
            "tokens",
        )


def _unplaceable(problem: MakespanProblem, configuration: Configuration) -> Infeasible:
    """Return an exception that states why no instance of the configuration can be placed."""
    gpus, per_node = configuration.gpus, problem.per_node
    if gpus > per_node and gpus % per_node:
        what = f"gpus.per_node: {configuration.id} neither fits in one node nor fills whole nodes"
        return Infeasible(what, gpus, per_node, "GPUs in a node")
    there = problem.gpus_count if gpus <= per_node else problem.gpus_count // per_node * per_node
    return Infeasible(f"gpus.count: too few GPUs to place {configuration.id}", gpus, there, "GPUs")
