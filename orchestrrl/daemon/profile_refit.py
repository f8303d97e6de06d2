"""Re-fit cost estimates to measurements, and provide the estimate of each configuration to plans, operators and
metrics. Step times and prefill rates are fitted to telemetry, and the costs of moves and engine starts to their
durations.

This module performs no I/O, and its memory is bounded. The newest few samples are kept for each load, so that an hour
at one load does not displace the samples of other loads. The weight of older samples decays. The initial profile keeps
a small weight at every load, and determines the estimate at loads that were never observed.
"""

import logging
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from orchestrrl.daemon.priors import AssumedProfile
from orchestrrl.engines.base import EngineSample
from planner.cost.fit import CurveFit, FitError, StepSample, TimedSample, refit_curve, refit_step
from planner.cost.profile import Curve, EngineProfile, ProfileSource, Provenance, StepTime
from planner.model import Configuration, ConfigurationId

logger = logging.getLogger(__name__)

Sample = TypeVar("Sample")

PER_CELL = 8  # newest samples of one load
MOST_CELLS = 512  # the least recently seen load is dropped
HALF_LIFE = 2000  # number of later samples that halves a sample's weight
# Weight of the initial profile, in samples: the square of the samples' scatter (about 5 %) over the profile's possible
# error (about half).
TRUST = 0.01
LEAST_SAMPLES = 8
# The largest plausible ratio of a measured step to its estimate. Beyond it the measurement is wrong.
PLAUSIBLE = 20.0
# The least share of the time between two scrapes that prefill must take: less is lost in decoding.
PREFILL_SHARE = 0.2
# A batch is steady if its sequences stay within this factor, and prompts are at most this share of its tokens.
STEADY = 1.25
STEADY_PROMPTS = 0.25
# Prefill is separable only if its growth with the context exceeds the samples' scatter by this factor.
GROWS_OVER_SCATTER = 2.0
# Starts are long and rare: use the median of the newest few, once there are at least LEAST_STARTS.
LEAST_STARTS = 3
MOST_STARTS = 16
LOADS_REMEMBERED = 64  # latest loads, at which step times are compared
# A re-fit that changes step times by less than this share, over the latest loads, is not applied.
NOTABLE = 0.03
# The same for prefill rates and starts, which scatter more and weigh less in a plan.
NOTABLE_FIGURE = 0.1
# Step times that differ from the configured ones by this factor cause a warning: they may be another engine's.
SUSPECT = 3.0
# Weight of the latest batch in the running ratio of predicted to measured step times.
WEIGHT = 0.05

Note = Callable[[ConfigurationId, dict[str, Any]], object]


class ObservedPrefill(NamedTuple):
    """An interval between two scrapes in which an engine prefilled prompts while decoding and was never idle."""

    tokens: int  # prefilled
    elapsed_s: float
    decoded_tokens: int
    fewest: int  # the lesser number of sequences at both ends
    most: int
    kv_tokens: float

    def prefill_s(self, step: StepTime) -> float | None:
        """Return the time, in seconds, spent on prefill: the length of the interval less the time of its decode steps,
        which is computed from the step times `step`. Return None if the result is too uncertain or not positive."""
        fewest_s, most_s = (
            self.decoded_tokens / batch * step.at(batch, self.kv_tokens) for batch in (self.fewest, self.most)
        )
        left_s = self.elapsed_s - (fewest_s + most_s) / 2
        vague = abs(fewest_s - most_s) > PREFILL_SHARE * self.elapsed_s
        return None if vague or left_s <= 0 else left_s


class RefittedFigure(NamedTuple):
    """The current estimate of one number of a configuration, e.g. its prefill rate."""

    value: float
    by: str  # the kind of samples: telemetry, moves or starts
    provenance: Provenance


def same_batch(earlier: EngineSample, later: EngineSample) -> bool:
    """Return whether nothing was prefilled, preempted or finished between two scrapes of an engine."""
    return (
        later.running == earlier.running
        and later.waiting >= earlier.waiting
        and later.prompt_tokens_total == earlier.prompt_tokens_total
        and later.preemptions_total == earlier.preemptions_total
        and later.generation_tokens_total >= earlier.generation_tokens_total
        and later.kv_usage_fraction >= earlier.kv_usage_fraction
    )


def steady_batch(earlier: EngineSample, later: EngineSample) -> bool:
    """Return whether the batch hardly changed between two scrapes. This condition is weaker than `same_batch`, which
    rarely holds while requests arrive and end."""
    fewest, most = sorted((earlier.running, later.running))
    decoded = later.generation_tokens_total - earlier.generation_tokens_total
    prompts = later.prompt_tokens_total - earlier.prompt_tokens_total
    return (
        fewest >= 1
        and most <= STEADY * fewest
        and 0 <= prompts <= STEADY_PROMPTS * max(decoded, 0)
        and later.preemptions_total == earlier.preemptions_total
    )


def batch_between(
    earlier: EngineSample, later: EngineSample, unchanged: Callable[[EngineSample, EngineSample], bool] = same_batch
) -> StepSample | None:
    """Return the mean decode step between two scrapes of an engine. Return None if the scrapes do not determine it.

    If `unchanged` is `steady_batch`, the step time is accurate to about 10 %.
    """
    elapsed_s = later.sampled_s - earlier.sampled_s
    made = later.generation_tokens_total - earlier.generation_tokens_total
    sequences = (earlier.running + later.running) / 2
    measurable = sequences >= 1 and elapsed_s > 0 and made >= sequences and later.kv_capacity_tokens >= 1
    if not measurable or not unchanged(earlier, later):
        return None
    usage = (earlier.kv_usage_fraction + later.kv_usage_fraction) / 2
    return StepSample(sequences, usage * later.kv_capacity_tokens, sequences * elapsed_s / made)


def prefilled_between(earlier: EngineSample, later: EngineSample) -> ObservedPrefill | None:
    """Return the number of prompt tokens that an engine prefilled between two scrapes, with the length of the interval.
    Return None if prefill cannot be separated from decoding.

    Intervals with waiting requests are skipped, because engines differ in when they add the tokens of a waiting prompt
    to their total.
    """
    elapsed_s = later.sampled_s - earlier.sampled_s
    tokens = later.prompt_tokens_total - earlier.prompt_tokens_total
    decoded = later.generation_tokens_total - earlier.generation_tokens_total
    fewest, most = sorted((earlier.running, later.running))
    idle_or_queued = fewest < 1 or earlier.waiting or later.waiting
    same_process = decoded >= 0 and later.preemptions_total == earlier.preemptions_total
    if idle_or_queued or not same_process or tokens < 1 or elapsed_s <= 0:
        return None
    usage = (earlier.kv_usage_fraction + later.kv_usage_fraction) / 2
    return ObservedPrefill(tokens, elapsed_s, decoded, fewest, most, usage * later.kv_capacity_tokens)


class ConfigurationEstimate:
    """The cost estimate of one configuration: its initial profile, the current estimate, and the samples from which it
    is computed.

    `date` returns the date of a re-fit in ISO 8601 format. `rebuilt_tokens` maps the length of a context to its
    equivalent length: the number of tokens that are prefilled in the same time in prompts of usual length. If it is
    None, the two lengths are taken as equal. For an assumed configuration without a prior, only the shape of its step
    times is valid until the estimate is `scaled`.
    """

    def __init__(
        self,
        given: EngineProfile,
        date: Callable[[], str],
        rebuilt_tokens: Curve | None = None,
        written: Configuration | None = None,
        assumed: AssumedProfile | None = None,
    ) -> None:
        """`given` is the initial profile. `written` is the configuration as written in the configuration file, without
        rounding, or None if it is not in the file. `assumed` is None unless the configuration is implicit."""
        self.given = self.profile = given  # the initial profile; the present estimate
        self.assumed = assumed
        self.scaled = assumed is None or bool(assumed.prior)
        self.figures: dict[str, RefittedFigure] = {}  # learned figures other than step times, by name
        self.predicted_ratio: float | None = None  # running mean, predicted over measured step time; None: no data
        self.taken = 0  # accepted samples
        self.refused = 0  # samples with implausible steps
        self._fresh = False  # new samples since the latest re-fit
        self._date = date
        self._rebuilt_tokens = rebuilt_tokens
        self._written = written
        self._plausible = PLAUSIBLE if assumed is None else math.inf
        self._loads: deque[StepSample] = deque(maxlen=LOADS_REMEMBERED)
        self._steps: _Window[StepSample] = _Window()
        self._recomputed: _Window[TimedSample] = _Window()
        self._prefilled: _Window[ObservedPrefill] = _Window()
        self._starts_s: deque[float] = deque(maxlen=MOST_STARTS)

    # --- learn

    def observe(self, sequences: float, kv_tokens: float, step_s: float) -> None:
        """Add a decode step of a batch as a sample. A sample with an implausible step time is counted but not used."""
        seen, given_s = StepSample(sequences, kv_tokens, step_s), self.given.step.at(sequences, kv_tokens)
        possible = all(map(math.isfinite, seen)) and sequences >= 1 and kv_tokens >= 0 and step_s > 0
        if not possible or (given_s > 0 and not 1 / self._plausible < step_s / given_s < self._plausible):
            self.refused += 1
            if self.refused == 1:
                logger.warning(
                    "%s: ignoring a step of %.3g s at %g sequences, where its profile has %.3g s (is it an engine of"
                    " this configuration?); further ones are only counted",
                    *(self.given.id, step_s, sequences, given_s),
                )
            return
        self._add(self._steps, seen, sequences, kv_tokens)
        ratio = self.profile.step.at(sequences, kv_tokens) / step_s
        before = ratio if self.predicted_ratio is None else self.predicted_ratio
        self.predicted_ratio = (1 - WEIGHT) * before + WEIGHT * ratio
        self._loads.append(seen)
        self.taken += 1
        if not self.scaled and len(self._loads) >= LEAST_SAMPLES:
            self._scale()

    def observe_recompute(self, context_tokens: Sequence[int], seconds: float) -> None:
        """Add a sample of requests that were moved to one engine at the same time. `seconds` is the time until the last
        of their contexts was computed again."""
        rebuilt = self._rebuilt_tokens
        tokens = sum(map(rebuilt.at, context_tokens) if rebuilt is not None else context_tokens)
        if tokens >= 1 and 0 < seconds < math.inf:
            self._add(self._recomputed, TimedSample(tokens, seconds), tokens)

    def observe_prefill(self, seen: ObservedPrefill) -> None:
        """Add a sample of prefill during decoding, if prefill took a large enough part of the interval to be
        measured."""
        takes_s = seen.tokens / self.given.prefill_tokens_per_s
        if self.scaled and all(map(math.isfinite, seen)) and takes_s >= PREFILL_SHARE * seen.elapsed_s:
            self._add(self._prefilled, seen, seen.tokens)

    def observe_start(self, seconds: float) -> None:
        """Add a sample of the duration of an engine's start."""
        if 0 <= seconds < math.inf:
            self._starts_s.append(seconds)
            self._fresh = True

    def refit(self, note: Note) -> None:
        """Re-fit the estimate to the samples, and apply the changes that are large enough to matter to a plan. `note`
        is called with the configuration's id and a description of each change."""
        if self._fresh and self.scaled:
            self._fresh = False
            self._accept_step(self.fitted(), note)
            self._accept_figure("prefill_tokens_per_s", self._prefill_tokens_per_s(), note)
            self._accept_figure("switch_s", self._switch_s(), note)

    def fitted(self) -> EngineProfile:
        """Return the profile with step times fitted to the samples, or the initial profile while there are too few
        samples."""
        given, window = self.given, self._steps
        if len(window) < LEAST_SAMPLES:
            return given
        found = refit_step(given, list(window), window.weights(), TRUST)
        return replace(given, step=found.step, provenance=measured(self._date(), found.error, given.provenance))

    # --- answer

    @property
    def as_written(self) -> Configuration | None:
        """Return the configuration with the step times written in the configuration file, and with the current
        estimates of its prefill rate and of the duration of an engine's start. Return None if the configuration is not
        in the file, or if its step times have been re-fitted."""
        if self._written is None or self.refitted:
            return None
        learnt = self.profile
        return replace(self._written, prefill_tokens_per_s=learnt.prefill_tokens_per_s, switch_s=learnt.switch_s)

    @property
    def refitted(self) -> bool:
        """Return whether the step times were re-fitted to samples."""
        return self.profile.step is not self.given.step

    @property
    def factor(self) -> float:
        """Return the mean ratio of the estimated to the configured step times at the latest loads."""
        return fmean(self._step_ratios(self.profile, self.given) or [1.0])

    @property
    def source(self) -> str:
        """Return the source of the step times: `configured`, `prior` or `observed`."""
        if self.assumed is None:
            return "configured"
        return "prior" if self.assumed.prior else "observed"

    @property
    def source_detail(self) -> str:
        """Return the source of the step times with details, e.g. `prior: qwen2.5-14b on H100, TP=2; refined by 12
        observed batches`."""
        if self.source == "observed":
            return f"observed: {self.taken} batches"
        detail = f"{self.source}: {self.assumed.prior if self.assumed is not None else self.profile.id}"
        return f"{detail}; refined by {self.profile.provenance.samples} observed batches" if self.refitted else detail

    def notes(self) -> Iterator[str]:
        """Yield notes for readers of a plan: one on the source of the step times, unless they are the configured ones,
        and one on each other number that was estimated from samples."""
        id, provenance = self.profile.id, self.profile.provenance
        error = "" if provenance.fit_error_mean is None else f", error {provenance.fit_error_mean:.1%}"
        if self.assumed is not None and (self.refitted or provenance.source is not ProfileSource.GIVEN):
            yield f"step times of {id}: {self.source_detail}{error}"
        elif self.refitted:
            factor = f"{self.factor:.2f} times the configured ones"
            batches = f"re-fitted to {provenance.samples} batches of its engines, {provenance.date}"
            yield f"step times of {id}: {factor}, {batches}{error}"
        elif provenance.source is not ProfileSource.GIVEN:
            yield f"step times of {id}: {provenance.source}, {provenance.date}{error}"
        began = "configured" if self.assumed is None else "assumed"
        texts = {
            "prefill_tokens_per_s": (f"prefill of {id}", "{:,.0f} tokens/s, {} {:,.0f}"),
            "switch_s": (f"starting {id}", "{:.3g} s, {} {:.3g} s"),
        }
        for name, (what, text) in texts.items():
            if (figure := self.figures.get(name)) is not None:
                values = text.format(figure.value, began, getattr(self.given, name))
                samples = f"{figure.provenance.samples} samples of {figure.by}, {figure.provenance.date}"
                yield f"{what}: {values}, by {samples}"

    # --- inside

    def _add(self, window: "_Window[Sample]", seen: Sample, *load: float) -> None:
        window.add(seen, *load)
        self._fresh = True

    def _scale(self) -> None:
        """Scale the assumed step times to the batches observed so far, and use them from now on. The prefill rate is
        scaled by the same factor."""
        shape = self.given
        factor = median(load.step_s / shape.step.at(load.sequences, load.kv_tokens) for load in self._loads)
        base_s = Curve(shape.step.base_s.xs, tuple(factor * y for y in shape.step.base_s.ys))
        step = StepTime(base_s, factor * shape.step.kv_s_per_token)
        self.given = replace(shape, step=step, prefill_tokens_per_s=shape.prefill_tokens_per_s / factor)
        self.profile, self.scaled, self.predicted_ratio = self.given, True, None
        logger.info("%s: step times learned from %d observed batches", shape.id, len(self._loads))

    def _prefill_tokens_per_s(self) -> RefittedFigure | None:
        """Return the prefill rate fitted to its samples. Return None if there are too few samples or they do not
        determine the rate. Once there are enough samples of moves, only these are used. They are more reliable than
        samples of prompts, which a prefix cache may have served in part."""
        given, moved = self.given, self._recomputed
        if len(moved) >= LEAST_SAMPLES:
            seen, weights, by = list(moved), moved.weights(), "moves"
        else:
            timed_s = [each.prefill_s(self.profile.step) for each in self._prefilled]
            is_clear = np.array([seconds is not None for seconds in timed_s], dtype=bool)
            seen = [TimedSample(e.tokens, s) for e, s in zip(self._prefilled, timed_s, strict=True) if s is not None]
            weights, by = self._prefilled.weights()[is_clear], "telemetry"
        if len(seen) < LEAST_SAMPLES:
            return None
        fitted = refit_curve(Curve.line(0.0, 1 / given.prefill_tokens_per_s), seen, weights, TRUST)
        largest = max(item.size for item in seen)
        grown_s = fitted.curve.at(largest) - fitted.curve.at(0.0)  # without the fixed wait of each
        if grown_s < GROWS_OVER_SCATTER * fitted.error.mean * median(item.seconds for item in seen):
            return None  # the fixed wait scatters more than that
        slope_s = grown_s / largest
        if not 1 / self._plausible < slope_s * given.prefill_tokens_per_s < self._plausible:
            return None
        return self._figure(1 / slope_s, "prefill_tokens_per_s", fitted.error, by)

    def _switch_s(self) -> RefittedFigure | None:
        """Return the duration of an engine's start in seconds, estimated from its samples. Return None while there are
        too few samples."""
        starts_s = self._starts_s
        if len(starts_s) < LEAST_STARTS:
            return None
        value = median(starts_s)
        misses = [abs(value / start_s - 1) for start_s in starts_s if start_s > 0] or [0.0]
        error = FitError(len(starts_s), sum(misses) / len(misses), max(misses))
        return self._figure(value, "switch_s", error, "starts")

    def _figure(self, value: float, name: str, error: FitError, by: str) -> RefittedFigure:
        began = dict(self.given.others).get(name, self.given.provenance)
        return RefittedFigure(value, by, measured(self._date(), error, began, by))

    def _accept_step(self, found: EngineProfile, note: Note) -> None:
        change = fmean([abs(ratio - 1) for ratio in self._step_ratios(found, self.profile)] or [0.0])
        if found.step is self.profile.step or change < NOTABLE:
            return
        self.profile = replace(self.profile, step=found.step, provenance=found.provenance)
        self.predicted_ratio = None  # it belonged to the previous estimate
        factor = self.factor
        body = {
            "figure": "step_s",
            "step_time_factor": factor,
            "changed_by": change,
            **_fit_of(found.provenance),
            "sequences": list(found.step.base_s.xs),
            "seconds": list(found.step.base_s.ys),
            "per_kv_token_s": found.step.kv_s_per_token,
        }
        note(self.given.id, body)
        suspect = self.assumed is None and not 1 / SUSPECT <= factor <= SUSPECT
        why = "; is it an engine of this configuration?" if suspect else ""
        logger.log(
            logging.WARNING if suspect else logging.INFO,
            "%s: step times are %.3g times the profile's, by %d samples%s",
            *(self.given.id, factor, found.provenance.samples, why),
        )

    def _accept_figure(self, name: str, found: RefittedFigure | None, note: Note) -> None:
        before: float = getattr(self.profile, name)
        if found is None or not abs(found.value - before) > NOTABLE_FIGURE * before:
            return
        learnt: dict[str, Any] = {name: found.value}
        self.profile, self.figures[name] = replace(self.profile, **learnt), found
        body = {
            "figure": name,
            "value": found.value,
            "before": before,
            "configured": getattr(self.given, name),
            "by": found.provenance.detail,
            **_fit_of(found.provenance),
        }
        note(self.given.id, body)
        logger.info("%s: %s is %.3g, was %.3g (%s)", self.given.id, name, found.value, before, found.provenance.detail)

    def _step_ratios(self, found: EngineProfile, base: EngineProfile) -> list[float]:
        """Return the ratios of the step times of `found` to the step times of `base`, at the latest loads."""
        times = ((found.step.at(*load[:2]), base.step.at(*load[:2])) for load in self._loads)
        return [found_s / base_s for found_s, base_s in times if base_s > 0]


def _fit_of(provenance: Provenance) -> dict[str, Any]:
    return {name: getattr(provenance, name) for name in ("samples", "fit_error_mean", "fit_error_max")}


class CurveRefitter:
    """Fits a curve to samples, starting from the curve `prior`. The curve maps a size (tokens or bytes) to a time in
    seconds."""

    def __init__(self, prior: Curve) -> None:
        self._prior = prior
        self._window: _Window[TimedSample] = _Window()

    def observe(self, size: float, seconds: float) -> None:
        if size >= 1 and 0 < seconds < math.inf:
            self._window.add(TimedSample(size, seconds), size)

    def fitted(self) -> CurveFit | None:
        """Return the fitted curve. Return None while there are too few samples."""
        if len(self._window) < LEAST_SAMPLES:
            return None
        return refit_curve(self._prior, list(self._window), self._window.weights(), TRUST)


def measured(date: str, error: FitError, prior: Provenance | None, by: str = "telemetry") -> Provenance:
    began = f"{by}; began as {prior.source}, {prior.date}" if prior is not None else by
    return Provenance(ProfileSource.MEASURED, date, began, error.samples, error.mean, error.max)


@dataclass(slots=True)
class _Window(Generic[Sample]):
    """The newest samples of each load, with their order of arrival."""

    _cells: OrderedDict[tuple[int, ...], deque[tuple[Sample, int]]] = field(default_factory=OrderedDict)
    _count: int = 0

    def add(self, seen: Sample, *load: float) -> None:
        """Add a sample. Samples whose loads differ by less than about a fifth share a cell, which keeps the newest
        PER_CELL samples."""
        cell = tuple(round(math.log(max(size, 1.0)) / math.log(1.2)) for size in load)
        self._count += 1
        self._cells.setdefault(cell, deque(maxlen=PER_CELL)).append((seen, self._count))
        self._cells.move_to_end(cell)
        if len(self._cells) > MOST_CELLS:
            self._cells.popitem(last=False)

    def __iter__(self) -> Iterator[Sample]:
        return (seen for cell in self._cells.values() for seen, _ in cell)

    def weights(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Return the weights of the samples in iteration order: 1 for the newest sample, halved every HALF_LIFE
        samples."""
        ages = np.array([self._count - came for cell in self._cells.values() for _, came in cell], dtype=float)
        return np.asarray(0.5 ** (ages / HALF_LIFE))

    def __len__(self) -> int:
        return sum(len(cell) for cell in self._cells.values())
