"""Decide when circuits may change. All ranks that use them must be quiet for as long as the change takes. Has no side
effects.

The time until packets may use a changed circuit is measured per switch. The delay of the device is often the smallest
part of this time, because receivers must lock to the light, links are debounced, and routes must be changed (section
2.3 of the paper). Until there are enough measurements, the stated delay plus an allowance is used.

This implements section 5.3 of the paper. Times are in the clock of the deciding host, except in `ReportedQuiet`, which
uses the clock of the reporting host.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from planner.fabric.clocks import ClockOffset
from planner.fabric.intent import Stage
from planner.fabric.model import OcsId
from planner.fabric.recent import RecentSamples
from planner.fabric.slack import RemainingQuiet
from planner.model import Act, Hold, Verdict

# Codes of holds, in addition to those that a rank reports.
NO_RANKS = "no_ranks"
CLOCK_UNKNOWN = "clock_unknown"
STALE_WINDOW = "stale_window"
CLOSED = "window_closed"
TOO_SHORT = "window_too_short"
SHORT = "short"  # as TOO_SHORT, for one host's ranks
RISKY = "window_risky"
NO_BOUNDARY = "no_boundary"

MOST_AGE_S = 1.0
COVERED = 0.95  # share of commits that take no longer than expected
# Used until there are enough measurements.
DEVICE_FACTOR, LINK_UP_S = 1.5, 0.005  # factor on the stated delay, and addition to it
ROUTE_S = CONTROL_S = 0.005
BEYOND = 1.5  # factor on the worst measurement while there are few
FADING = 0.9  # factor on the same per period without a sufficient window

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class ReportedQuiet:
    """A rank's prediction of quiet time, reported at `reported_s` in its host's clock."""

    host: str
    reported_s: float
    rank: int
    quiet: RemainingQuiet
    clock: ClockOffset | None  # host minus ours; None: unknown


@dataclass(frozen=True, slots=True)
class Window:
    """A time span in which all ranks are quiet. `limiting` names the rank whose prediction ends first. `risk` is an
    upper bound on the probability that some rank communicates before the window ends."""

    opened_s: float
    until_s: float
    limiting: str
    risk: float


@dataclass(frozen=True, slots=True)
class CommitNeed:
    """The time from the decision to change circuits until packets may use the new circuits, by part. `margin_s` is a
    safety margin."""

    device_s: float  # from the command at the switch until the link is up
    route_s: float  # from the link until routes use it
    control_s: float  # until the command reaches the switch
    margin_s: float

    def __post_init__(self) -> None:
        for name in ("device_s", "route_s", "control_s", "margin_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")

    @property
    def total_s(self) -> float:
        return self.device_s + self.route_s + self.control_s + self.margin_s

    def __str__(self) -> str:
        return (
            f"{_ms(self.total_s)} needed: device {_ms(self.device_s)}, route {_ms(self.route_s)}, "
            f"control {_ms(self.control_s)}, margin {_ms(self.margin_s)}"
        )


def intersect(reports: Iterable[ReportedQuiet], now_s: float) -> Window | Hold:
    """Return the window in which all ranks are quiet. The window may begin in the future or have ended already. Return
    a Hold if there are no reports or if a report cannot be used. In the second case, the Hold names the reporting
    host."""
    opened_s, until_s, limiting, risk = -inf, inf, "", 0.0
    for each in reports:
        if each.clock is None:
            return Hold(CLOCK_UNKNOWN, f"{each.host}: the offset of its clock is unknown")
        age_s = now_s - each.clock.ours(each.reported_s)[0]
        if age_s > MOST_AGE_S:
            return Hold(STALE_WINDOW, f"{each.host}: the last report is {_ms(age_s)} old, limit {_ms(MOST_AGE_S)}")
        opened_s = max(opened_s, each.clock.ours(each.quiet.opened_s)[1])
        risk += each.quiet.risk
        if (ends_s := each.clock.ours(each.quiet.until_s)[0]) < until_s:
            until_s, limiting = ends_s, f"{each.host}, rank {each.rank}"
    if not limiting:
        return Hold(NO_RANKS, "no rank that uses the changing circuits has reported")
    return Window(opened_s, until_s, limiting, min(1.0, risk))


def may_commit(
    stage: Stage, window: Window | Hold | None, need: CommitNeed, now_s: float, boundary: bool, most_risk: float = 1.0
) -> Verdict:
    """Decide whether circuits may change now.

    `boundary` states whether the stage is at a point where circuits may change: between two deployments (Gen), or
    before an announced weight sync begins. It is ignored for Train. A `window` of None means that no rank sends until
    the circuits are reported ready, which never applies to Train. `most_risk` is the highest risk that a window may
    have.
    """
    if stage is not Stage.TRAIN and not boundary:
        when = "between two deployments" if stage is Stage.GEN else "once the broadcast is announced, before it begins"
        return Hold(NO_BOUNDARY, f"{stage.value}: circuits change only {when}")
    if isinstance(window, Hold):
        return window
    if window is None:
        if stage is Stage.TRAIN:
            return Hold(NO_RANKS, "train: circuits change only inside a window, and no rank has reported one")
        return Act("at_boundary", f"{stage.value}: no rank sends until the circuits are ready; {need}")
    left_s = window.until_s - now_s
    if now_s < window.opened_s:
        return Hold(
            CLOSED,
            f"the window opens in at most {_ms(window.opened_s - now_s)}, given the uncertainty of the clock offsets",
        )
    if left_s <= 0:
        return Hold(CLOSED, f"the window ended {_ms(-left_s)} ago, according to the prediction for {window.limiting}")
    detail = f"{_ms(left_s)} remain, limited by {window.limiting} (risk {window.risk:.1%}), {need}"
    if left_s < need.total_s:
        return Hold(TOO_SHORT, detail)
    if window.risk > most_risk:
        return Hold(RISKY, f"{detail}; the risk limit is {most_risk:.1%}")
    return Act("in_window", detail)


def common_quiet(ranks: Iterable[Sequence[Interval]]) -> list[Interval]:
    """Return the intervals in which all ranks are quiet, given the busy intervals of each rank. The busy intervals may
    overlap and be in any order. A rank is considered quiet only between its first and its last busy interval."""
    busy: list[Interval] = []
    for each in ranks:
        busy += [*each, (-inf, min(start_s for start_s, _ in each)), (max(end_s for _, end_s in each), inf)]
    found: list[Interval] = []
    until_s = -inf
    for start_s, end_s in sorted(busy):
        if start_s > until_s:
            found.append((until_s, start_s))
        until_s = max(until_s, end_s)
    return found


def _ms(value_s: float) -> str:
    return f"{value_s * 1e3:.1f} ms"


@dataclass(frozen=True, slots=True)
class SwitchTimes:
    """The measured times of one commit at one switch: until the command is at the switch, then until the link is up,
    then until routes use the link."""

    switch: OcsId
    control_s: float
    device_s: float
    route_s: float

    @property
    def parts(self) -> Mapping[str, float]:
        return {"device_s": self.device_s, "route_s": self.route_s, "control_s": self.control_s}


@dataclass(slots=True)
class CommitTimes:
    """Estimates the times of commits from measurements. `stated_s` contains the delay of each switch according to its
    data sheet. `route_s` is the time assumed for routes until there are measurements."""

    stated_s: Mapping[OcsId, float]
    route_s: float = ROUTE_S
    _measured: dict[tuple[OcsId, str], RecentSamples] = field(default_factory=dict)  # by part of a commit
    _unfit: Counter[OcsId] = field(default_factory=Counter)  # periods without a fitting window since the last commit

    def measured(self, took: SwitchTimes) -> None:
        """Record the measured times of one commit at one switch. Raises ValueError if a time is negative or NaN."""
        for part, value_s in took.parts.items():
            if not value_s >= 0:
                raise ValueError(f"{part} of a commit on {took.switch} must be >= 0, got {value_s}")
            self._measured.setdefault((took.switch, part), RecentSamples()).add(value_s)
        self._unfit.pop(took.switch, None)

    def unfit(self, switches: Iterable[OcsId]) -> None:
        """Record that no window was as long as these switches need. Without correction, a single slow measurement could
        prevent all later commits, and thus all later measurements. While there are few measurements, each call
        therefore lowers the expected time of each switch. The time never falls below the fastest measurement or the
        default for unmeasured switches."""
        self._unfit.update(set(switches))

    def samples(self, switch: OcsId) -> int:
        return len(self._measured.get((switch, "device_s"), ()))

    def need(self, switches: Iterable[OcsId], margin_s: float) -> CommitNeed:
        """Return the expected time of changing circuits on all these switches concurrently. Each part of the time is
        that of the slowest switch."""
        slowest = dict.fromkeys(("device_s", "route_s", "control_s"), 0.0)
        for switch in set(switches):
            stated_s = self.stated_s.get(switch, 0.0) * DEVICE_FACTOR + LINK_UP_S
            for part, value_s in SwitchTimes(switch, CONTROL_S, stated_s, self.route_s).parts.items():
                slowest[part] = max(slowest[part], self._expected_s(switch, part, value_s))
        return CommitNeed(**slowest, margin_s=margin_s)

    def _expected_s(self, switch: OcsId, part: str, unmeasured_s: float) -> float:
        recent = self._measured.get((switch, part))
        if recent is None:
            return unmeasured_s
        bound = recent.upper(COVERED)
        if bound is not None:
            return bound.value_s
        seen = recent.newest()
        return max(unmeasured_s, min(seen), BEYOND * max(seen) * FADING ** self._unfit[switch])
