"""Which pairs are served where ports do not suffice for all. Pure; numbers are those of `planner/fabric/greedy.py`.

For given pairs, one circuit each and the next always to the slowest is already best: as long as that pair is slower
than the best time, it has fewer circuits than it needs for that time, and the others at its ends have no more than they
need: there is a port. So Algorithm 3 is only ever beaten by serving other pairs. Its own choice is greedy: the largest
first, whatever they keep out. Here that choice is improved, under the limit of its slowest pair and under lower ones.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from planner.fabric.chains import Chains
from planner.fabric.greedy import Demanded, emptiest_first, spend

LOWER = (0.5, 0.8, 0.95, 1.0)  # of the slowest pair's bytes per circuit: what is tried as a limit below it
WORK = 4_000_000  # elements of arrays gone through, in all


@dataclass(frozen=True, slots=True)
class Score:
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

    def no_worse(self, other: "Score") -> bool:
        return (
            self.pairs >= other.pairs
            and self.total_bytes >= other.total_bytes
            and self.slowest_bytes <= other.slowest_bytes
        )

    def rank(self, bytes_first: bool) -> tuple[float, float, float]:
        if bytes_first:
            return self.total_bytes, self.pairs, -self.slowest_bytes
        return self.pairs, -self.slowest_bytes, self.total_bytes


def reselect(demanded: Demanded, reference: Mapping[int, int], *, bytes_first: bool = False) -> Mapping[int, int]:
    """Circuits of each pair that is served: those of `reference`, or better ones that are in no way worse."""
    search = _Search(demanded, reference, bytes_first)
    search.from_the_reference()
    search.below()
    return search.best


class _Search:
    def __init__(self, demanded: Demanded, reference: Mapping[int, int], bytes_first: bool) -> None:
        self.demanded = demanded
        self.bytes_first = bytes_first
        self.best = reference
        self.score = self.least = Score.of(demanded, reference)
        self.chains = Chains(demanded, WORK)
        share = np.asarray(demanded.total_bytes) / math.fsum(demanded.total_bytes)
        few = 1.0 / max(1, len(share))
        # What a pair counts for: pairs first, then bytes; bytes first, then pairs; both.
        self.values = [1.0 + share, share + 1e-6 * few, few + share]

    def from_the_reference(self) -> None:
        limit = self.least.slowest_bytes
        for start in (list(self.best), emptiest_first(self.demanded)):
            for value in self.values:
                self._try(limit, start, value)

    def below(self) -> None:
        """Limits below the slowest pair of the best one, until none of them can be kept."""
        better = True
        while better and self.score.slowest_bytes > 0:
            better = any(self._below(fraction * self.score.slowest_bytes) for fraction in LOWER)

    def _below(self, limit: float) -> bool:
        limit = min(limit, math.nextafter(self.score.slowest_bytes, 0.0))
        largest_first = [pair for pair in self.demanded.largest_first() if pair in self.best]
        return limit > 0 and any(
            self._try(limit, start, value) for value in self.values for start in (largest_first, largest_first[::-1])
        )

    def _try(self, limit_bytes: float, start: Iterable[int], value: NDArray[np.float64]) -> bool:
        if self.chains.work <= 0:
            return False
        circuits = spend(self.demanded, self.chains.improved(limit_bytes, start, value))
        score = Score.of(self.demanded, circuits)
        if not score.no_worse(self.least) or score.rank(self.bytes_first) <= self.score.rank(self.bytes_first):
            return False
        self.best, self.score = circuits, score
        return True
