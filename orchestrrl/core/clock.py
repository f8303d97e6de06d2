"""Time as an argument: the wall clock in the shell, a virtual one in simulations and tests."""

import asyncio
import heapq
import itertools
import time
from collections.abc import Awaitable
from math import inf
from typing import Protocol, TypeVar

from orchestrrl.core.errors import Permanent

T = TypeVar("T")


class Clock(Protocol):
    """Seconds since the Unix epoch, and sleeping in the same seconds."""

    def now_s(self) -> float: ...

    async def sleep(self, duration_s: float) -> None: ...


class WallClock:
    """Real time: follows the system's clock once, then the monotonic one, so it never jumps back."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def now_s(self) -> float:
        return self._offset_s + time.monotonic()

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(max(0.0, duration_s))


class VirtualClock:
    """Time that moves only when told to: `await clock.advance(seconds)` wakes every sleeper on the way, in order."""

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
        """Move time forward by `duration_s`, letting woken tasks run (and sleep again) before time goes on."""
        if duration_s < 0:
            raise ValueError(f"time does not run backwards: duration_s must be >= 0, got {duration_s}")
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
        # Enough turns of the event loop for chains of awaits to come to rest.
        for _ in range(10):
            await asyncio.sleep(0)


async def within(clock: Clock, limit_s: float, work: Awaitable[T]) -> T:
    """Return what the work returns, like asyncio.timeout on `clock`. Raises Permanent past `limit_s`."""
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
            raise Permanent(f"took longer than {limit_s:g} s") from None
        raise
    finally:
        timer.cancel()
