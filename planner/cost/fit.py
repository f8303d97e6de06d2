"""Fit curves to measured step times, prefill times and move times, and calculate the errors of the fits. Has no side
effects.

Errors are relative, so that steps of 5 ms and of 50 ms have equal weight. All coefficients are >= 0, so that a fitted
step time never falls with load. The least-squares solver uses the active-set method of Lawson and Hanson (1974),
because importing scipy's solver takes longer than starting a daemon. Outliers, such as stalls, get little or no weight.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cost.profile import Curve, EngineProfile, StepTime

Floats = NDArray[np.float64]

# A straight line is kept if its cross-validated error is below this. Otherwise each further knot must lower the error
# by a share of KNOT_MUST_GAIN.
LINE_IS_ENOUGH = 0.015
KNOT_MUST_GAIN = 0.1
MOST_KNOTS = 12
FOLDS = 5

# A refit keeps at least this share of the scaled base at one sequence, because no step takes zero time.
LEAST_BASE = 0.05

_HUBER, _BISQUARE = 1.345, 4.685  # the usual tuning constants: 95 % efficiency on normal errors
_LEAST_SCALE = 0.02  # minimum scale, so that a small error never makes an outlier
_ROUNDS = 12


class TooFewSamples(ValueError):
    """Raised if the samples are too few or too similar to determine the fit."""


class StepSample(NamedTuple):
    """One measured batch, with the mean duration of its decode iterations in seconds."""

    sequences: float
    kv_tokens: float
    step_s: float


class TimedSample(NamedTuple):
    """The size of a measured operation, in tokens or bytes, and its duration in seconds."""

    size: float
    seconds: float


@dataclass(frozen=True, slots=True)
class FitError:
    """The relative errors of a fit over all samples, including outliers."""

    samples: int
    mean: float
    max: float


@dataclass(frozen=True, slots=True)
class StepFit:
    step: StepTime
    error: FitError
    prefill_s_per_token: float = 0.0  # for steps that also prefill other requests' prompts


@dataclass(frozen=True, slots=True)
class CurveFit:
    curve: Curve
    error: FitError


def fit_step(
    samples: Sequence[StepSample],
    line_is_enough: float = LINE_IS_ENOUGH,
    *,
    prefilled_tokens: Sequence[float] = (),
    robust: bool = True,
) -> StepFit:
    """Fit a step time to the samples. The fit is affine if the cross-validated error of an affine fit is at most
    `line_is_enough`. Otherwise it may be piecewise linear in the number of sequences.

    `prefilled_tokens` has, for each sample, the mean number of tokens that a step prefilled in addition to decoding. If
    `robust` is False, outliers keep their full weight. Raises TooFewSamples if there are fewer than 3 samples (4 with
    `prefilled_tokens`), or if sequences and KV tokens did not vary independently.
    """
    beside: list[tuple[float, ...]] = [(tokens,) for tokens in prefilled_tokens] or [()] * len(samples)
    # Sorted by size, so that neighbours fall into different folds.
    table = np.array(sorted((*sample, *more) for sample, more in zip(samples, beside, strict=True)), dtype=float)
    if len(table) < (4 if prefilled_tokens else 3) or not _varied_apart(table[:, 0], table[:, 1]):
        raise TooFewSamples(
            f"cannot separate the effect of sequences from that of KV tokens in {len(table)} samples; measure several"
            " batch sizes and context lengths"
        )
    sequences, step_s, others = table[:, 0], table[:, 2], np.delete(table, (0, 2), axis=1)
    knots = _choose_knots(sequences, others, step_s, line_is_enough, robust)
    fitted = _fit(_design(sequences, knots, others), step_s, robust=robust)
    kv_s, *prefill_s = fitted.coefficients[len(knots) :].tolist()
    return StepFit(StepTime(_curve(knots, fitted.coefficients), kv_s), fitted.error, *prefill_s)


def fit_curve(seen: Sequence[TimedSample], line_is_enough: float = LINE_IS_ENOUGH) -> CurveFit:
    """Fit a curve of seconds over sizes. It is a line if the cross-validated error of a line is at most
    `line_is_enough`. Otherwise it may be piecewise linear.

    Raises TooFewSamples if all samples have the same size.
    """
    sizes, seconds = (np.array(column, dtype=float) for column in zip(*sorted(seen), strict=True))
    if len(set(sizes)) < 2:
        raise TooFewSamples(f"a curve requires at least two sizes, got {sorted(set(sizes))}")
    nothing = np.empty((len(seen), 0))
    knots = _choose_knots(sizes, nothing, seconds, line_is_enough, robust=True)
    fitted = _fit(_design(sizes, knots, nothing), seconds)
    return CurveFit(_curve(knots, fitted.coefficients), fitted.error)


def fit_rate(seen: Sequence[TimedSample]) -> tuple[float, FitError]:
    """Fit a rate, in units of size per second, and a fixed time per sample; return the rate and the error of the fit.

    If the time hardly depends on the size, the variation of the times hides the true rate. The result is then limited
    to the highest rate that can be measured despite this variation. Raises TooFewSamples if all samples have the same
    size.
    """
    if len({item.size for item in seen}) < 2:
        raise TooFewSamples(f"a rate requires at least two sizes, got {sorted({item.size for item in seen})}")
    sizes = np.array([item.size for item in seen], dtype=float)
    seconds = np.array([item.seconds for item in seen], dtype=float)
    fitted = _fit(np.stack([np.ones_like(sizes), sizes], axis=1), seconds)
    slope = float(fitted.coefficients[1])
    unseen_s = float(np.max(np.abs(seconds - np.median(seconds)))) or 1e-6
    return 1 / max(slope, 0.01 * unseen_s / float(np.ptp(sizes))), fitted.error


def refit_step(prior: EngineProfile, samples: Sequence[StepSample], weights: Floats, trust: float) -> StepFit:
    """Adjust the prior's step time to the samples. Outside the samples' range, the step time keeps the prior's shape.

    First, the whole step time is scaled to the samples. If the batches varied, the time per KV token is then fitted
    separately, and the base time becomes `constant + scale * prior + slope * sequences`. Each coefficient is pulled
    towards the prior with the weight of `trust` samples. `weights` has the weight of each sample.
    """
    sequences, kv_tokens, step_s = _columns(samples)
    step = _scaled(prior.step, sequences, kv_tokens, step_s, weights)
    base, kv_s = _with_range(step.base_s, prior.max_sequences), step.kv_s_per_token
    misses = np.abs(np.array([step.at(b, k) for b, k in zip(sequences, kv_tokens, strict=True)]) / step_s - 1)
    scaled = StepFit(step, FitError(len(step_s), float(misses.mean()), float(misses.max())))
    if not _varied(sequences) and not _varied(kv_tokens):
        return scaled
    # In these units a coefficient of 1 is a typical step, so that the pull towards the prior is equal for all.
    typical_s = step.at(prior.max_sequences / 2, prior.kv_capacity_tokens / 2) or 1.0
    per_sequence_s, per_token_s = typical_s / prior.max_sequences, typical_s / prior.kv_capacity_tokens
    base_s = np.array([base.at(b) for b in sequences])
    columns = [np.full_like(step_s, typical_s), base_s, per_sequence_s * sequences, per_token_s * kv_tokens]
    believed = np.array([0.0, 1.0, 0.0, kv_s / per_token_s])
    fitted = _fit(np.stack(columns, axis=1), step_s, weights, (believed, trust))
    constant, scale, slope, kv = (float(value) for value in fitted.coefficients)
    moved = _moved(base, constant * typical_s, scale, slope * per_sequence_s)
    if moved.at(1.0) < LEAST_BASE * base.at(1.0):  # contradictory samples can reduce the base to zero
        return scaled
    return StepFit(StepTime(moved, kv * per_token_s, step.spill_s_per_token), fitted.error)


def _scaled(step: StepTime, sequences: Floats, kv_tokens: Floats, step_s: Floats, weights: Floats) -> StepTime:
    believed_s = np.array([step.at(b, k) for b, k in zip(sequences, kv_tokens, strict=True)])
    factor = _weighted_median(step_s / np.maximum(believed_s, 1e-12), weights)
    return StepTime(_moved(step.base_s, 0.0, factor, 0.0), factor * step.kv_s_per_token, step.spill_s_per_token)


def _moved(curve: Curve, constant: float, scale: float, slope: float) -> Curve:
    return Curve(curve.xs, tuple(constant + scale * y + slope * x for x, y in zip(curve.xs, curve.ys, strict=True)))


def refit_curve(prior: Curve, seen: Sequence[TimedSample], weights: Floats, trust: float) -> CurveFit:
    """Adjust the prior's curve to the samples in the same way as `refit_step` adjusts a step time."""
    sizes = np.array([item.size for item in seen], dtype=float)
    seconds = np.array([item.seconds for item in seen], dtype=float)
    largest = float(sizes.max())
    believed_s = np.array([prior.at(size) for size in sizes])
    factor = _weighted_median(seconds / np.maximum(believed_s, 1e-12), weights)
    curve = _with_range(_moved(prior, 0.0, factor, 0.0), largest)
    typical_s = curve.at(largest) or float(np.median(seconds))
    expected_s = np.array([curve.at(size) for size in sizes])
    columns = np.stack([np.full_like(seconds, typical_s), expected_s, typical_s / largest * sizes], axis=1)
    believed = np.array([0.0, 1.0, 0.0])
    if not _varied(sizes):
        columns, believed = columns[:, 1:2], believed[1:2]
    fitted = _fit(columns, seconds, weights, (believed, trust))
    constant, scale, slope = fitted.coefficients if _varied(sizes) else (0.0, fitted.coefficients[0], 0.0)
    moved = _moved(curve, float(constant) * typical_s, float(scale), float(slope) * typical_s / largest)
    return CurveFit(moved, fitted.error)


def _with_range(curve: Curve, most: float) -> Curve:
    """Return the curve extended to `most` by moving its last knot. No knot is added, because the slope of a short
    segment is imprecise."""
    xs, ys = curve.xs, curve.ys
    if len(xs) == 1:
        return Curve((xs[0], max(most, xs[0] + 1)), (ys[0], ys[0]))
    return Curve((*xs[:-1], most), (*ys[:-1], curve.at(most))) if most > xs[-1] else curve


class _Fitted(NamedTuple):
    coefficients: Floats  # [column]
    error: FitError


def _fit(
    design: Floats,
    seconds: Floats,
    weights: Floats | None = None,
    prior: tuple[Floats, float] | None = None,
    *,
    robust: bool = True,
) -> _Fitted:
    """Return the coefficients >= 0 with the least relative error. If `robust` is True, outliers get less weight.

    `design` is indexed by sample and column. `prior` has the expected coefficients and their weight, as a number of
    samples. Huber's weights are used first, because they converge to the majority of the samples from any start.
    Tukey's weights follow, because they exclude outliers.
    """
    relative = design / seconds[:, None]
    given = np.ones_like(seconds) if weights is None else weights
    believed, trust = prior if prior is not None else (np.zeros(design.shape[1]), 0.0)
    kept = np.ones_like(seconds)
    coefficients = np.zeros(design.shape[1])
    for turn in range(_ROUNDS):
        found = _nonnegative(relative, given * kept, believed, trust)
        settled = bool(np.allclose(found, coefficients, rtol=1e-6, atol=0.0))
        coefficients = found
        residuals = np.abs(relative @ coefficients - 1)
        if not robust:
            break
        spread = max(_LEAST_SCALE, 1.4826 * _weighted_median(residuals, given))
        ratio = residuals / spread
        if turn < _ROUNDS // 2 and not settled:
            kept = np.minimum(1.0, _HUBER / np.maximum(ratio, 1e-12))
        else:
            kept = np.where(ratio < _BISQUARE, (1 - (ratio / _BISQUARE) ** 2) ** 2, 0.0)
            if settled and turn >= _ROUNDS // 2:
                break
    share = given / given.sum()
    return _Fitted(coefficients, FitError(len(seconds), float(residuals @ share), float(residuals.max())))


def _nonnegative(relative: Floats, weights: Floats, believed: Floats, trust: float) -> Floats:
    """Return the weighted least-squares coefficients, all >= 0. The expected coefficients `believed` have the weight of
    `trust` samples. Columns are first scaled to equal size."""
    root = np.sqrt(weights)
    size = np.maximum(np.abs(relative).max(axis=0), 1e-300)
    rows, target = [relative / size * root[:, None]], [root]
    if trust > 0:
        rows.append(np.diag(np.sqrt(trust) / size))
        target.append(np.sqrt(trust) * believed)
    found: Floats = nonnegative_least_squares(np.concatenate(rows), np.concatenate(target)) / size
    return found


def _weighted_median(values: Floats, weights: Floats) -> float:
    order = np.argsort(values, kind="stable")
    below = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(below, below[-1] / 2)])


def _choose_knots(
    sizes: Floats, others: Floats, seconds: Floats, line_is_enough: float, robust: bool
) -> tuple[float, ...]:
    """Return the knots: the smallest and the largest size, and the measured sizes between them that lower the
    cross-validated error enough."""
    seen = np.unique(sizes)
    if len(seen) == 1:
        return (float(seen[0]),)
    knots: tuple[float, ...] = (float(seen[0]), float(seen[-1]))
    error = _left_out_error(_design(sizes, knots, others), seconds, robust)
    while error > line_is_enough and len(knots) < MOST_KNOTS:
        free = [float(size) for size in seen if size not in knots]
        tried = [(_left_out_error(_design(sizes, (*knots, x), others), seconds, robust), x) for x in free]
        best, x = min(tried, default=(error, 0.0))
        if best > (1 - KNOT_MUST_GAIN) * error:
            break
        knots, error = tuple(sorted((*knots, x))), best
    return knots


def _left_out_error(design: Floats, seconds: Floats, robust: bool) -> float:
    """Return the mean relative error of samples that were left out of the fit (cross-validation). The error of each
    sample is limited to 1."""
    fold = np.arange(len(seconds)) % FOLDS
    missed = np.empty_like(seconds)
    for number in range(min(FOLDS, len(seconds))):
        out = fold == number
        coefficients = _fit(design[~out], seconds[~out], robust=robust).coefficients
        missed[out] = np.abs(design[out] @ coefficients / seconds[out] - 1)
    return float(np.minimum(missed, 1.0).mean())


def _design(sizes: Floats, knots: tuple[float, ...], others: Floats) -> Floats:
    """Return the design matrix, indexed by sample and column. The columns are ones, the part of each size that lies in
    each segment, and `others`.

    Segments lie between neighbouring knots, and the coefficient of a segment is its slope. The first and the last
    segment extend beyond the end knots, as in a Curve.
    """
    ordered = sorted(knots)
    columns = [np.ones_like(sizes)]
    for number, (left, right) in enumerate(pairwise(ordered)):
        low = -np.inf if number == 0 else 0.0
        high = np.inf if number == len(ordered) - 2 else right - left
        columns.append(np.clip(sizes - left, low, high))
    return np.concatenate([np.stack(columns, axis=1), others], axis=1)


def _curve(knots: tuple[float, ...], coefficients: Floats) -> Curve:
    ys = np.cumsum([coefficients[0], *(coefficients[1 : len(knots)] * np.diff(knots))])
    return Curve(knots, tuple(float(y) for y in ys))


def _columns(samples: Sequence[StepSample]) -> tuple[Floats, Floats, Floats]:
    table = np.array(samples, dtype=float).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


def _varied(sizes: Floats) -> bool:
    return float(np.ptp(sizes)) > 0.2 * float(np.max(sizes))


def _varied_apart(sequences: Floats, kv_tokens: Floats) -> bool:
    """Return whether KV tokens vary independently of sequences, that is, are not a linear function of them."""
    design = np.stack([np.ones_like(sequences), sequences], axis=1)
    (coefficients, *_) = np.linalg.lstsq(design, kv_tokens, rcond=None)
    return float(np.abs(kv_tokens - design @ coefficients).max()) > 0.02 * max(float(np.max(kv_tokens)), 1.0)


def nonnegative_least_squares(rows: Floats, target: Floats) -> Floats:
    """Return the vector x >= 0 that minimises |rows @ x - target|. Raises ValueError if the iteration does not
    converge."""
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
        if trial[new] <= 0:  # only by rounding: the column would be added and removed forever
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
    raise ValueError(f"nonnegative least squares did not converge for {rows.shape[0]} rows of {count} columns")


def _least_squares(rows: Floats, target: Floats, free: NDArray[np.bool_]) -> Floats:
    """Return the least-squares solution over the free columns. The coefficients of all other columns are 0."""
    found = np.zeros(rows.shape[1])
    found[free] = np.linalg.lstsq(rows[:, free], target, rcond=None)[0]
    return found
