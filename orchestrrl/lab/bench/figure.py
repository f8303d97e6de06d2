"""What a benchmark says, and how it is measured: two things in turn, so that a noisy machine disturbs both alike."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured ratio. Less is better, in the value as in the ratio."""

    name: str
    value: float
    unit: str
    baseline: str
    baseline_value: float
    note: str

    @property
    def ratio(self) -> float | None:
        """Value by baseline; None where the baseline drowned in noise."""
        return self.value / self.baseline_value if self.baseline_value > 0 else None


def side_by_side(
    measured: Callable[[], object], baseline: Callable[[], object], repetitions: int
) -> tuple[float, float]:
    """Median CPU seconds of each, called in turn after one call of each that does not count."""
    spent_s: tuple[list[float], list[float]] = ([], [])
    for repetition in range(-1, repetitions):
        for call, times_s in zip((measured, baseline), spent_s, strict=True):
            started_s = time.process_time()
            call()
            if repetition >= 0:
                times_s.append(time.process_time() - started_s)
    return median(spent_s[0]), median(spent_s[1])
