"""Tests of plan admission: it acts exactly if the gain exceeds the cost on fresh inputs and mode and operator allow."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.admission import FREE, AdmissionLimits, ControlState, OperatorControl, PlanProposal, judge
from planner.model import Act, ConfigurationId, Hold, Mode

LIMITS = AdmissionLimits(epsilon_s=1.0, cooldown_s=60.0, stale_after_s=5.0)
GOOD = PlanProposal(
    now_s=1000.0,
    decision="reconfigure",
    current="4 x tp2",
    proposed="2 x tp4",
    current_makespan_s=100.0,
    makespan_s=60.0,
    cost_s=20.0,
    requests=8,
    inputs_age_s=0.5,
)
MOVES = replace(GOOD, decision="rebalance", proposed="4 x tp2", moves=7, cost_s=2.0)
PINNED = OperatorControl(ControlState.PINNED, reason="benchmark running")
OVERRIDE = OperatorControl(ControlState.OVERRIDDEN, ConfigurationId("tp4"), "trial", since_s=999.5)
NO_DEPLOYER = Hold("no_deployer", "no deployer can start engines")
OPEN = Hold("moves_open", "3 earlier operations have no result yet")

SECONDS = st.sampled_from([0.0, 0.5, 1.0, 5.0, 20.0, 60.0, 61.0, 100.0])


def test_good_proposal_is_acted_on_with_a_reason() -> None:
    assert judge(GOOD, LIMITS, Mode.ACT, FREE) == Act(
        "gain", "2 x tp4 instead of 4 x tp2 ends the step 20.0 s sooner, including 20 s for redeployment and moves"
    )
    assert judge(MOVES, LIMITS, Mode.ACT, FREE) == Act(
        "gain",
        "moving 7 requests between the current engines ends the step 38.0 s sooner, "
        "including 2 s for redeployment and moves",
    )


@pytest.mark.parametrize(
    ("change", "code", "detail"),
    [
        ({"requests": 0}, "nothing_to_do", "no requests are in flight"),
        ({"inputs_age_s": None}, "stale_telemetry", "an engine or a gateway has not reported yet"),
        ({"inputs_age_s": 9.24}, "stale_telemetry", "the oldest input is 9.2 s old, limit 5 s"),
        ({"underway": OPEN}, OPEN.code, OPEN.detail),
        ({"proposed": None}, "infeasible", "no configuration can serve the requests on these GPUs"),
        ({"proposed": None, "unknown": "tp4 was never timed"}, "no_step_times", "tp4 was never timed"),
        ({"decision": "keep"}, "already_deployed", "4 x tp2 is deployed and no other option is faster"),
        (
            {"current_makespan_s": None},
            "no_baseline",
            "the deployed configuration is unknown, so the gain cannot be calculated",
        ),
        (
            {"makespan_s": 79.5},
            "gain_too_small",
            "2 x tp4 instead of 4 x tp2 would end the step 0.5 s sooner, including costs; "
            "the gain must exceed 1 s (epsilon)",
        ),
        (
            {"makespan_s": 80.0},
            "gain_too_small",
            "2 x tp4 instead of 4 x tp2 would end the step 0.0 s sooner, including costs; "
            "the gain must exceed 1 s (epsilon)",
        ),
        (
            {"makespan_s": 95.0},
            "gain_too_small",
            "2 x tp4 instead of 4 x tp2 would end the step 15.0 s later, including costs; "
            "the gain must exceed 1 s (epsilon)",
        ),
        (
            {"sooner_in": (5, 8)},
            "gain_unsure",
            "2 x tp4 instead of 4 x tp2 would end the step 20.0 s sooner on average, "
            "but sooner in only 5 of 8 length samples; 6 are required",
        ),
        ({"last_redeploy_s": 970.0}, "cooldown", "the last redeployment was 30.0 s ago; the cooldown is 60 s"),
        (
            {"blocked": NO_DEPLOYER},
            "no_deployer",
            "no deployer can start engines; 2 x tp4 instead of 4 x tp2 ends the step 20.0 s sooner, "
            "including 20 s for redeployment and moves",
        ),
    ],
)
def test_each_reason_to_hold(change: dict[str, object], code: str, detail: str) -> None:
    assert judge(replace(GOOD, **change), LIMITS, Mode.ACT, FREE) == Hold(code, detail)  # type: ignore[arg-type]


def test_ages_and_shares_at_their_limit_pass_and_a_gain_of_epsilon_does_not() -> None:
    at_limits = replace(GOOD, inputs_age_s=5.0, last_redeploy_s=940.0, sooner_in=(6, 8))
    assert judge(at_limits, LIMITS, Mode.ACT, FREE).code == "gain"
    assert judge(replace(at_limits, makespan_s=79.0), LIMITS, Mode.ACT, FREE).code == "gain_too_small"


def test_moving_requests_leaves_the_deployment_alone() -> None:
    late = replace(MOVES, last_redeploy_s=999.0, blocked=NO_DEPLOYER)
    assert judge(late, LIMITS, Mode.ACT, PINNED).code == "gain"
    assert judge(replace(late, underway=OPEN), LIMITS, Mode.ACT, FREE) == OPEN


def test_advise_mode_holds_with_the_full_reason() -> None:
    held = judge(GOOD, LIMITS, Mode.ADVISE, FREE)
    assert isinstance(held, Hold)
    assert held.code == "advise_only"
    assert "2 x tp4 instead of 4 x tp2 ends the step 20.0 s sooner" in held.detail


def test_an_operators_pin_holds_until_it_expires() -> None:
    assert judge(GOOD, LIMITS, Mode.ACT, PINNED) == Hold("pinned", "pinned by the operator: benchmark running")
    assert judge(GOOD, LIMITS, Mode.ACT, replace(PINNED, expires_s=1000.1)).code == "pinned"
    assert judge(GOOD, LIMITS, Mode.ACT, replace(PINNED, expires_s=1000.0)).code == "gain"


def test_override_needs_no_gain_but_fresh_inputs_and_a_deployer() -> None:
    slower = replace(GOOD, makespan_s=500.0, last_redeploy_s=999.0)
    assert judge(slower, LIMITS, Mode.ACT, OVERRIDE) == Act(
        "overridden",
        "2 x tp4 instead of 4 x tp2 by the operator's override: trial; this ends the step 420.0 s later, including 20 s"
        " for redeployment and moves",
    )
    forced = Act("overridden", "2 x tp4 instead of 4 x tp2 by the operator's override: trial")
    assert judge(replace(slower, current_makespan_s=None), LIMITS, Mode.ACT, OVERRIDE) == forced
    assert judge(replace(slower, requests=0), LIMITS, Mode.ACT, OVERRIDE) == forced
    assert judge(replace(slower, inputs_age_s=6.0), LIMITS, Mode.ACT, OVERRIDE).code == "stale_telemetry"
    assert judge(replace(slower, blocked=NO_DEPLOYER), LIMITS, Mode.ACT, OVERRIDE).code == "no_deployer"
    assert judge(replace(slower, underway=OPEN), LIMITS, Mode.ACT, OVERRIDE).code == "moves_open"
    assert judge(slower, LIMITS, Mode.ADVISE, OVERRIDE).code == "advise_only"
    assert judge(replace(slower, decision="keep"), LIMITS, Mode.ACT, OVERRIDE).code == "already_deployed"


def test_override_whose_redeployment_failed_waits_for_the_cooldown() -> None:
    failed = replace(GOOD, last_redeploy_s=999.5, requests=0)
    held = judge(failed, LIMITS, Mode.ACT, OVERRIDE)
    assert held == Hold("cooldown", f"the last redeployment was 0.5 s ago; the cooldown is {LIMITS.cooldown_s:g} s")
    later = replace(failed, now_s=999.5 + LIMITS.cooldown_s)
    assert judge(later, LIMITS, Mode.ACT, OVERRIDE).code == "overridden"
    again = replace(OVERRIDE, since_s=999.6)
    assert judge(failed, LIMITS, Mode.ACT, again).code == "overridden"


def test_configuration_is_set_only_with_an_override() -> None:
    with pytest.raises(ValueError, match="must be set if and only if state is overridden"):
        OperatorControl(ControlState.PINNED, ConfigurationId("tp2"))
    with pytest.raises(ValueError, match="must be set if and only if state is overridden"):
        OperatorControl(ControlState.OVERRIDDEN)


PROPOSALS = st.builds(
    PlanProposal,
    now_s=st.just(1000.0),
    decision=st.sampled_from(["reconfigure", "rebalance", "keep"]),
    current=st.sampled_from(["", "4 x tp2"]),
    proposed=st.sampled_from([None, "2 x tp4"]),
    current_makespan_s=st.none() | SECONDS,
    makespan_s=SECONDS,
    cost_s=SECONDS,
    requests=st.integers(0, 2),
    inputs_age_s=st.none() | SECONDS,
    last_redeploy_s=st.none() | SECONDS.map(lambda ago_s: 1000.0 - ago_s),
    sooner_in=st.none() | st.sampled_from([(5, 8), (6, 8), (8, 8)]),
    underway=st.none() | st.none() | st.just(OPEN),
    blocked=st.none() | st.none() | st.just(NO_DEPLOYER),
)
CONTROLS = st.sampled_from([FREE, FREE, PINNED, OVERRIDE, replace(PINNED, expires_s=999.0)])


@given(PROPOSALS, st.sampled_from(list(Mode)), CONTROLS)
def test_judge_acts_exactly_when_all_conditions_hold(
    proposal: PlanProposal, mode: Mode, control: OperatorControl
) -> None:
    changes_engines = proposal.decision == "reconfigure"
    safe = (
        proposal.requests > 0
        and proposal.inputs_age_s is not None
        and proposal.inputs_age_s <= LIMITS.stale_after_s
        and proposal.underway is None
        and proposal.decision != "keep"
        and proposal.proposed is not None
        and not (changes_engines and (proposal.blocked is not None or control is PINNED))
    )
    pays = (
        proposal.current_makespan_s is not None
        and proposal.makespan_s is not None
        and proposal.makespan_s + proposal.cost_s < proposal.current_makespan_s - LIMITS.epsilon_s
        and (proposal.sooner_in is None or proposal.sooner_in[0] / proposal.sooner_in[1] >= 0.75)
        and not (
            changes_engines
            and proposal.last_redeploy_s is not None
            and proposal.now_s - proposal.last_redeploy_s < LIMITS.cooldown_s
        )
    )
    wanted = changes_engines and control is OVERRIDE
    assert isinstance(judge(proposal, LIMITS, mode, control), Act) == (mode is Mode.ACT and safe and (pays or wanted))


@given(PROPOSALS, CONTROLS)
def test_advice_differs_from_acting_only_in_being_held(proposal: PlanProposal, control: OperatorControl) -> None:
    acting, advising = (judge(proposal, LIMITS, mode, control) for mode in (Mode.ACT, Mode.ADVISE))
    assert isinstance(advising, Hold)
    if isinstance(acting, Act):
        assert advising == Hold("advise_only", f"mode is advise: {acting.detail}")
    else:
        assert advising == acting


@given(PROPOSALS, CONTROLS, st.sampled_from([0.5, 5.0, 50.0]))
def test_a_larger_gain_never_makes_it_hold(proposal: PlanProposal, control: OperatorControl, more_s: float) -> None:
    if proposal.current_makespan_s is None or not isinstance(judge(proposal, LIMITS, Mode.ACT, control), Act):
        return
    better = replace(proposal, current_makespan_s=proposal.current_makespan_s + more_s)
    assert isinstance(judge(better, LIMITS, Mode.ACT, control), Act)


def test_moves_must_gain_a_share_of_the_time_and_engines_the_return_cost() -> None:
    limits = replace(LIMITS, rebalance_share=0.4)
    held = judge(MOVES, limits, Mode.ACT, FREE)  # gains 38 s of 100
    assert held == Hold(
        "gain_too_small",
        "moving 7 requests between the current engines would end the step 38.0 s sooner, including costs; "
        "the gain must exceed 40 s (epsilon)",
    )
    assert judge(replace(GOOD, return_s=19.5), limits, Mode.ACT, FREE).code == "gain_too_small"  # gains 20 s
    assert judge(replace(GOOD, return_s=18.5), limits, Mode.ACT, FREE).code == "gain"


def test_change_that_is_better_later_waits_unless_overridden() -> None:
    later = replace(GOOD, later_gain_s=0.5, wait_s=30.0)
    held = Hold(
        "better_later",
        "2 x tp4 instead of 4 x tp2 would end the step 20.0 s sooner, and another 0.5 s sooner if "
        "the change is made 30 s later",
    )
    assert judge(later, LIMITS, Mode.ACT, FREE) == held
    assert judge(later, LIMITS, Mode.ACT, OVERRIDE).code == "overridden"
