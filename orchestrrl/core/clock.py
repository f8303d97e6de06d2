"""Clocks that are passed as arguments: the wall clock in production, a virtual clock in simulations and tests."""

import asyncio
import heapq
import itertools
import time
from collections.abc import Awaitable
from math import inf
from typing import Any, Protocol, TypeVar

from orchestrrl.core.errors import Permanent

T = TypeVar("T")


class Clock(Protocol):
    """A clock that returns the time in seconds since the Unix epoch and sleeps for a duration in seconds."""

    def now_s(self) -> float: ...

    async def sleep(self, duration_s: float) -> None: ...


class WallClock:
    """A clock that reads the wall clock once and then follows the monotonic clock, so that it never jumps back."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def now_s(self) -> float:
        return self._offset_s + time.monotonic()

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(max(0.0, duration_s))


class VirtualClock:
    """A clock that advances only on request: `await clock.advance(seconds)` wakes, in chronological order, all tasks
    whose sleep ends within that time."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def now_s(self) -> float:
        return self._now_s

    async def sleep(self, duration_s: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_s + max(0.0, duration_s), next(self._order), future))
        await future

    async def advance(self, duration_s: float) -> None:
        """Advance the time by `duration_s` seconds. Tasks that wake up run, and may sleep again, before the time
        advances further. Raises ValueError if `duration_s` is negative."""
        if duration_s < 0:
            raise ValueError(f"duration_s must be >= 0, got {duration_s}")
        end_s = self._now_s + duration_s
        await self._settle()
        while self._sleepers and self._sleepers[0][0] <= end_s:
            at_s, _, future = heapq.heappop(self._sleepers)
            self._now_s = max(self._now_s, at_s)
            if not future.done():
                future.set_result(None)
            await self._settle()
        self._now_s = end_s

    async def _settle(self) -> None:
        # This many turns of the event loop let chains of awaits come to rest.
        for _ in range(10):
            await asyncio.sleep(0)


async def within(clock: Clock, limit_s: float, work: Awaitable[T]) -> T:
    """Return the result of `work`. Raises Permanent if `work` takes longer than `limit_s` seconds of `clock`. In all
    other respects, the function behaves like asyncio.timeout."""
    if limit_s == inf:
        return await work
    task, expired = asyncio.current_task(), False
    assert task is not None
    cancelled_before = task.cancelling()

    async def expire() -> None:
        nonlocal expired
        await clock.sleep(limit_s)
        expired = True
        task.cancel()

    timer = asyncio.ensure_future(expire())
    try:
        return await work
    except asyncio.CancelledError:
        if expired and task.uncancel() <= cancelled_before:
            raise Permanent(f"timed out after {limit_s:g} s") from None
        raise
    finally:
        timer.cancel()


async def until_set(clock: Clock, event: asyncio.Event, within_s: float, *also: asyncio.Future[Any]) -> None:
    """Wait until the event is set, one of the futures `also` is done, or `within_s` seconds of `clock` have passed."""
    own = [asyncio.ensure_future(event.wait()), asyncio.ensure_future(clock.sleep(within_s))]
    try:
        await asyncio.wait([*own, *also], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in own:
            task.cancel()


async def stop(*tasks: asyncio.Future[Any]) -> None:
    """Cancel the tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
