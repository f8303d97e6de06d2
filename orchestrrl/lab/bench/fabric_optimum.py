"""The best allocation of circuits that there is, by CP-SAT: for small problems whose bytes are whole numbers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ortools.sat.python import cp_model

from planner.fabric.allocate import Allocation, AllocationProblem, seconds
from planner.fabric.model import Pair, pair_of

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
