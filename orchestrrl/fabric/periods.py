"""Data types that describe communication periods: their states, the commits of their stages, and operators'
constraints."""

from dataclasses import dataclass, field
from enum import StrEnum

from pydantic import TypeAdapter

from planner.fabric.intent import Stage
from planner.fabric.windows import SwitchTimes


class PeriodState(StrEnum):
    ANNOUNCED = "announced"
    MATERIALISED = "materialised"  # its circuits have been planned
    WAITING = "waiting"  # for a window
    COMMITTING = "committing"
    COMMITTED = "committed"  # all its circuits are up, or were
    KEPT = "kept"  # nothing, or not everything, was changed; the earlier circuits carry it
    SUPERSEDED = "superseded"  # a newer period was announced before its turn
    FAILED = "failed"  # a switch or a router did not carry out an order


OVER = frozenset({PeriodState.COMMITTED, PeriodState.KEPT, PeriodState.SUPERSEDED, PeriodState.FAILED})


@dataclass(frozen=True, slots=True)
class CommitReport:
    """A report on the commit of one stage of a transition. `needed_s` is the predicted duration of the commit in
    seconds. The other times are seconds since the Unix epoch. The fields that begin with `window_` are None if no
    window was needed."""

    window_opened_s: float | None
    window_until_s: float | None
    needed_s: float
    commanded_s: float  # when the commands were sent
    usable_s: float  # when all circuits were in place, verified and routed
    moves: int  # cross-connects that came down or went up
    done: bool
    detail: str = ""
    switch_times: tuple[SwitchTimes, ...] = ()
    # upper bound on the probability that some rank breaks the window; with many ranks, more than configured
    risk: float = 0.0


@dataclass(frozen=True, slots=True)
class PeriodReport:
    """The state of one period. `code` is a stable identifier of the reason for the state, and `detail` is a text for
    operators. `completion_s` is the planned time, in seconds, to carry the period's traffic.

    | state | codes |
    |---|---|
    | committed | committed, was_so (its circuits were up already) |
    | superseded | superseded |
    | kept, before planning | overridden, nobody_placed, infeasible |
    | kept, on request | advise, operator_paused, pinned, withdrawn (by its caller), stopped (the daemon) |
    | kept, no opportunity | no_boundary, no_window; `detail` names the last reason, e.g. window_too_short |
    | kept, after retries | overtaken (by other changes), switch_refused, not_drained, window_passed (while draining) |
    | failed | switch_failed, not_recorded (the journal), internal |

    A kept or failed period may have changed circuits if `stages_done` > 0 or some of its `commits` are not done.
    """

    id: str
    period: str
    stage: Stage
    state: PeriodState
    announced_s: float
    code: str = ""
    detail: str = ""
    ended_s: float | None = None
    stages: int = 0
    stages_done: int = 0
    moves: int = 0
    completion_s: float = 0.0
    notes: tuple[str, ...] = ()
    commits: tuple[CommitReport, ...] = field(default=())
    job: str = ""

    @property
    def over(self) -> bool:
        return self.state in OVER


PERIOD = TypeAdapter(PeriodReport)


class OverrideState(StrEnum):
    FREE = "free"
    PINNED = "pinned"
    OVERRIDDEN = "overridden"


@dataclass(frozen=True, slots=True)
class FabricControl:
    """An operator's constraint on circuits. If `state` is PINNED and `cross_connects` is empty, all circuits are
    pinned."""

    state: OverrideState = OverrideState.FREE
    cross_connects: tuple[str, ...] = ()
    period: str = ""
    reason: str = ""
    expires_s: float | None = None
    job: str = ""  # the job of `period`

    def at(self, now_s: float) -> "FabricControl":
        expired = self.expires_s is not None and self.expires_s <= now_s
        return FabricControl(reason="expired") if expired else self
