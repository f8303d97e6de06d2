"""One decision of the slow loop: forecast, alternatives, gate, and a Plan that explains itself. Pure.

The caller measures how long it took and says so with `dataclasses.replace(plan, solve_s=...)`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.cost import DoesNotFit, Pending
from planner.forecast import Forecast, forecast
from planner.gate import FREE, Control, ControlState, Limits, Proposal, judge
from planner.homogeneous import Job, as_placed_s, estimate, instances_that_fit, why_none_fits
from planner.model import (
    Alternative,
    Configuration,
    ConfigurationId,
    EngineHealth,
    EngineView,
    Mode,
    Plan,
    PlanId,
    RequestState,
    Snapshot,
)


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """What may be deployed, on what, and when a change is worth it."""

    configurations: tuple[Configuration, ...]
    gpus_count: int
    per_node: int = 8
    epsilon_s: float = 1.0
    cooldown_s: float = 60.0
    stale_after_s: float = 5.0
    bin_tokens: int = 256
    max_output_tokens: int = 32768

    def __post_init__(self) -> None:
        for name in ("gpus_count", "per_node", "bin_tokens", "max_output_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        for name in ("epsilon_s", "cooldown_s", "stale_after_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        ids = [configuration.id for configuration in self.configurations]
        if len(set(ids)) < len(ids):
            raise ValueError(f"configurations must have different ids, got {ids}")

    @property
    def limits(self) -> Limits:
        return Limits(self.epsilon_s, self.cooldown_s, self.stale_after_s)


def make_plan(
    plan_id: PlanId,
    snapshot: Snapshot,
    config: PlannerConfig,
    *,
    mode: Mode,
    control: Control = FREE,
    last_switch_s: float | None = None,
    earlier_output_tokens: Sequence[int] = (),
) -> Plan:
    """What to deploy for the rest of this step, against keeping what runs.

    `earlier_output_tokens` are finished lengths of the steps before; the snapshot has this step's. `last_switch_s` is
    when the deployment last changed, for the cooldown.
    """
    control = control.at(snapshot.now_s)
    expected = forecast(
        snapshot.requests,
        (*earlier_output_tokens, *snapshot.finished_output_tokens),
        config.bin_tokens,
        config.max_output_tokens,
    )
    fleet = _Fleet.of(snapshot, config)
    jobs = _jobs(snapshot, expected)
    options = [_option(configuration, fleet, config, jobs) for configuration in config.configurations]
    current_makespan_s = _current_makespan_s(fleet, options, jobs)
    wanted = _choose(options, fleet, control)
    proposal = Proposal(
        now_s=snapshot.now_s,
        current=fleet.current,
        proposed=wanted.alternative.configuration if wanted else None,
        current_makespan_s=current_makespan_s,
        makespan_s=wanted.alternative.makespan_s if wanted else None,
        switch_cost_s=wanted.alternative.switch_cost_s if wanted else 0.0,
        requests=len(jobs),
        inputs_age_s=snapshot.inputs_age_s,
        last_switch_s=last_switch_s,
    )
    running = sum(request.state is RequestState.RUNNING for request in snapshot.requests)
    return Plan(
        id=plan_id,
        created_s=snapshot.now_s,
        decision="reconfigure" if _worth_it(proposal, config, control) else "keep",
        verdict=judge(proposal, config.limits, mode, control),
        current_configuration=fleet.current,
        proposed_configuration=proposal.proposed,
        proposed_instances=wanted.alternative.instances if wanted else 0,
        current_makespan_s=current_makespan_s,
        proposed_makespan_s=proposal.makespan_s,
        switch_cost_s=proposal.switch_cost_s,
        lower_bound_s=min((option.lower_bound_s for option in options if option.feasible), default=0.0),
        solve_s=0.0,
        alternatives=tuple(option.alternative for option in options),
        inputs_age_s=snapshot.inputs_age_s,
        requests_running=running,
        requests_waiting=len(jobs) - running,
        remaining=expected.remaining,
        forecast_method=expected.method,
    )


@dataclass(frozen=True, slots=True)
class _Fleet:
    """The deployment that runs now: engines that answer."""

    engines: tuple[EngineView, ...]
    known: dict[ConfigurationId, Configuration]
    current: ConfigurationId | None  # of all engines; None: no engine, an unknown or a mixed one

    @classmethod
    def of(cls, snapshot: Snapshot, config: PlannerConfig) -> "_Fleet":
        answering = (EngineHealth.OK, EngineHealth.SLOW)
        engines = tuple(engine for engine in snapshot.engines if engine.health in answering)
        known = {configuration.id: configuration for configuration in config.configurations}
        deployed = {engine.configuration for engine in engines}
        current = next(iter(deployed)) if len(deployed) == 1 else None
        return cls(engines, known, current if current in known else None)


@dataclass(frozen=True, slots=True)
class _Option:
    alternative: Alternative
    lower_bound_s: float  # of makespan and switch cost together

    @property
    def feasible(self) -> bool:
        return not self.alternative.infeasible_because

    @property
    def total_s(self) -> float:
        return self.alternative.makespan_s + self.alternative.switch_cost_s


def _jobs(snapshot: Snapshot, expected: Forecast) -> list[Job]:
    return [
        Job(Pending(request.context_tokens, remaining), request.state is RequestState.RUNNING, request.engine)
        for request, remaining in zip(snapshot.requests, expected.remaining_tokens, strict=True)
    ]


def _option(configuration: Configuration, fleet: _Fleet, config: PlannerConfig, jobs: Sequence[Job]) -> _Option:
    """A whole fleet of one configuration: as many instances as there is room for, or those that run already."""
    deployed = configuration.id == fleet.current
    instances = (
        len(fleet.engines) if deployed else instances_that_fit(configuration, config.gpus_count, config.per_node)
    )
    if not instances:
        why = why_none_fits(configuration, config.gpus_count, config.per_node)
        return _Option(Alternative(configuration.id, 0, 0.0, 0.0, why), 0.0)
    try:
        found = estimate(configuration, instances, jobs)
    except DoesNotFit as error:
        return _Option(Alternative(configuration.id, instances, 0.0, 0.0, str(error)), 0.0)
    switch_cost_s = 0.0 if deployed else configuration.switch_s + found.rebuild_s
    bound_s = found.lower_bound_s + (0.0 if deployed else configuration.switch_s)
    return _Option(Alternative(configuration.id, instances, found.makespan_s, switch_cost_s), bound_s)


def _current_makespan_s(fleet: _Fleet, options: Sequence[_Option], jobs: Sequence[Job]) -> float | None:
    """What a switch has to beat: the fleet as placed, or as the fast loop can place it without a switch."""
    placed_s = as_placed_s(fleet.known, {engine.id: engine.configuration for engine in fleet.engines}, jobs)
    kept = [o.alternative.makespan_s for o in options if o.feasible and o.alternative.configuration == fleet.current]
    return min([*kept, *([] if placed_s is None else [placed_s])], default=None)


def _choose(options: Sequence[_Option], fleet: _Fleet, control: Control) -> _Option | None:
    """The operator's configuration, else the soonest end; what is deployed wins a tie."""
    feasible = [option for option in options if option.feasible]
    if control.state is ControlState.OVERRIDDEN:
        feasible = [option for option in feasible if option.alternative.configuration == control.configuration]
    return min(
        feasible,
        key=lambda option: (option.total_s, option.alternative.configuration != fleet.current),
        default=None,
    )


def _worth_it(proposal: Proposal, config: PlannerConfig, control: Control) -> bool:
    """Whether the plan is to change the deployment; whether that is done is the gate's word."""
    if proposal.proposed is None or proposal.proposed == proposal.current or not proposal.requests:
        return False
    gains = proposal.gain_s is not None and proposal.gain_s > config.epsilon_s
    return gains or control.state is ControlState.OVERRIDDEN
