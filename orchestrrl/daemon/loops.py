"""The daemon's two loops on any clock: when the control plane decides. A simulation runs the same."""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from orchestrrl.core.clock import Clock, until_set
from orchestrrl.core.defects import FAST_LOOP, SLOW_LOOP, Defects, is_cancelled
from orchestrrl.core.errors import OrchestrRLError
from orchestrrl.daemon.control_plane import ControlPlane

logger = logging.getLogger(__name__)


async def run_loops(control_plane: ControlPlane, clock: Clock, defects: Defects | None = None) -> None:
    """Run both loops until cancelled. With `defects`, an exception sets the work of one tick aside and is recorded
    there, and the next tick comes. Without, as in simulations and tests, a defect is raised."""
    await control_plane.fleet.barrier.settle()
    async with asyncio.TaskGroup() as loops:
        fast_pause = partial(_interval, control_plane, clock)
        slow_pause = partial(_interval_or_step, control_plane, clock)
        loops.create_task(_repeat(FAST_LOOP, control_plane.fast_tick, fast_pause, defects))
        loops.create_task(_repeat(SLOW_LOOP, control_plane.slow_tick, slow_pause, defects))


async def _interval(control_plane: ControlPlane, clock: Clock) -> None:
    await clock.sleep(control_plane.config.fast.interval_s)


async def _interval_or_step(control_plane: ControlPlane, clock: Clock) -> None:
    """Until the slow loop's next turn: an interval, or a fast one into a new step, when its requests are there."""
    began = control_plane.fleet.step_began
    await until_set(clock, began, control_plane.config.slow.interval_s)
    if began.is_set():
        began.clear()
        await clock.sleep(min(control_plane.config.fast.interval_s, control_plane.config.slow.interval_s))


async def _repeat(
    part: str, tick: Callable[[], Awaitable[Any] | Any], pause: Callable[[], Awaitable[None]], defects: Defects | None
) -> None:
    while True:
        try:
            outcome = tick()
            if inspect.isawaitable(outcome):
                await outcome
        except OrchestrRLError as error:  # the world made it fail, e.g. by a full disk
            if defects is None:
                logger.error("%s failed: %s", part, error)
            else:
                defects.met(part, error)
        except (Exception, asyncio.CancelledError) as error:
            if defects is None or is_cancelled():
                raise
            defects.met(part, error)
        else:
            if defects is not None:
                defects.passed(part)
        await pause()
