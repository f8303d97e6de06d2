"""The daemon's two loops on any clock: when the control plane decides. A simulation runs the same."""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from orchestrrl.clock import Clock
from orchestrrl.control_plane import ControlPlane
from orchestrrl.errors import OrchestrRLError

logger = logging.getLogger(__name__)


async def run_loops(plane: ControlPlane, clock: Clock) -> None:
    """Both loops, until cancelled."""
    async with asyncio.TaskGroup() as loops:
        loops.create_task(_repeat(plane.fast_tick, lambda: clock.sleep(plane.config.fast.interval_s)))
        loops.create_task(_repeat(plane.slow_tick, lambda: _interval_or_step(plane, clock)))


async def _interval_or_step(plane: ControlPlane, clock: Clock) -> None:
    """Until the slow loop's next turn: an interval, or a fast one into a new step, when its requests are there."""
    interval = asyncio.create_task(clock.sleep(plane.config.slow.interval_s))
    began = asyncio.create_task(plane.step_began.wait())
    try:
        await asyncio.wait({interval, began}, return_when=asyncio.FIRST_COMPLETED)
        if began.done():
            plane.step_began.clear()
            await clock.sleep(min(plane.config.fast.interval_s, plane.config.slow.interval_s))
    finally:
        interval.cancel()
        began.cancel()


async def _repeat(tick: Callable[[], Awaitable[Any] | Any], pause: Callable[[], Awaitable[None]]) -> None:
    """A tick that the world made fail, e.g. by a full disk, is logged and the next one comes; a defect ends the
    daemon, and gateways go on by its last orders."""
    while True:
        try:
            outcome = tick()
            if inspect.isawaitable(outcome):
                await outcome
        except OrchestrRLError as error:
            logger.error("%s failed: %s", tick.__name__, error)
        await pause()
