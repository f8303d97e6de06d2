"""Deal ports out to pairs one circuit at a time: to the bottleneck (Algorithm 3), evenly, or in turn. Pure.

Pairs and endpoints are numbers here: their places in the sorted lists of a `Demanded`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

from planner.fabric.model import Pair

LEVELS = 32  # of utilisation that are told apart


@dataclass(frozen=True, slots=True)
class Demanded:
    """The pairs that may get circuits and have something to send, in sorted order."""

    pairs: Sequence[Pair]
    ends: Sequence[tuple[int, ...]]  # [pair], its endpoints, and what else a circuit of it takes one of
    larger_bytes: Sequence[float]  # [pair], of its two directions: what its circuits take time for
    total_bytes: Sequence[float]  # [pair], both directions: what it counts for
    ports: Sequence[int]  # [endpoint], those that are usable
    largest_first: Sequence[int]  # all pairs, by their larger direction; ties: the smaller pair


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
    have ports. No other circuits for these pairs end sooner: see `planner/fabric/serve.py`."""
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


def evenly(demanded: Demanded) -> list[int]:
    """The pairs served where, of those without a circuit, one whose ends are less used comes before a larger one
    (appendix D: a tie-break by utilisation, so that hot endpoints do not take the ports that others depend on).
    Utilisation counts in `LEVELS` steps."""
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
