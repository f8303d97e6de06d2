"""Collect the estimates that both loops use (costs of engines and moves, output lengths, and the use of links by other
traffic), and build the planning problem of the slow loop from them.

Telemetry arrives on the event loop. A planning problem is self-contained once it is built, so it can be solved in a
thread.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from balancer.kv_headroom import LengthDistributions
from orchestrrl.core.config.schema import Config, FleetSettings
from orchestrrl.core.journal.store import EntryKind, Journal
from orchestrrl.daemon.live_profile import MOVE_FIXED, LiveProfile
from orchestrrl.daemon.priors import AssumedProfile, assumed_of
from orchestrrl.daemon.profile_refit import LEAST_SAMPLES, ConfigurationEstimate, Note
from orchestrrl.engines.base import EngineCapabilities
from orchestrrl.fleet.redeployment.book import EngineStart
from orchestrrl.fleet.reports import EngineReport
from planner.admission import OperatorControl
from planner.cost.profile import EngineProfile
from planner.model import (
    Configuration,
    ConfigurationId,
    EngineId,
    EngineView,
    FastPolicy,
    FinishedLength,
    Knowledge,
    Mode,
    MoveMethod,
    Plan,
    PlanId,
    RequestId,
    Snapshot,
    StepTimeEstimates,
    unknown_step_times,
)
from planner.move_methods import MovePricing
from planner.plan import History, PlannerConfig, make_plan, remaining_of
from planner.solver.phases import worth_evaluating
from planner.sync_tree.network import LeftForMoves
from planner.workload.remaining_tokens import KnownLengths, RemainingTokensEstimator
from planner.workload.series import STEPS_REMEMBERED, LengthCounts, SeriesForecaster, StepForecast, StepStatistics

logger = logging.getLogger(__name__)

STARTS_REMEMBERED = 256
REFITS_REMEMBERED = 256
# The share of the remaining time that a plan's moves must save if the fast loop does not pack.
REBALANCE_SHARE = 0.05
NICS_ALL_BUT_FREE = 0.995
# A move that could fill a node's NICs gets a smaller share than this only if others need more than exists.
NICS_CROWDED = 0.5
LIKE_OTHERS = ", of engines with the same model"


class Planning:
    """The estimates on which the decisions of both loops are based. `note` and `today` have the same meaning as in
    LiveProfile. `unstartable` returns the configurations of which no engine can be started, with the reasons.
    `known_output_tokens` are the true output lengths in a simulation, for plans with perfect knowledge."""

    def __init__(
        self,
        config: Config,
        note: Note,
        today: Callable[[], str],
        *,
        unstartable: Callable[[FleetSettings], Mapping[ConfigurationId, str]] = lambda _: {},
        known_output_tokens: Mapping[RequestId, int] | None = None,
    ) -> None:
        self.costs = LiveProfile(config.fleet, note, today)
        self.lengths = StepLengths(config.slow.bin_tokens, config.slow.max_output_tokens)
        self.lines = config.fleet.configuration_values()  # all configurations, as of the latest plan
        self.known_output_tokens = known_output_tokens
        self._nics = LeftForMoves()
        self._unstartable = unstartable
        self._not_startable = unstartable(config.fleet)
        self._config = config
        self._assumed: dict[
            EngineId, tuple[EngineCapabilities, AssumedProfile]
        ] = {}  # with the capabilities that it was derived from
        self._remaining = RemainingTokensEstimator()
        self._expected: StepForecast | None = None  # the slow loop's latest forecast of this step

    # --- learn

    def recover(self, journal: Journal) -> None:
        """Recover measurements of earlier daemons from the journal: the output lengths of steps, the durations of
        engine starts, and the fixed part of the duration of moves."""
        self.lengths.recover(journal)
        # Engine starts are rare, so their durations are recovered instead of learned again.
        for entry in journal.tail(STARTS_REMEMBERED, (EntryKind.ENGINE_STARTED,)):
            starts = journal.interpret(entry, _starts)
            if starts is not None:
                self.costs.started(starts)
        for entry in journal.tail(REFITS_REMEMBERED, (EntryKind.PROFILE_REFITTED,)):
            fixed = journal.interpret(entry, _move_fixed)
            if fixed is not None:
                self.costs.begin_fixed(*fixed)

    def reconfigure(self, config: Config, snapshot: Snapshot, journal: Journal) -> None:
        """Apply a reloaded configuration, and recompute the configurations for the fast loop from `snapshot`. If the
        bins of output lengths have changed, read the lengths of earlier steps from the journal again."""
        before, self._config = self._config.slow, config
        self._not_startable = self._unstartable(config.fleet)
        if (before.bin_tokens, before.max_output_tokens) != (config.slow.bin_tokens, config.slow.max_output_tokens):
            self.lengths = StepLengths(config.slow.bin_tokens, config.slow.max_output_tokens)
            self.lengths.recover(journal)
        self.costs.configured(config.fleet)
        cost_estimates = self.costs.cost_estimates()
        self.lines = cost_estimates.lines(snapshot, gpus_count(config, snapshot, cost_estimates.profiles))

    def share_nics(self, left: LeftForMoves) -> None:
        """Set the NIC share that other traffic leaves for KV transfers. All later costs of KV transfers are computed
        from this share."""
        self._nics = left

    def observe(self, report: EngineReport, configuration: ConfigurationId | None) -> None:
        """Update the measured step times of `configuration` from an agent's report. A report is ignored if
        `configuration` is None. While the NICs are congested, all reports are ignored, because other traffic may slow
        the engines' steps."""
        self.costs.observe(report, configuration, crowded_links=self._nics.share < NICS_CROWDED)

    def offered(self, engine: EngineId, capabilities: EngineCapabilities | None) -> None:
        """Derive an implicit configuration from the capabilities of an engine that has no configured one. The call has
        no effect if `capabilities` is None or unchanged."""
        before = self._assumed.get(engine)
        if capabilities is not None and (before is None or before[0] != capabilities):
            assumed = assumed_of(engine, capabilities)
            self._assumed[engine] = capabilities, assumed
            self.costs.assume(assumed)
            logger.info("%s: %s", engine, assumed.unknown or f"step times of {assumed.prior} are assumed")

    # --- implicit configurations

    def implicit_configuration(self, engine: EngineId) -> ConfigurationId | None:
        """Return the engine's implicit configuration, even if its step times are not known yet. Return None if the
        engine has none."""
        held = self._assumed.get(engine)
        return None if held is None else held[1].profile.id

    def identified(self, snapshot: Snapshot) -> Snapshot:
        """Return a copy of the snapshot in which each engine without a configuration has its implicit configuration, if
        the step times are known. If they are unknown, the engine gets the implicit configuration of another engine with
        the same model, if there is one."""
        cost_estimates = {profile.id for profile in self.costs.cost_estimates().profiles}
        stand_ins = self._stand_ins(cost_estimates)

        def identified(engine: EngineView) -> EngineView:
            own = self.implicit_configuration(engine.id)
            if engine.configuration is not None or own is None:
                return engine
            model = self._assumed[engine.id][0].serving.model
            return replace(engine, configuration=own if own in cost_estimates else stand_ins.get(model))

        return replace(snapshot, engines=tuple(map(identified, snapshot.engines)))

    def _stand_ins(self, cost_estimates: Collection[ConfigurationId]) -> dict[str, ConfigurationId]:
        """Return, for each model, the implicit configuration among `cost_estimates` with the most observed batches. It
        is used for an engine that has been idle, which is assumed to be as fast as the other engines that serve the
        same model."""
        best: dict[str, tuple[int, ConfigurationId]] = {}
        for capabilities, assumed in self._assumed.values():
            model, name = capabilities.serving.model, assumed.profile.id
            if model and name in cost_estimates:
                best[model] = max(best.get(model, (-1, name)), (self.costs.batches_taken(name), name))
        return {model: name for model, (_, name) in best.items()}

    def step_times(self, snapshot: Snapshot) -> Mapping[EngineId, StepTimeEstimates]:
        """Return the source of each engine's step times, or the reason why they are unknown."""
        estimates = {estimate.profile.id: estimate for estimate in self.costs.estimates()}
        identified = self.identified(snapshot)
        return {engine.id: self._step_times(engine, estimates) for engine in identified.engines}

    def _step_times(
        self, engine: EngineView, estimates: Mapping[ConfigurationId, ConfigurationEstimate]
    ) -> StepTimeEstimates:
        """Return the source of an engine's step times, or the reason why they are unknown. `engine` must be from a
        snapshot that `identified` returned."""
        own = self.implicit_configuration(engine.id)
        estimate = estimates.get(engine.configuration) if engine.configuration is not None else None
        if estimate is not None:
            like = "" if estimate.assumed is None or own == estimate.profile.id else LIKE_OTHERS
            return StepTimeEstimates(estimate.source, f"{estimate.source_detail}{like}")
        if engine.configuration is not None:
            return StepTimeEstimates("", f"{engine.configuration} is not in fleet.configurations")
        if own is None:
            return StepTimeEstimates("", "no agent has reported what the engine serves")
        taken = self.costs.batches_taken(own)
        learnt = f"will be learned from {LEAST_SAMPLES} observed batches, {taken} so far"
        return StepTimeEstimates("", f"{self._assumed[engine.id][1].unknown}; {learnt}")

    def configurations(self) -> tuple[Configuration, ...]:
        """Return the configurations for the fast loop: the configurations of the latest plan, and implicit
        configurations added since that plan."""
        planned = {line.id for line in self.lines}
        since = (profile for profile in self.costs.cost_estimates().profiles if profile.id not in planned)
        return (*self.lines, *(profile.configuration() for profile in since))

    # --- answer

    def remaining_tokens(self, snapshot: Snapshot) -> Mapping[RequestId, float]:
        """Return the expected number of remaining tokens of each request in flight, for the fast loop."""
        if self._config.fast.policy is FastPolicy.NONE:
            return {}
        slow, known = self._config.slow, self.known_output_tokens
        if known is not None and slow.knowledge is Knowledge.ORACLE:
            return {
                request.id: max(1.0, known[request.id] - request.generated_tokens)
                for request in snapshot.requests
                if request.id in known
            }
        return self._remaining.remaining_tokens(snapshot, slow.bin_tokens, slow.max_output_tokens, self._expected)

    def distributions(self, snapshot: Snapshot) -> LengthDistributions | None:
        """Return the length distributions of the requests in flight, as of the latest call of `remaining_tokens`.
        Return None if they are unknown."""
        known = self.known_output_tokens
        if self._config.fast.policy is FastPolicy.NONE:
            return None
        if known is not None and self._config.slow.knowledge is Knowledge.ORACLE:
            return KnownLengths(known) if all(request.id in known for request in snapshot.requests) else None
        return self._remaining.distributions

    def question(
        self,
        plan_id: PlanId,
        snapshot: Snapshot,
        history: History,
        *,
        mode: Mode,
        control: OperatorControl,
        can_deploy: bool,
    ) -> Callable[[], Plan]:
        """Build the planning problem from the present state. Return a function that solves the problem and returns the
        plan, with notes on its inputs."""
        there = {engine.id for engine in snapshot.engines}
        unconfigured = {engine.id for engine in snapshot.engines if engine.configuration is None}
        self._assumed = {engine: held for engine, held in self._assumed.items() if engine in unconfigured}
        self.costs.forget_implicit({held[1].profile.id for held in self._assumed.values()})
        self.costs.refit(there)
        overriding = () if control.configuration is None else (control.configuration,)
        configured = {configuration.id for configuration in self._config.fleet.configuration_values()}
        if not configured:
            snapshot = self.identified(snapshot)
        costs = self.costs.cost_estimates()
        gpus = gpus_count(self._config, snapshot, costs.profiles)
        notes = (*self.costs.notes(), *self._nic_notes())
        running = {engine.configuration for engine in snapshot.engines}
        barred = {id: why for id, why in self._not_startable.items() if id not in running}
        # Engines of implicit configurations cannot be started; configured ones take precedence.
        usable = configured or running
        worth = worth_evaluating(costs.profiles, snapshot, gpus, overriding)  # those for the phase
        worth = tuple(id for id in worth if id not in barred and id in usable)
        notes = (*notes, *(f"{id} is excluded: {why}" for id, why in sorted(barred.items())))
        unknown = self._unknown(snapshot)
        notes = (*notes, unknown) if unknown and worth else notes
        settings = replace(
            planner_config(self._config, gpus, can_deploy=can_deploy),
            only_as_deployed=not configured,
            unknown=unknown,
            transfer=self.costs.moving(self._nics.share),
        )
        lengths = self.lengths

        def decide() -> Plan:
            self._expected = lengths.expected()
            updated = replace(history, before=self._expected)
            remaining = () if costs.straight else remaining_of(snapshot, settings, updated)
            self.lines = costs.lines(snapshot, gpus, remaining)
            choices = replace(settings, configurations=tuple(line for line in self.lines if line.id in worth))
            plan = make_plan(plan_id, snapshot, choices, mode=mode, control=control, history=updated)
            return replace(plan, notes=(*plan.notes, *notes))

        return decide

    def move_costing(self, kv_versions: Mapping[EngineId, str]) -> MovePricing:
        """Return the current costs of moving single requests between engines with these KV versions."""
        gpus = self._config.fleet.gpus
        profiles = {profile.id: profile for profile in self.costs.cost_estimates().profiles}
        return MovePricing(profiles, self.costs.moving(self._nics.share), gpus.per_node if gpus else 8, kv_versions)

    def _unknown(self, snapshot: Snapshot) -> str:
        """Return the reason why the step times of some engines are unknown, or an empty string if all step times are
        known."""
        return unknown_step_times(
            {engine: times.detail for engine, times in self.step_times(snapshot).items() if not times.source}
        )

    def _nic_notes(self) -> Sequence[str]:
        if self._nics.share >= NICS_ALL_BUT_FREE:
            return ()
        take = "takes" if len(self._nics.taken_by) == 1 else "take"
        taken = f"moves have {self._nics.share:.0%} of the NICs: {' and '.join(self._nics.taken_by)} {take} the rest"
        if self._config.fleet.kv_transfer is None:
            return (taken,)
        return (f"{taken}, and KV between nodes is priced at {1 / self._nics.share:.1f} times its time",)


def _move_fixed(body: Mapping[str, Any]) -> tuple[MoveMethod, float] | None:
    """Return the method of moves to which a journal entry refers, and the fixed part of the duration of such moves in
    seconds. Return None if the entry describes another estimate."""
    if body.get("figure") != MOVE_FIXED:
        return None
    return MoveMethod(body["method"]), float(body["value"])


def _starts(body: Mapping[str, Any]) -> tuple[EngineStart, ...]:
    if "elapsed_s" not in body:
        return ()
    return (EngineStart(ConfigurationId(body["configuration"]), float(body["elapsed_s"]), float(body["expected_s"])),)


def gpus_count(config: Config, snapshot: Snapshot, profiles: Sequence[EngineProfile]) -> int:
    """Return the number of GPUs on which engines may run. This is `fleet.gpus.count` or, if it is not configured, the
    number of GPUs of all present engines according to the `profiles` of their configurations."""
    if config.fleet.gpus is not None:
        return config.fleet.gpus.count
    needed = {profile.id: profile.parallelism.gpus for profile in profiles}
    return max(1, sum(needed[engine.configuration] for engine in snapshot.engines if engine.configuration in needed))


def planner_config(config: Config, gpus: int, *, can_deploy: bool) -> PlannerConfig:
    """Return the planner's settings, with an empty list of configurations to choose from."""
    # The fast loop packs every second by the same length estimates: a plan's own moves would undo its packing, unless
    # lengths are known exactly (which waives the share).
    moves_itself = config.fast.policy is not FastPolicy.PACKING
    return PlannerConfig(
        configurations=(),
        gpus_count=gpus,
        per_node=config.fleet.gpus.per_node if config.fleet.gpus else 8,
        rebalance_share=REBALANCE_SHARE if moves_itself else 1.0,
        max_moves_per_request=config.fast.max_moves_per_request,
        can_deploy=can_deploy,
        **config.slow.model_dump(exclude={"correct_predictions"}),
    )


class StepLengths:
    """The output lengths of recent steps. They are journalled as steps end, recovered after a restart, and added to the
    forecast of the next step on demand.

    Adding a step to the forecast takes about a tenth of a second, or about a second if statsmodels must be imported
    first. Therefore `step_ended` only queues the step, on the event loop, and `expected` adds it, in the planner's
    thread. Neither method is called concurrently with itself.
    """

    def __init__(self, bin_tokens: int, max_output_tokens: int) -> None:
        self._series = SeriesForecaster(bin_tokens, max_output_tokens)
        self._waiting: deque[StepStatistics] = deque(maxlen=STEPS_REMEMBERED)

    def recover(self, journal: Journal) -> None:
        """Recover the steps that earlier daemons journalled, except those whose lengths were counted in other bins than
        this daemon's."""
        for entry in journal.tail(STEPS_REMEMBERED, (EntryKind.STEP_ENDED,)):
            step = journal.interpret(entry, self._written)
            if step is not None:
                self._waiting += step

    def step_ended(self, finished: Sequence[FinishedLength]) -> dict[str, Any]:
        """Queue the output lengths of an ended step, and return the body of the step's journal entry."""
        bin_tokens, max_output_tokens = self._series.bin_tokens, self._series.max_output_tokens
        step = StepStatistics.of(finished, bin_tokens, max_output_tokens)
        self._waiting.append(step)
        return {
            "bin_tokens": bin_tokens,
            "max_output_tokens": max_output_tokens,
            "all": _sparse(step.lengths),
            "tags": {tag: _sparse(counts) for tag, counts in step.tags},
        }

    def expected(self) -> StepForecast | None:
        """Return the forecast of the running step or, if no step is running, of the next step. Return None if no step
        has ended yet."""
        while self._waiting:
            self._series = self._series.fold(self._waiting.popleft())
        return self._series.next

    def _written(self, body: Mapping[str, Any]) -> tuple[StepStatistics, ...]:
        """Return the step in a journal entry as a tuple of one element. Return an empty tuple if the entry has no
        lengths, or its lengths are counted in other bins."""
        written, bins = body.get("lengths"), (self._series.bin_tokens, self._series.max_output_tokens)
        if written is None or (written["bin_tokens"], written["max_output_tokens"]) != bins:
            return ()
        return (_statistics(written),)


def _sparse(counts: LengthCounts) -> dict[str, Any]:
    """Return the counts by bin number without the empty bins, so that journal entries stay short and readable."""
    return {
        name: {str(place): round(count) for place, count in enumerate(values) if count}
        for name, values in (("ended", counts.ended), ("outlived", counts.outlived))
    }


def _statistics(written: Mapping[str, Any]) -> StepStatistics:
    bins = -(-written["max_output_tokens"] // written["bin_tokens"])

    def counts(sparse: Mapping[str, Any]) -> LengthCounts:
        ended, outlived = sparse["ended"], sparse["outlived"]
        return LengthCounts(
            tuple(float(ended.get(str(place), 0)) for place in range(bins)),
            tuple(float(outlived.get(str(place), 0)) for place in range(bins + 1)),
        )

    tags = tuple((tag, counts(sparse)) for tag, sparse in sorted(written["tags"].items()))
    return StepStatistics(written["bin_tokens"], counts(written["all"]), tags)
