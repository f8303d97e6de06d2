"""Fit a line to measured times, such as the time to the first token against the tokens to prefill. This module performs
no I/O."""

from collections import deque
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median

MOST_SAMPLES = 32
REFIT_EVERY = 8  # samples
LEAST_RATIO = 2.0  # of the counts of two samples from whose difference a slope is computed


@dataclass(slots=True, eq=False)
class MeasuredLine:
    """The line `base_s + slope_s * count` through the newest samples. The slope is the median slope of pairs of samples
    (Theil, 1950; Sen, 1968), so that a minority of disturbed samples does not matter.

    If the counts of the samples are too similar for a slope, the line is flat or, if `through_zero` is set,
    proportional to the count.
    """

    through_zero: bool = False
    fitted: tuple[float, float] | None = None  # base_s and slope_s; None: too few samples
    _samples: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MOST_SAMPLES))
    _unfitted: int = 0

    def add(self, count: float, seconds: float) -> None:
        """Add a sample of the time for `count`, which must be above 0. Times below 0 are ignored."""
        if seconds < 0:
            return
        self._samples.append((count, seconds))
        self._unfitted += 1
        if self._unfitted >= REFIT_EVERY:
            self._unfitted = 0
            self.fitted = fit(tuple(self._samples), through_zero=self.through_zero)


def fit(samples: tuple[tuple[float, float], ...], *, through_zero: bool) -> tuple[float, float]:
    """Return the base and the slope of the line through at least one sample, both at least 0."""
    slopes = [
        (later_s - earlier_s) / (more - fewer)
        for (fewer, earlier_s), (more, later_s) in combinations(sorted(samples), 2)
        if more >= LEAST_RATIO * fewer
    ]
    if slopes:
        slope_s = max(0.0, median(slopes))
    else:
        slope_s = median(seconds / count for count, seconds in samples) if through_zero else 0.0
    return max(0.0, median(seconds - slope_s * count for count, seconds in samples)), slope_s
