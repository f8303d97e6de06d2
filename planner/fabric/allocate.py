"""How many circuits each pair of endpoints gets for a demand: never worse than Algorithm 3 (appendix D). Pure.

An allocation is judged by three things: pairs served, bytes served, and the seconds of the slowest pair served. It is
worse where one of them is. A pair without a circuit is not slow but unserved: several hops or the packet side.

For given pairs, one circuit each and the next always to the slowest is already best: as long as that pair is slower
than the best time, it has fewer circuits than it needs for that time, and the others at its ends have no more than they
need: there is a port. So Algorithm 3 is only ever beaten by serving other pairs. Its own choice is greedy: the largest
first, whatever they keep out. Under a limit of bytes per circuit a pair needs a fixed number of ports at both ends, so
the best choice is an integer program: it is solved under the limit of Algorithm 3's slowest pair and under lower ones.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from planner.fabric.model import EndpointId, Pair, pair_of

BITS_PER_BYTE = 8
LOWER = (0.5, 0.8, 0.95, 1.0)  # of the slowest pair's bytes per circuit: what is tried as a limit below it
WORK = 20_000  # nodes of the search for one choice, times its pairs


@dataclass(frozen=True, slots=True)
class AllocationProblem:
    link_gbps: float
    ports: Mapping[EndpointId, int]
    demand: Mapping[tuple[EndpointId, EndpointId], float]  # bytes from one endpoint to another
    eligible: frozenset[Pair] | None = None  # None: every pair
    failed_ports: Mapping[EndpointId, int] = field(default_factory=dict)  # more than there are: none is left

    def __post_init__(self) -> None:
        if not (0 < self.link_gbps < math.inf):
            raise ValueError(f"link_gbps must be > 0, got {self.link_gbps}")
        for endpoint, count in (*self.ports.items(), *self.failed_ports.items()):
            if endpoint not in self.ports:
                raise ValueError(f"failed_ports names an endpoint that does not exist, got {endpoint!r}")
            if count < 0:
                raise ValueError(f"ports of {endpoint} must be >= 0, got {count}")
        for (source, destination), sent_bytes in self.demand.items():
            self._check("demand", pair_of(source, destination))
            if not (0 <= sent_bytes < math.inf):
                raise ValueError(f"demand of {source} to {destination} must be >= 0 bytes, got {sent_bytes}")
        if not math.isfinite(sum(self.demand.values())):
            raise ValueError("demand adds up to more bytes than there are numbers for")
        for pair in self.eligible or ():
            if pair != pair_of(*pair):
                raise ValueError(f"an eligible pair has the smaller endpoint first, got {pair}")
            self._check("eligible", pair)

    def _check(self, what: str, pair: Pair) -> None:
        for endpoint in pair:
            if endpoint not in self.ports:
                raise ValueError(f"{what} names an endpoint that does not exist, got {endpoint!r}")

    def usable_ports(self, endpoint: EndpointId) -> int:
        return max(0, self.ports[endpoint] - self.failed_ports.get(endpoint, 0))


@dataclass(frozen=True, slots=True)
class Demanded:
    """The pairs that may get circuits and have something to send, in sorted order. Pairs and endpoints are numbered by
    their places in sorted lists."""

    pairs: Sequence[Pair]
    ends: Sequence[tuple[int, ...]]  # [pair], its endpoints, and what else a circuit of it takes one of
    larger_bytes: Sequence[float]  # [pair], of its two directions: what its circuits take time for
    total_bytes: Sequence[float]  # [pair], both directions: what it counts for
    ports: Sequence[int]  # [endpoint], those that are usable
    largest_first: Sequence[int]  # all pairs, by their larger direction; ties: the smaller pair


@dataclass(frozen=True, slots=True)
class Allocation:
    circuits: Mapping[Pair, int]  # of each pair served, at least one; sorted by pair
    completion_s: float  # of the slowest pair served, both directions at once; 0 where none is
    unserved: tuple[Pair, ...]  # pairs with demand and no circuit, eligible or not; sorted
    uniform_completion_s: float  # with ports dealt out in turn over the demanded pairs, in sorted order


def allocate(problem: AllocationProblem, *, bipartite: bool = False) -> Allocation:
    """At least as many pairs and bytes served as by Algorithm 3, the slowest pair no slower; of such allocations that
    are found the one with the most pairs, then the fewest seconds, then the most bytes.

    `bipartite` is for demand between two sides with hot endpoints: the most bytes count first. A fixed amount of work;
    no randomness.
    """
    demanded, barred = _demanded(problem)
    reference = circuits = by_bottleneck(demanded)
    if 0 < len(circuits) < len(demanded.pairs):  # where all are served, nothing ends sooner
        circuits = _reselected(demanded, reference, circuits, bytes_first=False)
        if bipartite:
            circuits = _reselected(demanded, reference, circuits, bytes_first=True)
    return _allocation(problem, demanded, barred, circuits)


def algorithm3(problem: AllocationProblem) -> Allocation:
    """The paper's, its ties broken by the larger directional demand, then by the smaller pair."""
    demanded, barred = _demanded(problem)
    return _allocation(problem, demanded, barred, by_bottleneck(demanded))


def _demanded(problem: AllocationProblem) -> tuple[Demanded, list[Pair]]:
    """The pairs with something to send; those of them that are not eligible."""
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
    """Of one circuit, both directions at once."""
    return circuit_bytes * BITS_PER_BYTE / (link_gbps * 1e9)


def by_bottleneck(demanded: Demanded) -> dict[int, int]:
    """Circuits of each pair that is served, by Algorithm 3 (appendix D).

    A pair without a circuit has an infinite time. So each pair gets one, the largest first, as long as its ends have
    ports; then the slowest gets another.
    """
    free = list(demanded.ports)
    served = []
    for pair in demanded.largest_first:
        a, b = demanded.ends[pair]
        if free[a] and free[b]:
            free[a] -= 1
            free[b] -= 1
            served.append(pair)
    return spend(demanded, served)


def spend(demanded: Demanded, served: Iterable[int]) -> dict[int, int]:
    """One circuit for each of `served`, which have to fit; then again and again one for the slowest pair whose ends
    have ports. No other circuits for these pairs end sooner."""
    circuits = dict.fromkeys(served, 1)
    free = list(demanded.ports)
    for pair in circuits:
        for end in demanded.ends[pair]:
            free[end] -= 1
    larger = demanded.larger_bytes
    slowest = []  # bytes a circuit, bytes, pair; ports never come back, so what lacks them now is left out
    for pair in circuits:
        if all(map(free.__getitem__, demanded.ends[pair])):
            slowest.append((-larger[pair], -larger[pair], pair))
    heapify(slowest)
    while slowest:
        pair = slowest[0][2]
        ends = demanded.ends[pair]
        if all(map(free.__getitem__, ends)):
            for end in ends:
                free[end] -= 1
            circuits[pair] += 1
            heapreplace(slowest, (-larger[pair] / circuits[pair], -larger[pair], pair))
        else:
            heappop(slowest)
    return circuits


def in_turn(demanded: Demanded) -> dict[int, int]:
    """Circuits of each pair where ports are dealt out one at a time in turn over all pairs: what knows no demand."""
    free = list(demanded.ports)
    circuits: dict[int, int] = {}
    waiting = list(range(len(demanded.pairs)))
    while waiting:
        left = []
        for pair in waiting:
            a, b = demanded.ends[pair]
            if free[a] and free[b]:
                free[a] -= 1
                free[b] -= 1
                circuits[pair] = circuits.get(pair, 0) + 1
                left.append(pair)
        waiting = left
    return circuits


@dataclass(frozen=True, slots=True)
class ServedScore:
    pairs: int
    total_bytes: float
    slowest_bytes: float  # per circuit

    @classmethod
    def of(cls, demanded: Demanded, circuits: Mapping[int, int]) -> Self:
        return cls(
            len(circuits),
            math.fsum(demanded.total_bytes[pair] for pair in circuits),
            max((demanded.larger_bytes[pair] / count for pair, count in circuits.items()), default=0.0),
        )

    def no_worse(self, other: "ServedScore") -> bool:
        return (
            self.pairs >= other.pairs
            and self.total_bytes >= other.total_bytes
            and self.slowest_bytes <= other.slowest_bytes
        )

    def rank(self, bytes_first: bool) -> tuple[float, float, float]:
        if bytes_first:
            return self.total_bytes, self.pairs, -self.slowest_bytes
        return self.pairs, -self.slowest_bytes, self.total_bytes


def _reselected(
    demanded: Demanded, reference: dict[int, int], known: dict[int, int], bytes_first: bool
) -> dict[int, int]:
    """Circuits of each pair that is served: those of `known`, or better ones that are in no way worse than `reference`;
    so `known` has to be."""
    least, best, score = ServedScore.of(demanded, reference), known, ServedScore.of(demanded, known)

    def improved(limit_bytes: float) -> bool:
        nonlocal best, score
        floors = (least.pairs, score.total_bytes) if bytes_first else (score.pairs, least.total_bytes)
        served = _chosen(demanded, limit_bytes, *floors, bytes_first) if limit_bytes > 0 else []
        circuits = spend(demanded, served)
        found = ServedScore.of(demanded, circuits)
        if not found.no_worse(least) or found.rank(bytes_first) <= score.rank(bytes_first):
            return False
        best, score = circuits, found
        return True

    improved(least.slowest_bytes)
    while any(improved(min(part * score.slowest_bytes, math.nextafter(score.slowest_bytes, 0.0))) for part in LOWER):
        pass
    return best


def _chosen(
    demanded: Demanded, limit_bytes: float, least_pairs: int, least_bytes: float, bytes_first: bool
) -> list[int]:
    """The pairs that count for most where no circuit carries more than the limit; none where no choice is found that
    has so many pairs and bytes."""
    # Imported here since most problems need none of it, and it takes longer to load than they to solve.
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    count, ports = len(demanded.pairs), np.asarray(demanded.ports)
    need = needs(np.asarray(demanded.larger_bytes), limit_bytes, int(ports.max()))
    ends = np.asarray(demanded.ends).T.ravel()  # [side], each pair twice
    used = csr_array((np.tile(need, 2), (ends, np.tile(np.arange(count), 2))), shape=(len(ports), count))
    total_bytes = math.fsum(demanded.total_bytes)
    share, each = np.asarray(demanded.total_bytes) / total_bytes, np.ones(count)
    found = milp(
        -(share + 1e-3 / count if bytes_first else each + share),
        integrality=np.ones(count, dtype=np.int64),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(used, ub=ports),
            LinearConstraint(np.stack([each, share]), lb=[least_pairs, least_bytes / total_bytes - 1e-12]),
        ],
        options={"node_limit": 1 + WORK // count, "presolve": False},  # which would take ten times as long
    )
    return [] if found.x is None else [int(pair) for pair in np.flatnonzero(found.x > 0.5)]


def needs(larger_bytes: NDArray[np.float64], limit_bytes: float, most: int) -> NDArray[np.int64]:
    """[pair] the fewest circuits, at least one, that each carry no more than the limit; `most` + 1: more than that."""
    with np.errstate(over="ignore"):
        need = np.clip(np.ceil(larger_bytes / limit_bytes), 1, most + 1)
    need -= (need > 1) & (larger_bytes / np.maximum(need - 1, 1) <= limit_bytes)  # the quotient was rounded
    need += (need <= most) & (larger_bytes / need > limit_bytes)
    return need.astype(np.int64)
