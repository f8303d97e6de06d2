"""Assign ports to pairs, one circuit at a time: to the slowest pair first (Algorithm 3), to the least utilised
endpoints first, or round-robin. Has no side effects.

In this module, pairs and endpoints are represented by their indices in the sorted lists of a `Demanded`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

from planner.fabric.model import Pair

LEVELS = 32  # steps in which utilisation is measured


@dataclass(frozen=True, slots=True)
class Demanded:
    """The eligible pairs with traffic, in sorted order, and the ports of their endpoints."""

    pairs: Sequence[Pair]
    ends: Sequence[tuple[int, ...]]  # [pair], its endpoints, and any other resource that its circuits use
    larger_bytes: Sequence[float]  # [pair], of its two directions: determines the time of its circuits
    total_bytes: Sequence[float]  # [pair], both directions: determines its weight
    ports: Sequence[int]  # [endpoint], usable ports
    largest_first: Sequence[int]  # all pairs by their larger direction, descending; ties: the smaller pair


def by_bottleneck(demanded: Demanded) -> dict[int, int]:
    """Return the number of circuits of each served pair by the paper's Algorithm 3 (appendix D).

    The completion time of a pair without a circuit is infinite. Therefore each pair whose endpoints have free ports
    first gets one circuit, in descending order of bytes. Then the slowest pair whose endpoints have free ports
    repeatedly gets another circuit.
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
    """Return the number of circuits of each pair of `served`. Each pair first gets one circuit; there must be enough
    ports for this. Then the slowest pair whose endpoints have free ports repeatedly gets another circuit. No other
    distribution of circuits over these pairs has a shorter completion time (see `planner/fabric/serve.py`)."""
    circuits = dict.fromkeys(served, 1)
    free = list(demanded.ports)
    for pair in circuits:
        for end in demanded.ends[pair]:
            free[end] -= 1
    larger = demanded.larger_bytes
    slowest = []  # bytes per circuit, bytes, pair; ports are never released, so a pair without ports is dropped
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


def evenly(demanded: Demanded) -> list[int]:
    """Return the pairs that get a circuit if pairs with less utilised endpoints come before pairs with more bytes. Each
    pair gets one circuit. This is the utilisation tie-break of appendix D, which prevents hot endpoints from taking the
    ports that other endpoints depend on. The utilisation of an endpoint is its share of used ports, measured in
    `LEVELS` steps."""
    used = [0] * len(demanded.ports)
    served, waiting = [], list(demanded.largest_first)
    for level in range(1, LEVELS + 1):
        allowed = [-(-ports * level // LEVELS) for ports in demanded.ports]
        left = []
        for pair in waiting:
            a, b = demanded.ends[pair]
            if used[a] < allowed[a] and used[b] < allowed[b]:
                used[a] += 1
                used[b] += 1
                served.append(pair)
            elif used[a] < demanded.ports[a] and used[b] < demanded.ports[b]:
                left.append(pair)
        waiting = left
    return served


def in_turn(demanded: Demanded) -> dict[int, int]:
    """Return the number of circuits of each pair if ports are assigned round-robin to all pairs, regardless of
    demand."""
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
