"""Profile a weight sync: the time of each phase, the critical path, and the ratios of the transfer time to the plan's
estimate and to the lower bound on this time.

The functions have no side effects. advice.py derives advice from a profile.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrrl.weights.controller.reports import TRANSFER, PhaseTime, SyncPhase, SyncReport, SyncState

PHASE_WORDS: Mapping[SyncPhase, str] = {
    **{phase: phase.replace("_", " ") for phase in SyncPhase},
    SyncPhase.OFFLOAD: "trainer offload",
    SyncPhase.WINDOW: "wait for window",
    SyncPhase.PHASE_A: "phase A",
    SyncPhase.PHASE_B: "phase B",
    SyncPhase.NEXT_PAUSE: "wait for barrier",
}
# Phases that delay neither requests nor the trainer.
BESIDE = frozenset({SyncPhase.NEXT_PAUSE, SyncPhase.TEAR_DOWN})
# Requests are paused from the start of the first of these phases to the end of the last.
STILL = (SyncPhase.FENCE, SyncPhase.INSTALL, SyncPhase.VERIFY, SyncPhase.COMMIT, SyncPhase.RESUME)
AFTER_TRANSFER = frozenset({SyncPhase.CHECK, SyncPhase.NEXT_PAUSE, *STILL})
BEFORE_PREPARED = frozenset({SyncState.PUBLISHING, SyncState.PLANNING, SyncState.CARRYING})
LEAST_MODELLED_S = 0.01  # below this, process overhead dominates the transfer time


@dataclass(frozen=True, slots=True)
class PhaseStretch:
    """A segment of the critical path. `phase` is None for time outside any phase."""

    phase: SyncPhase | None
    began_s: float
    ended_s: float

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """The time of one phase. `seconds` is the total over all attempts. `waited_s` is the part on the critical path, and
    `share` is this part as a fraction of the sync's total time."""

    phase: SyncPhase
    seconds: float
    waited_s: float
    share: float


@dataclass(frozen=True, slots=True)
class SyncProfile:
    """The times of one sync. `whole_s` is the time from the start of the trainer's offload until requests run with the
    new version. It excludes phases that delay neither requests nor the trainer."""

    report: SyncReport
    path: tuple[PhaseStretch, ...]
    rows: tuple[PhaseRow, ...]  # in order of phases; phases that did not happen are left out
    whole_s: float
    unnamed_s: float  # part of `whole_s` outside any phase
    transfer_s: float  # part of `whole_s` in phases A and B
    still_s: float  # time during which requests were paused

    @property
    def dominating(self) -> SyncPhase | None:
        """Return the phase with the largest time on the critical path, or None if the path has no phases. Phases that
        delay neither requests nor the trainer are ignored."""
        waited = [row for row in self.rows if row.phase not in BESIDE and row.waited_s > 0]
        return max(waited, key=lambda row: row.waited_s).phase if waited else None

    @property
    def transfer_share(self) -> float:
        return self.transfer_s / self.whole_s if self.whole_s > 0 else 0.0

    @property
    def carried_gbps(self) -> float | None:
        """Return the total rate of all edges during the transfer in Gbit/s, or None if there was no transfer."""
        return self.report.carried_bytes * 8e-9 / self.transfer_s if self.transfer_s > 0 else None

    @property
    def over_estimate(self) -> float | None:
        """Return the transfer time divided by the plan's estimate. Return None if there is no plan, if the transfer was
        incomplete, or if the estimate is below LEAST_MODELLED_S."""
        return self._against(self.report.estimate_s)

    @property
    def over_bound(self) -> float | None:
        return self._against(self.report.lower_bound_s)

    def _against(self, modelled_s: float) -> float | None:
        return self.transfer_s / modelled_s if self.is_carried and modelled_s >= LEAST_MODELLED_S else None

    @property
    def is_carried(self) -> bool:
        """Return whether every engine's peer received every byte. For an aborted or superseded sync, return whether it
        reached a phase after the transfer."""
        if self.transfer_s <= 0:
            return False
        if self.report.state in (SyncState.ABORTED, SyncState.SUPERSEDED):
            went = [took.phase for took in self.report.phases if took.phase is not SyncPhase.TEAR_DOWN]
            return went[-1] in AFTER_TRANSFER
        return self.report.state not in BEFORE_PREPARED

    def seconds(self, *phases: SyncPhase) -> float:
        """Return the total time of these phases on the critical path, in seconds."""
        return sum(row.waited_s for row in self.rows if row.phase in phases)


def profile(report: SyncReport, now_s: float | None = None) -> SyncProfile:
    """Return the profile of a report. An open phase is measured until `now_s` or, if `now_s` is None, until the latest
    time in the report."""
    end_s = _end_s(report, now_s)
    path = critical_path(report.phases, end_s)
    waited: defaultdict[SyncPhase | None, float] = defaultdict(float)
    for stretch in path:
        waited[stretch.phase] += stretch.seconds
    ran: defaultdict[SyncPhase, float] = defaultdict(float)
    for took in report.phases:
        ran[took.phase] += max(0.0, _until_s(took, end_s) - took.began_s)
    whole_s = sum(seconds for phase, seconds in waited.items() if phase not in BESIDE)
    rows = tuple(
        PhaseRow(
            phase, ran[phase], waited[phase], waited[phase] / whole_s if whole_s > 0 and phase not in BESIDE else 0.0
        )
        for phase in SyncPhase
        if phase in ran
    )
    transfer_s, still_s = (sum(waited[phase] for phase in phases) for phases in (TRANSFER, STILL))
    return SyncProfile(report, path, rows, whole_s, waited[None], transfer_s, still_s)


def critical_path(phases: Sequence[PhaseTime], end_s: float) -> tuple[PhaseStretch, ...]:
    """Return the segments of the critical path from the start of the first phase to `end_s`. The path is built
    backwards from `end_s`. Each step adds the phase that ended last before the time reached so far, and continues at
    the start of that phase. Of phases that ended at the same time, the phase that began last is taken."""
    runs = [(took.phase, took.began_s, _until_s(took, end_s)) for took in phases]
    runs = [run for run in runs if run[2] > run[1]]
    path: list[PhaseStretch] = []
    at_s = end_s
    while earlier := [run for run in runs if run[1] < at_s]:
        phase, began_s, ended_s = max(earlier, key=lambda run: (min(run[2], at_s), run[1]))
        ended_s = min(ended_s, at_s)
        if ended_s < at_s:
            path.append(PhaseStretch(None, ended_s, at_s))
        path.append(PhaseStretch(phase, began_s, ended_s))
        at_s = began_s
    return tuple(reversed(path))


def phase_text(phase: SyncPhase | None) -> str:
    return "between phases" if phase is None else PHASE_WORDS[phase]


def _end_s(report: SyncReport, now_s: float | None) -> float:
    """Return the time at which the profile ends: the latest time in the report or, if the sync is not over and `now_s`
    is later, `now_s`."""
    known = [took.began_s for took in report.phases]
    known += [took.ended_s for took in report.phases if took.ended_s is not None]
    if report.ended_s is not None:
        known.append(report.ended_s)
    elif now_s is not None:
        known.append(now_s)
    return max(known, default=report.began_s)


def _until_s(phase: PhaseTime, end_s: float) -> float:
    return end_s if phase.ended_s is None else min(phase.ended_s, end_s)
