"""Engines that are there when a redeployment goes back, and not for long, or not to serve: on a virtual clock."""

import dataclasses
from pathlib import Path

import pytest
from builders import engine_report, sample
from redeployment_house import FakeEngine, House

from orchestrrl.core.errors import Permanent
from orchestrrl.engines.base import EngineCapabilities
from orchestrrl.fleet.deployers.base import EngineLife
from orchestrrl.fleet.redeployment.steps import (
    BRING_UP,
    RedeploymentState,
    RedeployRequest,
    RedeployStepState,
    StepDirection,
    StepKind,
)
from planner.model import EngineId

TO_TP2 = RedeployRequest((("tp2", 0),), reason="the test says so")


@pytest.fixture
def house(tmp_path: Path) -> House:
    """Two narrow engines with requests, and one that stays out of it."""
    return house_of(tmp_path)


def house_of(folder: Path, *, sleepers: bool = False) -> House:
    house = House(folder, sleepers=sleepers)
    house.place("a", "tp1", 0)
    house.place("b", "tp1", 1)
    house.place("w", "tp2", 2, 3)
    for number in range(6):
        house.gateway.put(f"r{number}", "abw"[number % 3])
    return house


def check_whole(house: House, *engines: str) -> None:
    """The fleet is these engines, awake, and requests are on them alone."""
    assert set(house.machines.alive()) == set(engines) == {str(engine) for engine in house.gateway.usable()}
    assert not any(house.machines.engines[EngineId(engine)].sleeping for engine in engines)
    assert {str(view.engine) for view in house.gateway.requests.values()} <= set(engines)
    assert not house.gateway.held


async def test_a_stop_that_was_begun_is_ended_before_going_back(house: House) -> None:
    """A process that was told to end is there for a while: the next daemon does not count on it."""
    house.machines.hangs.add(("stop", "a"))
    async with house.daemon() as redeployer:
        redeployer.begin(TO_TP2)
        await house.clock.advance(2.0)
    house.machines.hangs.clear()
    async with house.daemon():
        report = await house.until_ended()
        assert report.state is RedeploymentState.ROLLED_BACK
        check_whole(house, "a", "b", "w")
        assert (house.machines.stops, house.machines.starts) == (["b", "a"], {"a": 1, "b": 1})


async def test_so_is_one_that_is_called_off(house: House) -> None:
    house.machines.hangs.add(("stop", "a"))
    async with house.daemon() as redeployer:
        redeployer.begin(TO_TP2)
        await house.clock.advance(2.0)
        house.machines.hangs.clear()
        redeployer.cancel("", "changed my mind")
        report = await house.until_ended()
        assert report.state is RedeploymentState.ROLLED_BACK
        check_whole(house, "a", "b", "w")
        assert house.machines.starts == {"a": 1, "b": 1}


async def test_one_that_was_started_again_is_not_stopped_by_the_next_daemon(house: House) -> None:
    """Killed on the way back: who is there by then stays, and serves once it has been verified."""
    house.machines.hangs.add(("stop", "a"))
    async with house.daemon() as redeployer:
        redeployer.begin(TO_TP2)
        await house.clock.advance(2.0)
    house.machines.hangs = {("probe", "a")}
    async with house.daemon():
        await house.clock.advance(4.0)
        assert house.machines.starts == {"a": 1, "b": 1}
    house.machines.hangs.clear()
    async with house.daemon():
        report = await house.until_ended()
        assert report.state is RedeploymentState.ROLLED_BACK
        check_whole(house, "a", "b", "w")
        assert house.machines.starts == {"a": 1, "b": 1}
        back = [told.step for told in report.steps if told.direction is StepDirection.BACK]
        assert [step.engine for step in back if step.kind is StepKind.VERIFY] == ["a"]


async def test_who_fell_asleep_and_is_not_known_to_is_woken(tmp_path: Path) -> None:
    house = house_of(tmp_path, sleepers=True)
    house.machines.hangs.add(("lend", "a"))
    async with house.daemon() as redeployer:
        tell_that_it_sleeps(house, "a")
        redeployer.begin(TO_TP2)
        await house.clock.advance(2.0)
        assert house.machines.engines[EngineId("a")].sleeping
        assert not house.machines.engines[EngineId("a")].lent
    house.machines.hangs.clear()
    async with house.daemon():
        report = await house.until_ended()
        assert report.state is RedeploymentState.ROLLED_BACK
        check_whole(house, "a", "b", "w")
        assert house.machines.starts == {"b": 1}


async def test_who_cannot_be_woken_is_started(tmp_path: Path) -> None:
    house = house_of(tmp_path, sleepers=True)
    house.machines.faults["probe", "tp2"] = Permanent("is broken")
    house.machines.faults["wake", "a"] = Permanent("sleeps like a log")
    async with house.daemon() as redeployer:
        tell_that_it_sleeps(house, "a")
        redeployer.begin(TO_TP2)
        report = await house.until_ended()
        assert report.state is RedeploymentState.ROLLED_BACK, report.detail
        check_whole(house, "a", "b", "w")
        assert house.machines.starts == {f"{report.id}.0": 1, "a": 1, "b": 1}
        back = [told for told in report.steps if told.direction is StepDirection.BACK and told.step.engine == "a"]
        assert [(told.step.kind, told.state) for told in back] == [
            (kind, RedeployStepState.DONE) for kind in (StepKind.START, *BRING_UP)
        ]


def tell_that_it_sleeps(house: House, engine: str) -> None:
    told = engine_report(engine, sample=sample(house.clock.now_s()))
    offers = EngineCapabilities("fake", "1", ("fake",), sleep=True)
    house.plane.engine_reported(dataclasses.replace(told, capabilities=offers), 1)


async def test_an_engine_that_ends_while_its_requests_leave_is_as_good_as_stopped(house: House) -> None:
    house.gateway.put("stuck", "a", movable=False)
    async with house.daemon() as redeployer:
        redeployer.begin(TO_TP2)
        await house.clock.advance(1.0)
        house.machines.engines[EngineId("a")].life = EngineLife.ENDED
        report = await house.until_ended()
        assert report.state is RedeploymentState.DONE
        check_whole(house, f"{report.id}.0", "w")


async def test_one_that_ends_while_others_come_up_is_not_admitted(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.place("wide", "tp2", 0, 1)
    house.gateway.put("r", "wide")

    def slow(engine: FakeEngine) -> None:
        engine.up_at_s += 5.0 if engine.spec.engine == "s1.1" else 0.0

    house.machines.made = slow
    async with house.daemon() as redeployer:
        redeployer.begin(RedeployRequest((("tp1", 2),)))
        await house.clock.advance(4.0)
        house.machines.engines[EngineId("s1.0")].life = EngineLife.ENDED
        report = await house.until_ended()
        assert (report.state, report.detail) == (
            RedeploymentState.ROLLED_BACK,
            "admit: s1.0 ended before it served: died",
        )
        check_whole(house, "wide")


async def test_going_back_brings_back_who_ended_meanwhile(house: House) -> None:
    house.gateway.put("stuck", "b", movable=False)
    async with house.daemon() as redeployer:
        redeployer.begin(TO_TP2)
        await house.clock.advance(1.0)
        house.machines.engines[EngineId("a")].life = EngineLife.ENDED
        report = await house.until_ended()
        assert report.state is RedeploymentState.ROLLED_BACK
        check_whole(house, "a", "b", "w")
        assert house.machines.starts == {"a": 1}
