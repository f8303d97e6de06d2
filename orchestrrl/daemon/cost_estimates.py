"""What is believed of engines' costs, as plans, people and metrics take it. Values only; live_profile.py learns."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from orchestrrl.daemon.priors import AssumedProfile
from planner.cost.profile import EngineProfile, ProfileSource, Provenance
from planner.model import Configuration, ConfigurationId, Snapshot
from planner.solver.phases import line_ahead, worth_evaluating


@dataclass(frozen=True, slots=True)
class ConfigurationEstimate:
    """One configuration, for people and metrics."""

    profile: EngineProfile
    given: EngineProfile  # as it was configured
    refitted: bool  # its step times
    factor: float  # step times against the configured ones, over the loads seen last
    predicted_ratio: float | None  # predicted over measured step time, running; None: nothing was measured
    taken: int  # samples
    refused: int  # of steps that no engine of this configuration can take
    assumed: AssumedProfile | None = None  # None: it is configured

    @property
    def source(self) -> str:
        """configured | prior | observed"""
        if self.assumed is None:
            return "configured"
        return "prior" if self.assumed.prior else "observed"

    @property
    def source_detail(self) -> str:
        """Where step times come from, e.g. `prior: qwen2.5-14b on H100, TP=2; refined by 12 observed batches`."""
        match self.source:
            case "configured":
                detail = f"configured: {self.profile.id}"
            case "prior":
                assert self.assumed is not None
                detail = f"prior: {self.assumed.prior}"
            case _:
                return f"observed: {self.taken} batches"
        return f"{detail}; refined by {self.profile.provenance.samples} observed batches" if self.refitted else detail


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

    def worth(
        self, snapshot: Snapshot, gpus_count: int, always: Collection[ConfigurationId] = ()
    ) -> tuple[ConfigurationId, ...]:
        """Those that a plan should choose from: all of a few, of many those that fit the step's phase."""
        return worth_evaluating(self.profiles, snapshot, gpus_count, always)


def provenance_notes(estimate: ConfigurationEstimate) -> tuple[str, ...]:
    """For a plan's reader: where step times come from, unless they are as somebody wrote them, and what else was
    learnt."""
    steps = (_steps_configured(estimate),) if _worth_saying(estimate) else ()
    began = "configured" if estimate.assumed is None else "assumed"
    return (*steps, *_figures_configured(estimate.profile, estimate.given, began))


def _worth_saying(estimate: ConfigurationEstimate) -> bool:
    return estimate.refitted or estimate.profile.provenance.source is not ProfileSource.GIVEN


def _steps_configured(estimate: ConfigurationEstimate) -> str:
    provenance = estimate.profile.provenance
    error = "" if provenance.fit_error_mean is None else f", error {provenance.fit_error_mean:.1%}"
    if estimate.assumed is not None:
        return f"step times of {estimate.profile.id}: {estimate.source_detail}{error}"
    if not estimate.refitted:
        return f"step times of {estimate.profile.id}: {provenance.source}, {provenance.date}{error}"
    return (
        f"step times of {estimate.profile.id}: {estimate.factor:.2f} times the configured ones, re-fitted to"
        f" {provenance.samples} batches of its engines, {provenance.date}{error}"
    )


def _figures_configured(held: EngineProfile, given: EngineProfile, began: str) -> tuple[str, ...]:
    """What was learnt beside step times. `began`: how the figure from before came to be."""
    others = dict(held.others)
    said = []
    if held.prefill_tokens_per_s != given.prefill_tokens_per_s:
        rates = f"{held.prefill_tokens_per_s:,.0f} tokens/s, {began} {given.prefill_tokens_per_s:,.0f}"
        said.append(f"prefill of {held.id}: {rates}, by {_samples_of(others['prefill_tokens_per_s'])}")
    if held.switch_s != given.switch_s:
        times = f"{held.switch_s:.3g} s, {began} {given.switch_s:.3g} s"
        said.append(f"starting {held.id}: {times}, by {_samples_of(others['switch_s'])}")
    return tuple(said)


def _samples_of(provenance: Provenance) -> str:
    return f"{provenance.samples} samples of {provenance.detail.partition(';')[0]}, {provenance.date}"
