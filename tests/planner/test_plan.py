"""The slow loop's decision, whole: what it chooses, what it compares, and that it can be explained."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_builders import configuration, engine, request, snapshot

from planner.gate import FREE, Control, ControlState
from planner.model import Act, ConfigurationId, EngineHealth, Mode, Plan, PlanId, RequestId, Snapshot
from planner.plan import PlannerConfig, make_plan

TP2 = configuration("tp2", 2)
TP4 = configuration("tp4", 4, alpha_s=0.0092, beta_s=0.00004, gamma_s=2e-8, switch_s=5.0)
CONFIG = PlannerConfig((TP2, TP4), gpus_count=8)
FLEET = tuple(engine(f"e{i}") for i in range(4))


def plan_of(view: Snapshot, config: PlannerConfig = CONFIG, mode: Mode = Mode.ACT, control: Control = FREE) -> Plan:
    return make_plan(PlanId("p1"), view, config, mode=mode, control=control)


def long_step(finished: Sequence[int] = (8000,) * 20) -> Snapshot:
    """A few requests that will run long: the wide engines' hour."""
    return snapshot(FLEET, [request(f"r{i}", 200, where=f"e{i}") for i in range(4)], finished)


def test_in_the_tail_wide_engines_are_proposed() -> None:
    plan = plan_of(long_step())
    assert plan.decision == "reconfigure"
    assert isinstance(plan.verdict, Act)
    assert plan.verdict.code == "gain"
    assert (plan.current_configuration, plan.proposed_configuration, plan.proposed_instances) == ("tp2", "tp4", 2)
    assert plan.current_makespan_s is not None
    assert plan.proposed_makespan_s is not None
    assert plan.proposed_makespan_s + plan.switch_cost_s < plan.current_makespan_s - CONFIG.epsilon_s
    assert plan.forecast_method == "kaplan_meier"
    assert plan.remaining.total == pytest.approx(4)
    assert (plan.requests_running, plan.requests_waiting) == (4, 0)
    assert plan.inputs_age_s == 0.1


def test_towards_the_end_a_switch_no_longer_pays() -> None:
    nearly_done = snapshot(FLEET, [request(f"r{i}", 7900, where=f"e{i}") for i in range(4)], [8000] * 20)
    plan = plan_of(nearly_done)
    assert (plan.decision, plan.proposed_configuration) == ("keep", "tp2")
    assert plan.verdict.code == "already_deployed"
    assert plan.switch_cost_s == 0.0


def test_advice_is_the_same_decision_held() -> None:
    acting, advising = plan_of(long_step()), plan_of(long_step(), mode=Mode.ADVISE)
    assert advising.verdict.code == "advise_only"
    assert replace(advising, verdict=acting.verdict) == acting


def test_an_idle_fleet_has_nothing_to_do() -> None:
    plan = plan_of(snapshot(FLEET))
    assert (plan.decision, plan.verdict.code, plan.lower_bound_s) == ("keep", "nothing_to_do", 0.0)
    assert plan.remaining.total == 0


def test_every_alternative_is_listed_with_its_seconds_or_its_reason() -> None:
    wide = configuration("tp16", 16)
    odd = configuration("tp12", 12)
    small = configuration("small", 2, capacity=1000)
    plan = plan_of(long_step(), replace(CONFIG, configurations=(TP2, TP4, wide, odd, small)))
    by_id = {alternative.configuration: alternative for alternative in plan.alternatives}
    assert list(by_id) == ["tp2", "tp4", "tp16", "tp12", "small"]
    assert by_id[TP2.id].switch_cost_s == 0.0
    assert by_id[TP4.id].switch_cost_s > TP4.switch_s  # and the contexts to prefill again
    assert by_id[wide.id].infeasible_because == "an instance takes 16 GPUs; there are 8 in nodes of 8"
    assert "neither inside a node" in by_id[odd.id].infeasible_because
    assert "does not fit into a KV cache of 1000" in by_id[small.id].infeasible_because


def test_without_a_feasible_configuration_the_fleet_is_kept() -> None:
    plan = plan_of(long_step(), replace(CONFIG, configurations=(configuration("tp16", 16),)))
    assert (plan.decision, plan.verdict.code) == ("keep", "infeasible")
    assert plan.proposed_configuration is None
    assert plan_of(long_step(), replace(CONFIG, configurations=())).verdict.code == "infeasible"


@pytest.mark.parametrize("fleet", [(engine("e0", None),), (engine("e0", "exotic"),), ()])
def test_an_unknown_fleet_is_no_baseline(fleet: tuple[object, ...]) -> None:
    plan = plan_of(replace(long_step(), engines=fleet))  # type: ignore[arg-type]
    assert plan.decision == "keep"
    assert plan.current_makespan_s is None
    assert plan.verdict.code == ("no_baseline" if fleet else "stale_telemetry")


def test_a_mixed_fleet_is_measured_as_it_stands() -> None:
    mixed = (engine("e0"), engine("e1"), engine("e2", "tp4"))
    plan = plan_of(replace(long_step(), engines=mixed))
    assert plan.current_configuration is None
    assert plan.current_makespan_s is not None


def test_an_engine_that_is_gone_counts_neither_as_fleet_nor_as_stale() -> None:
    gone = engine("e9", "tp4", EngineHealth.GONE, age_s=500.0)
    assert plan_of(replace(long_step(), engines=(*FLEET, gone))).verdict.code == "gain"


def test_stale_inputs_hold_a_plan_that_is_made_all_the_same() -> None:
    plan = plan_of(replace(long_step(), requests_age_s=9.2))
    assert plan.verdict.code == "stale_telemetry"
    assert (plan.decision, plan.proposed_configuration) == ("reconfigure", "tp4")


def test_cooldown_counts_from_the_last_switch() -> None:
    plan = make_plan(PlanId("p"), long_step(), CONFIG, mode=Mode.ACT, last_switch_s=990.0)
    assert plan.verdict.code == "cooldown"


def test_an_override_proposes_the_operators_configuration_even_at_a_loss() -> None:
    control = Control(ControlState.OVERRIDDEN, ConfigurationId("tp4"), "trial")
    nearly_done = snapshot(FLEET, [request("r0", 7900)], [8000] * 20)
    plan = plan_of(nearly_done, control=control)
    assert (plan.decision, plan.proposed_configuration, plan.verdict.code) == ("reconfigure", "tp4", "overridden")
    unknown = Control(ControlState.OVERRIDDEN, ConfigurationId("exotic"), "trial")
    assert plan_of(nearly_done, control=unknown).verdict.code == "infeasible"
    expired = replace(control, expires_s=999.0)
    assert plan_of(nearly_done, control=expired).verdict.code == "already_deployed"


def test_a_pin_keeps_the_deployment_and_shows_what_it_forgoes() -> None:
    plan = plan_of(long_step(), control=Control(ControlState.PINNED, reason="benchmark"))
    assert (plan.verdict.code, plan.proposed_configuration) == ("pinned", "tp4")


def test_lengths_of_earlier_steps_serve_before_this_one_has_any() -> None:
    fresh = snapshot(FLEET, [request(f"r{i}", where=None) for i in range(32)])
    assert plan_of(fresh).forecast_method == "uniform"
    earlier = make_plan(PlanId("p"), fresh, CONFIG, mode=Mode.ACT, earlier_output_tokens=[300] * 64)
    assert earlier.forecast_method == "kaplan_meier"
    assert max(place for place, count in enumerate(earlier.remaining.counts) if count > 1) == 1  # 300 of 256-token bins


REQUESTS = st.lists(
    st.builds(
        lambda generated, where, limit: request("", generated, where=where, limit=limit),
        st.integers(0, 4000),
        st.sampled_from(["e0", "e1", "e2", "e3", None]),
        st.none() | st.integers(1, 5000),
    ),
    max_size=24,
)


@settings(max_examples=150, deadline=None)
@given(REQUESTS, st.lists(st.integers(1, 5000), max_size=40))
def test_what_holds_of_every_plan(requests: list[object], finished: list[int]) -> None:
    named = [replace(view, id=RequestId(f"r{i:02}")) for i, view in enumerate(requests)]  # type: ignore[type-var]
    view = snapshot(FLEET, named, finished)  # type: ignore[arg-type]
    plan = plan_of(view, replace(CONFIG, max_output_tokens=5000))
    assert plan == plan_of(view, replace(CONFIG, max_output_tokens=5000))
    assert plan.remaining.total == pytest.approx(len(requests))
    assert plan.proposed_makespan_s is not None
    assert plan.current_makespan_s is not None
    proposed_s = plan.proposed_makespan_s + plan.switch_cost_s
    # Nothing listed is better than the proposal, and nothing at all is better than the bound.
    assert all(proposed_s <= option.makespan_s + option.switch_cost_s for option in plan.alternatives)
    assert plan.lower_bound_s <= proposed_s
    assert plan.lower_bound_s <= plan.current_makespan_s
    assert isinstance(plan.verdict, Act) == (plan.decision == "reconfigure")
    if plan.decision == "reconfigure":
        assert proposed_s < plan.current_makespan_s - CONFIG.epsilon_s


def test_a_configuration_checks_itself() -> None:
    with pytest.raises(ValueError, match="configurations must have different ids"):
        PlannerConfig((TP2, TP2), gpus_count=8)
    with pytest.raises(ValueError, match="gpus_count must be >= 1, got 0"):
        PlannerConfig((), gpus_count=0)
    with pytest.raises(ValueError, match="epsilon_s must be >= 0, got nan"):
        PlannerConfig((), gpus_count=1, epsilon_s=float("nan"))
