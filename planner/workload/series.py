"""Forecast the output lengths of the next generation step from the lengths of recent steps. Has no side effects.

In section 4.1 of the paper, ARIMA runs over the length statistics of recent steps before each step. Here, three methods
forecast every step: ARIMA on a few components, an exponentially weighted average, and the last step. Each method is
scored when the step has ended, and the method with the smallest error over recent steps makes the next forecast.
`SeriesForecaster` is an immutable value: `fold` an ended step into it and read `next`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil

import numpy as np
from numpy.typing import NDArray

from planner.model import FinishedLength, Histogram, check_at_least
from planner.workload.arima import LengthComponent, LengthComponents, NotForecast, fit_components

STEPS_REMEMBERED = 48
TAGS_REMEMBERED = 64  # most frequent tags kept of a step; others count as untagged
TAG_DECAY = 0.5  # factor on a tag's counts for each step of age
ALPHAS = (0.1, 0.2, 0.3, 0.5, 0.8)  # weights of the newest step in an average
FIRST_ALPHA = 0.3  # until there is a backtest
ERROR_DECAY = 0.93  # factor on the weight of an error for each step of age
MIN_SCORED = 4  # scored forecasts required before a method is trusted
REFIT_STEPS = 8  # steps until components are fitted again; twice as many while ARIMA is not the chosen method
# A step whose deviation from its forecast is this many times the usual one starts a new series.
BREAK = 6.0
MIN_WORTH, MAX_WORTH_STEPS = 16.0, 16.0  # limits of a forecast's worth, in requests and in steps
BAND_REQUESTS = 5.0  # expected requests in a band of bins that is compared by chi-square

Shares = NDArray[np.float64]  # [bin], of all requests of a step; they sum to 1


@dataclass(frozen=True, slots=True)
class LengthCounts:
    """Counts of outputs. Ended outputs are counted by bin. Outputs that were cut at their limit are counted by the
    number of bins that they outlived."""

    ended: tuple[float, ...]  # [bin]
    outlived: tuple[float, ...]  # [bins outlived], one entry more than `ended`

    def __post_init__(self) -> None:
        if len(self.outlived) != len(self.ended) + 1:
            raise ValueError(f"outlived must have {len(self.ended) + 1} entries, got {len(self.outlived)}")
        if any(count < 0 for count in (*self.ended, *self.outlived)):
            raise ValueError(f"counts must be >= 0, got {min((*self.ended, *self.outlived))}")

    @classmethod
    def of(cls, lengths: Sequence[FinishedLength], bin_tokens: int, max_output_tokens: int) -> "LengthCounts":
        bins = ceil(max_output_tokens / bin_tokens)
        tokens = np.fromiter((length.tokens for length in lengths), np.int64, len(lengths))
        cut = np.fromiter((length.censored for length in lengths), np.bool_, len(lengths))
        ended = np.clip(-(-tokens[~cut] // bin_tokens), 1, bins) - 1
        outlived = np.minimum(tokens[cut] // bin_tokens, bins)
        return cls(
            tuple(np.bincount(ended, minlength=bins).astype(float).tolist()),
            tuple(np.bincount(outlived, minlength=bins + 1).astype(float).tolist()),
        )

    @property
    def total(self) -> float:
        return sum(self.ended) + sum(self.outlived)

    def shares(self) -> Shares:
        """Return the shares of outputs by bin as if none were cut (the estimator of Kaplan and Meier).

        The last bin includes all outputs that would be longer.
        """
        ended = np.array(self.ended)
        at_risk = self.at_risk()
        survival = np.append(1.0, np.cumprod(1.0 - ended / np.maximum(at_risk, 1.0)))
        survival = extended(survival, int(np.max(np.nonzero(at_risk), initial=0)) + 1)
        survival[-1] = 0.0
        shares: Shares = -np.diff(survival)
        return shares

    def at_risk(self) -> NDArray[np.float64]:
        """Return the number of outputs at risk in each bin: an output counts in every bin up to its end or its cut."""
        last_seen: NDArray[np.float64] = np.array(self.ended) + np.array(self.outlived)[1:]
        return last_seen[::-1].cumsum()[::-1]


@dataclass(frozen=True, slots=True)
class StepStatistics:
    """The length statistics of an ended step."""

    bin_tokens: int
    lengths: LengthCounts
    tags: tuple[tuple[str, LengthCounts], ...] = ()  # by tag, for outputs that have one

    @classmethod
    def of(cls, finished: Sequence[FinishedLength], bin_tokens: int, max_output_tokens: int) -> "StepStatistics":
        by_tag: dict[str, list[FinishedLength]] = {}
        for length in finished:
            if length.tag:
                by_tag.setdefault(length.tag, []).append(length)
        frequent = sorted(by_tag, key=lambda tag: (-len(by_tag[tag]), tag))[:TAGS_REMEMBERED]
        tags = tuple((tag, LengthCounts.of(by_tag[tag], bin_tokens, max_output_tokens)) for tag in sorted(frequent))
        return cls(bin_tokens, LengthCounts.of(finished, bin_tokens, max_output_tokens), tags)


@dataclass(frozen=True, slots=True)
class MethodError:
    """A method's forecast error, averaged over steps with more weight on recent steps. The error in a step is the sum
    of the absolute errors of the shares of all bins."""

    method: str
    error: float
    steps: int


@dataclass(frozen=True, slots=True)
class StepForecast:
    """The expected distribution of output lengths in the next step."""

    bin_tokens: int
    shares: tuple[float, ...]  # [bin]
    method: str  # arima | ewma | last_step
    why: str  # reason for the method
    dispersion: float  # mean squared error of recent forecasts relative to sampling alone; 1 at best
    worth_requests: float  # the forecast is worth as much as this many requests of the step
    components: tuple[LengthComponent, ...] = ()  # forecasts by ARIMA, in standard units of sampling noise
    backtest: tuple[MethodError, ...] = ()
    tags: tuple[tuple[str, LengthCounts], ...] = ()  # counts of each tag in recent steps, weighted towards the newest

    def histogram(self, requests: float) -> Histogram:
        """Return the expected histogram of `requests` outputs. Counts are not rounded, so that the tail keeps its
        weight."""
        return Histogram(self.bin_tokens, tuple(share * requests for share in self.shares))

    def std(self, requests: float) -> NDArray[np.float64]:
        """Return the standard deviation of the count in each bin, for a step of `requests` outputs, including the
        forecast's error."""
        shares = np.array(self.shares)
        return np.sqrt(requests * shares * (1.0 - shares) * self.dispersion)


@dataclass(frozen=True, slots=True)
class SeriesForecaster:
    """The recent steps, the forecasts and errors of each method, and the forecast of the next step."""

    bin_tokens: int
    max_output_tokens: int
    steps: tuple[StepStatistics, ...] = ()  # since the last break; newest last
    next: StepForecast | None = None  # None: no step has been folded yet
    forecasts: Mapping[str, Shares] = field(default_factory=dict, compare=False)  # of the next step, by method
    errors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # of recent steps by method, newest last
    dispersions: tuple[float, ...] = ()  # of the chosen method, newest last
    components: LengthComponents | None = field(default=None, compare=False)
    fit_age_steps: int = 0
    fits: int = 0  # number of fits of the components

    def __post_init__(self) -> None:
        check_at_least(self, 1, "bin_tokens", "max_output_tokens")

    def fold(self, step: StepStatistics) -> "SeriesForecaster":
        """Return a copy with one more ended step. A step without ended outputs changes nothing."""
        bins = ceil(self.max_output_tokens / self.bin_tokens)
        if (step.bin_tokens, len(step.lengths.ended)) != (self.bin_tokens, bins):
            raise ValueError(
                f"step must have {bins} bins of {self.bin_tokens} tokens, "
                f"got {len(step.lengths.ended)} bins of {step.bin_tokens} tokens"
            )
        if not sum(step.lengths.ended):
            return self
        scored = self._scored(step)
        kept = replace(scored, steps=(*scored.steps, step)[-STEPS_REMEMBERED:])
        return kept._forecast()

    def _scored(self, step: StepStatistics) -> "SeriesForecaster":
        """Return a copy with the methods' forecasts scored against the step. If the step deviates from its forecast far
        more than usual, return the start of a new series."""
        if self.next is None:
            return self
        shares, requests = step.lengths.shares(), step.lengths.total
        deviation = dispersion(np.array(self.next.shares), shares, requests)
        if len(self.dispersions) >= MIN_SCORED and deviation > BREAK * max(1.0, float(np.median(self.dispersions))):
            return SeriesForecaster(self.bin_tokens, self.max_output_tokens, dispersions=self.dispersions)
        errors = {
            method: (*self.errors.get(method, ()), float(np.abs(forecast - shares).sum()))[-STEPS_REMEMBERED:]
            for method, forecast in self.forecasts.items()
        }
        dispersions = (*self.dispersions, deviation)[-STEPS_REMEMBERED:]
        return replace(self, errors=errors, dispersions=dispersions)

    def _forecast(self) -> "SeriesForecaster":
        history = np.array([step.lengths.shares() for step in self.steps])
        requests = float(np.mean([step.lengths.total for step in self.steps]))
        forecasts = {"last_step": history[-1]}
        forecasts |= {_ewma_name(alpha): _ewma(history, alpha) for alpha in ALPHAS}
        ewma = self._best([_ewma_name(alpha) for alpha in ALPHAS]) or _ewma_name(FIRST_ALPHA)
        forecasts["ewma"] = forecasts[ewma]
        components, age, fits = self.components, self.fit_age_steps + 1, self.fits
        component_forecasts: tuple[LengthComponent, ...] = ()
        refused = ""
        try:
            if components is None or self._refit_pays(components, history, age):
                components, age, fits = fit_components(history, requests), 0, fits + 1
            forecasts["arima"], component_forecasts = components.forecast(history, forecasts["ewma"])
        except NotForecast as error:
            refused, components = str(error), None
        method, why = self._choice(refused)
        worth, spread = self._worth(requests)
        following = StepForecast(
            bin_tokens=self.bin_tokens,
            shares=tuple(forecasts[method].tolist()),
            method=method,
            why=f"{why}; {ewma}" if method == "ewma" else why,
            dispersion=spread,
            worth_requests=worth,
            components=component_forecasts,
            backtest=tuple(self._error(name) for name in ("arima", "ewma", "last_step") if name in self.errors),
            tags=_decayed(self.steps),
        )
        return replace(self, next=following, forecasts=forecasts, components=components, fit_age_steps=age, fits=fits)

    def _choice(self, refused: str) -> tuple[str, str]:
        """Return the method with the smallest error over recent steps, and the reason for choosing it. `refused` is the
        reason why ARIMA cannot forecast the step, or an empty string if it can."""
        if len(self.steps) < 2:
            return "last_step", "only one step is known"
        candidates = ["ewma", "last_step"] + ([] if refused else ["arima"])
        best = self._best(candidates)
        why = "" if best is None else f"least recent error: {self._error(best).error:.3f}"
        if refused:
            why = f"{why}; no arima: {refused}" if why else f"no arima: {refused}"
        return best or "ewma", why or "too few scored forecasts"

    def _best(self, methods: Sequence[str]) -> str | None:
        """Return the method with the least error relative to the first method, over the steps that both forecast.

        Return None if the first method has too few scores.
        """
        first, best, least = methods[0], None, 1.0
        if len(self.errors.get(first, ())) < MIN_SCORED:
            return None
        for method in methods:
            paired = min(len(self.errors.get(method, ())), len(self.errors[first]))
            if paired < MIN_SCORED:
                continue
            ratio = _weighted(self.errors[method][-paired:]) / max(_weighted(self.errors[first][-paired:]), 1e-12)
            if best is None or ratio < least:
                best, least = method, ratio
        return best

    def _error(self, method: str) -> MethodError:
        errors = self.errors[method]
        return MethodError(method, _weighted(errors), len(errors))

    def _refit_pays(self, components: LengthComponents, history: Shares, age: int) -> bool:
        """Return whether to refit the components. They are refitted if their forecasts fail, or after REFIT_STEPS steps
        (twice as many while ARIMA is not the chosen method)."""
        in_use = self.next is not None and self.next.method == "arima"
        return age >= (REFIT_STEPS if in_use else 2 * REFIT_STEPS) or components.astray(history, min(age, 4))

    def _worth(self, requests: float) -> tuple[float, float]:
        """Return the worth of the forecast as a number of requests, and its dispersion.

        Sampling alone has a dispersion of 1; a forecast that is worth w requests has a dispersion of 1 + requests/w.
        """
        if not self.dispersions:
            return max(MIN_WORTH, requests / 4), 2.0
        spread = max(_weighted(self.dispersions), 1.0)
        worth = requests / max(spread - 1.0, 1.0 / MAX_WORTH_STEPS)
        return max(MIN_WORTH, worth), spread


def extended(survival: NDArray[np.float64], longest: int, exponent: float = 1.0) -> NDArray[np.float64]:
    """Return the survival curve extended beyond the `longest` observed bin by a power law of the length.

    With an exponent of 1, half of the outputs that reach a length also reach twice that length.
    """
    onwards = survival.copy()
    onwards[longest + 1 :] = survival[longest] * (longest / np.arange(longest + 1, len(survival))) ** exponent
    return onwards


def dispersion(forecast: Shares, actual: Shares, requests: float) -> float:
    """Return the mean squared error of the forecast relative to the error of sampling `requests` outputs alone.

    The errors are taken over bands of bins with a few expected requests each.
    """
    expected = requests * forecast
    band = (np.cumsum(expected) / BAND_REQUESTS).astype(np.int64)
    band = np.minimum(band, max(int(requests / BAND_REQUESTS) - 1, 0))
    means = np.bincount(band, expected)
    counts = np.bincount(band, requests * actual, minlength=len(means))
    used = means > 0
    squares = (counts[used] - means[used]) ** 2 / means[used]
    unforeseen = counts[~used].sum()  # in bands in which the forecast expects nothing
    return float((squares.sum() + unforeseen) / max(int(used.sum()) - 1, 1))


def _ewma_name(alpha: float) -> str:
    return f"ewma alpha={alpha:g}"


def _ewma(history: Shares, alpha: float) -> Shares:
    weights = (1.0 - alpha) ** np.arange(len(history))[::-1]
    average: Shares = weights @ history / weights.sum()
    return average


def _weighted(values: Sequence[float]) -> float:
    weights = ERROR_DECAY ** np.arange(len(values))[::-1]
    return float(weights @ np.array(values) / weights.sum())


def _decayed(steps: Sequence[StepStatistics]) -> tuple[tuple[str, LengthCounts], ...]:
    """Return the counts of each tag over recent steps. The weight of a step halves with each further step of age."""
    ended: dict[str, Shares] = {}
    outlived: dict[str, Shares] = {}
    for age, step in enumerate(reversed(steps[-8:])):
        for tag, counts in step.tags:
            weight = TAG_DECAY**age
            ended[tag] = ended.get(tag, 0.0) + weight * np.array(counts.ended)
            outlived[tag] = outlived.get(tag, 0.0) + weight * np.array(counts.outlived)
    frequent = sorted(ended, key=lambda tag: (-float(ended[tag].sum()), tag))[:TAGS_REMEMBERED]
    return tuple(
        (tag, LengthCounts(tuple(ended[tag].tolist()), tuple(outlived[tag].tolist()))) for tag in sorted(frequent)
    )
