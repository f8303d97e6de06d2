"""The result of a benchmark, and a function that measures CPU time. The function alternates between the measured call
and the baseline, so that background load affects both."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value and the value of its baseline, both in `unit`. Lower values and lower ratios are better."""

    name: str
    value: float
    unit: str
    baseline: str
    baseline_value: float
    note: str

    @property
    def ratio(self) -> float | None:
        """The value divided by the baseline's value. It is None if the baseline's value is 0, or negative because of
        noise."""
        return self.value / self.baseline_value if self.baseline_value > 0 else None


def side_by_side(
    measured: Callable[[], object], baseline: Callable[[], object], repetitions: int
) -> tuple[float, float]:
    """Return the median CPU times of `measured` and of `baseline`, in seconds. The two functions are called
    alternately; the first call of each is not counted."""
    spent_s: tuple[list[float], list[float]] = ([], [])
    for repetition in range(-1, repetitions):
        for call, times_s in zip((measured, baseline), spent_s, strict=True):
            started_s = time.process_time()
            call()
            if repetition >= 0:
                times_s.append(time.process_time() - started_s)
    return median(spent_s[0]), median(spent_s[1])
