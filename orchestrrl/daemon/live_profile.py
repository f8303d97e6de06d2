"""Estimate the costs of the fleet's engines. The estimates start from the configured profile, and are fitted again to
measurements while the engines run.

This module performs no I/O: reports and results are passed in, and each tick reads the estimates. A re-fit replaces an
estimate only if the new value differs notably, so that plans do not fluctuate with noise. After a restart, the
estimates start from the configured profile again. Only the durations of engine starts and the fixed part of moves are
recovered from the journal.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from orchestrrl.core.config.schema import FleetSettings, KvTransfer
from orchestrrl.core.operations import OperationItemResult
from orchestrrl.daemon.priors import AssumedProfile
from orchestrrl.daemon.profile_refit import (
    NOTABLE_FIGURE,
    ConfigurationEstimate,
    CurveRefitter,
    Note,
    batch_between,
    measured,
    prefilled_between,
    same_batch,
    steady_batch,
)
from orchestrrl.engines.base import EngineSample
from orchestrrl.fleet.move_orders import MovedRequest, fixed_parts
from orchestrrl.fleet.redeployment.book import EngineStart
from orchestrrl.fleet.reports import EngineReport
from planner.cost.profile import (
    Curve,
    EngineProfile,
    MoveCosts,
    Parallelism,
    ProfileSource,
    Provenance,
    StepTime,
)
from planner.model import Configuration, ConfigurationId, EngineHealth, EngineId, MoveMethod, Snapshot
from planner.move_methods import FIXED_PRIOR_S, FixedMoveCost
from planner.solver.phases import line_ahead
from planner.solver.problem import KvTransferCost

# A batch is watched for at least this many steps, since a scrape falls anywhere within a step, and for at least this
# time, since a scrape takes time and an engine may count in bursts.
LEAST_STEPS = 8
LEAST_S = 0.5
MOVE_FIXED = "move_fixed_s"  # the figure's name in the journal


@dataclass(frozen=True, slots=True)
class _Watched:
    """A watched engine's configuration, and the sample since which the engine's batch has not changed."""

    configuration: ConfigurationId
    since: EngineSample


def given_profile(configuration: Configuration, date: str) -> EngineProfile:
    """Return the initial profile of a configuration that the configuration file defines. `date` is recorded as the date
    of the profile."""
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


@dataclass(frozen=True, slots=True)
class CostEstimates:
    """The current cost estimates of all configurations."""

    profiles: tuple[EngineProfile, ...]
    as_written: Mapping[ConfigurationId, Configuration]  # those with the step times of the configuration file

    @property
    def straight(self) -> bool:
        """Return whether the step time of each configuration is linear in the batch size, so that `lines` does not
        depend on the coming batches."""
        return all(
            profile.id in self.as_written or (len(profile.step.base_s.xs) <= 2 and not profile.spill_capacity_tokens)
            for profile in self.profiles
        )

    def lines(
        self, snapshot: Snapshot, gpus_count: int, remaining_tokens: Sequence[float] = ()
    ) -> tuple[Configuration, ...]:
        """Return each configuration with its step time approximated as a linear function of the batch size. The
        function is fitted to the sizes of the coming batches, which are derived from `remaining_tokens`, the expected
        remaining tokens of each request in flight, and from the number of GPUs."""
        count = max(1, len(snapshot.requests))
        context = sum(request.context_tokens for request in snapshot.requests) / count
        return tuple(
            self.as_written.get(profile.id) or line_ahead(profile, remaining_tokens, context, gpus_count)
            for profile in self.profiles
        )


class LiveProfile:
    """The cost estimates of all configurations. `note` is called with each estimate that changes. `today` returns the
    current date in ISO 8601 format."""

    def __init__(self, fleet: FleetSettings, note: Note, today: Callable[[], str]) -> None:
        self._note = note
        self._today = today
        self._watched: dict[EngineId, _Watched] = {}
        self._known: dict[ConfigurationId, ConfigurationEstimate] = {}
        self._fixed: dict[MoveMethod, FixedMoveCost] = {}
        self._fixed_noted_s: dict[MoveMethod, float] = {}
        for method in MoveMethod:
            self.begin_fixed(method, FIXED_PRIOR_S)
        self._begin(fleet)

    def assume(self, assumed: AssumedProfile) -> None:
        """Add an implicit configuration, unless it already exists. If it has no prior, its estimate is used only after
        LEAST_SAMPLES observed batches."""
        if assumed.profile.id not in self._known:
            self._known[assumed.profile.id] = ConfigurationEstimate(assumed.profile, self._today, assumed=assumed)

    def forget_implicit(self, used: Collection[ConfigurationId]) -> None:
        """Drop all implicit configurations except the configurations in `used`."""
        self._known = {id: known for id, known in self._known.items() if known.assumed is None or id in used}

    def batches_taken(self, configuration: ConfigurationId) -> int:
        known = self._known.get(configuration)
        return 0 if known is None else known.taken

    def configured(self, fleet: FleetSettings) -> None:
        """Apply a reloaded configuration. Learned estimates are kept, unless the configured costs on which they are
        based have changed."""
        if (fleet.configurations, fleet.profile_value()) != self._costs:
            self._begin(fleet)
        elif _rates_of(fleet.kv_transfer) != _rates_of(self._links):
            self._begin_transfers(fleet.kv_transfer)

    # --- learn

    def observe(
        self, report: EngineReport, configuration: ConfigurationId | None, *, crowded_links: bool = False
    ) -> None:
        """Update the measured step and prefill times of `configuration` from a report of one of its engines. A report
        is ignored if `configuration` is None. It is also ignored if `crowded_links` is True, because other traffic may
        slow the engine's steps temporarily."""
        sample, watched = report.sample, self._watched.get(report.engine)
        if configuration is None or configuration not in self._known or sample is None or crowded_links:
            self._watched.pop(report.engine, None)
            return
        if watched is None or watched.configuration != configuration or report.health is not EngineHealth.OK:
            self._watched[report.engine] = _Watched(configuration, sample)
            return
        known, since = self._known[configuration], watched.since
        steps = (sample.generation_tokens_total - since.generation_tokens_total) / max(1, sample.running)
        enough = steps >= LEAST_STEPS and sample.sampled_s - since.sampled_s >= LEAST_S
        # An assumed profile may be far off, so batches that change slightly are used too.
        unchanged = same_batch if known.assumed is None else steady_batch
        if unchanged(since, sample) and not enough:
            return
        batch = batch_between(since, sample, unchanged if enough else same_batch)
        prefilled = prefilled_between(since, sample)
        self._watched[report.engine] = _Watched(configuration, sample)
        if batch is not None:
            known.observe(*batch)
        if prefilled is not None:
            known.observe_prefill(prefilled)

    def moved(
        self, moves: Sequence[MovedRequest], configuration_of: Callable[[EngineId], ConfigurationId | None]
    ) -> None:
        """Update the estimated costs of moves from the finished moves of one operation. The contexts of moves to one
        engine are prefilled together, so the duration of the longest of these moves is the time to prefill all their
        tokens. KV transfers are independent of each other."""
        self._learn_fixed(moves)
        tokens: dict[EngineId, list[int]] = {}
        seconds: dict[EngineId, float] = {}
        for each in moves:
            engine, item = each.move.to_engine, each.item
            if not item.duration_s:
                continue
            if item.method is MoveMethod.TRANSFER:
                self._loaded(configuration_of(engine), item)
            elif item.recomputed_tokens:
                tokens.setdefault(engine, []).append(item.recomputed_tokens)
                seconds[engine] = max(seconds.get(engine, 0.0), item.duration_s)
        for engine, contexts in sorted(tokens.items()):
            if self._recompute is not None:
                self._recompute.observe(sum(contexts), seconds[engine])
            configuration = configuration_of(engine)
            if configuration in self._known:
                self._known[configuration].observe_recompute(contexts, seconds[engine])

    def _learn_fixed(self, moves: Sequence[MovedRequest]) -> None:
        """Update the fixed part of the duration of moves. A stall affects all moves of one operation, so the moves of
        an operation form one sample for each method."""
        found = fixed_parts(moves)
        for method in MoveMethod:
            seconds = [seconds for by, seconds in found if by is method]
            if not seconds:
                continue
            part = self._fixed[method] = self._fixed[method].after(median(seconds))
            before_s = self._fixed_noted_s[method]
            if abs(part.seconds - before_s) > NOTABLE_FIGURE * before_s:
                self._fixed_noted_s[method] = part.seconds
                body = {"figure": MOVE_FIXED, "method": method, "value": part.seconds, "before": before_s}
                self._note(ConfigurationId(""), {**body, "samples": len(part.measured_s)})

    def begin_fixed(self, method: MoveMethod, seconds: float) -> None:
        """Set the fixed part of the duration of moves by `method` to `seconds`, which is used until moves are
        measured."""
        self._fixed[method] = FixedMoveCost(seconds)
        self._fixed_noted_s[method] = seconds

    def _loaded(self, configuration: ConfigurationId | None, item: OperationItemResult) -> None:
        """Update the estimated cost of KV transfers from one transfer. Each GPU of an engine holds a part of the KV
        cache, and all parts are sent in parallel, so the measured duration is the time to send one part."""
        if configuration in self._known and self._transfers is not None:
            tokens = max(1, round(item.loaded_tokens / self._known[configuration].profile.parallelism.gpus))
            self._transfers.observe(tokens * self._priced.kv_bytes_per_token, item.duration_s)

    def started(self, starts: Iterable[EngineStart]) -> None:
        """Update the measured start times of configurations from the engine starts of redeployments. A start whose
        expected duration differs from the configured `switch_s` is skipped, because the configuration was changed after
        this start and the conditions may have changed too."""
        for start in starts:
            known = self._known.get(start.configuration)
            if known is not None and start.expected_s == known.given.switch_s:
                known.observe_start(start.elapsed_s)

    def refit(self, engines: Iterable[EngineId]) -> None:
        """Re-fit all estimates and apply notable changes. Watched engines that are not in `engines` are dropped."""
        there = set(engines)
        self._watched = {engine: watched for engine, watched in self._watched.items() if engine in there}
        for known in self._known.values():
            known.refit(self._note)

    # --- answer

    def cost_estimates(self) -> CostEstimates:
        """Return the current estimates as an immutable value, which another thread can use while reports arrive."""
        estimates = self.estimates()
        written = {known.given.id: known.as_written for known in estimates}
        return CostEstimates(
            tuple(known.profile for known in estimates), {id: line for id, line in written.items() if line is not None}
        )

    def estimates(self) -> tuple[ConfigurationEstimate, ...]:
        return tuple(known for known in self._known.values() if known.scaled)

    def moves(self) -> MoveCosts | None:
        """Return the estimated costs of moves, or None if the configured profile contains no costs of moves."""
        fitted = None if self._recompute is None else self._recompute.fitted()
        if self._moves is None or fitted is None:
            return self._moves
        provenance = measured(self._today(), fitted.error, self._moves.provenance)
        return replace(self._moves, recompute_s=fitted.curve, provenance=provenance)

    def moving(self, nic_share: float = 1.0) -> KvTransferCost:
        """Return the costs of moves for a plan. KV transfer is possible only if it is configured. A transfer between
        nodes gets the share `nic_share` of the NICs' bandwidth."""
        moves, links = self.moves(), self._links
        rebuilt_tokens = moves.rebuilt_tokens() if moves is not None else None
        recompute_s = self.recompute_fixed_s
        if links is None:
            return KvTransferCost(0.0, 0.0, 0.0, rebuilt_tokens, recompute_fixed_s=recompute_s)
        across_gbps = links.inter_node_gbps_per_gpu or (moves.transfer_gbps if moves is not None else 0.0)
        transfer_s = self._fixed[MoveMethod.TRANSFER].seconds
        inside_gbps = links.intra_node_gbps_per_gpu or across_gbps
        kv_bytes = links.kv_bytes_per_token or (moves.kv_bytes_per_token if moves is not None else 0.0)
        fitted = None if self._transfers is None else self._transfers.fitted()
        if fitted is not None:  # KV transfers were measured, inside or between nodes
            learnt = replace(self._priced, transfer_s=fitted.curve)
            transfer_s, across_gbps = max(0.0, learnt.transfer_s.at(0.0)), learnt.transfer_gbps or across_gbps
            inside_gbps = learnt.transfer_gbps or inside_gbps
        return KvTransferCost(
            across_gbps * nic_share,
            inside_gbps,
            0.0,
            rebuilt_tokens,
            kv_bytes_per_token=kv_bytes,
            transfer_fixed_s=transfer_s,
            recompute_fixed_s=recompute_s,
        )

    @property
    def recompute_fixed_s(self) -> float:
        """Return the time, in seconds, for which a moved running request produces no tokens, not including the prefill
        of its context."""
        return self._fixed[MoveMethod.RECOMPUTE].seconds

    def notes(self) -> tuple[str, ...]:
        """Return notes on the estimates for readers of a plan."""
        fixed = (
            f"moving a running request by {method}: {part.seconds:.3g} s plus its context, by the latest"
            f" {len(part.measured_s)} orders to move"
            for method, part in self._fixed.items()
            if part.measured_s
        )
        return (*(note for estimate in self.estimates() for note in estimate.notes()), *fixed)

    # --- inside

    def _begin(self, fleet: FleetSettings) -> None:
        self._costs = fleet.configurations, fleet.profile_value()
        profile, lines = fleet.profile_value(), {settings.id: settings.value() for settings in fleet.configurations}
        moves = self._moves = profile.moves if profile is not None else None
        rebuilt_tokens = moves.rebuilt_tokens() if moves is not None else None
        self._recompute = CurveRefitter(moves.recompute_s) if moves is not None else None
        self._begin_transfers(fleet.kv_transfer)
        given = [given_profile(line, self._today()) for line in lines.values()]
        configured = {
            engine.id: ConfigurationEstimate(engine, self._today, rebuilt_tokens, lines.get(engine.id))
            for engine in (*given, *(profile.configurations if profile is not None else ()))
        }
        # Implicit configurations do not depend on the configuration file.
        implicit = {id: known for id, known in self._known.items() if known.assumed is not None}
        self._known = {**configured, **implicit, **configured}  # configured ones come first and take precedence

    def _begin_transfers(self, links: KvTransfer | None) -> None:
        """Reset the estimates of KV transfer to the configured values, which are used until transfers are measured."""
        self._links = links
        self._transfers: CurveRefitter | None = None
        if links is not None:
            moves, latency_s = self.moves(), links.latency_s
            if latency_s is None:
                latency_s = moves.transfer_s.at(0.0) if moves is not None else 0.0
            self.begin_fixed(MoveMethod.TRANSFER, latency_s + FIXED_PRIOR_S)
            told = self.moving()
            gbps = told.inter_node_gbps_per_gpu
            transfer_s = Curve.line(told.transfer_fixed_s, 8 / (gbps * 1e9) if gbps > 0 else 0.0)
            self._priced = MoveCosts(told.kv_bytes_per_token, transfer_s, Curve.line(0.0, 0.0))
            self._transfers = CurveRefitter(transfer_s)


def _rates_of(links: KvTransfer | None) -> object:
    return None if links is None else links.model_copy(update={"weights": ""})
