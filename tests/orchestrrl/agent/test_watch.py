"""Tests of watching an engine that starts, slows down, stops and restarts changed, in virtual time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from fake_engine import FakeEngine

from orchestrrl.agent.watch import ASK_AGAIN_S, EngineWatch, HealthLimits
from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.errors import Permanent, Retryable
from orchestrrl.engines.base import EngineCapabilities, EngineSample
from orchestrrl.fleet.reports import EngineReport
from planner.model import EngineHealth, EngineId, NodeId


class Scene:
    def __init__(self) -> None:
        self.clock = VirtualClock(1000.0)
        self.engine = FakeEngine(self.clock)
        self.seen: list[EngineReport] = []
        self.watch = EngineWatch(
            EngineId("e0"),
            self.engine,
            self.seen.append,
            agent=NodeId("a"),
            clock=self.clock,
            interval_s=0.25,
            limits=HealthLimits(slow_after_s=1.0, gone_after_s=3.0),
            describe=self._describe,
        )
        self.describing_s = 0.0
        self.description_error: Exception | None = None

    async def _describe(self, offered: EngineCapabilities, url: str) -> EngineCapabilities:
        await self.clock.sleep(self.describing_s)
        if self.description_error is not None:
            raise self.description_error
        serving = replace(offered.serving, gpu_detail=f"{url} has none")
        return replace(offered, serving=serving) if self.describing_s else offered

    @property
    def last(self) -> EngineReport:
        return self.seen[-1]

    async def pass_time(self, duration_s: float, tokens_per_s: int = 0) -> None:
        for _ in range(round(duration_s / 0.25)):
            self.engine.generate_tokens(tokens_per_s // 4)
            await self.clock.advance(0.25)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    made = Scene()
    task = asyncio.create_task(made.watch.run())
    await made.clock.advance(0.0)  # the first scrape, at 1000
    yield made
    assert not task.done(), "the watch must survive every engine failure"
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_impossible_capabilities_are_read_again(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    good = scene.engine.offers
    scene.engine.offers = replace(good, max_model_len_tokens=-1)
    scene.engine.error = Retryable("connection refused", 1.0)  # another engine replaces it
    await scene.pass_time(0.5)
    scene.engine.error = None
    await scene.pass_time(1.0)
    assert scene.last.capabilities is None
    assert "e0: cannot read its capabilities: max_model_len_tokens cannot be -1" in caplog.messages
    scene.engine.offers = good
    await scene.pass_time(ASK_AGAIN_S + 1.0)
    assert scene.last.capabilities == good


async def test_working_engine_has_load_rate_and_capabilities(scene: Scene) -> None:
    await scene.pass_time(3.0, tokens_per_s=400)
    first = scene.seen[0].sample
    assert first is not None
    assert first.decode_tokens_per_s is None
    assert scene.last.health is EngineHealth.OK
    assert scene.last.sample is not None
    assert scene.last.sample.decode_tokens_per_s == 400
    assert scene.last.capabilities == scene.engine.offers
    assert scene.engine.calls == ["capabilities"]
    assert len(scene.seen) == 13


async def test_slow_engine_is_slow_while_awaited_and_when_it_answers(scene: Scene) -> None:
    scene.engine.answer_s = 1.5
    await scene.pass_time(1.75)
    waiting, answered = scene.seen[-2], scene.seen[-1]
    assert (waiting.health, waiting.sample) == (EngineHealth.SLOW, None)
    assert waiting.health_detail == "no answer for 1.25 s, limit 1 s"
    assert answered.health is EngineHealth.SLOW
    assert answered.sample is not None
    assert answered.sample.sampled_s == 1000.25  # the time of the request, not of the answer
    assert answered.sample.scrape_s == 1.5


async def test_hung_engine_is_gone_after_its_limit(scene: Scene) -> None:
    scene.engine.answer_s = 1e9
    await scene.pass_time(3.25)
    assert (scene.last.health, scene.last.health_detail) == (EngineHealth.GONE, "no answer for 3 s, limit 3 s")
    first_gone = len(scene.seen)
    await scene.pass_time(10.0)
    assert all(seen.sample is None for seen in scene.seen[1:])
    assert {seen.health for seen in scene.seen[first_gone:]} == {EngineHealth.GONE}, "gone until it answers"
    assert len(scene.seen) - first_gone >= 30, "reported at each interval"
    scene.engine.answer_s = 0.0
    await scene.pass_time(4.0)
    assert scene.last.health is EngineHealth.OK


async def test_restarted_engine_is_read_anew_without_its_old_rate(scene: Scene) -> None:
    await scene.pass_time(2.0, tokens_per_s=400)
    scene.engine.error = Retryable("connection refused", 1.0)
    await scene.pass_time(1.0)
    gone = scene.last
    assert (gone.health, gone.health_detail, gone.sample, gone.capabilities) == (
        EngineHealth.GONE,
        "connection refused",
        None,
        None,
    )
    scene.engine.error = None
    scene.engine.offers = EngineCapabilities("fake", "2", ("other",))
    start = len(scene.seen)
    await scene.pass_time(1.0, tokens_per_s=400)
    back = scene.seen[start].sample
    assert back is not None
    assert back.decode_tokens_per_s is None
    assert scene.last.capabilities == scene.engine.offers


async def test_restart_between_two_scrapes_is_detected_by_counters(scene: Scene) -> None:
    await scene.pass_time(2.0, tokens_per_s=400)
    scene.engine.current = replace(scene.engine.current, generation_tokens_total=0)
    scene.engine.offers = EngineCapabilities("fake", "2", ("m",))
    start = len(scene.seen)
    await scene.pass_time(1.0, tokens_per_s=40)
    fresh = scene.seen[start].sample
    assert fresh is not None
    assert fresh.decode_tokens_per_s is None
    assert scene.last.capabilities == scene.engine.offers
    assert scene.last.sample is not None
    assert scene.last.sample.decode_tokens_per_s == 40


async def test_stalled_engine_reads_zero_and_an_idle_one_unknown(scene: Scene) -> None:
    await scene.pass_time(2.0, tokens_per_s=400)
    await scene.pass_time(1.5)
    assert scene.last.sample is not None
    assert scene.last.sample.decode_tokens_per_s == 0
    scene.engine.current = replace(scene.engine.current, running=0)
    await scene.pass_time(0.25)
    assert scene.last.sample is not None
    assert scene.last.sample.decode_tokens_per_s is None


@pytest.mark.parametrize("error", [Permanent("not metrics: '<html>'"), KeyError("vllm:x"), ValueError("NaN")])
async def test_impossible_metrics_are_nonsense(scene: Scene, error: Exception) -> None:
    scene.engine.error = error
    await scene.pass_time(1.0)
    assert scene.last.health is EngineHealth.NONSENSE
    assert scene.last.sample is None
    scene.engine.error = None
    scene.engine.current = EngineSample(-1, 0, 0.0, 0, 0, 0, 0)
    await scene.pass_time(0.5)
    assert (scene.last.health, scene.last.health_detail) == (EngineHealth.NONSENSE, "running cannot be -1")


@pytest.mark.parametrize("error", [Retryable("still loading", 1.0), Permanent("no /openapi.json"), KeyError("paths")])
async def test_capabilities_are_read_again_until_they_are_known(scene: Scene, error: Exception) -> None:
    scene.engine.error, scene.engine.capabilities_error = Retryable("connection refused", 1.0), error
    await scene.pass_time(0.5)
    scene.engine.error = None
    await scene.pass_time(1.0)
    assert (scene.last.health, scene.last.capabilities) == (EngineHealth.OK, None)
    scene.engine.capabilities_error = None
    await scene.pass_time(ASK_AGAIN_S + 0.5)
    assert scene.last.capabilities == scene.engine.offers


async def restart(scene: Scene) -> None:
    """Replace the answering process, and expect its capabilities to be read."""
    await scene.pass_time(1.0, tokens_per_s=400)
    scene.engine.current = replace(scene.engine.current, generation_tokens_total=0)


async def test_host_facts_are_reported_once_known(scene: Scene) -> None:
    scene.describing_s = 10.0  # far beyond an engine's limit
    await restart(scene)
    await scene.pass_time(5.0)
    assert scene.last.capabilities == scene.engine.offers
    await scene.pass_time(6.0)
    assert scene.last.capabilities is not None
    assert scene.last.capabilities.serving.gpu_detail == "http://127.0.0.1:8000 has none"
    assert scene.engine.calls.count("capabilities") == 2


@pytest.mark.parametrize("error", [OSError("no /proc"), KeyError("gpu")])
async def test_failed_host_description_leaves_the_engines_own_facts(
    scene: Scene, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    scene.description_error = error
    await restart(scene)
    await scene.pass_time(2.0)
    assert scene.last.capabilities == scene.engine.offers
    assert "defect in reading an answer" in caplog.text
