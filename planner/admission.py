"""Decide whether to act on a proposal, and why. Has no side effects: time and operator control are arguments."""

from dataclasses import dataclass
from enum import StrEnum
from math import inf

from planner.model import Act, ConfigurationId, Hold, Mode, Verdict

# The share of length samples that must end sooner: a gain on average may come from a few unlikely samples.
SURE_SHARE = 0.75


class ControlState(StrEnum):
    """The operator's restriction on the planner."""

    FREE = "free"
    PINNED = "pinned"  # keep the deployment as it is
    OVERRIDDEN = "overridden"  # deploy `OperatorControl.configuration`, regardless of the planner's result


@dataclass(frozen=True, slots=True)
class OperatorControl:
    """The operator's pin or override. It is in force until it is released or `expires_s` is reached; None means that it
    does not expire."""

    state: ControlState = ControlState.FREE
    configuration: ConfigurationId | None = None
    reason: str = ""
    expires_s: float | None = None
    since_s: float = 0.0  # when the operator set it

    def __post_init__(self) -> None:
        if (self.state is ControlState.OVERRIDDEN) != (self.configuration is not None):
            raise ValueError(
                f"configuration must be set if and only if state is overridden, got {self.configuration} in state"
                f" {self.state}"
            )

    def at(self, now_s: float) -> "OperatorControl":
        """Return this control if it is still in force at `now_s`, and FREE if it has expired."""
        return self if self.expires_s is None or now_s < self.expires_s else FREE


FREE = OperatorControl()


@dataclass(frozen=True, slots=True)
class PlanProposal:
    """The inputs of plan admission: a proposed change, its costs, and the current state of the deployment."""

    now_s: float
    decision: str  # reconfigure: engines change; rebalance: only requests move; keep
    current: str  # description of the current fleet; empty: no fleet, or unknown
    proposed: str | None  # description of the proposed fleet; None: nothing is feasible
    current_makespan_s: float | None  # None: unknown, so that no gain can be shown
    makespan_s: float | None  # without the cost
    cost_s: float  # of redeployment and moves
    requests: int
    inputs_age_s: float | None  # of the oldest input; None: something was never reported
    last_redeploy_s: float | None = None
    moves: int = 0
    return_s: float = 0.0  # by which the next step may take longer if it begins with the proposed fleet
    wait_s: float = 0.0  # until the change can be proposed again
    later_gain_s: float = 0.0  # additional gain if the change waits for `wait_s`
    sooner_in: tuple[int, int] | None = None  # length samples in which the step ends sooner, and their total
    infeasible: str = "no configuration can serve the requests on these GPUs"  # reason if nothing is proposed
    unknown: str = ""  # reason if nothing is proposed because step times are unknown
    otherwise: str = "no other option is faster"  # reason for keeping the deployed fleet
    underway: Hold | None = None  # unfinished work of earlier plans or of the fast loop
    blocked: Hold | None = None  # why the deployment cannot be changed at present

    @property
    def gain_s(self) -> float | None:
        """The time, in seconds, by which the change ends the step sooner, minus the costs; None if either makespan is
        unknown."""
        if self.current_makespan_s is None or self.makespan_s is None:
            return None
        return self.current_makespan_s - self.makespan_s - self.cost_s

    @property
    def reconfigures(self) -> bool:
        return self.decision == "reconfigure"


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Limits for accepting a proposal: the minimum gain, the maximum age of the inputs, and the maximum frequency of
    changes."""

    epsilon_s: float
    cooldown_s: float
    stale_after_s: float
    rebalance_share: float = 0.0  # share of the time until the end that moving requests alone must gain

    def least_gain_s(self, decision: str, current_s: float) -> float:
        """Return the minimum gain, in seconds, that a change of kind `decision` must have. Without the change, the step
        would end after `current_s`."""
        return max(self.epsilon_s, self.rebalance_share * current_s) if decision == "rebalance" else self.epsilon_s


def judge(proposal: PlanProposal, limits: AdmissionLimits, mode: Mode, control: OperatorControl) -> Verdict:
    """Return Act if the new makespan plus costs is below the current makespan minus epsilon, the inputs are fresh, and
    cooldown, mode and operator control allow the change. Otherwise return Hold.

    Codes of Hold, in the order of the checks: nothing_to_do, stale_telemetry, the code of `underway`, pinned,
    no_step_times, infeasible, already_deployed, no_baseline, gain_too_small, gain_unsure, better_later, cooldown, the
    code of `blocked`, advise_only. Codes of Act: gain, overridden. The checks for pins, cooldown and `blocked` do not
    apply to a rebalance, because moving requests leaves the deployment unchanged. An override skips the check
    nothing_to_do and the checks of the gain, from no_baseline to better_later. The cooldown applies to it only after a
    redeployment that ended since the operator set it, so that a failed redeployment is not repeated at once. All other
    checks apply to it.
    """
    control = control.at(proposal.now_s)
    overridden = control.state is ControlState.OVERRIDDEN and proposal.reconfigures
    hold = _ruled_out(proposal, limits, control)
    if hold is None and overridden:
        hold = _too_soon(proposal, limits, control.since_s)
    elif hold is None:
        hold = too_weak(proposal, limits) or _too_soon(proposal, limits)
    if hold is None and proposal.reconfigures and proposal.blocked is not None:
        hold = Hold(proposal.blocked.code, f"{proposal.blocked.detail}; {_case(proposal, overridden, control)}")
    if hold is not None:
        return hold
    if mode is Mode.ADVISE:
        return Hold("advise_only", f"mode is advise: {_case(proposal, overridden, control)}")
    return Act("overridden" if overridden else "gain", _case(proposal, overridden, control))


def _ruled_out(proposal: PlanProposal, limits: AdmissionLimits, control: OperatorControl) -> Hold | None:
    if not proposal.requests and control.state is not ControlState.OVERRIDDEN:
        return Hold("nothing_to_do", "no requests are in flight")
    if proposal.inputs_age_s is None:
        return Hold("stale_telemetry", "an engine or a gateway has not reported yet")
    if proposal.inputs_age_s > limits.stale_after_s:
        return Hold(
            "stale_telemetry",
            f"the oldest input is {proposal.inputs_age_s:.1f} s old, limit {limits.stale_after_s:g} s",
        )
    if proposal.underway is not None:
        return proposal.underway
    if control.state is ControlState.PINNED and proposal.decision != "rebalance":
        return Hold("pinned", f"pinned by the operator{_because(control)}")
    if proposal.proposed is None and proposal.unknown:
        return Hold("no_step_times", proposal.unknown)
    if proposal.proposed is None:
        return Hold("infeasible", proposal.infeasible)
    if proposal.decision == "keep":
        return Hold("already_deployed", f"{proposal.current or 'no fleet'} is deployed and {proposal.otherwise}")
    return None


def too_weak(proposal: PlanProposal, limits: AdmissionLimits) -> Hold | None:
    """Return the reason why the proposal's gain does not justify the change, or None if it does."""
    gain_s = proposal.gain_s
    if gain_s is None:
        return Hold("no_baseline", "the deployed configuration is unknown, so the gain cannot be calculated")
    assert proposal.current_makespan_s is not None, "gain_s is known"
    least_s = limits.least_gain_s(proposal.decision, proposal.current_makespan_s) + proposal.return_s
    if not gain_s > least_s:
        back = f" and {proposal.return_s:.2g} s for changing back" if proposal.return_s else ""
        return Hold(
            "gain_too_small",
            f"{_change(proposal)} would end the step {_sooner(gain_s)}, including costs; "
            f"the gain must exceed {least_s:.3g} s (epsilon{back})",
        )
    if proposal.sooner_in is not None and proposal.sooner_in[0] < SURE_SHARE * proposal.sooner_in[1]:
        sooner, samples = proposal.sooner_in
        return Hold(
            "gain_unsure",
            f"{_change(proposal)} would end the step {_sooner(gain_s)} on average, "
            f"but sooner in only {sooner} of {samples} length samples; {SURE_SHARE * samples:g} are required",
        )
    if proposal.later_gain_s > 0:
        return Hold(
            "better_later",
            f"{_change(proposal)} would end the step {_sooner(gain_s)}, "
            f"and another {proposal.later_gain_s:.1f} s sooner if the change is made {proposal.wait_s:g} s later",
        )
    return None


def _too_soon(proposal: PlanProposal, limits: AdmissionLimits, counts_from_s: float = -inf) -> Hold | None:
    """Return a Hold within the cooldown of the last redeployment, unless that ended before `counts_from_s`."""
    last_s = proposal.last_redeploy_s
    since_s = None if last_s is None or last_s < counts_from_s else proposal.now_s - last_s
    if proposal.reconfigures and since_s is not None and since_s < limits.cooldown_s:
        return Hold(
            "cooldown", f"the last redeployment was {since_s:.1f} s ago; the cooldown is {limits.cooldown_s:g} s"
        )
    return None


def _case(proposal: PlanProposal, overridden: bool, control: OperatorControl) -> str:
    gain = "sooner" if proposal.gain_s is None else _sooner(proposal.gain_s)
    ends = f"ends the step {gain}, including {proposal.cost_s:.3g} s for redeployment and moves"
    if not overridden:
        return f"{_change(proposal)} {ends}"
    forced = f"{_change(proposal)} by the operator's override{_because(control)}"
    return f"{forced}; this {ends}" if proposal.requests and proposal.gain_s is not None else forced


def _change(proposal: PlanProposal) -> str:
    if proposal.reconfigures:
        return f"{proposal.proposed} instead of {proposal.current or 'the running engines'}"
    return f"moving {proposal.moves} requests between the current engines"


def _sooner(gain_s: float) -> str:
    return f"{gain_s:.1f} s sooner" if gain_s >= 0 else f"{-gain_s:.1f} s later"


def _because(control: OperatorControl) -> str:
    return f": {control.reason}" if control.reason else ""
