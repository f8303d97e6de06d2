"""Tests of engines that exist when a redeployment is undone, but not for long, or without serving, on a virtual
clock."""

import dataclasses
from pathlib import Path

import pytest
from builders import engine_report, sample
from redeployment_harness import FakeEngine, Harness

from orchestrrl.core.errors import Permanent
from orchestrrl.core.operation import OperationState, StepDirection, StepState
from orchestrrl.engines.base import EngineCapabilities
from orchestrrl.fleet.deployers.base import EngineLife
from orchestrrl.fleet.redeployment.steps import (
    BRING_UP,
    RedeployRequest,
    StepKind,
)
from planner.model import EngineId

TO_TP2 = RedeployRequest((("tp2", 0),), reason="requested by the test")


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    """Provide two narrow engines with requests, and one that is not part of the redeployment."""
    return harness_of(tmp_path)


def harness_of(folder: Path, *, sleepers: bool = False) -> Harness:
    harness = Harness(folder, sleepers=sleepers)
    harness.place("a", "tp1", 0)
    harness.place("b", "tp1", 1)
    harness.place("w", "tp2", 2, 3)
    for number in range(6):
        harness.gateway.put(f"r{number}", "abw"[number % 3])
    return harness


def check_whole(harness: Harness, *engines: str) -> None:
    """Check that the fleet is exactly these engines, awake, and that all requests are on them."""
    assert set(harness.machines.alive()) == set(engines) == {str(engine) for engine in harness.gateway.usable()}
    assert not any(harness.machines.engines[EngineId(engine)].sleeping for engine in engines)
    assert {str(view.engine) for view in harness.gateway.requests.values()} <= set(engines)
    assert not harness.gateway.held


async def test_begun_stop_is_finished_before_undoing(harness: Harness) -> None:
    """A process that was ordered to stop exists for a while: the next daemon must not rely on it."""
    harness.machines.hangs.add(("stop", "a"))
    async with harness.daemon() as redeployer:
        redeployer.begin(TO_TP2)
        await harness.clock.advance(2.0)
    harness.machines.hangs.clear()
    async with harness.daemon():
        report = await harness.until_ended()
        assert report.state is OperationState.ROLLED_BACK
        check_whole(harness, "a", "b", "w")
        assert (harness.machines.stops, harness.machines.starts) == (["b", "a"], {"a": 1, "b": 1})


async def test_begun_stop_is_finished_before_a_cancellation_undoes(harness: Harness) -> None:
    harness.machines.hangs.add(("stop", "a"))
    async with harness.daemon() as redeployer:
        redeployer.begin(TO_TP2)
        await harness.clock.advance(2.0)
        harness.machines.hangs.clear()
        redeployer.cancel("", "changed my mind")
        report = await harness.until_ended()
        assert report.state is OperationState.ROLLED_BACK
        check_whole(harness, "a", "b", "w")
        assert harness.machines.starts == {"a": 1, "b": 1}


async def test_restarted_engine_is_kept_by_the_next_daemon(harness: Harness) -> None:
    """Engines that exist when the daemon is killed while undoing stay, and serve once verified."""
    harness.machines.hangs.add(("stop", "a"))
    async with harness.daemon() as redeployer:
        redeployer.begin(TO_TP2)
        await harness.clock.advance(2.0)
    harness.machines.hangs = {("probe", "a")}
    async with harness.daemon():
        await harness.clock.advance(4.0)
        assert harness.machines.starts == {"a": 1, "b": 1}
    harness.machines.hangs.clear()
    async with harness.daemon():
        report = await harness.until_ended()
        assert report.state is OperationState.ROLLED_BACK
        check_whole(harness, "a", "b", "w")
        assert harness.machines.starts == {"a": 1, "b": 1}
        back = [reported.step for reported in report.steps if reported.direction is StepDirection.BACK]
        assert [step.engine for step in back if step.kind is StepKind.VERIFY] == ["a"]


async def test_engine_asleep_without_a_record_is_woken(tmp_path: Path) -> None:
    harness = harness_of(tmp_path, sleepers=True)
    harness.machines.hangs.add(("lend", "a"))
    async with harness.daemon() as redeployer:
        tell_that_it_sleeps(harness, "a")
        redeployer.begin(TO_TP2)
        await harness.clock.advance(2.0)
        assert harness.machines.engines[EngineId("a")].sleeping
        assert not harness.machines.engines[EngineId("a")].lent
    harness.machines.hangs.clear()
    async with harness.daemon():
        report = await harness.until_ended()
        assert report.state is OperationState.ROLLED_BACK
        check_whole(harness, "a", "b", "w")
        assert harness.machines.starts == {"b": 1}


async def test_engine_that_cannot_be_woken_is_started(tmp_path: Path) -> None:
    harness = harness_of(tmp_path, sleepers=True)
    harness.machines.faults["probe", "tp2"] = Permanent("is broken")
    harness.machines.faults["wake", "a"] = Permanent("sleeps like a log")
    async with harness.daemon() as redeployer:
        tell_that_it_sleeps(harness, "a")
        redeployer.begin(TO_TP2)
        report = await harness.until_ended()
        assert report.state is OperationState.ROLLED_BACK, report.detail
        check_whole(harness, "a", "b", "w")
        assert harness.machines.starts == {f"{report.id}.0": 1, "a": 1, "b": 1}
        back = [each for each in report.steps if each.direction is StepDirection.BACK and each.step.engine == "a"]
        assert [(each.step.kind, each.state) for each in back] == [
            (kind, StepState.DONE) for kind in (StepKind.START, *BRING_UP)
        ]


def tell_that_it_sleeps(harness: Harness, engine: str) -> None:
    reported = engine_report(engine, sample=sample(harness.clock.now_s()))
    offers = EngineCapabilities("fake", "1", ("fake",), sleep=True)
    harness.plane.fleet.engine_reported(dataclasses.replace(reported, capabilities=offers), 1)


async def test_engine_that_ends_while_evacuating_counts_as_stopped(harness: Harness) -> None:
    harness.gateway.put("stuck", "a", movable=False)
    async with harness.daemon() as redeployer:
        redeployer.begin(TO_TP2)
        await harness.clock.advance(1.0)
        harness.machines.engines[EngineId("a")].life = EngineLife.ENDED
        report = await harness.until_ended()
        assert report.state is OperationState.DONE
        check_whole(harness, f"{report.id}.0", "w")


async def test_engine_that_ends_while_others_start_is_not_admitted(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    harness.place("wide", "tp2", 0, 1)
    harness.gateway.put("r", "wide")

    def slow(engine: FakeEngine) -> None:
        engine.up_at_s += 5.0 if engine.spec.engine == "s1.1" else 0.0

    harness.machines.made = slow
    async with harness.daemon() as redeployer:
        redeployer.begin(RedeployRequest((("tp1", 2),)))
        await harness.clock.advance(4.0)
        harness.machines.engines[EngineId("s1.0")].life = EngineLife.ENDED
        report = await harness.until_ended()
        assert (report.state, report.detail) == (
            OperationState.ROLLED_BACK,
            "admit: engine s1.0 ended before serving requests: died",
        )
        check_whole(harness, "wide")


async def test_undo_restarts_engines_that_ended_meanwhile(harness: Harness) -> None:
    harness.gateway.put("stuck", "b", movable=False)
    async with harness.daemon() as redeployer:
        redeployer.begin(TO_TP2)
        await harness.clock.advance(1.0)
        harness.machines.engines[EngineId("a")].life = EngineLife.ENDED
        report = await harness.until_ended()
        assert report.state is OperationState.ROLLED_BACK
        check_whole(harness, "a", "b", "w")
        assert harness.machines.starts == {"a": 1}
