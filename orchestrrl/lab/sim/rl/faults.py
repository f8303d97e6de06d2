"""Model failures of a cluster over time, and how they lengthen a stage. The functions have no side effects.

If a server fails, the work of its current iteration is lost.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Annotated

from pydantic import BeforeValidator, Field

from orchestrrl.lab.sim.net.fabrics.base import SimulatedFailures
from orchestrrl.lab.sim.scenario import NotNegative, Positive, ScenarioSection


class FaultyPart(StrEnum):
    """The type of a component that fails."""

    NIC = "nic"
    TOR_UPLINKS = "tor_uplinks"
    POD_UPLINKS = "pod_uplinks"
    SERVER = "server"
    ENGINE = "engine"


Numbers = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]


class ClusterFaultSection(ScenarioSection):
    """A failure of components that begins at `at_s`. `of` contains the indices of the failed NICs, ToRs, PoDs, servers
    or engines. Engines are in the order of their GPUs. A failed link or port is given as a fraction of one ToR's
    uplinks. A failed switch is given as a fraction of the uplinks of all ToRs, or of all PoDs, that it connects."""

    at_s: NotNegative
    fail: FaultyPart
    of: Annotated[Numbers, BeforeValidator(lambda of: (of,) if isinstance(of, int) else of)]
    share: Annotated[float, Field(gt=0, le=1)] = 1.0  # fraction of the uplinks
    back_after_s: Positive | None = None  # None: permanent

    @property
    def back_s(self) -> float:
        return math.inf if self.back_after_s is None else self.at_s + self.back_after_s

    def holds(self, now_s: float) -> bool:
        return self.at_s <= now_s < self.back_s

    def __str__(self) -> str:
        share = f", {self.share:.0%}" if self.fail in (FaultyPart.TOR_UPLINKS, FaultyPart.POD_UPLINKS) else ""
        return f"{self.fail.replace('_', ' ')} {', '.join(map(str, self.of))}{share}"


@dataclass(frozen=True, slots=True)
class ClusterFaultSchedule:
    """The failures of a run."""

    faults: tuple[ClusterFaultSection, ...] = ()

    def holding(self, now_s: float, *parts: FaultyPart) -> tuple[ClusterFaultSection, ...]:
        return tuple(fault for fault in self.faults if fault.fail in parts and fault.holds(now_s))

    def network(self, now_s: float) -> SimulatedFailures:
        """Return the fabric's failures at the time `now_s`. Failed servers are not included, because they are replaced
        or unused."""
        nics = {nic for fault in self.holding(now_s, FaultyPart.NIC) for nic in fault.of}
        return SimulatedFailures(
            nics=frozenset(nics),
            tor_uplinks=_shares(self.holding(now_s, FaultyPart.TOR_UPLINKS)),
            pod_uplinks=_shares(self.holding(now_s, FaultyPart.POD_UPLINKS)),
        )

    def changes_s(self) -> tuple[float, ...]:
        """Return the times at which a component fails or recovers, ascending."""
        times = {time_s for fault in self.faults for time_s in (fault.at_s, fault.back_s) if math.isfinite(time_s)}
        return tuple(sorted(times))

    def pieces(self, begin_s: float) -> Iterator[tuple[float, float]]:
        """Yield the intervals (from, until) in which the failures do not change, from `begin_s` on. The last interval
        ends at infinity."""
        return pairwise([begin_s, *(change_s for change_s in self.changes_s() if change_s > begin_s), math.inf])


def _shares(faults: Iterable[ClusterFaultSection]) -> dict[int, float]:
    """Return the lost fraction of each bundle of links. Faults of the same bundle add up, to at most 1."""
    lost: dict[int, float] = {}
    for fault in faults:
        for number in fault.of:
            lost[number] = min(1.0, lost.get(number, 0.0) + fault.share)
    return lost


class NeverEnds(ValueError):
    """Raised if a permanent fault prevents a stage from ending."""


def stretched_s(schedule: ClusterFaultSchedule, begin_s: float, seconds: Callable[[float], float]) -> float:
    """Return the duration, in seconds, of work that begins at `begin_s` and is slowed down by faults. `seconds(now_s)`
    is the duration of the whole work under the faults at the time `now_s`, or inf if these faults prevent progress.
    Completed work is kept. Raises NeverEnds if permanent faults prevent progress."""
    left = 1.0
    for from_s, until_s in schedule.pieces(begin_s):
        whole_s = seconds(from_s)
        if from_s + left * whole_s <= until_s and math.isfinite(whole_s):
            return from_s + left * whole_s - begin_s
        if math.isinf(until_s):
            break
        left -= (until_s - from_s) / whole_s if whole_s > 0 else 0.0
    gone = "; ".join(str(fault) for fault in schedule.faults if math.isinf(fault.back_s)) or "a required component"
    raise NeverEnds(f"the stage that begins at {begin_s:g} s never ends: {gone} does not recover; set back_after_s")


def with_lost_work_s(
    schedule: ClusterFaultSchedule, begin_s: float, seconds: Callable[[float], float], servers: range, recovery_s: float
) -> float:
    """Return the duration of an iteration as `stretched_s` does, including the work that is lost when a server fails.
    If one of `servers` fails, a replacement server begins the iteration again `recovery_s` seconds later."""
    start_s = begin_s
    lost = sorted(
        fault.at_s
        for fault in schedule.faults
        if fault.fail is FaultyPart.SERVER and any(n in servers for n in fault.of)
    )
    for at_s in (*lost, math.inf):
        if at_s < start_s:
            continue
        end_s = start_s + stretched_s(schedule, start_s, seconds)
        if end_s <= at_s:
            return end_s - begin_s
        start_s = at_s + recovery_s
    raise AssertionError("unreachable: the last time is infinite")
