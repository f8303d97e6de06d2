"""Choose how many circuits each pair of endpoints gets for a demand. The result is never worse than that of the paper's
Algorithm 3 (appendix D). Has no side effects.

An allocation is judged by the number of pairs served, the bytes served, and the completion time of the slowest served
pair. It is worse than another allocation if any of these three values is worse. A pair without a circuit is unserved,
not slow: its packets pass over several circuits or the packet side of the network.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.fabric.greedy import Demanded, by_bottleneck, in_turn
from planner.fabric.model import EndpointId, Pair, pair_of
from planner.fabric.serve import most_bytes, reselect

BITS_PER_BYTE = 8


@dataclass(frozen=True, slots=True)
class AllocationProblem:
    link_gbps: float
    ports: Mapping[EndpointId, int]
    demand: Mapping[tuple[EndpointId, EndpointId], float]  # bytes from one endpoint to another
    eligible: frozenset[Pair] | None = None  # None: every pair
    failed_ports: Mapping[EndpointId, int] = field(default_factory=dict)  # values above `ports` leave no port

    def __post_init__(self) -> None:
        if not (0 < self.link_gbps < math.inf):
            raise ValueError(f"link_gbps must be finite and > 0, got {self.link_gbps}")
        for endpoint, count in (*self.ports.items(), *self.failed_ports.items()):
            if endpoint not in self.ports:
                raise ValueError(f"failed_ports must name existing endpoints, got {endpoint!r}")
            if count < 0:
                raise ValueError(f"ports of {endpoint} must be >= 0, got {count}")
        for (source, destination), sent_bytes in self.demand.items():
            self._check("demand", pair_of(source, destination))
            if not (0 <= sent_bytes < math.inf):
                raise ValueError(
                    f"demand from {source} to {destination} must be finite and >= 0 bytes, got {sent_bytes}"
                )
        if not math.isfinite(sum(self.demand.values())):
            raise ValueError(f"demand must have a finite sum in bytes, got {sum(self.demand.values())}")
        for pair in self.eligible or ():
            if pair != pair_of(*pair):
                raise ValueError(f"an eligible pair must have the smaller endpoint first, got {pair}")
            self._check("eligible", pair)

    def _check(self, what: str, pair: Pair) -> None:
        for endpoint in pair:
            if endpoint not in self.ports:
                raise ValueError(f"{what} must name existing endpoints, got {endpoint!r}")

    def usable_ports(self, endpoint: EndpointId) -> int:
        return max(0, self.ports[endpoint] - self.failed_ports.get(endpoint, 0))


@dataclass(frozen=True, slots=True)
class Allocation:
    circuits: Mapping[Pair, int]  # circuits per pair served, at least one; sorted by pair
    completion_s: float  # of the slowest pair served, both directions at once; 0 if no pair is served
    unserved: tuple[Pair, ...]  # pairs with demand and no circuit, eligible or not; sorted
    uniform_completion_s: float  # completion_s if ports were assigned to the demanded pairs round-robin


def allocate(problem: AllocationProblem, *, bipartite: bool = False) -> Allocation:
    """Allocate circuits that serve at least as many pairs and bytes as Algorithm 3 does, and whose slowest pair is no
    slower.

    Of the allocations found, the result has the most pairs, then the shortest completion time, then the most bytes. Set
    `bipartite` if traffic flows between two groups of endpoints, some of which have much more traffic than others. In
    that case, the utilisation-aware tie-break is tried as well, and the number of bytes is compared first. The search
    is deterministic, and its amount of work is limited.
    """
    demanded, barred = _demanded(problem)
    circuits: Mapping[int, int] = by_bottleneck(demanded)
    if 0 < len(circuits) < len(demanded.pairs):  # if all are served, no allocation ends sooner
        reference, circuits = circuits, reselect(demanded, circuits)
        if bipartite:
            circuits = most_bytes(demanded, reference, circuits)
    return _allocation(problem, demanded, barred, circuits)


def algorithm3(problem: AllocationProblem) -> Allocation:
    """Allocate circuits by the paper's Algorithm 3. Ties go to the larger directional demand, then to the pair that
    sorts first."""
    demanded, barred = _demanded(problem)
    return _allocation(problem, demanded, barred, by_bottleneck(demanded))


def _demanded(problem: AllocationProblem) -> tuple[Demanded, list[Pair]]:
    """Return the eligible pairs that have traffic, with their ports, and the ineligible pairs that have traffic."""
    sent: dict[Pair, tuple[float, float]] = {}  # bytes of the larger direction, and of both
    for (source, destination), sent_bytes in problem.demand.items():
        if sent_bytes > 0:
            pair = (source, destination) if source < destination else (destination, source)
            before = sent.get(pair)
            sent[pair] = (
                (sent_bytes, sent_bytes) if before is None else (max(before[0], sent_bytes), before[1] + sent_bytes)
            )
    eligible = problem.eligible
    pairs = sorted(sent if eligible is None else sent.keys() & eligible)
    endpoints = sorted(problem.ports)
    place = {endpoint: number for number, endpoint in enumerate(endpoints)}
    smallest = [-sent[pair][0] for pair in pairs]
    demanded = Demanded(
        pairs=pairs,
        ends=[(place[a], place[b]) for a, b in pairs],
        larger_bytes=[sent[pair][0] for pair in pairs],
        total_bytes=[sent[pair][1] for pair in pairs],
        ports=[problem.usable_ports(endpoint) for endpoint in endpoints],
        largest_first=sorted(range(len(pairs)), key=smallest.__getitem__),
    )
    return demanded, [] if eligible is None else sorted(sent.keys() - eligible)


def _allocation(
    problem: AllocationProblem, demanded: Demanded, barred: list[Pair], circuits: Mapping[int, int]
) -> Allocation:
    idle = [pair for number, pair in enumerate(demanded.pairs) if number not in circuits]
    return Allocation(
        circuits={demanded.pairs[pair]: circuits[pair] for pair in sorted(circuits)},
        completion_s=_completion_s(problem, demanded, circuits),
        unserved=tuple(sorted(idle + barred)),
        uniform_completion_s=_completion_s(problem, demanded, in_turn(demanded)),
    )


def _completion_s(problem: AllocationProblem, demanded: Demanded, circuits: Mapping[int, int]) -> float:
    slowest_bytes = max((demanded.larger_bytes[pair] / count for pair, count in circuits.items()), default=0.0)
    return seconds(slowest_bytes, problem.link_gbps)


def seconds(circuit_bytes: float, link_gbps: float) -> float:
    """Return the time, in seconds, to send `circuit_bytes` in one direction over a circuit at the full link rate."""
    return circuit_bytes * BITS_PER_BYTE / (link_gbps * 1e9)
