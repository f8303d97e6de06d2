"""Announced periods: what is known of each, whose turn it is, and who makes way for whom.

Of one job there is one period to come in training, weight syncs included, and one in generation: a newer one supersedes
it. Those of several jobs wait for their windows side by side, and one changes circuits at a time. Where the caller
stands still, its period goes first and alone, and those that wait for a window are put off meanwhile.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from orchestrrl.fabric.periods import PeriodReport
from planner.fabric.intent import Intent, Stage
from planner.model import Hold

Lane = tuple[str, bool]  # job, whether it is generation


def lane_of(intent: Intent) -> Lane:
    return intent.job, intent.stage is Stage.GEN


@dataclass(eq=False)
class AnnouncedPeriod:
    """`stop`: why it is not to go on. `woken`: whoever carries it out is to look around. `begun`: its first circuits
    are being changed."""

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
        """What becomes of it, whenever that changes; ends after the last."""
        seen: PeriodReport | None = None
        while seen is None or not seen.over:
            if self.report == seen:
                self._changed.clear()
                await self._changed.wait()
                continue
            seen = self.report
            yield seen


class PeriodQueue:
    """At most one of each lane, those whose caller stands still first."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self._waiting: list[AnnouncedPeriod] = []

    def __iter__(self) -> Iterator[AnnouncedPeriod]:
        return iter(self._waiting)

    @property
    def urgent(self) -> bool:
        return any(period.boundary for period in self._waiting)

    def put(self, period: AnnouncedPeriod) -> AnnouncedPeriod | None:
        """The one that it supersedes."""
        before = next((each for each in self._waiting if each.lane == period.lane), None)
        if before is not None:
            self._waiting.remove(before)
        self._waiting.append(period)
        self.news.set()
        return before

    def put_back(self, period: AnnouncedPeriod) -> bool:
        """Whether it may wait on: not where a newer one of its lane has come."""
        if any(each.lane == period.lane for each in self._waiting):
            return False
        self._waiting.insert(0, period)
        self.news.set()
        return True

    def remove(self, period: AnnouncedPeriod) -> bool:
        """Whether it was waiting."""
        if period not in self._waiting:
            return False
        self._waiting.remove(period)
        return True

    def take(self, active: Collection[AnnouncedPeriod]) -> AnnouncedPeriod | None:
        """The next that may go on beside these."""
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
    """Whose turn it is to change circuits, and how often they have been: what was planned before is void then."""

    def __init__(self) -> None:
        self.by: AnnouncedPeriod | None = None
        self.changes = 0  # begun
        self._at_rest = asyncio.Event()
        self._at_rest.set()

    def begin(self, by: AnnouncedPeriod) -> None:
        """Only where `as_at` says so in the same turn of the loop."""
        assert self.by is None, (self.by, by)
        self.by = by
        self.changes += 1
        self._at_rest.clear()
        by.begun.set()

    def end(self, by: AnnouncedPeriod) -> bool:
        """Whether it had begun."""
        if self.by is not by:
            return False
        self.by = None
        self._at_rest.set()
        return True

    def as_at(self, changes: int) -> bool:
        """Nobody changes them, nor has since then."""
        return self.by is None and self.changes == changes

    async def at_rest(self) -> int:
        """Wait until nobody changes them; how often they have been."""
        while self.by is not None:
            await self._at_rest.wait()
        return self.changes
