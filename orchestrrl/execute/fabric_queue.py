"""Announced periods: what is known of each, whose turn it is, and who makes way for whom.

Of one job there is one period to come in training, weight syncs included, and one in generation: a newer one supersedes
it. Where the caller stands still, its period goes first, and one that waits for a window is put off meanwhile.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from orchestrrl.periods import PeriodReport
from planner.fabric.intent import Intent, Stage
from planner.model import Hold

Lane = tuple[str, bool]  # job, whether it is generation


def lane_of(intent: Intent) -> Lane:
    return intent.job, intent.stage is Stage.GEN


@dataclass(eq=False)
class Announced:
    """`stop`: why it is not to go on. `poked`: whoever carries it out is to look around."""

    intent: Intent
    deadline_s: float
    boundary: bool
    report: PeriodReport
    stop: Hold | None = None
    poked: asyncio.Event = field(default_factory=asyncio.Event)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def lane(self) -> Lane:
        return lane_of(self.intent)

    def tell(self, **changes: Any) -> None:
        self.report = replace(self.report, **changes)
        self._changed.set()

    def call_off(self, why: Hold) -> None:
        self.stop = self.stop or why
        self.poked.set()

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
        self._waiting: list[Announced] = []

    def __iter__(self) -> Iterator[Announced]:
        return iter(self._waiting)

    @property
    def urgent(self) -> bool:
        return any(period.boundary for period in self._waiting)

    def put(self, period: Announced) -> Announced | None:
        """The one that it supersedes."""
        before = next((each for each in self._waiting if each.lane == period.lane), None)
        if before is not None:
            self._waiting.remove(before)
        self._waiting.append(period)
        self.news.set()
        return before

    def put_back(self, period: Announced) -> bool:
        """Whether it may wait on: not where a newer one of its lane has come."""
        if any(each.lane == period.lane for each in self._waiting):
            return False
        self._waiting.insert(0, period)
        self.news.set()
        return True

    def remove(self, period: Announced) -> bool:
        """Whether it was waiting."""
        if period not in self._waiting:
            return False
        self._waiting.remove(period)
        return True

    def take(self) -> Announced | None:
        chosen = next((each for each in self._waiting if each.boundary), next(iter(self._waiting), None))
        if chosen is not None:
            self._waiting.remove(chosen)
        return chosen
