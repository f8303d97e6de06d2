"""Make one decision of the slow loop: forecast lengths, compare fleets, and admit a plan. Has no side effects.

The caller measures the solving time and sets it with `dataclasses.replace(plan, solve_s=...)`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.admission import FREE, AdmissionLimits, ControlState, OperatorControl, PlanProposal, judge, too_weak
from planner.model import (
    Act,
    Configuration,
    Hold,
    Knowledge,
    Mode,
    Plan,
    PlanId,
    PlannedInstance,
    RequestId,
    RequestState,
    Snapshot,
    Verdict,
    check_at_least,
)
from planner.solver.candidates import CandidateFleet, moves_of, with_fresh_names
from planner.solver.from_snapshot import NO_TRANSFER, LiveFleet, instances_text, live_fleet
from planner.solver.options import TOTAL_S, FleetOption, FleetOptions, consider
from planner.solver.problem import KvTransferCost
from planner.workload.forecast import Forecast, forecast
from planner.workload.sampled_lengths import SampledLengths, averaged, sampled, with_known_lengths
from planner.workload.series import StepForecast


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """The deployable configurations, the GPUs, and the limits on changes."""

    configurations: tuple[Configuration, ...]
    gpus_count: int
    per_node: int = 8
    epsilon_s: float = 1.0
    rebalance_share: float = 0.05  # share of the time until the end that moves must gain, unless lengths are exact
    cooldown_s: float = 60.0
    interval_s: float = 0.0  # until the next plan, which may also change engines; 0: there is no next plan
    stale_after_s: float = 5.0
    bin_tokens: int = 256
    max_output_tokens: int = 32768
    max_moves_per_request: int = 4
    scenarios: int = 8  # length samples that candidates are evaluated on
    work_budget: int | None = 100_000  # of the solver, in deterministic units; None: the solver's default
    knowledge: Knowledge = Knowledge.FORECAST
    seed: int = 0
    transfer: KvTransferCost = NO_TRANSFER  # of KV between engines
    can_deploy: bool = True  # a deployer can stop and start engines
    only_as_deployed: bool = False  # `configurations` describe the running engines only; none can be started
    unknown: str = ""  # message that lists the engines without step times, with reasons

    def __post_init__(self) -> None:
        check_at_least(self, 1, "gpus_count", "per_node", "bin_tokens", "max_output_tokens", "scenarios")
        check_at_least(self, 0, "epsilon_s", "rebalance_share", "cooldown_s", "interval_s", "stale_after_s")
        ids = [configuration.id for configuration in self.configurations]
        if len(set(ids)) < len(ids):
            raise ValueError(f"configurations must have unique ids, got {ids}")

    @property
    def limits(self) -> AdmissionLimits:
        sure = self.knowledge is Knowledge.ORACLE
        return AdmissionLimits(
            self.epsilon_s, self.cooldown_s, self.stale_after_s, 0.0 if sure else self.rebalance_share
        )


@dataclass(frozen=True, slots=True)
class History:
    """The inputs from earlier decisions and steps that the snapshot does not contain."""

    earlier_output_tokens: Sequence[int] = ()  # finished lengths of earlier steps; the snapshot has this step's
    last_redeploy_s: float | None = None  # when the deployment last changed, for the cooldown
    underway: Hold | None = None  # unfinished work of earlier decisions
    correction: float = 1.0  # factor on decoding seconds, learned from earlier plans
    known_output_tokens: Mapping[RequestId, int] | None = None  # for Knowledge.ORACLE
    before: StepForecast | None = None  # forecast of this step from recent steps; replaces `earlier_output_tokens`


NO_HISTORY = History()
NO_OTHERS = "no other configuration is known: add some to fleet.configurations or fleet.profile"
NO_DEPLOYER = Hold("no_deployer", "no deployer is configured that can stop and start engines")


def make_plan(
    plan_id: PlanId,
    snapshot: Snapshot,
    config: PlannerConfig,
    *,
    mode: Mode,
    control: OperatorControl = FREE,
    history: History = NO_HISTORY,
) -> Plan:
    """Return a plan for the rest of this step: the fleet to deploy and the assignment of requests to engines."""
    control = control.at(snapshot.now_s)
    expected = _expected(snapshot, config, history)
    fleet = live_fleet(
        snapshot,
        config.configurations,
        config.gpus_count,
        config.per_node,
        config.max_moves_per_request,
        config.transfer,
        config.work_budget,
    )
    lengths = _lengths(snapshot, fleet, config, history, expected)
    options = NOTHING
    if (fleet.requests or control.state is ControlState.OVERRIDDEN) and config.configurations:
        options = consider(
            fleet,
            lengths,
            history.correction,
            control.configuration,
            config.interval_s,
            only_as_deployed=config.only_as_deployed,
        )
    choice = _Case(snapshot, config, history, mode, control, fleet, options).choose()
    running = sum(request.state is RequestState.RUNNING for request in snapshot.requests)
    wanted, acts = choice.wanted, isinstance(choice.verdict, Act)
    deployed = {instance.configuration for instance in fleet.problem.current}
    target = with_fresh_names(wanted.fleet, plan_id) if wanted else None
    best_s = min((option.total_s for option in options.found), default=None)
    moves = moves_of(fleet.expecting(lengths.expected).problem, target) if acts and target else ()
    return Plan(
        id=plan_id,
        created_s=snapshot.now_s,
        decision=choice.decision,
        verdict=choice.verdict,
        current_configuration=next(iter(deployed)) if len(deployed) == 1 else None,
        proposed_configuration=wanted.alternative.configuration if wanted else None,
        proposed_instances=wanted.alternative.instances if wanted else 0,
        current_makespan_s=options.current.total_s if options.current else None,
        proposed_makespan_s=wanted.alternative.makespan_s if wanted else None,
        redeploy_cost_s=wanted.alternative.redeploy_cost_s if wanted else 0.0,
        migration_cost_s=wanted.alternative.migration_cost_s if wanted else 0.0,
        lower_bound_s=options.bound_s,
        gap=best_s / options.bound_s - 1 if best_s is not None and options.bound_s > 0 else None,
        solve_s=0.0,
        alternatives=(*(option.alternative for option in options.found), *options.ruled_out),
        inputs_age_s=snapshot.inputs_age_s,
        requests_running=running,
        requests_waiting=len(snapshot.requests) - running,
        remaining=expected.remaining,
        forecast_method=expected.method,
        instances=_planned(wanted, target, fleet, acts) if wanted and target else (),
        moves=moves,
        moves_count=len(wanted.fleet.moved) if wanted else 0,
        forgone=choice.forgone,
        knowledge=config.knowledge,
        scenarios=len(lengths.samples),
        correction=history.correction,
        notes=(*fleet.notes, *((NO_OTHERS,) if config.only_as_deployed and config.configurations else ())),
    )


def remaining_of(snapshot: Snapshot, config: PlannerConfig, history: History) -> Sequence[int]:
    """Return the remaining tokens of each request: exact under ORACLE, otherwise drawn from the forecast."""
    drawn = _expected(snapshot, config, history).remaining_tokens
    known = history.known_output_tokens if config.knowledge is Knowledge.ORACLE else None
    if known is None:
        return drawn
    return [
        max(1, known[request.id] - request.generated_tokens) if request.id in known else tokens
        for request, tokens in zip(snapshot.requests, drawn, strict=True)
    ]


NOTHING = FleetOptions(None, (), (), 0.0)


def _expected(snapshot: Snapshot, config: PlannerConfig, history: History) -> Forecast:
    """Return the length forecast for the snapshot's requests, in the order of the snapshot."""
    return forecast(
        snapshot.requests,
        () if history.before is not None else history.earlier_output_tokens,
        config.bin_tokens,
        config.max_output_tokens,
        finished=snapshot.finished,
        before=history.before,
    )


def _lengths(
    snapshot: Snapshot, fleet: LiveFleet, config: PlannerConfig, history: History, expected: Forecast
) -> SampledLengths:
    """Return the sampled lengths of the fleet's requests, in the order of the fleet."""
    if config.knowledge is Knowledge.MEAN:
        seen = (*history.earlier_output_tokens, *(length.tokens for length in snapshot.finished))
        return averaged(fleet.requests, seen, config.max_output_tokens)
    lengths = sampled(expected, len(snapshot.requests), config.scenarios, config.seed).at(fleet.rows)
    if config.knowledge is Knowledge.ORACLE:
        return with_known_lengths(fleet.requests, history.known_output_tokens or {}, lengths)
    return lengths


@dataclass(frozen=True, slots=True)
class _Choice:
    decision: str
    verdict: Verdict
    wanted: FleetOption | None
    forgone: Hold | None = None


@dataclass(frozen=True, slots=True)
class _Case:
    """The inputs of a decision and its options."""

    snapshot: Snapshot
    config: PlannerConfig
    history: History
    mode: Mode
    control: OperatorControl
    fleet: LiveFleet
    options: FleetOptions

    def choose(self) -> _Choice:
        """Return the option with the earliest end. Of the options that end at most epsilon later, return the one with
        the smallest change.

        If a change of engines is not admitted but moving requests is, return the option that only moves requests, and
        report the change that was not admitted.
        """
        current, found = self.options.current, self.options.found
        moving, changing = (
            min((option for option in found if option.fleet.decision == decision), key=TOTAL_S, default=None)
            for decision in ("rebalance", "reconfigure")
        )
        is_deployed = {each.configuration for each in self.fleet.problem.current} == {self.control.configuration}
        if self._is_overridden and is_deployed:
            changing = None
        instead = moving if moving is not None and self._decision(moving) == "rebalance" else current
        if changing is not None and (
            self._is_overridden or instead is None or changing.total_s < instead.total_s - self.config.epsilon_s
        ):
            forgone = self._verdict(changing, Mode.ACT)
            if isinstance(forgone, Act) or moving is None or not isinstance(self._verdict(moving, Mode.ACT), Act):
                return _Choice(self._decision(changing), self._verdict(changing, self.mode), changing)
            return _Choice("rebalance", self._verdict(moving, self.mode), moving, forgone)
        in_place = min((option for option in (current, moving) if option), key=TOTAL_S, default=None)
        if self._is_overridden and not is_deployed:
            in_place = None  # the operator's configuration is not available
        decision = "keep" if in_place is None else self._decision(in_place)
        return _Choice(decision, self._verdict(in_place, self.mode), in_place)

    @property
    def _is_overridden(self) -> bool:
        return self.control.state is ControlState.OVERRIDDEN

    def _verdict(self, option: FleetOption | None, mode: Mode) -> Verdict:
        return judge(self._proposal(option), self.config.limits, mode, self.control)

    def _decision(self, option: FleetOption) -> str:
        """Return the value of `decision` for a plan with this option. Plan admission then determines whether the plan
        is carried out."""
        changes = self._is_overridden and option.fleet.decision == "reconfigure"
        return "keep" if not changes and too_weak(self._proposal(option), self.config.limits) else option.fleet.decision

    def _proposal(self, option: FleetOption | None) -> PlanProposal:
        snapshot, config, current = self.snapshot, self.config, self.options.current
        later_s = option.later_s if option else None
        return PlanProposal(
            now_s=snapshot.now_s,
            decision=option.fleet.decision if option else "keep",
            current=instances_text([instance.configuration for instance in self.fleet.problem.current]),
            proposed=instances_text(option.fleet.configurations) if option else None,
            current_makespan_s=current.total_s if current else None,
            makespan_s=option.alternative.makespan_s if option else None,
            cost_s=option.total_s - option.alternative.makespan_s if option else 0.0,
            requests=len(snapshot.requests),
            inputs_age_s=snapshot.inputs_age_s,
            last_redeploy_s=self.history.last_redeploy_s,
            moves=len(option.fleet.moved) if option else 0,
            return_s=self._return_s(option) if option else 0.0,
            wait_s=config.interval_s,
            later_gain_s=option.total_s - later_s if option and later_s is not None else 0.0,
            unknown=config.unknown if not config.configurations else "",
            infeasible=self._why_nothing(),
            otherwise=self._why_kept(),
            sooner_in=(int((option.ends_s < current.ends_s).sum()), len(option.ends_s)) if option and current else None,
            underway=self.history.underway,
            blocked=self.fleet.blocked if config.can_deploy else NO_DEPLOYER,
        )

    def _return_s(self, option: FleetOption) -> float:
        """Return the expected cost, in seconds, of starting the replaced engines again.

        The next step is assumed to need the fleet that this step began with. The cost is weighted by the share of the
        step's requests that have finished.
        """
        stays = {instance.id for instance, kept in zip(option.fleet.instances, option.fleet.kept, strict=True) if kept}
        engines = zip(self.fleet.problem.current, self.fleet.limits, strict=True)
        restart_s = max((limit.switch_s for engine, limit in engines if engine.id not in stays), default=0.0)
        ended = len(self.snapshot.finished)
        return restart_s * ended / max(1, ended + len(self.snapshot.requests))

    def _why_kept(self) -> str:
        if self._is_overridden:
            return "the operator's override requires it"
        return NO_OTHERS if self.config.only_as_deployed else "no other option is faster"

    def _why_nothing(self) -> str:
        if not self.config.configurations:
            return "no configurations are given: set fleet.configurations or fleet.profile"
        if not self.fleet.requests:
            return "no request is on an engine with a known configuration"
        reasons = sorted({option.infeasible_because for option in self.options.ruled_out})
        return "no configuration can serve the requests on these GPUs" + (f": {'; '.join(reasons)}" if reasons else "")


def _planned(wanted: FleetOption, target: CandidateFleet, fleet: LiveFleet, named: bool) -> tuple[PlannedInstance, ...]:
    mean_s = wanted.decode_s.mean(axis=0)
    ids = fleet.problem.requests.ids
    return tuple(
        PlannedInstance(
            id=instance.id,
            configuration=instance.configuration,
            gpus=instance.gpus,
            kept=bool(target.kept[place]),
            requests_count=len(target.requests_of(place)),
            decode_s=float(mean_s[place]),
            migration_s=float(target.migration_s[place]),
            switch_s=float(target.switch_s[place]),
            requests=tuple(ids[request] for request in target.requests_of(place)) if named else (),
        )
        for place, instance in enumerate(target.instances)
    )
