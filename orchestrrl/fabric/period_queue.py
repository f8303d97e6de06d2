"""Queue announced periods, and decide which period may change circuits and which periods must wait.

Each job has at most two waiting periods: one for training or a weight sync, and one for generation. A newer period
supersedes the waiting period of the same kind. Periods of several jobs wait for their windows at the same time, but
only one period changes circuits at a time. A period during which the caller pauses (a boundary) runs first and alone.
Periods that wait for a window are deferred until the boundary is over.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from orchestrrl.fabric.periods import PeriodReport
from planner.fabric.intent import Intent, Stage
from planner.model import Hold

Lane = tuple[str, bool]  # job, and True for generation


def lane_of(intent: Intent) -> Lane:
    return intent.job, intent.stage is Stage.GEN


@dataclass(eq=False)
class AnnouncedPeriod:
    """An announced period. `boundary` is True if the caller pauses during the period. `stop` is the reason why the
    period must not continue, if there is one. `woken` is set when the period's task must check its conditions again.
    `begun` is set when the first change of circuits for the period begins."""

    intent: Intent
    deadline_s: float
    boundary: bool
    report: PeriodReport
    stop: Hold | None = None
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def lane(self) -> Lane:
        return lane_of(self.intent)

    def update(self, **changes: Any) -> None:
        self.report = replace(self.report, **changes)
        self._changed.set()

    def call_off(self, why: Hold) -> None:
        self.stop = self.stop or why
        self.woken.set()

    async def follow(self) -> AsyncIterator[PeriodReport]:
        """Yield the current report of the period, then a new report after each change. The iteration ends after the
        first report in which the period is over."""
        seen: PeriodReport | None = None
        while seen is None or not seen.over:
            if self.report == seen:
                self._changed.clear()
                await self._changed.wait()
                continue
            seen = self.report
            yield seen


class PeriodQueue:
    """The waiting periods, at most one per lane (job and kind of traffic). Boundaries, during which the caller pauses,
    have precedence over other periods."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self._waiting: list[AnnouncedPeriod] = []

    def __iter__(self) -> Iterator[AnnouncedPeriod]:
        return iter(self._waiting)

    @property
    def urgent(self) -> bool:
        return any(period.boundary for period in self._waiting)

    def put(self, period: AnnouncedPeriod) -> AnnouncedPeriod | None:
        """Add a period. If another period of the same lane is waiting, remove and return that period; otherwise, return
        None."""
        before = next((each for each in self._waiting if each.lane == period.lane), None)
        if before is not None:
            self._waiting.remove(before)
        self._waiting.append(period)
        self.news.set()
        return before

    def put_back(self, period: AnnouncedPeriod) -> bool:
        """Put a period back at the front of the queue and return True. If a newer period of its lane is waiting, do
        nothing and return False."""
        if any(each.lane == period.lane for each in self._waiting):
            return False
        self._waiting.insert(0, period)
        self.news.set()
        return True

    def remove(self, period: AnnouncedPeriod) -> bool:
        """Remove a period from the queue and return True. If the period is not waiting, do nothing and return False."""
        if period not in self._waiting:
            return False
        self._waiting.remove(period)
        return True

    def take(self, active: Collection[AnnouncedPeriod]) -> AnnouncedPeriod | None:
        """Remove and return the next period that may run concurrently with the periods in `active`. Return None if
        there is no such period."""
        if self.urgent:
            chosen = None if active else next(each for each in self._waiting if each.boundary)
        elif any(each.boundary for each in active):
            chosen = None
        else:
            lanes = {each.lane for each in active}
            chosen = next((each for each in self._waiting if each.lane not in lanes), None)
        if chosen is not None:
            self._waiting.remove(chosen)
        return chosen


class CircuitTurn:
    """Grants one period at a time the right to change circuits. Each change invalidates the plans that were made before
    it."""

    def __init__(self) -> None:
        self.by: AnnouncedPeriod | None = None
        self.changes = 0  # changes begun so far
        self._at_rest = asyncio.Event()
        self._at_rest.set()

    def begin(self, by: AnnouncedPeriod) -> None:
        """Start the turn of the period `by`. The caller must have received True from `as_at` and must not have awaited
        since then."""
        assert self.by is None, (self.by, by)
        self.by = by
        self.changes += 1
        self._at_rest.clear()
        by.begun.set()

    def end(self, by: AnnouncedPeriod) -> bool:
        """End the turn of the period `by` and return True. If it is not the turn of `by`, do nothing and return
        False."""
        if self.by is not by:
            return False
        self.by = None
        self._at_rest.set()
        return True

    def as_at(self, changes: int) -> bool:
        """Return whether no change of circuits is in progress and the number of changes is still `changes`."""
        return self.by is None and self.changes == changes

    async def at_rest(self) -> int:
        """Wait until no change of circuits is in progress. Return the number of changes that have begun so far."""
        while self.by is not None:
            await self._at_rest.wait()
        return self.changes
