"""Fit a line to measured times, such as the time to the first token against the tokens to prefill. This module performs
no I/O."""

from collections import deque
from itertools import combinations
from statistics import median

MOST_SAMPLES = 32
REFIT_EVERY = 8  # samples
LEAST_RATIO = 2.0  # of the counts of two samples from whose difference a slope is computed


class MeasuredLine:
    """The line `base_s + slope_s * count` through the newest samples. The slope is the median slope of pairs of samples
    (Theil, 1950; Sen, 1968), so that a minority of disturbed samples does not matter.

    If the counts of the samples are too similar for a slope, the line is flat or, if `through_zero` is set,
    proportional to the count. The line is fitted when it is read, because a fit takes longer than many samples.
    """

    __slots__ = ("_fitted", "_samples", "_through_zero", "_unfitted")

    def __init__(self, *, through_zero: bool = False, fitted: tuple[float, float] | None = None) -> None:
        self._through_zero = through_zero
        self._fitted = fitted
        self._samples: deque[tuple[float, float]] = deque(maxlen=MOST_SAMPLES)
        self._unfitted = 0

    @property
    def fitted(self) -> tuple[float, float] | None:
        """The values base_s and slope_s, or None if there are too few samples."""
        if self._unfitted >= REFIT_EVERY:
            self._unfitted = 0
            self._fitted = fit(tuple(self._samples), through_zero=self._through_zero)
        return self._fitted

    @fitted.setter
    def fitted(self, line: tuple[float, float]) -> None:
        self._fitted = line

    def add(self, count: float, seconds: float) -> None:
        """Add a sample of the time for `count`, which must be above 0. Times below 0 are ignored."""
        if seconds < 0:
            return
        self._samples.append((count, seconds))
        self._unfitted += 1


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
