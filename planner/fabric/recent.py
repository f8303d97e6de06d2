"""A bounded memory of measurements, the newest weighing most, and what it promises of the next one. Pure.

A promise is distribution-free: if the next value is as likely as any remembered one to take any place in their order,
it falls below the k-th smallest of n with probability k / (n + 1). With weights, the next one itself weighs 1, and is
counted on the bad side (conformal prediction with weights, Barber et al., Annals of Statistics 2023).
"""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf, log

MEMORY = 256
HALF_LIFE = 64.0  # a value counts half after so many newer ones
RUN = 8  # so many in a row beyond an outer tenth of those before them, and the older ones are forgotten
TENTH = 0.1
ROUNDING = 1e-9  # of sums of weights
MIN_SAMPLES = 4  # for a promise
SHRINK = 0.5  # what is promised of the least value if it is as likely as not to be undercut


@dataclass(frozen=True, slots=True)
class QuantileBound:
    """The next value lies beyond `value_s`, but for a probability of at most `risk`."""

    value_s: float
    risk: float
    samples: int


class RecentSamples:
    """The last `memory` values. A run of values beyond most of the older ones is a new regime: the older ones go."""

    __slots__ = ("_added", "_asked", "_edges", "_half_life", "_least", "_memory", "_next", "_run", "_side", "_values")

    def __init__(self, memory: int = MEMORY, half_life: float = HALF_LIFE) -> None:
        if memory < 2 * RUN:
            raise ValueError(f"memory must be >= {2 * RUN}, got {memory}")
        if not half_life > 0:
            raise ValueError(f"half_life must be > 0, got {half_life}")
        self._memory, self._half_life = memory, half_life
        self._values = array("d")  # a ring once it is full
        self._added = 0
        self._next = 0  # where the oldest of a full ring is
        self._edges = (-inf, inf)  # a tenth of the values lies on either side, as of lately
        self._least: float | None = None  # of the values
        self._asked: tuple[float, QuantileBound | None] | None = None  # a lower bound, by its q
        self._side, self._run = 0, 0  # the newest `_run` values all lie on that side

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> bool:
        """Whether the older values were forgotten over it."""
        values = self._values
        self._added += 1
        self._least = self._asked = None
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
        """Newest first."""
        values = self._values
        return (values[self._next :] + values[: self._next]).tolist()[::-1]

    def quantile(self, q: float) -> float | None:
        """Of what is remembered, by weight; None while there is nothing."""
        pairs, total = self._sorted(-inf)
        passed = 0.0
        for value, weight in pairs:
            passed += weight
            if passed >= q * total - 1e-12:
                return value
        return None

    def lower(self, q: float, above: float = -inf) -> QuantileBound | None:
        """What the next value exceeds but for a probability of `q`, given that it exceeds `above`. None: too few.

        The answer is kept until a value is added: asked before it is needed, it is there at once.
        """
        if not self._values or above >= self._minimum():
            return _bound(*self._sorted(above), q)
        if self._asked is None or self._asked[0] != q:
            self._asked = q, _bound(*self._sorted(-inf), q)
        return self._asked[1]

    def upper(self, q: float) -> QuantileBound | None:
        """What the next value does not exceed but for a probability of `1 - q`. None: too few."""
        pairs, total = self._sorted(-inf)
        return _bound(pairs[::-1], total, 1 - q)

    def least(self, above: float = -inf) -> QuantileBound | None:
        """The least remembered value, with the risk that the next one is less. None where some do not exceed `above`:
        those that do say too little."""
        if not self._values or self._minimum() <= above:
            return None
        return QuantileBound(self._minimum(), 1 / (_weight(self._half_life, len(self)) + 1), len(self))

    def promised(self, q: float, level: float, above: float = -inf) -> QuantileBound | None:
        """What the next value exceeds but for a probability of `q`, given that it exceeds `above`; `level` is what is
        aimed at for that. Where the values are too few, the least one, shrunk. None: too few for that, too."""
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
        """(value, weight) of those above, ascending, and the sum of their weights."""
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
        self._least = self._asked = None
        self._set_edges()


def shrunk(risk: float, q: float) -> float:
    """Return the factor for a least value that is undercut with probability `risk`, where only `q` is wanted: 1 for
    `risk` = q, `SHRINK` for 1/2, and in between by the logarithm of `risk`."""
    return 1.0 if risk <= q or q >= 0.5 else float(SHRINK ** (log(risk / q) / log(0.5 / q)))


def _bound(pairs: Sequence[tuple[float, float]], total: float, q: float) -> QuantileBound | None:
    """The last value, in order of `pairs`, before which no more than q lies, the next one being counted there too."""
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
