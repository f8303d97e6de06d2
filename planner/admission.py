"""Whether to act on a proposal, and why or why not. Pure: time and the operator's will are arguments."""

from dataclasses import dataclass
from enum import StrEnum

from planner.model import Act, ConfigurationId, Hold, Mode, Verdict

# Of the samples of the lengths, so many must end sooner: a gain in the mean may come from a few unlikely ones.
SURE_SHARE = 0.75


class ControlState(StrEnum):
    """How far an operator has bound the planner."""

    FREE = "free"
    PINNED = "pinned"  # keep the deployment as it is
    OVERRIDDEN = "overridden"  # deploy `OperatorControl.configuration`, whatever the planner finds


@dataclass(frozen=True, slots=True)
class OperatorControl:
    """The operator's word, in force until released or until `expires_s` (None: no end)."""

    state: ControlState = ControlState.FREE
    configuration: ConfigurationId | None = None
    reason: str = ""
    expires_s: float | None = None

    def __post_init__(self) -> None:
        if (self.state is ControlState.OVERRIDDEN) != (self.configuration is not None):
            raise ValueError(f"a configuration belongs to an override and to nothing else, got {self.configuration}")

    def at(self, now_s: float) -> "OperatorControl":
        """What is in force at `now_s`: an expired word is none."""
        return self if self.expires_s is None or now_s < self.expires_s else FREE


FREE = OperatorControl()


@dataclass(frozen=True, slots=True)
class PlanProposal:
    """What plan admission looks at."""

    now_s: float
    decision: str  # reconfigure: engines change; rebalance: only requests move; keep
    current: str  # the fleet as it is, in words; empty: none, or one that is not known
    proposed: str | None  # the fleet that is wanted, in words; None: nothing feasible
    current_makespan_s: float | None  # None: unknown, so that no gain can be shown
    makespan_s: float | None  # without the cost
    cost_s: float  # switching and moving
    requests: int
    inputs_age_s: float | None  # of the oldest input; None: something was never reported
    last_redeploy_s: float | None = None
    moves: int = 0
    return_s: float = 0.0  # that the next step may take longer for beginning with what is proposed
    wait_s: float = 0.0  # until it can be proposed again
    later_gain_s: float = 0.0  # by which the step ends sooner if this is done only then
    sooner_in: tuple[int, int] | None = None  # samples of the lengths in which it ends sooner, and of how many
    infeasible: str = "no configuration can serve the requests on these GPUs"  # why nothing is proposed, if nothing is
    unknown: str = ""  # the same, where step times are not known
    otherwise: str = "nothing considered is faster"  # why nothing else than what is deployed
    underway: Hold | None = None  # what earlier plans or the fast loop have not ended yet
    blocked: Hold | None = None  # why the deployment could not be changed, whoever wanted it

    @property
    def gain_s(self) -> float | None:
        """Seconds by which the step ends sooner, the cost paid for."""
        if self.current_makespan_s is None or self.makespan_s is None:
            return None
        return self.current_makespan_s - self.makespan_s - self.cost_s

    @property
    def reconfigures(self) -> bool:
        return self.decision == "reconfigure"


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """When a proposal is too weak, too old or too soon."""

    epsilon_s: float
    cooldown_s: float
    stale_after_s: float
    rebalance_share: float = 0.0  # of the time until the end, that moving requests alone must gain

    def least_gain_s(self, decision: str, current_s: float) -> float:
        """What a change must gain, at least, where all would end after `current_s` without it."""
        return max(self.epsilon_s, self.rebalance_share * current_s) if decision == "rebalance" else self.epsilon_s


def judge(proposal: PlanProposal, limits: AdmissionLimits, mode: Mode, control: OperatorControl) -> Verdict:
    """Act only when new + cost < current - epsilon, on fresh inputs, outside cooldown, as mode and operator allow.

    Codes, in the order in which they are looked for: nothing_to_do, stale_telemetry, what is underway, pinned,
    no_step_times, infeasible, already_deployed, no_baseline, gain_too_small, gain_unsure, better_later, cooldown, what
    blocks a change of the deployment, advise_only; to act: gain, overridden. Only a reconfiguration is pinned, cooled
    down or blocked: moving requests leaves the deployment as it is. An override skips what weighs gain (no_baseline to
    cooldown), never what protects the fleet.
    """
    control = control.at(proposal.now_s)
    overridden = control.state is ControlState.OVERRIDDEN and proposal.reconfigures
    hold = _ruled_out(proposal, limits, control)
    if hold is None and not overridden:
        hold = too_weak(proposal, limits) or _too_soon(proposal, limits)
    if hold is None and proposal.reconfigures and proposal.blocked is not None:
        hold = Hold(proposal.blocked.code, f"{proposal.blocked.detail}; {_case(proposal, overridden, control)}")
    if hold is not None:
        return hold
    if mode is Mode.ADVISE:
        return Hold("advise_only", f"mode is advise: {_case(proposal, overridden, control)}")
    return Act("overridden" if overridden else "gain", _case(proposal, overridden, control))


def _ruled_out(proposal: PlanProposal, limits: AdmissionLimits, control: OperatorControl) -> Hold | None:
    if not proposal.requests:
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
    """Why it is not worth it, whoever may do it and whenever."""
    gain_s = proposal.gain_s
    if gain_s is None:
        return Hold("no_baseline", "the deployed configuration is unknown, so no gain can be shown")
    assert proposal.current_makespan_s is not None, "there is a gain over it"
    least_s = limits.least_gain_s(proposal.decision, proposal.current_makespan_s) + proposal.return_s
    if not gain_s > least_s:
        back = f", {proposal.return_s:.2g} s of it for going back" if proposal.return_s else ""
        return Hold(
            "gain_too_small",
            f"{_change(proposal)} would end the step {_sooner(gain_s)}, its cost paid for; "
            f"epsilon is {least_s:.3g} s{back}",
        )
    if proposal.sooner_in is not None and proposal.sooner_in[0] < SURE_SHARE * proposal.sooner_in[1]:
        sooner, samples = proposal.sooner_in
        return Hold(
            "gain_unsure",
            f"{_change(proposal)} would end the step {_sooner(gain_s)} in the mean, "
            f"and sooner in {sooner} of {samples} samples of the lengths; {SURE_SHARE * samples:g} are wanted",
        )
    if proposal.later_gain_s > 0:
        return Hold(
            "better_later",
            f"{_change(proposal)} would end the step {_sooner(gain_s)}, "
            f"and another {proposal.later_gain_s:.1f} s sooner if done in {proposal.wait_s:g} s",
        )
    return None


def _too_soon(proposal: PlanProposal, limits: AdmissionLimits) -> Hold | None:
    since_s = None if proposal.last_redeploy_s is None else proposal.now_s - proposal.last_redeploy_s
    if proposal.reconfigures and since_s is not None and since_s < limits.cooldown_s:
        return Hold("cooldown", f"the last switch was {since_s:.1f} s ago, cooldown is {limits.cooldown_s:g} s")
    return None


def _case(proposal: PlanProposal, overridden: bool, control: OperatorControl) -> str:
    if overridden:
        return f"{_change(proposal)} by the operator's override{_because(control)}"
    gain = "sooner" if proposal.gain_s is None else _sooner(proposal.gain_s)
    return f"{_change(proposal)} ends the step {gain}, {proposal.cost_s:.3g} s of switching and moving paid for"


def _change(proposal: PlanProposal) -> str:
    if proposal.reconfigures:
        return f"{proposal.proposed} instead of {proposal.current or 'what runs'}"
    return f"moving {proposal.moves} requests between the engines as they are"


def _sooner(gain_s: float) -> str:
    return f"{gain_s:.1f} s sooner" if gain_s >= 0 else f"{-gain_s:.1f} s later"


def _because(control: OperatorControl) -> str:
    return f": {control.reason}" if control.reason else ""
