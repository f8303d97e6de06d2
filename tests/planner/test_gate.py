"""The gate: acts exactly when the gain pays for the switch, on fresh inputs, as mode and operator allow."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.gate import FREE, Control, ControlState, Limits, Proposal, judge
from planner.model import Act, ConfigurationId, Hold, Mode

TP2, TP4 = ConfigurationId("tp2"), ConfigurationId("tp4")
LIMITS = Limits(epsilon_s=1.0, cooldown_s=60.0, stale_after_s=5.0)
GOOD = Proposal(
    now_s=1000.0,
    current=TP2,
    proposed=TP4,
    current_makespan_s=100.0,
    makespan_s=60.0,
    switch_cost_s=20.0,
    requests=8,
    inputs_age_s=0.5,
    last_switch_s=None,
)
PINNED = Control(ControlState.PINNED, reason="benchmark running")
OVERRIDE = Control(ControlState.OVERRIDDEN, TP4, "trial")

SECONDS = st.sampled_from([0.0, 0.5, 1.0, 5.0, 20.0, 60.0, 61.0, 100.0])


def test_a_good_proposal_is_acted_on_and_says_why() -> None:
    assert judge(GOOD, LIMITS, Mode.ACT, FREE) == Act(
        "gain", "tp4 instead of tp2 ends the step 20.0 s sooner, 20 s of switching paid for"
    )


@pytest.mark.parametrize(
    ("change", "code", "detail"),
    [
        ({"requests": 0}, "nothing_to_do", "no requests are in flight"),
        ({"inputs_age_s": None}, "stale_telemetry", "an engine or a gateway has not reported yet"),
        ({"inputs_age_s": 9.24}, "stale_telemetry", "the oldest input is 9.2 s old, limit 5 s"),
        ({"proposed": None}, "infeasible", "no configuration can serve the requests on these GPUs"),
        ({"proposed": TP2}, "already_deployed", "tp2 is deployed and nothing considered is faster"),
        ({"current_makespan_s": None}, "no_baseline", "the deployed configuration is unknown, so no gain can be shown"),
        (
            {"makespan_s": 79.5},
            "gain_too_small",
            "tp4 would end the step 0.5 s sooner, the switch paid for; epsilon is 1 s",
        ),
        (
            {"makespan_s": 95.0},
            "gain_too_small",
            "tp4 would end the step 15.0 s later, the switch paid for; epsilon is 1 s",
        ),
        ({"last_switch_s": 970.0}, "cooldown", "the last switch was 30.0 s ago, cooldown is 60 s"),
    ],
)
def test_each_reason_to_hold(change: dict[str, object], code: str, detail: str) -> None:
    assert judge(replace(GOOD, **change), LIMITS, Mode.ACT, FREE) == Hold(code, detail)  # type: ignore[arg-type]


def test_in_advise_mode_the_case_is_made_and_nothing_is_done() -> None:
    held = judge(GOOD, LIMITS, Mode.ADVISE, FREE)
    assert isinstance(held, Hold)
    assert held.code == "advise_only"
    assert "tp4 instead of tp2 ends the step 20.0 s sooner" in held.detail


def test_an_operators_pin_holds_until_it_expires() -> None:
    assert judge(GOOD, LIMITS, Mode.ACT, PINNED) == Hold("pinned", "pinned by the operator: benchmark running")
    assert judge(GOOD, LIMITS, Mode.ACT, replace(PINNED, expires_s=1000.1)).code == "pinned"
    assert judge(GOOD, LIMITS, Mode.ACT, replace(PINNED, expires_s=1000.0)).code == "gain"


def test_an_override_needs_no_gain_but_fresh_inputs() -> None:
    slower = replace(GOOD, makespan_s=500.0, last_switch_s=999.0)
    assert judge(slower, LIMITS, Mode.ACT, OVERRIDE) == Act(
        "overridden", "tp4 instead of tp2 by the operator's override: trial"
    )
    assert judge(replace(slower, current_makespan_s=None), LIMITS, Mode.ACT, OVERRIDE).code == "overridden"
    assert judge(replace(slower, inputs_age_s=6.0), LIMITS, Mode.ACT, OVERRIDE).code == "stale_telemetry"
    assert judge(slower, LIMITS, Mode.ADVISE, OVERRIDE).code == "advise_only"
    assert judge(replace(slower, proposed=TP2), LIMITS, Mode.ACT, OVERRIDE).code == "already_deployed"


def test_a_configuration_belongs_to_an_override_only() -> None:
    with pytest.raises(ValueError, match="a configuration belongs to an override"):
        Control(ControlState.PINNED, TP2)
    with pytest.raises(ValueError, match="a configuration belongs to an override"):
        Control(ControlState.OVERRIDDEN)


@settings(max_examples=500)
@given(
    st.builds(
        Proposal,
        now_s=st.just(1000.0),
        current=st.sampled_from([None, TP2, TP4]),
        proposed=st.sampled_from([None, TP2, TP4]),
        current_makespan_s=st.none() | SECONDS,
        makespan_s=SECONDS,
        switch_cost_s=SECONDS,
        requests=st.integers(0, 2),
        inputs_age_s=st.none() | SECONDS,
        last_switch_s=st.none() | SECONDS.map(lambda ago_s: 1000.0 - ago_s),
    ),
    st.sampled_from(list(Mode)),
)
def test_it_acts_exactly_when_all_is_well(proposal: Proposal, mode: Mode) -> None:
    well = (
        mode is Mode.ACT
        and proposal.requests > 0
        and proposal.inputs_age_s is not None
        and proposal.inputs_age_s <= LIMITS.stale_after_s
        and proposal.proposed not in (None, proposal.current)
        and proposal.current_makespan_s is not None
        and proposal.makespan_s is not None
        and proposal.makespan_s + proposal.switch_cost_s < proposal.current_makespan_s - LIMITS.epsilon_s
        and (proposal.last_switch_s is None or proposal.now_s - proposal.last_switch_s >= LIMITS.cooldown_s)
    )
    assert isinstance(judge(proposal, LIMITS, mode, FREE), Act) == well
