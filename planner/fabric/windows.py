"""Circuits may be changed while it is quiet on every rank that uses them, for as long as that takes. Pure.

How long a change takes until packets may use it is measured switch by switch: a device's own delay is often the least
of it, as receivers lock to the light, links are debounced, and routes follow (section 2.3 of the paper). Until enough
was measured, its stated delay is taken with an allowance.

Section 5.3 of the paper. Times are in the clock of whoever decides, but in `HostWindows`, whose host has its own.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from planner.fabric.clocks import ClockOffset
from planner.fabric.intent import Stage
from planner.fabric.model import OcsId
from planner.fabric.recent import RecentSamples
from planner.fabric.slack import RemainingQuiet
from planner.model import Act, Hold, Verdict

# Codes of holds, beside those that a rank gives itself.
NO_RANKS = "no_ranks"
CLOCK_UNKNOWN = "clock_unknown"
STALE_WINDOW = "stale_window"
CLOSED = "window_closed"
TOO_SHORT = "window_too_short"
SHORT = "short"  # the same, of one host's ranks
RISKY = "window_risky"
NO_BOUNDARY = "no_boundary"

MOST_AGE_S = 1.0

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class HostWindows:
    """What the ranks of one host promise, reported at `reported_s` of that host's clock."""

    host: str
    reported_s: float
    ranks: tuple[tuple[int, RemainingQuiet | Hold], ...]
    clock: ClockOffset | None  # host minus ours; None: not known


@dataclass(frozen=True, slots=True)
class Window:
    """It is quiet on all ranks. `limiting`: whose promise ends first. `risk`: at most, that any of them is broken."""

    opened_s: float
    until_s: float
    limiting: str
    risk: float

    def left_s(self, now_s: float) -> float:
        return self.until_s - now_s


@dataclass(frozen=True, slots=True)
class CommitNeed:
    """From the decision until packets may take the new circuits."""

    device_s: float  # from the command at the switch to the link up
    route_s: float  # from there until routes use it
    control_s: float  # until the command is at the switch
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


def intersect(hosts: Iterable[HostWindows], now_s: float, most_age_s: float = MOST_AGE_S) -> Window | Hold:
    """The window of all ranks together. A Hold names the rank or host that has none, the first by host and rank."""
    opened_s, until_s, limiting, risk = -inf, inf, "", 0.0
    for host in sorted(hosts, key=lambda each: each.host):
        if host.clock is None:
            return Hold(CLOCK_UNKNOWN, f"{host.host}: the offset of its clock is not known")
        age_s = now_s - host.clock.ours(host.reported_s)[0]
        if age_s > most_age_s:
            return Hold(STALE_WINDOW, f"{host.host}: said {_ms(age_s)} ago, limit {_ms(most_age_s)}")
        for rank, said in sorted(host.ranks, key=lambda each: each[0]):
            if isinstance(said, Hold):
                return Hold(said.code, f"{host.host}: {said.detail}")
            opened_s = max(opened_s, host.clock.ours(said.opened_s)[1])
            risk += said.risk
            if (ends_s := host.clock.ours(said.until_s)[0]) < until_s:
                until_s, limiting = ends_s, f"{host.host}, rank {rank}"
    if not limiting:
        return Hold(NO_RANKS, "no rank has said anything of the circuits that are to change")
    if now_s < opened_s:
        return Hold(CLOSED, f"opens in {_ms(opened_s - now_s)} at the latest, by the bounds of clocks")
    if now_s >= until_s:
        return Hold(CLOSED, f"promised until {_ms(now_s - until_s)} ago by {limiting}")
    return Window(opened_s, until_s, limiting, min(1.0, risk))


def may_commit(
    stage: Stage, window: Window | Hold | None, need: CommitNeed, now_s: float, boundary: bool, most_risk: float = 1.0
) -> Verdict:
    """`boundary`: Gen between two deployments; weight sync announced and not begun. Train needs none.

    `window` None: nobody sends until told that the circuits are there. It never is in Train.
    """
    if stage is not Stage.TRAIN and not boundary:
        when = "between two deployments" if stage is Stage.GEN else "once the broadcast is announced, before it begins"
        return Hold(NO_BOUNDARY, f"{stage.value}: circuits are changed {when}")
    if isinstance(window, Hold):
        return window
    if window is None:
        if stage is Stage.TRAIN:
            return Hold(NO_RANKS, "train: changed inside a window only, and no rank has said anything of one")
        return Act("at_boundary", f"{stage.value}: nobody sends until it is done; {need}")
    left_s = window.left_s(now_s)
    detail = f"{_ms(left_s)} remain by {window.limiting} (risk {window.risk:.1%}), {need}"
    if now_s < window.opened_s or left_s <= 0:
        return Hold(CLOSED, detail)
    if left_s < need.total_s:
        return Hold(TOO_SHORT, detail)
    if window.risk > most_risk:
        return Hold(RISKY, f"{detail}; at most {most_risk:.1%} is risked")
    return Act("in_window", detail)


def common_quiet(ranks: Sequence[Sequence[Interval]]) -> list[Interval]:
    """When it is quiet on all of them. Of each rank: disjoint intervals, ascending."""
    if not ranks:
        return []
    both = list(ranks[0])
    for each in ranks[1:]:
        both = list(_overlaps(both, each))
    return both


def quiet_between(busy: Iterable[Interval]) -> list[Interval]:
    """Between the first and the last of `busy`, which may overlap and come in any order."""
    found: list[Interval] = []
    until_s: float | None = None
    for start_s, end_s in sorted(busy):
        if until_s is not None and start_s > until_s:
            found.append((until_s, start_s))
        until_s = end_s if until_s is None else max(until_s, end_s)
    return found


def _overlaps(ones: Sequence[Interval], others: Sequence[Interval]) -> Iterator[Interval]:
    index = other = 0
    while index < len(ones) and other < len(others):
        start_s = max(ones[index][0], others[other][0])
        end_s = min(ones[index][1], others[other][1])
        if start_s < end_s:
            yield start_s, end_s
        if ones[index][1] < others[other][1]:
            index += 1
        else:
            other += 1


def _ms(value_s: float) -> str:
    return f"{value_s * 1e3:.1f} ms"


@dataclass(frozen=True, slots=True)
class Allowance:
    """What is taken for what was not measured often enough yet."""

    device_factor: float = 1.5  # on the stated delay
    link_up_s: float = 0.005  # on top of it
    route_s: float = 0.005
    control_s: float = 0.005
    beyond: float = 1.5  # on the worst seen, while too few were seen
    fading: float = 0.9  # of that, for each period that it found no window for

    def __post_init__(self) -> None:
        for name in ("device_factor", "beyond"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if not 0 < self.fading <= 1:
            raise ValueError(f"fading must be in (0, 1], got {self.fading}")


@dataclass(slots=True)
class CommitTimes:
    """`stated_s`: each switch's delay by its data sheet. `q`: a commit lasts longer with probability 1 - q at most."""

    stated_s: Mapping[OcsId, float]
    q: float = 0.95
    allowance: Allowance = field(default_factory=Allowance)
    _device: dict[OcsId, RecentSamples] = field(default_factory=dict)
    _route: dict[OcsId, RecentSamples] = field(default_factory=dict)
    _control: dict[OcsId, RecentSamples] = field(default_factory=dict)
    _unfit: Counter[OcsId] = field(default_factory=Counter)  # periods without a window since the last commit

    def __post_init__(self) -> None:
        if not 0 < self.q < 1:
            raise ValueError(f"q must be in (0, 1), got {self.q}")

    def measured(self, switch: OcsId, *, control_s: float, device_s: float, route_s: float) -> None:
        """One commit: decision to command at the switch, to link up, to routes that use it."""
        for memory, value_s in ((self._control, control_s), (self._device, device_s), (self._route, route_s)):
            if not value_s >= 0:
                raise ValueError(f"times of a commit must be >= 0, got {value_s} on {switch}")
            memory.setdefault(switch, RecentSamples()).add(value_s)
        self._unfit.pop(switch, None)

    def unfit(self, switches: Iterable[OcsId]) -> None:
        """No window was as long as they need. Only a commit tells how long one takes: were a single slow one believed
        for good, there would never be another. Where few were measured it is believed a little less each time, but
        never less than the fastest of them, nor than what is taken for what was not measured."""
        self._unfit.update(set(switches))

    def samples(self, switch: OcsId) -> int:
        return len(self._device.get(switch, ()))

    def need(self, switches: Iterable[OcsId], margin_s: float) -> CommitNeed:
        """All of them changed side by side: of each part the slowest."""
        chosen = sorted(set(switches))
        return CommitNeed(
            max((self._expected_s(self._device, switch, self._stated_s(switch)) for switch in chosen), default=0.0),
            max((self._expected_s(self._route, switch, self.allowance.route_s) for switch in chosen), default=0.0),
            max((self._expected_s(self._control, switch, self.allowance.control_s) for switch in chosen), default=0.0),
            margin_s,
        )

    def _stated_s(self, switch: OcsId) -> float:
        return self.stated_s.get(switch, 0.0) * self.allowance.device_factor + self.allowance.link_up_s

    def _expected_s(self, memory: Mapping[OcsId, RecentSamples], switch: OcsId, unmeasured_s: float) -> float:
        recent = memory.get(switch)
        if recent is None:
            return unmeasured_s
        bound = recent.upper(self.q)
        if bound is not None:
            return bound.value_s
        seen = recent.newest()
        worst_s = self.allowance.beyond * max(seen) * self.allowance.fading ** self._unfit[switch]
        return max(unmeasured_s, min(seen), worst_s)
