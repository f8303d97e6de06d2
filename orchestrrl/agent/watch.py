"""Scrape one engine for ever: its load at each interval, its features whenever it appears. The shell of health.py."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

from orchestrrl.agent.health import EngineTrack, HealthLimits, capability_faults, fold, judge
from orchestrrl.core.clock import Clock, stop
from orchestrrl.core.errors import OrchestrRLError
from orchestrrl.engines.base import Engine, EngineCapabilities, EngineSample
from orchestrrl.fleet.reports import EngineReport
from planner.model import EngineHealth, EngineId, NodeId

logger = logging.getLogger(__name__)

# What an engine offers is asked again this long after it did not say.
ASK_AGAIN_S = 2.0

Describe = Callable[[EngineCapabilities, str], Awaitable[EngineCapabilities]]

_Answer = TypeVar("_Answer")


class EngineWatch:
    """Watches one engine for `agent`; `publish` is called with each report, which is numbered when it is sent. Whatever
    the engine does, watching goes on."""

    def __init__(
        self,
        engine_id: EngineId,
        engine: Engine,
        publish: Callable[[EngineReport], None],
        *,
        agent: NodeId,
        clock: Clock,
        interval_s: float = 0.25,
        limits: HealthLimits | None = None,
        describe: Describe | None = None,
    ) -> None:
        """`describe` adds what the engine's host tells of it, from its capabilities and URL."""
        if not interval_s > 0:
            raise ValueError(f"interval_s must be > 0, got {interval_s}")
        self._agent = agent
        self._engine_id = engine_id
        self._engine = engine
        self._publish = publish
        self._clock = clock
        self._interval_s = interval_s
        self._limits = limits or HealthLimits()
        self._describe = describe
        self._track = EngineTrack()
        self._capabilities: EngineCapabilities | None = None
        self._finding: asyncio.Task[None] | None = None
        self._server = ""
        self._health: EngineHealth | None = None
        self._silent_since_s: float | None = None  # when the oldest scrape without an answer began

    async def run(self) -> None:
        """Scrape until cancelled."""
        try:
            while True:
                started_s = self._clock.now_s()
                await self._scrape(started_s)
                await self._clock.sleep(self._interval_s - (self._clock.now_s() - started_s))
        finally:
            await self._forget_capabilities()

    async def _scrape(self, started_s: float) -> None:
        if self._silent_since_s is None:
            self._silent_since_s = started_s
        scrape = asyncio.create_task(self._engine.metrics())
        try:
            await self._be_patient(scrape, started_s)
        finally:
            await stop(scrape)
        answer, now_s = self._answer(scrape), self._clock.now_s()
        waited_s = self._silent_for_s(now_s) if answer is None else now_s - started_s
        if answer is not None:
            self._silent_since_s = None
        health, detail = judge(answer, waited_s, self._limits)
        reading = None
        if isinstance(answer, EngineSample) and health is not EngineHealth.NONSENSE:
            # The time of a sample is when it was asked for: it is never older than it says.
            reading = replace(answer, sampled_s=started_s, scrape_s=waited_s)
        if reading is None or self._track.restarted(reading):
            await self._forget_capabilities()
        self._track, sample = fold(self._track, reading, self._limits)
        if sample is not None and self._capabilities is None and self._finding is None:
            self._finding = asyncio.create_task(self._find_capabilities())
        self._server = "" if sample is None else sample.server
        self._report(health, detail, sample)

    async def _be_patient(self, scrape: asyncio.Task[EngineSample], started_s: float) -> None:
        """Wait for the answer up to `gone_after_s`; while the engine has been silent for too long, also since earlier
        scrapes, say so at each interval."""
        end_s = started_s + self._limits.gone_after_s
        while not scrape.done() and (now_s := self._clock.now_s()) < end_s:
            late_s = self._silent_for_s(now_s) - self._limits.slow_after_s
            if late_s >= 0:
                self._report(*judge(None, self._silent_for_s(now_s), self._limits), None)
            await self._wait(scrape, min(self._interval_s if late_s >= 0 else -late_s, end_s - now_s))

    def _silent_for_s(self, now_s: float) -> float:
        return 0.0 if self._silent_since_s is None else now_s - self._silent_since_s

    async def _wait(self, task: asyncio.Task[Any], at_most_s: float) -> None:
        pause = asyncio.create_task(self._clock.sleep(at_most_s))
        try:
            await asyncio.wait({task, pause}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await stop(pause)

    def _answer(self, task: asyncio.Task[_Answer]) -> _Answer | BaseException | None:
        """What the engine answered or raised; None if it did not in time. A defect is logged with its traceback."""
        if task.cancelled():
            return None
        error = task.exception()
        if error is None:
            return task.result()
        if not isinstance(error, OrchestrRLError):
            logger.error("%s: defect in reading an answer", self._engine_id, exc_info=error)
        return error

    def _report(self, health: EngineHealth, detail: str, sample: EngineSample | None) -> None:
        if health is not self._health:
            level = logging.INFO if health is EngineHealth.OK else logging.WARNING
            logger.log(level, "%s at %s is %s. %s", self._engine_id, self._engine.url, health, detail)
            self._health = health
        self._publish(
            EngineReport(
                self._agent,
                0,
                self._engine_id,
                self._engine.url,
                health,
                detail,
                sample,
                self._capabilities,
                server=self._server,
            )
        )

    async def _find_capabilities(self) -> None:
        """Find out what the engine offers, however often it takes: a server may answer metrics first."""
        while True:
            task = asyncio.create_task(self._engine.capabilities())
            try:
                await self._wait(task, self._limits.gone_after_s)
            finally:
                await stop(task)
            answer = self._answer(task)
            faults = capability_faults(answer) if isinstance(answer, EngineCapabilities) else []
            if isinstance(answer, EngineCapabilities) and not faults:
                self._capabilities = answer
                await self._add_description(answer)
                return
            words = "; ".join(faults) or answer or "no answer"
            logger.warning("%s: does not say what it offers: %s", self._engine_id, words)
            await self._clock.sleep(ASK_AGAIN_S)

    async def _add_description(self, offered: EngineCapabilities) -> None:
        """Takes as long as it takes: what the engine offers is reported meanwhile."""
        if self._describe is None:
            return
        task = asyncio.ensure_future(self._describe(offered, self._engine.url))
        try:
            await asyncio.wait({task})
        finally:
            await stop(task)
        answer = self._answer(task)
        if isinstance(answer, EngineCapabilities):
            self._capabilities = answer

    async def _forget_capabilities(self) -> None:
        """Another process may answer the next time, with other features."""
        self._capabilities = None
        if self._finding is not None:
            await stop(self._finding)
            self._finding = None
