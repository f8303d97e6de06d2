"""Communication periods as they are carried out: what became of each, stage by stage, and why. Values only."""

from dataclasses import dataclass, field
from enum import StrEnum

from pydantic import TypeAdapter

from planner.fabric.intent import Stage
from planner.fabric.windows import SwitchTimes


class PeriodState(StrEnum):
    ANNOUNCED = "announced"
    MATERIALISED = "materialised"  # there is a plan of its circuits
    WAITING = "waiting"  # for a window
    COMMITTING = "committing"
    COMMITTED = "committed"  # all its circuits are up, or were
    KEPT = "kept"  # nothing, or not all, was changed: what was up before carries it
    SUPERSEDED = "superseded"  # the next one was announced before its turn came
    FAILED = "failed"  # a switch or a router did not do as it was told


OVER = frozenset({PeriodState.COMMITTED, PeriodState.KEPT, PeriodState.SUPERSEDED, PeriodState.FAILED})


@dataclass(frozen=True, slots=True)
class CommitReport:
    """One stage of a transition. Times are seconds since the Unix epoch; `window_*` None: it needed no window."""

    window_opened_s: float | None
    window_until_s: float | None
    needed_s: float
    commanded_s: float  # when the orders were given
    usable_s: float  # when all was in place, verified and routed
    moves: int  # cross-connects that came down or went up
    done: bool
    detail: str = ""
    switch_times: tuple[SwitchTimes, ...] = ()
    risk: float = 0.0  # at most, that the window was to be broken by some rank; of many ranks more than was asked for


@dataclass(frozen=True, slots=True)
class PeriodReport:
    """`code` is stable, `detail` is for people.

    | state | codes |
    |---|---|
    | committed | committed, was_so (its circuits were up already) |
    | superseded | superseded |
    | kept, before anything is planned | overridden, nobody_placed, infeasible |
    | kept, by a word | advise, operator_paused, pinned, withdrawn (by who announced it), stopped (the daemon) |
    | kept, for want of a chance | no_boundary, no_window; `detail` names the last reason, e.g. window_too_short |
    | kept, several times over | overtaken (by other changes), switch_refused, not_drained, window_passed (draining) |
    | failed | switch_failed, not_recorded (the journal), internal |

    With `stages_done`, or `commits` that are not done, a period that is kept or failed has changed something.
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
    """An operator's word on circuits. PINNED with no cross-connects: all stay."""

    state: OverrideState = OverrideState.FREE
    cross_connects: tuple[str, ...] = ()
    period: str = ""
    reason: str = ""
    expires_s: float | None = None
    job: str = ""  # whose period

    def at(self, now_s: float) -> "FabricControl":
        expired = self.expires_s is not None and self.expires_s <= now_s
        return FabricControl(reason="expired") if expired else self
