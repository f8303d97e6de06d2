"""Deal ports out to pairs one circuit at a time: by bottleneck (Algorithm 3), by how full the ends are, or in turn.

Pairs and endpoints are numbers here: their places in the sorted lists of a `Demanded`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

from planner.fabric.model import Pair


@dataclass(frozen=True, slots=True)
class Demanded:
    """The pairs that may get circuits and have something to send, in sorted order."""

    pairs: Sequence[Pair]
    ends: Sequence[tuple[int, int]]  # [pair], endpoints
    larger_bytes: Sequence[float]  # [pair], of its two directions: what its circuits take time for
    total_bytes: Sequence[float]  # [pair], both directions: what it counts for
    ports: Sequence[int]  # [endpoint], those that are usable

    def largest_first(self) -> list[int]:
        """Ties: the smaller pair."""
        return sorted(range(len(self.pairs)), key=[-each for each in self.larger_bytes].__getitem__)


def by_bottleneck(demanded: Demanded) -> dict[int, int]:
    """Circuits of each pair that is served, by Algorithm 3 (appendix D).

    A pair without a circuit has an infinite time. So each pair gets one, the largest first, as long as its ends have
    ports; then the slowest gets another.
    """
    free = list(demanded.ports)
    served = []
    for pair in demanded.largest_first():
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
    slowest = [(-larger[pair], -larger[pair], pair) for pair in circuits]  # bytes a circuit, bytes, pair
    heapify(slowest)
    while slowest:
        pair = slowest[0][2]
        a, b = demanded.ends[pair]
        if free[a] and free[b]:
            free[a] -= 1
            free[b] -= 1
            circuits[pair] += 1
            heapreplace(slowest, (-larger[pair] / circuits[pair], -larger[pair], pair))
        else:
            heappop(slowest)  # ports never come back
    return circuits


def emptiest_first(demanded: Demanded) -> list[int]:
    """The pairs served where of those without a circuit the one with the emptier ends comes first, then the larger
    (appendix D: a tie-break by utilisation, so that hot endpoints do not take the ports that others depend on)."""
    ports, larger = demanded.ports, demanded.larger_bytes
    free = list(ports)

    def rank(pair: int) -> tuple[float, float, int]:
        a, b = demanded.ends[pair]
        return 1 - min(free[a] / ports[a], free[b] / ports[b]), -larger[pair], pair

    waiting = [rank(pair) for pair, (a, b) in enumerate(demanded.ends) if ports[a] and ports[b]]
    heapify(waiting)
    served = []
    while waiting:
        was, _, pair = waiting[0]
        a, b = demanded.ends[pair]
        if not (free[a] and free[b]):
            heappop(waiting)
        elif (now := rank(pair))[0] != was:  # its ends have filled up meanwhile
            heapreplace(waiting, now)
        else:
            heappop(waiting)
            free[a] -= 1
            free[b] -= 1
            served.append(pair)
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
