"""Least squares with coefficients >= 0, by the active sets of Lawson and Hanson (1974). Pure.

For the few columns of a fitted curve; scipy's takes longer to load than a daemon to start.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def nonnegative_least_squares(rows: Floats, target: Floats) -> Floats:
    """Return the x >= 0 with the least |rows @ x - target|. Raises ValueError where no end is found."""
    count = rows.shape[1]
    found, free, barred = np.zeros(count), np.zeros(count, dtype=bool), np.zeros(count, dtype=bool)
    rounding = 10 * max(rows.shape) * np.finfo(float).eps * np.abs(rows).sum(axis=0) * np.abs(target).max(initial=0.0)
    for _ in range(10 * count + 10):
        descent = rows.T @ (target - rows @ found)
        open_ = ~free & ~barred & (descent > rounding)
        if not open_.any():
            return found
        new = int(np.argmax(np.where(open_, descent, -np.inf)))
        free[new] = True
        trial = _least_squares(rows, target, free)
        if trial[new] <= 0:  # by rounding alone: it would come and go for ever
            free[new], barred[new] = False, True
            continue
        barred[:] = False
        while (trial[free] <= 0).any():
            ending = free & (trial <= 0)
            share = (found[ending] / (found[ending] - trial[ending])).min()
            found += share * (trial - found)
            free &= found > np.finfo(float).eps * found.max()
            found[~free] = 0.0
            trial = _least_squares(rows, target, free)
        found = trial
    raise ValueError(f"no least squares >= 0 were found for {rows.shape[0]} rows of {count} columns")


def _least_squares(rows: Floats, target: Floats, free: NDArray[np.bool_]) -> Floats:
    """Return the least squares over the free columns; the others are 0."""
    found = np.zeros(rows.shape[1])
    found[free] = np.linalg.lstsq(rows[:, free], target, rcond=None)[0]
    return found
