"""A bounded history of measurements, weighted towards the newest, and bounds on the next value. Has no side effects.

A bound makes no assumption about the distribution. If the next value is equally likely to take any rank among n stored
values, it is below the k-th smallest value with probability k / (n + 1). If values are weighted, the next value has
weight 1 and is assumed to violate the bound (conformal prediction with weights, Barber et al., Annals of Statistics
2023).
"""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf, log

MEMORY = 256
HALF_LIFE = 64.0  # newer values after which a value counts half
RUN = 8  # consecutive values beyond an outer tenth after which older values are dropped
TENTH = 0.1
ROUNDING = 1e-9  # of sums of weights
MIN_SAMPLES = 4  # for a bound
SHRINK = 0.5  # factor for the least value if it is undercut with probability 1/2


@dataclass(frozen=True, slots=True)
class QuantileBound:
    """A lower or upper bound on the next value. The next value violates the bound `value_s` with a probability of at
    most `risk`. `samples` is the number of values that the bound is based on."""

    value_s: float
    risk: float
    samples: int


class RecentSamples:
    """The last `memory` values. The weight of a value is halved for every `half_life` newer values. If a run of new
    values lies beyond most of the older values, the older values are dropped, because they belong to an earlier
    regime."""

    __slots__ = ("_added", "_cached", "_edges", "_half_life", "_least", "_memory", "_next", "_run", "_side", "_values")

    def __init__(self, memory: int = MEMORY, half_life: float = HALF_LIFE) -> None:
        if memory < 2 * RUN:
            raise ValueError(f"memory must be >= {2 * RUN}, got {memory}")
        if not half_life > 0:
            raise ValueError(f"half_life must be > 0, got {half_life}")
        self._memory, self._half_life = memory, half_life
        self._values = array("d")  # a ring once it is full
        self._added = 0
        self._next = 0  # position of the oldest value in a full ring
        self._edges = (-inf, inf)  # a tenth of the values lies beyond each, updated periodically
        self._least: float | None = None  # of the values
        self._cached: tuple[float, QuantileBound | None] | None = None  # the last lower bound, with its q
        self._side, self._run = 0, 0  # the newest `_run` values lie on that side

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> bool:
        """Add a value, and return whether older values were dropped because of it."""
        values = self._values
        self._added += 1
        self._least = self._cached = None
        if len(values) < self._memory:
            values.append(value)
        else:
            values[self._next] = value
            self._next = (self._next + 1) % self._memory
        low, high = self._edges
        side = (value > high) - (value < low)
        if not side or side != self._side:
            self._side, self._run = side, 1
            if self._added % RUN == 0:
                self._set_edges()
            return False
        self._run += 1
        if self._run < RUN:
            return False
        self._keep(RUN)
        return True

    def newest(self) -> Sequence[float]:
        """Return the values, newest first."""
        values = self._values
        return (values[self._next :] + values[: self._next]).tolist()[::-1]

    def quantile(self, q: float) -> float | None:
        """Return the weighted `q`-quantile of the stored values; None if no value is stored."""
        pairs, total = self._sorted(-inf)
        passed = 0.0
        for value, weight in pairs:
            passed += weight
            if passed >= q * total - 1e-12:
                return value
        return None

    def lower(self, q: float, above: float = -inf) -> QuantileBound | None:
        """Return a bound that the next value exceeds except with probability `q`, given that the next value exceeds
        `above`; None if there are too few values.

        If all stored values exceed `above`, the result is cached until a value is added, so that it can be computed in
        advance.
        """
        if not self._values or above >= self._minimum():
            return _bound(*self._sorted(above), q)
        if self._cached is None or self._cached[0] != q:
            self._cached = q, _bound(*self._sorted(-inf), q)
        return self._cached[1]

    def upper(self, q: float) -> QuantileBound | None:
        """Return a bound that the next value does not exceed except with probability `1 - q`; None if there are too few
        values."""
        pairs, total = self._sorted(-inf)
        return _bound(pairs[::-1], total, 1 - q)

    def least(self, above: float = -inf) -> QuantileBound | None:
        """Return the least stored value as a lower bound, with the risk that the next value is less. Return None if no
        value is stored or if the least value does not exceed `above`."""
        if not self._values or self._minimum() <= above:
            return None
        return QuantileBound(self._minimum(), 1 / (_weight(self._half_life, len(self)) + 1), len(self))

    def promised(self, q: float, level: float, above: float = -inf) -> QuantileBound | None:
        """Return the result of `lower` for probability `level`. If there are too few values for this probability,
        return the least value, reduced so that its risk is about `q`. Return None if fewer than `MIN_SAMPLES` values
        are stored, or if the least value is needed and does not exceed `above`."""
        if len(self) < MIN_SAMPLES:
            return None
        if (bound := self.lower(level, above)) is not None or (least := self.least(above)) is None:
            return bound
        since = max(0.0, above)
        return replace(least, value_s=since + shrunk(least.risk, q) * (least.value_s - since))

    def _minimum(self) -> float:
        if self._least is None:
            self._least = min(self._values)
        return self._least

    def _sorted(self, above: float) -> tuple[Sequence[tuple[float, float]], float]:
        """Return the stored values greater than `above` with their weights, in ascending order, and the sum of these
        weights."""
        pairs = sorted(zip(self.newest(), _weights(self._half_life, len(self)), strict=True))
        if pairs and pairs[0][0] <= above:
            pairs = pairs[bisect_left(pairs, (above, inf)) :]
        return pairs, sum(weight for _, weight in pairs)

    def _set_edges(self) -> None:
        ordered = sorted(self._values)
        tenth = int(TENTH * len(ordered))
        self._edges = ordered[tenth], ordered[-1 - tenth]

    def _keep(self, newest: int) -> None:
        self._values = array("d", reversed(self.newest()[:newest]))
        self._next, self._side, self._run = 0, 0, 0
        self._least = self._cached = None
        self._set_edges()


def shrunk(risk: float, q: float) -> float:
    """Return the factor by which the least stored value is multiplied so that the probability of a lower next value
    falls from `risk` to `q`. The factor is 1 if `risk` is at most `q`, and `SHRINK` if `risk` is 1/2. In between, the
    logarithm of the factor is interpolated linearly by the logarithm of `risk`."""
    return 1.0 if risk <= q or q >= 0.5 else float(SHRINK ** (log(risk / q) / log(0.5 / q)))


def _bound(pairs: Sequence[tuple[float, float]], total: float, q: float) -> QuantileBound | None:
    """Return the first value of `pairs` at which the sum of weights exceeds the share `q` of the total weight. Both
    sums include the weight of the unknown next value, which is 1. Return None if there is no such value, or if the next
    value alone exceeds the share. `pairs` lists (value, weight), and `total` is the sum of the weights."""
    budget, passed = q * (total + 1) - 1 + ROUNDING, 0.0
    if budget < 0:
        return None
    for value, weight in pairs:
        if passed + weight > budget:
            return QuantileBound(value, (1 + passed) / (total + 1), len(pairs))
        passed += weight
    return None


@cache
def _weights(half_life: float, count: int) -> tuple[float, ...]:
    return tuple(0.5 ** (age / half_life) for age in range(count))


@cache
def _weight(half_life: float, count: int) -> float:
    return sum(_weights(half_life, count))
