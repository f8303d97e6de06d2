"""Tests of the slow loop's whole decision: its choice, the alternatives that it compares, and its explanation."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_builders import configuration, engine, request, snapshot

import planner.solver.options
from planner.admission import FREE, ControlState, OperatorControl
from planner.model import (
    Act,
    Configuration,
    ConfigurationId,
    EngineHealth,
    EngineId,
    EngineView,
    GpuId,
    Hold,
    Knowledge,
    Mode,
    Plan,
    PlanId,
    RequestId,
    RequestView,
    Snapshot,
)
from planner.plan import NO_HISTORY, History, PlannerConfig, make_plan
from planner.solver.makespan import solve
from planner.solver.problem import MakespanProblem, Solution

TP2 = configuration("tp2", 2)
TP4 = configuration("tp4", 4, alpha_s=0.0092, beta_s=0.00004, gamma_s=2e-8, switch_s=5.0)
CONFIG = PlannerConfig((TP2, TP4), gpus_count=8)
PINNED = OperatorControl(ControlState.PINNED, reason="benchmark")


def at(view: EngineView, *gpus: int) -> EngineView:
    return replace(view, gpus=tuple(GpuId(gpu) for gpu in gpus))


FLEET = tuple(at(engine(f"e{i}"), 2 * i, 2 * i + 1) for i in range(4))


def plan_of(
    view: Snapshot,
    config: PlannerConfig = CONFIG,
    mode: Mode = Mode.ACT,
    control: OperatorControl = FREE,
    history: History = NO_HISTORY,
) -> Plan:
    return make_plan(PlanId("p1"), view, config, mode=mode, control=control, history=history)


def long_step(finished: Sequence[int] = (8000,) * 20) -> Snapshot:
    """Return a step with a few long requests, for which wide engines are best."""
    return snapshot(FLEET, [request(f"r{i}", 200, where=f"e{i}") for i in range(4)], finished)


def lopsided_step() -> Snapshot:
    """Return a step in which two engines have all requests, at equal progress, so that moves alone suffice."""
    requests = [request(f"r{i:02}", 500, where=f"e{i % 2}") for i in range(80)]
    return snapshot(FLEET, requests, [3000] * 20)


# Sequences dominate the cost and wide engines are not faster, so only the number of requests per engine matters.
CROWDED = replace(CONFIG, configurations=(replace(TP2, alpha_s=0.001, beta_s=0.001),))


def alternative(plan: Plan, name: str) -> object:
    return next(option for option in plan.alternatives if option.name == name)


# --- the choice


def test_in_the_tail_wide_engines_are_proposed() -> None:
    plan = plan_of(long_step())
    assert plan.decision == "reconfigure"
    assert isinstance(plan.verdict, Act)
    assert plan.verdict.code == "gain"
    assert (plan.current_configuration, plan.proposed_configuration, plan.proposed_instances) == ("tp2", "tp4", 2)
    assert plan.current_makespan_s is not None
    assert plan.proposed_total_s is not None
    assert plan.proposed_total_s < plan.current_makespan_s - CONFIG.epsilon_s
    assert plan.redeploy_cost_s == pytest.approx(TP4.switch_s)
    assert 0 < plan.migration_cost_s < 1  # contexts to prefill again
    assert plan.remaining.total == pytest.approx(4)
    assert (plan.requests_running, plan.requests_waiting) == (4, 0)
    assert plan.inputs_age_s == 0.1


def test_an_acting_plan_names_its_engines_their_gpus_and_every_request() -> None:
    plan = plan_of(long_step())
    assert [(i.configuration, i.gpus, i.kept) for i in plan.instances] == [
        ("tp4", (0, 1, 2, 3), False),
        ("tp4", (4, 5, 6, 7), False),
    ]
    assert {i.id for i in plan.instances} == {"p1.0", "p1.1"}  # unique across plans
    assert sorted(r for i in plan.instances for r in i.requests) == ["r0", "r1", "r2", "r3"]
    assert [i.requests_count for i in plan.instances] == [len(i.requests) for i in plan.instances]
    assert {move.request: move.source for move in plan.moves} == {f"r{i}": f"e{i}" for i in range(4)}
    assert all(move.method == "recompute" and move.cost_s > 0 for move in plan.moves)


def test_redeployment_does_not_pay_near_the_end() -> None:
    nearly_done = snapshot(FLEET, [request(f"r{i}", 7900, where=f"e{i}") for i in range(4)], [8000] * 20)
    plan = plan_of(nearly_done)
    assert (plan.decision, plan.proposed_configuration) == ("keep", "tp2")
    assert plan.verdict.code == "already_deployed"
    assert plan.redeploy_cost_s == 0.0


def test_requests_move_if_that_suffices() -> None:
    plan = plan_of(lopsided_step(), CROWDED)
    assert (plan.decision, plan.verdict.code) == ("rebalance", "gain")
    assert isinstance(plan.verdict, Act)
    assert all(instance.kept for instance in plan.instances)
    assert [instance.id for instance in plan.instances] == ["e0", "e1", "e2", "e3"]
    assert len(plan.moves) == plan.moves_count > 20
    assert {move.destination for move in plan.moves} == {"e2", "e3"}
    assert plan.redeploy_cost_s == 0.0


def test_immovable_and_often_moved_requests_stay() -> None:
    view = lopsided_step()
    bound = {"r00": replace(view.requests[0], movable=False), "r02": replace(view.requests[2], moves=4)}
    plan = plan_of(replace(view, requests=tuple(bound.get(r.id, r) for r in view.requests)), CROWDED)
    assert plan.decision == "rebalance"
    moved = {move.request for move in plan.moves}
    assert moved
    assert not moved & bound.keys()
    stays = {request for instance in plan.instances if instance.id == "e0" for request in instance.requests}
    assert bound.keys() <= stays


def test_an_engine_whose_request_cannot_move_is_not_stopped() -> None:
    view = long_step()
    plan = plan_of(replace(view, requests=(replace(view.requests[0], movable=False), *view.requests[1:])))
    assert plan.proposed_configuration != "tp4"
    why = [option.infeasible_because for option in plan.alternatives if option.name == "tp4 spread"]
    assert why == ["1 requests on replaced engines cannot move"]


def test_advice_is_the_same_decision_held() -> None:
    acting, advising = plan_of(long_step()), plan_of(long_step(), mode=Mode.ADVISE)
    assert advising.verdict.code == "advise_only"
    unnamed = tuple(replace(instance, requests=()) for instance in acting.instances)
    assert replace(advising, verdict=acting.verdict) == replace(acting, instances=unnamed, moves=())


def test_an_idle_fleet_has_nothing_to_do() -> None:
    plan = plan_of(snapshot(FLEET))
    assert (plan.decision, plan.verdict.code, plan.lower_bound_s) == ("keep", "nothing_to_do", 0.0)
    assert plan.remaining.total == 0


# --- the alternatives


def test_every_alternative_is_listed_with_its_seconds_or_its_reason() -> None:
    wide = configuration("tp16", 16)
    odd = configuration("tp12", 12)
    small = configuration("small", 2, capacity=1000)
    plan = plan_of(long_step(), replace(CONFIG, configurations=(TP2, TP4, wide, odd, small)))
    by_name = {alternative.name: alternative for alternative in plan.alternatives}
    assert {"as it stands", "rebalanced", "mixed", "tp2 spread", "tp4 spread", "tp16 spread"} <= by_name.keys()
    assert by_name["as it stands"].decision == by_name["tp2 spread"].decision == "keep"
    assert by_name["tp4 spread"].redeploy_cost_s == pytest.approx(TP4.switch_s)
    assert by_name["tp4 spread"].low_s <= by_name["tp4 spread"].total_s <= by_name["tp4 spread"].high_s
    assert by_name["tp16 spread"].infeasible_because == "an instance takes 16 GPUs; there are 8 in nodes of 8"
    assert "neither fits in a node" in by_name["tp12 spread"].infeasible_because
    assert "does not fit in a KV cache of 1000" in by_name["small spread"].infeasible_because


def test_without_a_feasible_configuration_the_fleet_is_kept() -> None:
    plan = plan_of(long_step(), replace(CONFIG, configurations=(configuration("tp16", 16),)))
    assert (plan.decision, plan.verdict.code) == ("keep", "infeasible")
    assert plan.proposed_configuration is None
    assert plan.verdict.detail == "no request is on an engine with a known configuration"
    held = snapshot(FLEET, [request("r0", where=None)])
    assert (
        "an instance takes 16 GPUs; there are 8 in nodes of 8"
        in plan_of(held, replace(CONFIG, configurations=(configuration("tp16", 16),))).verdict.detail
    )
    assert plan_of(long_step(), replace(CONFIG, configurations=())).verdict == Hold(
        "infeasible", "no configurations are given: set fleet.configurations or fleet.profile"
    )


def test_plan_keeps_the_fleet_if_no_other_configuration_is_known() -> None:
    config = replace(CONFIG, only_as_deployed=True)
    others = "no other configuration is known: add some to fleet.configurations or fleet.profile"
    plan = plan_of(long_step(), config)  # where TP4 would be proposed
    assert plan.decision == "keep"
    assert plan.verdict == Hold("already_deployed", f"4 x tp2 is deployed and {others}")
    assert {option.name for option in plan.alternatives} == {"as it stands", "rebalanced"}
    assert others in plan.notes
    assert plan.current_makespan_s is not None
    assert 0 < plan.lower_bound_s <= plan.current_makespan_s


def test_requests_may_move_if_no_other_configuration_is_known() -> None:
    plan = plan_of(lopsided_step(), replace(CROWDED, only_as_deployed=True))
    assert plan.decision == "rebalance"
    assert isinstance(plan.verdict, Act)


def test_plan_without_step_times_has_that_reason() -> None:
    why = "no step times for e0, e1: the engine runs on CPUs"
    plan = plan_of(long_step(), replace(CONFIG, configurations=(), only_as_deployed=True, unknown=why))
    assert plan.decision == "keep"
    assert plan.verdict == Hold("no_step_times", why)
    assert plan.lower_bound_s == 0
    idle = plan_of(snapshot(FLEET, []), replace(CONFIG, configurations=(), unknown=why))
    assert idle.verdict.code == "nothing_to_do"


def test_seconds_follow_each_engines_reported_capacity() -> None:
    requests = [request(f"r{i:02}", where="e0") for i in range(16)]
    roomy = snapshot(FLEET[:1], requests, [1000] * 20)
    tight = replace(roomy, engines=(replace(FLEET[0], max_sequences=4),))
    before_s, after_s = plan_of(roomy).current_makespan_s, plan_of(tight).current_makespan_s
    assert before_s is not None
    assert after_s is not None
    assert after_s > 3 * before_s  # four rounds instead of one


def test_lengths_of_earlier_steps_are_used_at_the_start() -> None:
    fresh = snapshot(FLEET, [request(f"r{i}", where=None) for i in range(32)])
    unknown = plan_of(fresh)
    known = plan_of(fresh, history=History(earlier_output_tokens=[300] * 64))
    assert known.forecast_method != unknown.forecast_method
    assert known.current_makespan_s is not None
    assert unknown.current_makespan_s is not None
    assert known.current_makespan_s < unknown.current_makespan_s / 4


def test_predicted_end_depends_on_the_assumed_lengths() -> None:
    """One request is long. The end of the step is known only if its length is; by the mean, no request is long."""
    view = snapshot(FLEET, [request(f"r{i:02}", where=f"e{i % 4}") for i in range(16)], [500] * 15 + [8000])
    lengths = {RequestId(f"r{i:02}"): 500 for i in range(16)} | {RequestId("r05"): 8000}
    told = History(known_output_tokens=lengths)

    def foreseen_s(knowledge: Knowledge) -> float:
        plan = plan_of(view, replace(CONFIG, knowledge=knowledge), history=told)
        assert plan.knowledge == knowledge
        assert plan.current_makespan_s is not None
        return plan.current_makespan_s

    alone_s = TP2.alpha_s * 8000
    assert foreseen_s(Knowledge.ORACLE) == pytest.approx(alone_s, rel=0.1)
    assert foreseen_s(Knowledge.MEAN) < alone_s / 4
    assert alone_s / 4 < foreseen_s(Knowledge.FORECAST) < alone_s * 1.1


def test_correction_scales_decoding_but_no_costs() -> None:
    plain, slow = plan_of(long_step()), plan_of(long_step(), history=History(correction=1.5))
    assert slow.correction == 1.5
    assert slow.current_makespan_s == pytest.approx(1.5 * (plain.current_makespan_s or 0))
    assert slow.proposed_makespan_s == pytest.approx(1.5 * (plain.proposed_makespan_s or 0))
    assert slow.redeploy_cost_s == pytest.approx(plain.redeploy_cost_s)


# --- unknown and forbidden


@pytest.mark.parametrize("fleet", [(engine("e0", None),), (engine("e0", "exotic"),), ()])
def test_an_unknown_fleet_is_no_baseline(fleet: tuple[EngineView, ...]) -> None:
    plan = plan_of(replace(long_step(), engines=fleet))
    assert plan.decision == "keep"
    assert plan.current_makespan_s is None
    assert plan.verdict.code == ("no_baseline" if fleet else "stale_telemetry")


def test_engines_of_an_unknown_configuration_are_excluded_with_their_requests() -> None:
    stranger = at(engine("x", "exotic"), 6, 7)
    view = snapshot((*FLEET[:3], stranger), [request(f"r{i}", 200, where=w) for i, w in enumerate("xx")], [8000] * 20)
    view = replace(view, requests=(*view.requests, request("r9", 200, where="e0")))
    plan = plan_of(view)
    assert plan.notes == ("engines with an unknown configuration are excluded, with 2 requests: x",)
    assert sum(instance.requests_count for instance in plan.instances) == 1
    assert not isinstance(plan.verdict, Act) or plan.decision != "reconfigure"  # its GPUs are not available


def test_mixed_fleet_is_evaluated_unchanged() -> None:
    mixed = (FLEET[0], FLEET[1], at(engine("e2", "tp4"), 4, 5, 6, 7))
    plan = plan_of(replace(long_step(), engines=mixed))
    assert plan.current_configuration is None
    assert plan.current_makespan_s is not None


def test_an_engine_that_is_gone_counts_neither_as_fleet_nor_as_stale() -> None:
    gone = engine("e9", "tp4", EngineHealth.GONE, age_s=500.0)
    assert plan_of(replace(long_step(), engines=(*FLEET, gone))).verdict.code == "gain"


def test_gpus_of_an_engine_that_is_gone_are_not_reused() -> None:
    gone = replace(FLEET[3], health=EngineHealth.GONE)
    plan = plan_of(replace(long_step(), engines=(*FLEET[:3], gone)))
    assert (plan.decision, plan.verdict.code) == ("reconfigure", "gpus_unavailable")
    assert "e3" in plan.verdict.detail


def test_gpus_are_inferred_only_if_unambiguous() -> None:
    silent = replace(FLEET[3], gpus=())
    assert plan_of(replace(long_step(), engines=(*FLEET[:3], silent))).verdict.code == "gain"
    two = tuple(replace(view, gpus=()) for view in FLEET[2:])
    plan = plan_of(replace(long_step(), engines=(*FLEET[:2], *two)))
    assert (plan.decision, plan.verdict.code) == ("reconfigure", "gpus_unknown")
    assert plan.verdict.detail.startswith("the GPUs of e2, e3 are unknown: set fleet.engines[].gpus; 2 x tp4")


@pytest.mark.parametrize(
    ("fleet", "gpus_count", "why"),
    [
        ((FLEET[0], replace(FLEET[1], gpus=FLEET[0].gpus)), 8, "two engines report the same GPU"),
        (
            tuple(replace(view, gpus=()) for view in FLEET),
            6,
            "the engines take more than the 6 configured GPUs",
        ),
        ((FLEET[0], replace(FLEET[1], gpus=(GpuId(2),))), 8, "the GPUs of e1 are unknown"),
    ],
)
def test_inconsistent_gpus_block_engine_changes(fleet: tuple[EngineView, ...], gpus_count: int, why: str) -> None:
    wide = replace(TP4, alpha_s=0.001)
    requests = [request(f"r{i}", 200, where=view.id) for i, view in enumerate(fleet)]
    plan = plan_of(
        snapshot(fleet, requests, [8000] * 20), replace(CONFIG, gpus_count=gpus_count, configurations=(TP2, wide))
    )
    assert (plan.decision, plan.verdict.code) == ("reconfigure", "gpus_unknown")
    assert plan.verdict.detail.startswith(why)
    assert plan.current_makespan_s is not None


def test_change_without_a_deployer_is_held_with_its_gain() -> None:
    plan = plan_of(long_step(), replace(CONFIG, can_deploy=False))
    assert (plan.decision, plan.verdict.code) == ("reconfigure", "no_deployer")
    assert "sooner" in plan.verdict.detail


@pytest.mark.parametrize(
    ("config", "control", "history", "code"),
    [
        (replace(CONFIG, can_deploy=False), FREE, NO_HISTORY, "no_deployer"),
        (CONFIG, PINNED, NO_HISTORY, "pinned"),
        (CONFIG, FREE, History(last_redeploy_s=990.0), "cooldown"),
    ],
)
def test_requests_move_and_the_forgone_change_is_reported_if_engines_must_stay(
    config: PlannerConfig, control: OperatorControl, history: History, code: str
) -> None:
    fast = replace(TP4, alpha_s=0.0005, beta_s=0.0001)
    slow = replace(TP2, alpha_s=0.001, beta_s=0.001)
    plan = plan_of(lopsided_step(), replace(config, configurations=(slow, fast)), control=control, history=history)
    assert (plan.decision, plan.verdict.code) == ("rebalance", "gain")
    assert plan.forgone is not None
    assert plan.forgone.code == code


def test_plan_with_stale_inputs_is_made_but_held() -> None:
    plan = plan_of(replace(long_step(), requests_age_s=9.2))
    assert plan.verdict.code == "stale_telemetry"
    assert (plan.decision, plan.proposed_configuration) == ("reconfigure", "tp4")


def test_unfinished_work_holds_the_plan() -> None:
    plan = plan_of(long_step(), history=History(underway=Hold("deployment_open", "engines are being changed")))
    assert plan.verdict == Hold("deployment_open", "engines are being changed")


def test_cooldown_counts_from_the_last_redeployment() -> None:
    assert plan_of(long_step(), history=History(last_redeploy_s=990.0)).verdict.code == "cooldown"


# --- the operator


def test_an_override_proposes_the_operators_configuration_even_at_a_loss() -> None:
    control = OperatorControl(ControlState.OVERRIDDEN, ConfigurationId("tp4"), "trial")
    nearly_done = snapshot(FLEET, [request("r0", 7900)], [8000] * 20)
    plan = plan_of(nearly_done, control=control)
    assert (plan.decision, plan.proposed_configuration, plan.verdict.code) == ("reconfigure", "tp4", "overridden")
    unknown = OperatorControl(ControlState.OVERRIDDEN, ConfigurationId("exotic"), "trial")
    assert plan_of(nearly_done, control=unknown).verdict.code == "infeasible"
    expired = replace(control, expires_s=999.0)
    assert plan_of(nearly_done, control=expired).verdict.code == "already_deployed"


def test_an_override_is_carried_out_while_no_requests_are_in_flight() -> None:
    control = OperatorControl(ControlState.OVERRIDDEN, ConfigurationId("tp4"), "trial")
    plan = plan_of(snapshot(FLEET), control=control)
    assert (plan.decision, plan.proposed_configuration, plan.proposed_instances) == ("reconfigure", "tp4", 2)
    assert plan.verdict == Act("overridden", "2 x tp4 instead of 4 x tp2 by the operator's override: trial")
    assert [instance.configuration for instance in plan.instances] == ["tp4", "tp4"]
    assert (plan.moves, plan.lower_bound_s) == ((), 0.0)
    done = plan_of(snapshot(FLEET), control=replace(control, configuration=ConfigurationId("tp2")))
    assert done.verdict == Hold("already_deployed", "4 x tp2 is deployed and the operator's override requires it")
    unknown = replace(control, configuration=ConfigurationId("exotic"))
    assert plan_of(snapshot(FLEET), control=unknown).verdict.code == "infeasible"


def test_an_override_to_what_is_deployed_changes_no_engine() -> None:
    control = OperatorControl(ControlState.OVERRIDDEN, ConfigurationId("tp2"), "trial")
    plan = plan_of(long_step(), control=control)
    assert (plan.decision, plan.proposed_configuration) == ("keep", "tp2")


def test_pin_keeps_the_deployment_and_reports_the_forgone_change() -> None:
    plan = plan_of(long_step(), control=PINNED)
    assert (plan.verdict.code, plan.proposed_configuration) == ("pinned", "tp4")


# --- invariants

REQUESTS = st.lists(
    st.builds(
        lambda generated, where, limit, movable: replace(
            request("", generated, where=where, limit=limit), movable=movable
        ),
        st.integers(0, 4000),
        st.sampled_from(["e0", "e1", "e2", "e3", None]),
        st.none() | st.integers(1, 5000),
        st.sampled_from([True, True, True, False]),
    ),
    max_size=24,
)
CHEAP = tuple(replace(c, switch_s=1.0, kv_capacity_tokens=12_000, max_sequences=4) for c in (TP2, TP4))


@given(REQUESTS, st.lists(st.integers(1, 5000), max_size=40), st.sampled_from([(TP2, TP4), CHEAP]))
def test_every_plan_satisfies_the_invariants(
    requests: list[RequestView], finished: list[int], configurations: tuple[Configuration, ...]
) -> None:
    named = [replace(view, id=RequestId(f"r{i:02}")) for i, view in enumerate(requests)]
    view = snapshot(FLEET, named, finished)
    config = replace(CONFIG, max_output_tokens=5000, configurations=configurations, scenarios=3)
    plan = plan_of(view, config)
    assert plan == plan_of(view, config)
    assert plan.remaining.total == pytest.approx(len(requests))
    assert isinstance(plan.verdict, Act) == (plan.decision != "keep")
    if not requests:
        return
    assert plan.proposed_total_s is not None
    assert plan.current_makespan_s is not None
    # No option is better than the bound, and no option with more changes is worth its cost.
    feasible = [option for option in plan.alternatives if not option.infeasible_because]
    assert plan.lower_bound_s <= min(option.total_s for option in feasible) + 1e-9
    assert plan.lower_bound_s <= plan.current_makespan_s + 1e-9
    if plan.decision == "keep":
        # A gain must be sure. Moves must gain a share of the time, and engine changes also the cost of changing back.
        least_s = {
            "keep": config.epsilon_s,
            "rebalance": max(config.epsilon_s, config.rebalance_share * plan.current_makespan_s),
            "reconfigure": config.epsilon_s + max(c.switch_s for c in configurations),
        }
        assert plan.verdict.code == "gain_unsure" or all(
            option.total_s >= plan.current_makespan_s - least_s[option.decision] - 1e-9 for option in feasible
        )
        return
    assert plan.proposed_total_s < plan.current_makespan_s - config.epsilon_s
    placed = sorted(r for instance in plan.instances for r in instance.requests)
    assert placed == [r.id for r in named]
    gpus = [gpu for instance in plan.instances for gpu in instance.gpus]
    assert len(gpus) == len(set(gpus))
    assert set(gpus) <= set(range(8))
    moved = {move.request for move in plan.moves}
    assert all(view.movable for view in named if view.id in moved)
    where = {r: instance.id for instance in plan.instances for r in instance.requests}
    for move in plan.moves:
        assert where[move.request] == move.destination != move.source
    for held in named:
        if held.engine is not None and held.id not in moved:
            assert where[held.id] == held.engine
    if plan.decision == "rebalance":
        assert all(instance.kept for instance in plan.instances)
        assert [instance.id for instance in plan.instances] == [EngineId(f"e{i}") for i in range(4)]


def test_invalid_planner_config_is_rejected() -> None:
    with pytest.raises(ValueError, match="configurations must have unique ids"):
        PlannerConfig((TP2, TP2), gpus_count=8)
    with pytest.raises(ValueError, match="gpus_count must be >= 1, got 0"):
        PlannerConfig((), gpus_count=0)
    with pytest.raises(ValueError, match="epsilon_s must be >= 0, got nan"):
        PlannerConfig((), gpus_count=1, epsilon_s=float("nan"))


def test_change_waits_if_fewer_requests_move_later() -> None:
    """76 of 80 requests are about to end, and a change now would recompute all of them."""
    tp8 = replace(TP4, id=ConfigurationId("tp8"), gpus=8, alpha_s=TP4.alpha_s / 2)
    requests = [request(f"r{i:02}", 12_000, where=f"e{i % 4}") for i in range(80)]
    known = {view.id: 12_150 if i % 20 else 20_000 for i, view in enumerate(requests)}
    history = History(known_output_tokens=known)
    config = replace(CONFIG, configurations=(TP2, tp8), knowledge=Knowledge.ORACLE)
    at_once = plan_of(snapshot(FLEET, requests), config, history=history)
    assert (at_once.decision, at_once.verdict.code) == ("reconfigure", "gain")
    waiting = plan_of(snapshot(FLEET, requests), replace(config, interval_s=10.0), history=history)
    assert waiting.forgone is not None
    assert waiting.forgone.code == "better_later"
    soon_over = [replace(view, generated_tokens=12_149) for i, view in enumerate(requests) if not i % 20]
    then = plan_of(snapshot(FLEET, soon_over), replace(config, interval_s=10.0), history=history)
    assert then.decision == "reconfigure"


# --- large problems


def test_solver_runs_once_for_many_requests_and_other_options_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The solver uses the estimate of the best family. The other families and small problems are not affected."""
    requests = [request(f"r{i:02}", 37 * i % 900, where=f"e{i % 2}") for i in range(60)]
    view = snapshot(FLEET, requests, [600, 900, 1500, 3000, 4000] * 4)
    asked: list[int] = []

    def counted(problem: MakespanProblem) -> Solution:
        asked.append(len(problem.configurations))
        return solve(problem)

    monkeypatch.setattr(planner.solver.options, "solve", counted)
    in_full = plan_of(view)
    assert asked == [2, 2, 2]
    monkeypatch.setattr(planner.solver.options, "SOLVED_BY_ALL", len(requests) - 1)
    once = plan_of(view)
    assert len(asked) == 4
    others = [option for option in in_full.alternatives if option.name != "mixed"]
    assert [option for option in once.alternatives if option.name != "mixed"] == others
    (mixed,) = (option for option in once.alternatives if option.name == "mixed")
    assert mixed.infeasible_because or mixed.total_s > 0


def test_solver_gets_only_efficient_configurations_for_many_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wasteful = replace(TP4, id=ConfigurationId("slow"), alpha_s=1.0, beta_s=0.01)
    offered: list[list[str]] = []

    def counted(problem: MakespanProblem) -> Solution:
        offered.append([kind.id for kind in problem.configurations])
        return solve(problem)

    monkeypatch.setattr(planner.solver.options, "solve", counted)
    monkeypatch.setattr(planner.solver.options, "SOLVED_BY_ALL", 0)
    plan = plan_of(lopsided_step(), replace(CONFIG, configurations=(TP2, wasteful)))
    assert offered == [["tp2"]]
    assert [option.name for option in plan.alternatives] == [
        "as it stands",
        "rebalanced",
        "tp2 spread",
        "slow spread",
        "mixed",
    ]
