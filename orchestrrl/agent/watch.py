"""Scrape one engine: its load, health and decode rate at each interval, and its capabilities whenever it starts or
restarts."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, TypeVar

from orchestrrl.core.clock import Clock, stop, until_set, within
from orchestrrl.core.errors import OrchestrRLError, Permanent, cut, shorten
from orchestrrl.engines.base import Engine, EngineCapabilities, EngineSample
from orchestrrl.fleet.reports import EngineReport
from planner.model import EngineHealth, EngineId, NodeId

logger = logging.getLogger(__name__)

# Delay before capabilities are read again after a failure.
ASK_AGAIN_S = 2.0

Describe = Callable[[EngineCapabilities, str], Awaitable[EngineCapabilities]]

_Answer = TypeVar("_Answer")

# The largest values that the daemon accepts.
_MAX_COUNT = 2**32 - 1
_MAX_TOTAL = 2**63 - 1
_MAX_TOKENS_PER_S = 1e9  # the largest rate that the daemon accepts; a jump of the counter exceeds it


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """Time limits for judging an engine's health, in seconds. An engine that takes longer than `slow_after_s` to answer
    is slow. An engine that does not answer for `gone_after_s` is gone. The decode rate is measured over the scrapes of
    the last `rate_window_s`."""

    slow_after_s: float = 1.0
    gone_after_s: float = 5.0
    rate_window_s: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.slow_after_s <= self.gone_after_s:
            raise ValueError(
                f"slow_after_s must be > 0 and <= gone_after_s, got {self.slow_after_s} and {self.gone_after_s}"
            )
        if not self.rate_window_s > 0:
            raise ValueError(f"rate_window_s must be > 0, got {self.rate_window_s}")


def judge(
    answer: EngineSample | BaseException | None, waited_s: float, limits: HealthLimits
) -> tuple[EngineHealth, str]:
    """Return an engine's health and the reason for it. The reason is "" if the engine is healthy.

    `answer` is the scraped sample, the exception that the scrape raised, or None if there is no answer yet. `waited_s`
    is the time, in seconds, for which the agent has waited for the answer.
    """
    if answer is None:
        gone = waited_s >= limits.gone_after_s
        limit_s = limits.gone_after_s if gone else limits.slow_after_s
        detail = f"no answer for {waited_s:.3g} s, limit {limit_s:.3g} s"
        return EngineHealth.GONE if gone else EngineHealth.SLOW, detail
    if isinstance(answer, BaseException):
        gone = isinstance(answer, OrchestrRLError) and not isinstance(answer, Permanent)
        words = str(answer) if isinstance(answer, OrchestrRLError) else f"unreadable answer: {answer!r}"
        return EngineHealth.GONE if gone else EngineHealth.NONSENSE, cut(words)
    faults = metric_faults(answer)
    if faults:
        return EngineHealth.NONSENSE, "; ".join(faults)
    if waited_s > limits.slow_after_s:
        return EngineHealth.SLOW, f"answered after {waited_s:.3g} s, limit {limits.slow_after_s:.3g} s"
    return EngineHealth.OK, ""


def metric_faults(metrics: EngineSample) -> list[str]:
    """Return one message for each impossible value in an engine's metrics."""
    most = dict.fromkeys(("running", "waiting"), _MAX_COUNT)
    totals = ("kv_capacity_tokens", "generation_tokens_total", "prompt_tokens_total", "preemptions_total")
    most |= dict.fromkeys(totals, _MAX_TOTAL)
    values = {name: getattr(metrics, name) for name in most}
    faults = [f"{name} cannot be {value}" for name, value in values.items() if not 0 <= value <= most[name]]
    # Engines round: a full cache may read a little over 1.
    if not (math.isfinite(metrics.kv_usage_fraction) and 0 <= metrics.kv_usage_fraction <= 1.001):
        faults.append(f"kv_usage_fraction cannot be {metrics.kv_usage_fraction}")
    return faults


def capability_faults(capabilities: EngineCapabilities) -> list[str]:
    """Return one message for each impossible value in an engine's capabilities. The values may have any type, because
    they are read from the engine's JSON."""
    faults = []
    for name in ("max_model_len_tokens", "max_sequences"):
        value = getattr(capabilities, name)
        if value is not None and not (type(value) is int and 0 <= value <= _MAX_COUNT):
            faults.append(f"{name} cannot be {shorten(value)}")
    if not isinstance(capabilities.version, str):
        faults.append(f"version cannot be {shorten(capabilities.version)}")
    return faults


@dataclass(frozen=True, slots=True)
class EngineTrack:
    """Earlier scrapes from which the decode rate is computed: (sampled_s, generation_tokens_total) pairs, oldest first.
    The track begins anew whenever the engine cannot be read, has nothing to decode, or restarts."""

    points: tuple[tuple[float, int], ...] = ()
    last_total: int = 0  # generation_tokens_total of the last reading; 0 after a break

    def restarted(self, metrics: EngineSample) -> bool:
        """Return whether the token counter decreased, which shows that another process answers now."""
        return metrics.generation_tokens_total < self.last_total


def fold(
    track: EngineTrack, sample: EngineSample | None, limits: HealthLimits
) -> tuple[EngineTrack, EngineSample | None]:
    """Return the updated track, and the sample with its decode rate. `sample` is None if the engine could not be read.

    The decode rate is the mean over the scrapes of the last `rate_window_s` in which the engine was decoding. If the
    scrapes are further apart than this, it is the mean over the last two. The rate is None (unknown) at the first
    scrape, after a counter reset, and while no request is running. It is also None if no token has arrived in the
    observed time and this time is shorter than `rate_window_s`, because the engine may still be in prefill. A rate of 0
    means that the engine has stalled.
    """
    if sample is None:
        return EngineTrack(), None
    points = () if track.restarted(sample) else track.points
    if sample.running == 0:
        points = ()
    else:
        points = _within_window((*points, (sample.sampled_s, sample.generation_tokens_total)), limits.rate_window_s)
    sample = replace(
        sample,
        kv_usage_fraction=min(1.0, sample.kv_usage_fraction),
        decode_tokens_per_s=_rate(points, limits.rate_window_s),
    )
    return EngineTrack(points, sample.generation_tokens_total), sample


def _within_window(points: tuple[tuple[float, int], ...], window_s: float) -> tuple[tuple[float, int], ...]:
    """Return the last points, starting with the newest point that is at least `window_s` older than the last point.
    Return all points if none is that old."""
    newest_s = points[-1][0]
    whole = [index for index, (at_s, _) in enumerate(points) if newest_s - at_s >= window_s]
    return points[whole[-1] :] if whole else points


def _rate(points: tuple[tuple[float, int], ...], window_s: float) -> float | None:
    if len(points) < 2:
        return None
    (from_s, from_tokens), (to_s, to_tokens) = points[0], points[-1]
    if to_s <= from_s or (to_tokens == from_tokens and to_s - from_s < window_s):
        return None
    rate = (to_tokens - from_tokens) / (to_s - from_s)
    return rate if rate <= _MAX_TOKENS_PER_S else None


@dataclass(slots=True, eq=False)
class EngineWatch:
    """Watches one engine for `agent`. `publish` is called with each report. Reports are numbered later, when they are
    sent. The watch continues after any failure of the engine."""

    engine_id: EngineId
    engine: Engine
    publish: Callable[[EngineReport], None]
    _: KW_ONLY
    agent: NodeId
    clock: Clock
    interval_s: float = 0.25
    limits: HealthLimits = field(default_factory=HealthLimits)
    describe: Describe | None = None  # adds facts from the engine's host, by capabilities and URL
    _track: EngineTrack = field(default_factory=EngineTrack, init=False)
    _capabilities: EngineCapabilities | None = field(default=None, init=False)
    _finding: asyncio.Task[None] | None = field(default=None, init=False)
    _server: str = field(default="", init=False)
    _health: EngineHealth | None = field(default=None, init=False)
    # The start of the oldest scrape without an answer.
    _silent_since_s: float | None = field(default=None, init=False)

    async def run(self) -> None:
        """Scrape the engine until cancelled."""
        try:
            while True:
                started_s = self.clock.now_s()
                await self._scrape(started_s)
                await self.clock.sleep(self.interval_s - (self.clock.now_s() - started_s))
        finally:
            await self._forget_capabilities()

    async def _scrape(self, started_s: float) -> None:
        if self._silent_since_s is None:
            self._silent_since_s = started_s
        scrape = asyncio.create_task(self._asked(self.engine.metrics()))
        try:
            await self._be_patient(scrape, started_s)
        finally:
            await stop(scrape)
        answer, now_s = None if scrape.cancelled() else scrape.result(), self.clock.now_s()
        waited_s = self._silent_for_s(now_s) if answer is None else now_s - started_s
        if answer is not None:
            self._silent_since_s = None
        health, detail = judge(answer, waited_s, self.limits)
        reading = None
        if isinstance(answer, EngineSample) and health is not EngineHealth.NONSENSE:
            # A sample's time is that of its request, so that it is never older than its timestamp.
            reading = replace(answer, sampled_s=started_s, scrape_s=waited_s)
        if reading is None or self._track.restarted(reading):
            await self._forget_capabilities()
        self._track, sample = fold(self._track, reading, self.limits)
        if sample is not None and self._capabilities is None and self._finding is None:
            self._finding = asyncio.create_task(self._find_capabilities())
        self._server = "" if sample is None else sample.server
        self._report(health, detail, sample)

    async def _be_patient(self, scrape: asyncio.Task[Any], started_s: float) -> None:
        """Wait for the answer to a scrape for at most `gone_after_s`. If the engine has not answered for
        `slow_after_s`, counted from the oldest unanswered scrape, report its health at each interval."""
        end_s = started_s + self.limits.gone_after_s
        while not scrape.done() and (now_s := self.clock.now_s()) < end_s:
            late_s = self._silent_for_s(now_s) - self.limits.slow_after_s
            if late_s >= 0:
                self._report(*judge(None, self._silent_for_s(now_s), self.limits), None)
            pause_s = min(self.interval_s if late_s >= 0 else -late_s, end_s - now_s)
            await until_set(self.clock, asyncio.Event(), pause_s, scrape)

    def _silent_for_s(self, now_s: float) -> float:
        return 0.0 if self._silent_since_s is None else now_s - self._silent_since_s

    async def _asked(self, work: Awaitable[_Answer]) -> _Answer | Exception:
        """Await `work` and return the engine's answer, or the exception that `work` raised. Unexpected exceptions are
        logged with a traceback."""
        try:
            return await work
        except OrchestrRLError as error:
            return error
        except Exception as error:
            logger.exception("%s: defect in reading an answer", self.engine_id)
            return error

    def _report(self, health: EngineHealth, detail: str, sample: EngineSample | None) -> None:
        if health is not self._health:
            level = logging.INFO if health is EngineHealth.OK else logging.WARNING
            why = f": {detail}" if detail else ""
            logger.log(level, "%s at %s is %s%s", self.engine_id, self.engine.url, health, why)
            self._health = health
        found = health, detail, sample, self._capabilities
        self.publish(EngineReport(self.agent, 0, self.engine_id, self.engine.url, *found, server=self._server))

    async def _find_capabilities(self) -> None:
        """Read the engine's capabilities, and retry until they can be read. A starting server may serve its metrics
        before its capabilities."""
        while True:
            answer = await self._asked(within(self.clock, self.limits.gone_after_s, self.engine.capabilities()))
            faults = capability_faults(answer) if isinstance(answer, EngineCapabilities) else [str(answer)]
            if isinstance(answer, EngineCapabilities) and not faults:
                self._capabilities = answer
                if self.describe is not None:  # the engine's own capabilities are reported meanwhile
                    described = await self._asked(self.describe(answer, self.engine.url))
                    if isinstance(described, EngineCapabilities):
                        self._capabilities = described
                return
            logger.warning("%s: cannot read its capabilities: %s", self.engine_id, "; ".join(faults))
            await self.clock.sleep(ASK_AGAIN_S)

    async def _forget_capabilities(self) -> None:
        """Drop the capabilities, because another process with different features may answer next."""
        self._capabilities = None
        if self._finding is not None:
            await stop(self._finding)
            self._finding = None
