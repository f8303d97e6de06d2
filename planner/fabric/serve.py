"""Which pairs are served where ports do not suffice for all. Pure; numbers are those of `planner/fabric/greedy.py`.

For given pairs, one circuit each and the next always to the slowest is already best: as long as that pair is slower
than the best time, it has fewer circuits than it needs for that time, and the others at its ends have no more than they
need: there is a port. So Algorithm 3 is only ever beaten by serving other pairs. Its own choice is greedy: the largest
first, whatever they keep out. Here that choice is improved, under the limit of its slowest pair and under lower ones.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from planner.fabric.chains import PairChains
from planner.fabric.greedy import Demanded, evenly, spend

LOWER = (0.5, 0.8, 0.95, 1.0)  # of the slowest pair's bytes per circuit: what is tried as a limit below it
WORK = 6_000_000  # elements of arrays gone through, in all
CIRCUIT_WORK = 200  # what dealing out one costs, in such elements


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


def reselect(demanded: Demanded, reference: Mapping[int, int]) -> Mapping[int, int]:
    """Circuits of each pair that is served: those of `reference`, or better ones that are in no way worse: the most
    pairs, then the fewest seconds, then the most bytes."""
    return _Search(demanded, reference, reference, bytes_first=False).searched()


def most_bytes(demanded: Demanded, reference: Mapping[int, int], known: Mapping[int, int]) -> Mapping[int, int]:
    """No fewer bytes than `known` has, and in no way worse than `reference`; so `known` has to be."""
    return _Search(demanded, reference, known, bytes_first=True).searched()


class _Search:
    def __init__(
        self, demanded: Demanded, reference: Mapping[int, int], known: Mapping[int, int], bytes_first: bool
    ) -> None:
        self.demanded = demanded
        self.bytes_first = bytes_first
        self.least = ServedScore.of(demanded, reference)
        self.best, self.score = known, ServedScore.of(demanded, known)
        self.chains = PairChains(demanded, WORK)
        self.sum_bytes = math.fsum(demanded.total_bytes)
        self.share = share = np.asarray(demanded.total_bytes) / self.sum_bytes
        few = 1.0 / max(1, len(share))
        # What a pair counts for: pairs before bytes, both, bytes before pairs.
        self.values = [1.0 + share, few + share, 1e-6 * few + share]

    def searched(self) -> Mapping[int, int]:
        if self.least.slowest_bytes > 0:  # bytes may be too few to be divided
            self._try(self.least.slowest_bytes, list(self.best))
            if self.bytes_first:
                self._try(self.least.slowest_bytes, evenly(self.demanded))
        while any(self._below(fraction * self.score.slowest_bytes) for fraction in LOWER):
            pass
        return self.best

    def _below(self, limit: float) -> bool:
        """Look for a choice under a limit that the best one does not keep."""
        limit = min(limit, math.nextafter(self.score.slowest_bytes, 0.0))
        if not self._possible(limit):
            return False
        largest_first = [pair for pair in self.demanded.largest_first if pair in self.best]
        return any(self._try(limit, start) for start in (largest_first, largest_first[::-1]))

    def _possible(self, limit_bytes: float) -> bool:
        """Whether it is not plain that too few pairs or bytes fit under the limit."""
        if limit_bytes <= 0:
            return False
        pairs = self.least.pairs if self.bytes_first else self.score.pairs
        total_bytes = self.score.total_bytes if self.bytes_first else self.least.total_bytes
        most_pairs, most_bytes = (
            self.chains.most(limit_bytes, value) for value in (np.ones_like(self.share), self.share)
        )
        return most_pairs >= pairs - 1e-6 and most_bytes * self.sum_bytes >= total_bytes * (1 - 1e-6)

    def _try(self, limit_bytes: float, start: list[int]) -> bool:
        """Improve the choice by one value after the other, and by each alone."""
        better = False
        refined = start
        for number, value in enumerate(self.values):
            if self.chains.work <= 0:
                break
            refined = self.chains.improved(limit_bytes, refined, value)
            better |= self._keep(refined)
            if number > 0:
                better |= self._keep(self.chains.improved(limit_bytes, start, value))
        return better

    def _keep(self, served: list[int]) -> bool:
        circuits = spend(self.demanded, served)
        self.chains.work -= CIRCUIT_WORK * sum(circuits.values())
        score = ServedScore.of(self.demanded, circuits)
        if not score.no_worse(self.least) or score.rank(self.bytes_first) <= self.score.rank(self.bytes_first):
            return False
        self.best, self.score = circuits, score
        return True
