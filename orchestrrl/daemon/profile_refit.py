"""Follow what engines really take: step times and prefill from telemetry, what moves and starts take from their ends;
and what is believed of each configuration, as plans, people and metrics take it.

No input or output; bounded in memory. Samples are kept by the load at which they
were seen, the newest few of each, so that an hour at one load does not wash out what is known of the others; older ones
fade. The profile that it began with pulls a little everywhere, and stays what it was wherever nothing has been seen.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from orchestrrl.daemon.priors import AssumedProfile
from orchestrrl.engines.base import EngineSample
from planner.cost.fit import CurveFit, FitError, StepSample, StepTimePrior, TimedSample, refit_curve, refit_step
from planner.cost.profile import Curve, EngineProfile, Parallelism, ProfileSource, Provenance, StepTime
from planner.model import Configuration, ConfigurationId, Snapshot
from planner.solver.phases import line_ahead

Sample = TypeVar("Sample")

PER_CELL = 8  # newest samples of one load
MOST_CELLS = 512  # the load that has not been seen for longest is forgotten
HALF_LIFE = 2000  # samples after which one counts half
# Weight of the beginning's profile, in samples: the square of how far samples scatter (5 %, say) over how far that
# profile may be off (by half).
TRUST = 0.01
LEAST_SAMPLES = 8
# What a step can be, against what is believed. Beyond is a fault of measuring, not of the profile.
PLAUSIBLE = 20.0
# Of the time between two scrapes, what prefill must have taken by the profile's rate: less drowns in decoding.
PREFILL_SHARE = 0.2
# A batch is steady while its sequences stay within this factor, and prompts are at most this share of its tokens.
STEADY = 1.25
STEADY_PROMPTS = 0.25
# Prefill is told from other time only where it grows with the context by this many times what samples scatter.
GROWS_OVER_SCATTER = 2.0
# Starts take long and come seldom: the median of the newest few, once there are some.
LEAST_STARTS = 3
MOST_STARTS = 16


class ObservedPrefill(NamedTuple):
    """What an engine did between two scrapes in which it prefilled beside decoding, and never stood idle."""

    tokens: int  # prefilled
    elapsed_s: float
    decoded_tokens: int
    fewest: int  # sequences, at either end
    most: int
    kv_tokens: float

    def prefill_s(self, step: StepTime) -> float | None:
        """What decoding does not account for; None where that is too vague, or nothing."""
        fewest_s, most_s = (
            self.decoded_tokens / batch * step.at(batch, self.kv_tokens) for batch in (self.fewest, self.most)
        )
        left_s = self.elapsed_s - (fewest_s + most_s) / 2
        vague = abs(fewest_s - most_s) > PREFILL_SHARE * self.elapsed_s
        return None if vague or left_s <= 0 else left_s


class RefittedFigure(NamedTuple):
    """A figure of a configuration, as it is now believed to be."""

    value: float
    by: str  # the kind of samples: telemetry, moves or starts
    provenance: Provenance


def same_batch(earlier: EngineSample, later: EngineSample) -> bool:
    """Whether nothing was prefilled, preempted or finished between two scrapes of an engine."""
    return (
        later.running == earlier.running
        and later.waiting >= earlier.waiting
        and later.prompt_tokens_total == earlier.prompt_tokens_total
        and later.preemptions_total == earlier.preemptions_total
        and later.generation_tokens_total >= earlier.generation_tokens_total
        and later.kv_usage_fraction >= earlier.kv_usage_fraction
    )


def steady_batch(earlier: EngineSample, later: EngineSample) -> bool:
    """Whether the batch hardly changed between two scrapes. Weaker than `same_batch`, since no batch stays the same for
    long while requests come and go."""
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
    """Return the mean decode step between two scrapes of an engine; None where they do not determine it.

    Of a `steady_batch` it is right to about a tenth.
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
    """What was prefilled between two scrapes of an engine; None where its time cannot be told from other time.

    While requests wait, engines differ in when they count a prompt.
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


def given_profile(configuration: Configuration, date: str) -> EngineProfile:
    """Return a configuration that somebody wrote out, as a profile to begin with."""
    alpha_s, most = configuration.alpha_s, configuration.max_sequences
    base_s = Curve((0.0, float(most)), (alpha_s, alpha_s + configuration.beta_s * most))
    return EngineProfile(
        id=configuration.id,
        parallelism=Parallelism(tp=configuration.gpus),
        step=StepTime(base_s, configuration.gamma_s),
        prefill_tokens_per_s=configuration.prefill_tokens_per_s,
        kv_capacity_tokens=configuration.kv_capacity_tokens,
        max_sequences=most,
        switch_s=configuration.switch_s,
        provenance=Provenance(ProfileSource.GIVEN, date, "configuration"),
    )


class EngineRefitter:
    """Believes the profile `prior` of one configuration until samples say otherwise. `date` gives the day of a re-fit,
    ISO 8601; `rebuilt_tokens` the tokens of usual prompts that take as long to prefill as a context."""

    def __init__(
        self,
        prior: EngineProfile,
        date: Callable[[], str],
        rebuilt_tokens: Curve | None = None,
        plausible: float = PLAUSIBLE,
    ) -> None:
        """`plausible`: samples that differ from the profile by a larger factor are refused; inf for a guess."""
        self.fresh = False  # samples have come since this was last set to False
        self._prior = prior
        self._date = date
        self._rebuilt_tokens = rebuilt_tokens
        self._plausible = plausible
        self._steps: _Window[StepSample] = _Window()
        self._recomputed: _Window[TimedSample] = _Window()
        self._prefilled: _Window[ObservedPrefill] = _Window()
        self._starts_s: deque[float] = deque(maxlen=MOST_STARTS)

    def observe(self, sequences: float, kv_tokens: float, step_s: float) -> bool:
        """Take a sample in. False: it is an impossible step."""
        seen = StepSample(sequences, kv_tokens, step_s)
        if not all(map(math.isfinite, seen)) or sequences < 1 or kv_tokens < 0 or step_s <= 0:
            return False
        believed_s = self._prior.step.at(sequences, kv_tokens)
        if believed_s > 0 and not 1 / self._plausible < step_s / believed_s < self._plausible:
            return False
        self._add(self._steps, seen, sequences, kv_tokens)
        return True

    def observe_recompute(self, context_tokens: Sequence[int], seconds: float) -> None:
        """Take in requests that moved to an engine at once, and what it took until the last had its context again."""
        rebuilt = self._rebuilt_tokens
        tokens = sum(map(rebuilt.at, context_tokens) if rebuilt is not None else context_tokens)
        if tokens >= 1 and 0 < seconds < math.inf:
            self._add(self._recomputed, TimedSample(tokens, seconds), tokens)

    def observe_prefill(self, seen: ObservedPrefill) -> None:
        """Take in prefill beside decoding, where it is enough to be seen."""
        if all(map(math.isfinite, seen)) and (
            seen.tokens / self._prior.prefill_tokens_per_s >= PREFILL_SHARE * seen.elapsed_s
        ):
            self._add(self._prefilled, seen, seen.tokens)

    def observe_start(self, seconds: float) -> None:
        """Take in an engine that was started."""
        if 0 <= seconds < math.inf:
            self._starts_s.append(seconds)
            self.fresh = True

    def profile(self) -> EngineProfile:
        """The configuration as it is now believed to be; the one of the beginning while samples are few."""
        prior, window = self._prior, self._steps
        if len(window) < LEAST_SAMPLES:
            return prior
        estimate = StepTimePrior(prior.step, prior.max_sequences, prior.kv_capacity_tokens)
        fitted = refit_step(estimate, list(window), window.weights(), TRUST)
        return replace(prior, step=fitted.step, provenance=measured(self._date(), fitted.error, prior.provenance))

    def prefill_tokens_per_s(self, step: StepTime) -> RefittedFigure | None:
        """The prefill rate as it is now believed to be, where decode steps take `step`; None while little was seen.

        Moves say more than prompts do, part of which a prefix cache may have had: once there are enough, they alone
        count.
        """
        prior, moved = self._prior, self._recomputed
        if len(moved) >= LEAST_SAMPLES:
            seen, weights, by = list(moved), moved.weights(), "moves"
        else:
            timed_s = [each.prefill_s(step) for each in self._prefilled]
            is_clear = np.array([seconds is not None for seconds in timed_s], dtype=bool)
            seen = [TimedSample(e.tokens, s) for e, s in zip(self._prefilled, timed_s, strict=True) if s is not None]
            weights, by = self._prefilled.weights()[is_clear], "telemetry"
        if len(seen) < LEAST_SAMPLES:
            return None
        fitted = refit_curve(Curve.line(0.0, 1 / prior.prefill_tokens_per_s), seen, weights, TRUST)
        largest = max(item.size for item in seen)
        grown_s = fitted.curve.at(largest) - fitted.curve.at(0.0)  # beside what each of them waits
        if grown_s < GROWS_OVER_SCATTER * fitted.error.mean * median(item.seconds for item in seen):
            return None  # what each waits scatters more than that
        slope_s = grown_s / largest
        if not 1 / self._plausible < slope_s * prior.prefill_tokens_per_s < self._plausible:
            return None
        return self._figure(1 / slope_s, "prefill_tokens_per_s", fitted.error, by)

    def switch_s(self) -> RefittedFigure | None:
        """What starting an engine is now believed to take; None while few were started."""
        starts_s = self._starts_s
        if len(starts_s) < LEAST_STARTS:
            return None
        value = median(starts_s)
        misses = [abs(value / start_s - 1) for start_s in starts_s if start_s > 0] or [0.0]
        error = FitError(len(starts_s), sum(misses) / len(misses), max(misses))
        return self._figure(value, "switch_s", error, "starts")

    def _add(self, window: "_Window[Sample]", seen: Sample, *load: float) -> None:
        window.add(seen, *load)
        self.fresh = True

    def _figure(self, value: float, name: str, error: FitError, by: str) -> RefittedFigure:
        began = dict(self._prior.others).get(name, self._prior.provenance)
        return RefittedFigure(value, by, measured(self._date(), error, began, by))


class CurveRefitter:
    """Believes `prior`, seconds over sizes, until samples say otherwise."""

    def __init__(self, prior: Curve) -> None:
        self._prior = prior
        self._window: _Window[TimedSample] = _Window()

    def observe(self, size: float, seconds: float) -> None:
        if size >= 1 and 0 < seconds < math.inf:
            self._window.add(TimedSample(size, seconds), size)

    def fitted(self) -> CurveFit | None:
        """The curve as it is now believed to be; None while samples are few."""
        if len(self._window) < LEAST_SAMPLES:
            return None
        return refit_curve(self._prior, list(self._window), self._window.weights(), TRUST)


def measured(date: str, error: FitError, prior: Provenance | None, by: str = "telemetry") -> Provenance:
    began = f"{by}; began as {prior.source}, {prior.date}" if prior is not None else by
    return Provenance(ProfileSource.MEASURED, date, began, error.samples, error.mean, error.max)


@dataclass(slots=True)
class _Window(Generic[Sample]):
    """The newest samples of each load, with when they came, counted in samples."""

    _cells: OrderedDict[tuple[int, ...], deque[tuple[Sample, int]]] = field(default_factory=OrderedDict)
    _count: int = 0

    def add(self, seen: Sample, *load: float) -> None:
        """Loads within about a fifth of each other share a cell."""
        cell = tuple(round(math.log(max(size, 1.0)) / math.log(1.2)) for size in load)
        self._count += 1
        self._cells.setdefault(cell, deque(maxlen=PER_CELL)).append((seen, self._count))
        self._cells.move_to_end(cell)
        if len(self._cells) > MOST_CELLS:
            self._cells.popitem(last=False)

    def __iter__(self) -> Iterator[Sample]:
        return (seen for cell in self._cells.values() for seen, _ in cell)

    def weights(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """[sample], in their order: 1 for the newest, halved every HALF_LIFE."""
        ages = np.array([self._count - came for cell in self._cells.values() for _, came in cell], dtype=float)
        return np.asarray(0.5 ** (ages / HALF_LIFE))

    def __len__(self) -> int:
        return sum(len(cell) for cell in self._cells.values())


LOADS_REMEMBERED = 64  # loads seen last, over which step times are compared


@dataclass(slots=True, eq=False)
class ConfigurationEstimate:
    """One configuration: what it began with, what is believed of it now, and the samples behind that."""

    given: EngineProfile  # as it was configured or assumed
    profile: EngineProfile
    refitter: EngineRefitter
    written: Configuration | None = None  # as the configuration file has it, to the last digit
    assumed: AssumedProfile | None = None  # None: it is configured
    scaled: bool = True  # False: only the shape of its step times means anything yet
    loads: deque[StepSample] = field(default_factory=lambda: deque(maxlen=LOADS_REMEMBERED))
    figures: dict[str, RefittedFigure] = field(default_factory=dict)  # learnt beside step times, by name
    predicted_ratio: float | None = None  # predicted over measured step time, running; None: nothing was measured
    taken: int = 0  # samples
    refused: int = 0  # of steps that no engine of this configuration can take

    @property
    def as_written(self) -> Configuration | None:
        """None once other step times were learnt, or where nobody wrote it out."""
        if self.written is None or self.refitted:
            return None
        learnt = self.profile
        return replace(self.written, prefill_tokens_per_s=learnt.prefill_tokens_per_s, switch_s=learnt.switch_s)

    @property
    def refitted(self) -> bool:
        """Whether its step times were learnt."""
        return self.profile.step is not self.given.step

    def step_ratios(self, found: EngineProfile, base: EngineProfile) -> list[float]:
        """Step times of one profile over those of another, at the loads seen last."""
        times = ((found.step.at(*load[:2]), base.step.at(*load[:2])) for load in self.loads)
        return [found_s / base_s for found_s, base_s in times if base_s > 0]

    @property
    def factor(self) -> float:
        """Step times against the configured ones, over the loads seen last."""
        return fmean(self.step_ratios(self.profile, self.given) or [1.0])

    @property
    def source(self) -> str:
        """configured | prior | observed"""
        if self.assumed is None:
            return "configured"
        return "prior" if self.assumed.prior else "observed"

    @property
    def source_detail(self) -> str:
        """Where step times come from, e.g. `prior: qwen2.5-14b on H100, TP=2; refined by 12 observed batches`."""
        if self.source == "observed":
            return f"observed: {self.taken} batches"
        detail = f"{self.source}: {self.assumed.prior if self.assumed is not None else self.profile.id}"
        return f"{detail}; refined by {self.profile.provenance.samples} observed batches" if self.refitted else detail

    def notes(self) -> Iterator[str]:
        """For a plan's reader: where step times come from, unless they are as somebody wrote them, and what else was
        learnt."""
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


@dataclass(frozen=True, slots=True)
class CostEstimates:
    """Every configuration, with what is believed of it."""

    profiles: tuple[EngineProfile, ...]
    as_written: Mapping[
        ConfigurationId, Configuration
    ]  # where step times are as somebody wrote them: to the last digit

    @property
    def straight(self) -> bool:
        """Whether each step time is a line anyway, whatever batches are to come."""
        return all(
            profile.id in self.as_written or (len(profile.step.base_s.xs) <= 2 and not profile.spill_capacity_tokens)
            for profile in self.profiles
        )

    def lines(
        self, snapshot: Snapshot, gpus_count: int, remaining_tokens: Sequence[float] = ()
    ) -> tuple[Configuration, ...]:
        """Each step time as a line over the batches to come. `remaining_tokens`: of the requests in flight, by which
        curves that bend go."""
        count = max(1, len(snapshot.requests))
        context = sum(request.context_tokens for request in snapshot.requests) / count
        return tuple(
            self.as_written.get(profile.id) or line_ahead(profile, remaining_tokens, context, gpus_count)
            for profile in self.profiles
        )
