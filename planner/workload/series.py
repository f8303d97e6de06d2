"""How long the outputs of the next generation step will be, from those of recent steps. Pure.

Section 4.1 of the paper: before a step, ARIMA over the length statistics of recent steps. Three methods forecast every
step: ARIMA on a few components, an exponentially weighted average, and the step before. Each is scored once the step
has ended, and the one with the least recent error gives the next forecast. `SeriesForecaster` is a value: `fold` an
ended step into it and read `next`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil

import numpy as np
from numpy.typing import NDArray

from planner.model import FinishedLength, Histogram, check_at_least
from planner.workload.arima import LengthComponent, LengthComponents, NotForecast, fit_components

STEPS_REMEMBERED = 48
TAGS_REMEMBERED = 64  # of a step, the most frequent ones; the others count as untagged
TAG_DECAY = 0.5  # what a tag showed a step earlier counts this much
ALPHAS = (0.1, 0.2, 0.3, 0.5, 0.8)  # how much the newest step weighs in an average
FIRST_ALPHA = 0.3  # until the backtest tells
ERROR_DECAY = 0.93  # an error counts this much less with every step that it is older
MIN_SCORED = 4  # forecasts a method must have been scored on before it is trusted
REFIT_STEPS = 8  # a fit ages this long; twice as long while the method is not the best
# A step this many times as far from its forecast as steps usually are begins a series of its own.
BREAK = 6.0
MIN_WORTH, MAX_WORTH_STEPS = 16.0, 16.0  # in requests, in steps
BAND_REQUESTS = 5.0  # expected in a band of bins that is compared by chi-square

Shares = NDArray[np.float64]  # [bin], of all requests of a step; they add up to 1


@dataclass(frozen=True, slots=True)
class LengthCounts:
    """Outputs of one kind: those that ended by themselves by bin, and those that were cut by the bins they outlived."""

    ended: tuple[float, ...]  # [bin]
    outlived: tuple[float, ...]  # [bins outlived]: one longer than `ended`

    def __post_init__(self) -> None:
        if len(self.outlived) != len(self.ended) + 1:
            raise ValueError(f"outlived must have {len(self.ended) + 1} entries, got {len(self.outlived)}")
        if any(count < 0 for count in (*self.ended, *self.outlived)):
            raise ValueError("counts must be >= 0")

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
        """Of outputs that nothing cuts before the last bin, which takes all that is left (Kaplan and Meier's
        estimator)."""
        ended = np.array(self.ended)
        at_risk = self.at_risk()
        survival = np.append(1.0, np.cumprod(1.0 - ended / np.maximum(at_risk, 1.0)))
        survival = extended(survival, int(np.max(np.nonzero(at_risk), initial=0)) + 1)
        survival[-1] = 0.0
        shares: Shares = -np.diff(survival)
        return shares

    def at_risk(self) -> NDArray[np.float64]:
        """[bin]: an output takes part in every bin up to the one that it ended in or was last seen beyond."""
        last_seen: NDArray[np.float64] = np.array(self.ended) + np.array(self.outlived)[1:]
        return last_seen[::-1].cumsum()[::-1]


@dataclass(frozen=True, slots=True)
class StepStatistics:
    """What an ended step tells of lengths."""

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
    """How far a method's forecasts were off: total absolute error over bins by the number of requests, weighted towards
    recent steps."""

    method: str
    error: float
    steps: int


@dataclass(frozen=True, slots=True)
class StepForecast:
    """The lengths that the next step is expected to show."""

    bin_tokens: int
    shares: tuple[float, ...]  # [bin]
    method: str  # arima | ewma | last_step
    why: str  # this method and no other
    dispersion: float  # mean squared error by that of sampling alone, as recent forecasts had it; 1 at best
    worth_requests: float  # the forecast knows as much of the step as that many of its requests would
    components: tuple[LengthComponent, ...] = ()  # what ARIMA forecasts, in standard units of sampling noise
    backtest: tuple[MethodError, ...] = ()
    tags: tuple[tuple[str, LengthCounts], ...] = ()  # what recent steps tell of each, the newest counting most

    def histogram(self, requests: float) -> Histogram:
        """Expected counts. They are means, so that the tail keeps its weight; most of its bins will show none."""
        return Histogram(self.bin_tokens, tuple(share * requests for share in self.shares))

    def std(self, requests: float) -> NDArray[np.float64]:
        """[bin]: standard deviation of a step's counts about the histogram, the forecast's own error included."""
        shares = np.array(self.shares)
        return np.sqrt(requests * shares * (1.0 - shares) * self.dispersion)


@dataclass(frozen=True, slots=True)
class SeriesForecaster:
    """Recent steps, what each method made of them, and the forecast of the next step."""

    bin_tokens: int
    max_output_tokens: int
    steps: tuple[StepStatistics, ...] = ()  # since the last break; newest last
    next: StepForecast | None = None  # None: nothing is known yet
    forecasts: Mapping[str, Shares] = field(default_factory=dict, compare=False)  # of the next step, by method
    errors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # of recent steps by method, newest last
    dispersions: tuple[float, ...] = ()  # of the chosen method, newest last
    components: LengthComponents | None = field(default=None, compare=False)
    fit_age_steps: int = 0
    fits: int = 0  # how often orders were chosen anew

    def __post_init__(self) -> None:
        check_at_least(self, 1, "bin_tokens", "max_output_tokens")

    def fold(self, step: StepStatistics) -> "SeriesForecaster":
        """With one more ended step. A step in which nothing ended changes nothing."""
        bins = ceil(self.max_output_tokens / self.bin_tokens)
        if (step.bin_tokens, len(step.lengths.ended)) != (self.bin_tokens, bins):
            raise ValueError(
                f"step must have {bins} bins of {self.bin_tokens} tokens, "
                f"got {len(step.lengths.ended)} of {step.bin_tokens}"
            )
        if not sum(step.lengths.ended):
            return self
        scored = self._scored(step)
        kept = replace(scored, steps=(*scored.steps, step)[-STEPS_REMEMBERED:])
        return kept._forecast()

    def _scored(self, step: StepStatistics) -> "SeriesForecaster":
        """The methods' forecasts held against what came."""
        if self.next is None:
            return self
        shares, requests = step.lengths.shares(), step.lengths.total
        told = dispersion(np.array(self.next.shares), shares, requests)
        if len(self.dispersions) >= MIN_SCORED and told > BREAK * max(1.0, float(np.median(self.dispersions))):
            return SeriesForecaster(self.bin_tokens, self.max_output_tokens, dispersions=self.dispersions)
        errors = {
            method: (*self.errors.get(method, ()), float(np.abs(forecast - shares).sum()))[-STEPS_REMEMBERED:]
            for method, forecast in self.forecasts.items()
        }
        dispersions = (*self.dispersions, told)[-STEPS_REMEMBERED:]
        return replace(self, errors=errors, dispersions=dispersions)

    def _forecast(self) -> "SeriesForecaster":
        history = np.array([step.lengths.shares() for step in self.steps])
        requests = float(np.mean([step.lengths.total for step in self.steps]))
        forecasts = {"last_step": history[-1]}
        forecasts |= {_ewma_name(alpha): _ewma(history, alpha) for alpha in ALPHAS}
        ewma = self._best([_ewma_name(alpha) for alpha in ALPHAS]) or _ewma_name(FIRST_ALPHA)
        forecasts["ewma"] = forecasts[ewma]
        components, age, fits = self.components, self.fit_age_steps + 1, self.fits
        told: tuple[LengthComponent, ...] = ()
        refused = ""
        try:
            if components is None or self._refit_pays(components, history, age):
                components, age, fits = fit_components(history, requests), 0, fits + 1
            forecasts["arima"], told = components.forecast(history, forecasts["ewma"])
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
            components=told,
            backtest=tuple(self._error(name) for name in ("arima", "ewma", "last_step") if name in self.errors),
            tags=_decayed(self.steps),
        )
        return replace(self, next=following, forecasts=forecasts, components=components, fit_age_steps=age, fits=fits)

    def _choice(self, refused: str) -> tuple[str, str]:
        """The method that was best of late, and why it is trusted."""
        if len(self.steps) < 2:
            return "last_step", "one step is all there is"
        candidates = ["ewma", "last_step"] + ([] if refused else ["arima"])
        best = self._best(candidates)
        why = "" if best is None else f"least error of late: {self._error(best).error:.3f}"
        if refused:
            why = f"{why}; no arima: {refused}" if why else f"no arima: {refused}"
        return best or "ewma", why or "not scored often enough to tell"

    def _best(self, methods: Sequence[str]) -> str | None:
        """Least error over the steps that it and the first method both forecast; None: too few."""
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
        """A fit ages, the faster when its forecasts are in use; one whose forecasts have gone astray is renewed."""
        in_use = self.next is not None and self.next.method == "arima"
        return age >= (REFIT_STEPS if in_use else 2 * REFIT_STEPS) or components.astray(history, min(age, 4))

    def _worth(self, requests: float) -> tuple[float, float]:
        """What the forecast is worth in requests, from how much further than a sample's its errors were. Sampling alone
        has a dispersion of 1; a forecast that knows as much as w requests has 1 + requests/w."""
        if not self.dispersions:
            return max(MIN_WORTH, requests / 4), 2.0
        spread = max(_weighted(self.dispersions), 1.0)
        worth = requests / max(spread - 1.0, 1.0 / MAX_WORTH_STEPS)
        return max(MIN_WORTH, worth), spread


def extended(survival: NDArray[np.float64], longest: int, exponent: float = 1.0) -> NDArray[np.float64]:
    """Past the `longest` bin that anything was seen in, the curve goes on like a power of the length. With an exponent
    of 1, an output that has come so far is as likely as not to come twice as far."""
    onwards = survival.copy()
    onwards[longest + 1 :] = survival[longest] * (longest / np.arange(longest + 1, len(survival))) ** exponent
    return onwards


def dispersion(forecast: Shares, actual: Shares, requests: float) -> float:
    """Mean squared error by that of sampling `requests` alone, over bands of bins that expect a few each."""
    expected = requests * forecast
    band = (np.cumsum(expected) / BAND_REQUESTS).astype(np.int64)
    band = np.minimum(band, max(int(requests / BAND_REQUESTS) - 1, 0))
    means = np.bincount(band, expected)
    counts = np.bincount(band, requests * actual, minlength=len(means))
    used = means > 0
    squares = (counts[used] - means[used]) ** 2 / means[used]
    unforeseen = counts[~used].sum()  # where the forecast expects nothing at all
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
    """Counts by tag over all steps, the newest in full and each older one at half of the next."""
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
