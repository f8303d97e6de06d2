"""Benchmark circuit allocation: its run time on a full-size fabric, and how far its results are from the optimum on
small fabrics."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean

from ortools.sat.python import cp_model

from orchestrrl.lab.bench.figure import Figure, side_by_side
from planner.fabric.allocate import Allocation, AllocationProblem, algorithm3, allocate, seconds
from planner.fabric.model import EndpointId, Pair, pair_of

ENDPOINTS, PORTS = 128, 32
AIM_S = 0.1
SMALL = 120  # random problems, including those with enough ports
LINK_GBPS = 200.0


def fabric_allocate() -> list[Figure]:
    return [_cost(), *_gaps()]


def dense(endpoints: int, ports: int, seed: int) -> AllocationProblem:
    """Return a problem with heavy-tailed demand between all pairs of endpoints."""
    draw = random.Random(seed)
    ids = [EndpointId(f"tor{number:03}") for number in range(endpoints)]
    demand = {(a, b): draw.lognormvariate(20, 1) for a in ids for b in ids if a != b}
    return AllocationProblem(LINK_GBPS, dict.fromkeys(ids, ports), demand)


def small(seed: int, *, bipartite: bool = False) -> AllocationProblem:
    """Return a random problem with 4 to 8 endpoints, few ports and integral demand in bytes. The demand is sparse or
    dense. If `bipartite` is set, the endpoints have two sides, and there is demand only between different sides."""
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
        f"{ENDPOINTS} endpoints of {PORTS} ports, {demanded:,} demanded pairs; the target is {AIM_S:g} s; "
        f"{ours:,} pairs served, {theirs:,} by Algorithm 3, at most {ENDPOINTS * PORTS // 2:,} circuits"
    )
    return Figure("fabric_allocate", ours_s, "s", "Algorithm 3 alone", theirs_s, note)


def _gaps() -> list[Figure]:
    scarce = [problem for problem in map(small, range(SMALL)) if algorithm3(problem).unserved]
    sided = [small(seed, bipartite=True) for seed in range(SMALL)]
    sided = [problem for problem in sided if algorithm3(problem).unserved and algorithm3(problem).circuits]
    rows = [
        (Judged.of(problem, allocate(problem)), theirs, Optimum(problem, theirs).fewest_seconds())
        for problem in scarce
        for theirs in [Judged.of(problem, algorithm3(problem))]
    ]
    by_bytes = [
        (Judged.of(problem, allocate(problem, bipartite=True)), theirs, Optimum(problem, theirs).most_bytes())
        for problem in sided
        for theirs in [Judged.of(problem, algorithm3(problem))]
    ]
    slower, slower_theirs = ([_over(row[n].completion_s, row[2].completion_s) for row in rows] for n in (0, 1))
    missed, missed_theirs = ([-_over(row[n].total_bytes, row[2].total_bytes) for row in by_bytes] for n in (0, 1))
    pairs, pairs_theirs = (sum(row[2].pairs - row[n].pairs for row in rows) for n in (0, 1))
    what = f"{len(scarce)} random problems of 4 to 8 endpoints with more pairs than ports"
    later = (
        f"{what}; worst {max(slower):.3g} vs. {max(slower_theirs):.3g}; optimal in {slower.count(0.0)} vs. "
        f"{slower_theirs.count(0.0)} (CP-SAT: the most pairs, then the fewest seconds, no fewer bytes)"
    )
    served = f"{what}; of {sum(best.pairs for *_, best in rows):,} pairs that can be served with none later"
    sides = (
        f"{len(sided)} random problems with two sides, --bipartite; worst {max(missed):.3g} vs. "
        f"{max(missed_theirs):.3g} (CP-SAT: the most bytes, no fewer pairs, none later)"
    )
    return [
        Figure(f"fabric_allocate_{name}", value, unit, "Algorithm 3", value_theirs, note)
        for name, value, unit, value_theirs, note in (
            ("seconds", mean(slower), "% over optimum", mean(slower_theirs), later),
            ("pairs", float(pairs), "pairs missed", float(pairs_theirs), served),
            ("bytes", mean(missed), "% below optimum", mean(missed_theirs), sides),
        )
    ]


def _over(value: float, best: float) -> float:
    """Return by how many percent `value` exceeds `best`. Differences within rounding error are 0."""
    over = value / best - 1
    return 0.0 if abs(over) < 1e-12 else 100 * over


# --- the optimal allocation by CP-SAT, for small problems with integral bytes


@dataclass(frozen=True, slots=True)
class Judged:
    """The criteria by which allocations are compared: the number of pairs served, the bytes served, and the time, in
    seconds, of the slowest pair."""

    pairs: int
    total_bytes: int
    completion_s: float

    @classmethod
    def of(cls, problem: AllocationProblem, allocation: Allocation) -> "Judged":
        sent = _both_ways(problem)
        total = sum(sent[pair][1] for pair in allocation.circuits)
        return cls(len(allocation.circuits), total, allocation.completion_s)


class Optimum:
    """Finds the optimal allocation among those that are at least as good as `least` in every criterion."""

    def __init__(self, problem: AllocationProblem, least: Judged) -> None:
        sent, ports = _both_ways(problem), {each: problem.usable_ports(each) for each in problem.ports}
        each_bytes = {
            (pair, count): larger / count
            for pair, (larger, _) in sent.items()
            for count in range(1, min(ports[end] for end in pair) + 1)
            if seconds(larger / count, problem.link_gbps) <= least.completion_s
        }
        # The bytes on the busiest circuit of any allocation are one of these values.
        rank = {limit: place for place, limit in enumerate(sorted(set(each_bytes.values())))}
        self._limits_s = [seconds(limit, problem.link_gbps) for limit in rank]
        self._model = model = cp_model.CpModel()
        self._rank = model.new_int_var(0, max(0, len(rank) - 1), "rank")
        served = {option: model.new_bool_var(f"{option}") for option in each_bytes}
        for pair in sent:
            model.add_at_most_one(taken for (other, _), taken in served.items() if other == pair)
        for end, there in ports.items():
            model.add(sum(count * taken for (pair, count), taken in served.items() if end in pair) <= there)
        for option, taken in served.items():
            model.add(self._rank >= rank[each_bytes[option]]).only_enforce_if(taken)
        self._pairs = sum(served.values())
        self._bytes = sum(sent[pair][1] * taken for (pair, _), taken in served.items())
        model.add(self._pairs >= least.pairs)
        model.add(self._bytes >= least.total_bytes)

    def fewest_seconds(self) -> Judged:
        """Return the criteria of the allocation that serves the most pairs. Ties are broken by the shortest time, and
        then by the most bytes."""
        return self._best(self._pairs, -self._rank, self._bytes)

    def most_bytes(self) -> Judged:
        return self._best(self._bytes)

    def _best(self, *goals: cp_model.LinearExprT) -> Judged:
        """Return the criteria of the allocation that maximizes the goals in lexicographic order."""
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        for goal in goals:
            self._model.maximize(goal)
            if (status := solver.solve(self._model)) != cp_model.OPTIMAL:
                raise AssertionError(f"CP-SAT must solve a small problem optimally, got {solver.status_name(status)}")
            self._model.add(goal >= solver.value(goal))
        pairs, total_bytes, rank = map(solver.value, (self._pairs, self._bytes, self._rank))
        return Judged(pairs, total_bytes, self._limits_s[rank])


def _both_ways(problem: AllocationProblem) -> Mapping[Pair, tuple[int, int]]:
    """Return two numbers of bytes for each eligible pair with demand: the demand of the direction with more bytes, and
    the sum over both directions."""
    sent: dict[Pair, list[int]] = {}
    for (source, destination), sent_bytes in problem.demand.items():
        pair = pair_of(source, destination)
        if sent_bytes > 0 and (problem.eligible is None or pair in problem.eligible):
            sent.setdefault(pair, []).append(int(sent_bytes))
    return {pair: (max(each), sum(each)) for pair, each in sent.items()}
