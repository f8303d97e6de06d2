"""Circuits for a demand: what choosing them costs at full size, and how far from the best they are at small sizes."""

import random
from collections.abc import Sequence
from statistics import mean

from orchestrrl.lab.bench.fabric_optimum import Judged, Optimum
from orchestrrl.lab.bench.figure import Figure, side_by_side
from planner.fabric.allocate import Allocation, AllocationProblem, algorithm3, allocate
from planner.fabric.model import EndpointId

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


def _judged(problems: Sequence[AllocationProblem], allocations: Sequence[Allocation]) -> list[Judged]:
    return [Judged.of(problem, allocation) for problem, allocation in zip(problems, allocations, strict=True)]
