"""Circuits for a demand: what choosing them costs at full size, and how far from the best they are at small sizes."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Literal

from ortools.sat.python import cp_model

from orchestrrl.lab.bench.figure import Figure, side_by_side
from planner.fabric.allocate import Allocation, AllocationProblem, algorithm3, allocate, seconds
from planner.fabric.model import EndpointId, Pair, pair_of

ENDPOINTS, PORTS = 128, 32
AIM_S = 0.1
SMALL = 120  # problems, those without too few ports included
LINK_GBPS = 200.0


def fabric_allocate() -> list[Figure]:
    return [_cost(), *_gaps()]


def dense(endpoints: int, ports: int, seed: int) -> AllocationProblem:
    """Everyone sends to everyone, heavy-tailed."""
    draw = random.Random(seed)
    ids = [EndpointId(f"tor{number:03}") for number in range(endpoints)]
    demand = {(a, b): draw.lognormvariate(20, 1) for a in ids for b in ids if a != b}
    return AllocationProblem(LINK_GBPS, dict.fromkeys(ids, ports), demand)


def small(seed: int, *, bipartite: bool = False) -> AllocationProblem:
    """Few endpoints and ports, sparse or dense; whole numbers of bytes."""
    draw = random.Random(seed)
    ids = [EndpointId(f"tor{number}") for number in range(draw.randint(4, 8))]
    most, share, spread = draw.choice((2, 3, 4, 6)), draw.choice((0.3, 0.6, 1.0)), draw.choice((0.5, 1.0, 1.5))
    demand = {
        (a, b): float(int(draw.lognormvariate(20, spread)))
        for place, a in enumerate(ids)
        for other, b in enumerate(ids)
        if a != b and (not bipartite or place % 2 != other % 2) and draw.random() < share
    }
    return AllocationProblem(LINK_GBPS, {each: draw.randint(1, most) for each in ids}, demand)


def _cost() -> Figure:
    problem = dense(ENDPOINTS, PORTS, seed=1)
    ours_s, theirs_s = side_by_side(lambda: allocate(problem), lambda: algorithm3(problem), repetitions=5)
    ours, theirs = (len(each(problem).circuits) for each in (allocate, algorithm3))
    demanded = ENDPOINTS * (ENDPOINTS - 1) // 2
    note = (
        f"{ENDPOINTS} endpoints of {PORTS} ports, {demanded:,} demanded pairs; the aim is {AIM_S:g} s; "
        f"{ours:,} pairs served, {theirs:,} by Algorithm 3, {ENDPOINTS * PORTS // 2:,} circuits there can be"
    )
    return Figure("fabric_allocate", ours_s, "s", "Algorithm 3 alone", theirs_s, note)


def _gaps() -> list[Figure]:
    scarce = [problem for problem in map(small, range(SMALL)) if algorithm3(problem).unserved]
    sided = [small(seed, bipartite=True) for seed in range(SMALL)]
    sided = [problem for problem in sided if algorithm3(problem).unserved and algorithm3(problem).circuits]
    theirs = _judged(scarce, [algorithm3(problem) for problem in scarce])
    ours = _judged(scarce, [allocate(problem) for problem in scarce])
    best = [Optimum(problem, least).fewest_seconds() for problem, least in zip(scarce, theirs, strict=True)]
    greedy = _judged(sided, [algorithm3(problem) for problem in sided])
    bytes_first = _judged(sided, [allocate(problem, bipartite=True) for problem in sided])
    most = [Optimum(problem, least).most_bytes() for problem, least in zip(sided, greedy, strict=True)]
    slower, slower_theirs = (
        [_over(each.completion_s, b.completion_s) for each, b in zip(some, best, strict=True)]
        for some in (ours, theirs)
    )
    missed, missed_theirs = (
        [-_over(each.total_bytes, b.total_bytes) for each, b in zip(some, most, strict=True)]
        for some in (bytes_first, greedy)
    )
    pairs, pairs_theirs = (
        sum(b.pairs - each.pairs for each, b in zip(some, best, strict=True)) for some in (ours, theirs)
    )
    what = f"{len(scarce)} random problems of 4 to 8 endpoints with more pairs than ports"
    later = (
        f"{what}; worst {max(slower):.3g} against {max(slower_theirs):.3g}; best of {slower.count(0.0)} against "
        f"{slower_theirs.count(0.0)} (CP-SAT: the most pairs, then the fewest seconds, no fewer bytes)"
    )
    served = f"{what}; of {sum(each.pairs for each in best):,} pairs that can be served with none any later"
    sides = (
        f"{len(sided)} random problems with two sides, --bipartite; worst {max(missed):.3g} against "
        f"{max(missed_theirs):.3g} (CP-SAT: the most bytes, no fewer pairs, none later)"
    )
    return [
        Figure(f"fabric_allocate_{name}", value, unit, "Algorithm 3", value_theirs, note)
        for name, value, unit, value_theirs, note in (
            ("seconds", mean(slower), "% over the best", mean(slower_theirs), later),
            ("pairs", float(pairs), "pairs missed", float(pairs_theirs), served),
            ("bytes", mean(missed), "% of the most missed", mean(missed_theirs), sides),
        )
    ]


def _over(value: float, best: float) -> float:
    """Per cent; the same up to rounding is the same."""
    over = value / best - 1
    return 0.0 if abs(over) < 1e-12 else 100 * over


def _judged(problems: Sequence[AllocationProblem], allocations: Sequence[Allocation]) -> "list[Judged]":
    return [Judged.of(problem, allocation) for problem, allocation in zip(problems, allocations, strict=True)]


# --- the best allocation that there is, by CP-SAT: for small problems whose bytes are whole numbers

Goal = Literal["pairs", "bytes", "any"]


@dataclass(frozen=True, slots=True)
class Judged:
    """What the contract judges an allocation by."""

    pairs: int
    total_bytes: int
    completion_s: float

    @classmethod
    def of(cls, problem: AllocationProblem, allocation: Allocation) -> "Judged":
        sent = _both_ways(problem)
        total = sum(sent[pair][1] for pair in allocation.circuits)
        return cls(len(allocation.circuits), total, allocation.completion_s)


class Optimum:
    """Of those that are in no way worse than `least`."""

    def __init__(self, problem: AllocationProblem, least: Judged) -> None:
        self._problem, self._least = problem, least
        sent = _both_ways(problem)
        self._larger = {pair: larger for pair, (larger, _) in sent.items()}
        self._total = {pair: total for pair, (_, total) in sent.items()}
        self._ports = {each: problem.usable_ports(each) for each in problem.ports}
        # Bytes on the busiest circuit: one of these whatever the allocation.
        self._limits = sorted(
            {
                larger / count
                for (a, b), larger in self._larger.items()
                for count in range(1, min(self._ports[a], self._ports[b]) + 1)
                if seconds(larger / count, problem.link_gbps) <= least.completion_s
            }
        )

    def fewest_seconds(self) -> Judged:
        """The most pairs, then the fewest seconds, then the most bytes."""
        most = self._best(self._limits[-1], self._least.pairs, "pairs")
        low, high = 0, len(self._limits) - 1
        while low < high:
            middle = (low + high) // 2
            if self._best(self._limits[middle], most.pairs, "any").pairs:
                high = middle
            else:
                low = middle + 1
        return self._best(self._limits[low], most.pairs, "bytes")

    def most_bytes(self) -> Judged:
        return self._best(self._limits[-1], self._least.pairs, "bytes")

    def _best(self, limit_bytes: float, pairs: int, goal: Goal) -> Judged:
        """No pairs where there is none."""
        model = cp_model.CpModel()
        served = {pair: model.new_bool_var("-".join(pair)) for pair in self._larger}
        for endpoint, ports in self._ports.items():
            model.add(
                sum(circuits(self._larger[pair], limit_bytes) * served[pair] for pair in served if endpoint in pair)
                <= ports
            )
        count, total = sum(served.values()), sum(self._total[pair] * served[pair] for pair in served)
        model.add(count >= pairs)
        model.add(total >= self._least.total_bytes)
        if goal != "any":
            model.maximize(count if goal == "pairs" else total)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        status = solver.solve(model)
        if status == cp_model.INFEASIBLE:
            return Judged(0, 0, math.inf)
        if status != cp_model.OPTIMAL:
            raise AssertionError(f"CP-SAT left a small problem open: {solver.status_name(status)}")
        chosen = [pair for pair in served if solver.value(served[pair])]
        return Judged(
            len(chosen), sum(self._total[pair] for pair in chosen), seconds(limit_bytes, self._problem.link_gbps)
        )


def circuits(larger_bytes: float, limit_bytes: float) -> int:
    """The fewest that each carry no more than the limit."""
    count = max(1, math.ceil(larger_bytes / limit_bytes) - 1)
    while larger_bytes / count > limit_bytes:
        count += 1
    return count


def _both_ways(problem: AllocationProblem) -> Mapping[Pair, tuple[int, int]]:
    """Of each pair that may be served: bytes of the larger direction, and of both."""
    sent: dict[Pair, list[int]] = {}
    for (source, destination), sent_bytes in problem.demand.items():
        pair = pair_of(source, destination)
        if sent_bytes > 0 and (problem.eligible is None or pair in problem.eligible):
            sent.setdefault(pair, []).append(int(sent_bytes))
    return {pair: (max(each), sum(each)) for pair, each in sent.items()}
