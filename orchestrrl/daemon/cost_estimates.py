"""What is believed of engines' costs, as plans, people and metrics take it; live_profile.py learns."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from orchestrrl.daemon.priors import AssumedProfile
from orchestrrl.daemon.profile_refit import EngineRefitter, RefittedFigure
from planner.cost.fit import StepSample
from planner.cost.profile import EngineProfile, ProfileSource
from planner.model import Configuration, ConfigurationId, Snapshot
from planner.solver.phases import line_ahead

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
