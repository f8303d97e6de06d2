"""Where the parts of a switch meet: what runs beside it, or happens to it, and is none of its steps. Virtual time."""

import asyncio
from pathlib import Path

import pytest
from switch_house import House

from orchestrrl.deployers.base import Life
from orchestrrl.switch import SwitchState, SwitchWish
from planner.model import EngineId

TO_TP2 = SwitchWish((("tp2", 0),), reason="the test says so")
A, B, W = EngineId("a"), EngineId("b"), EngineId("w")


@pytest.fixture
def house(tmp_path: Path) -> House:
    """Two narrow engines with requests, and one that stays out of it."""
    house = House(tmp_path)
    house.place("a", "tp1", 0)
    house.place("b", "tp1", 1)
    house.place("w", "tp2", 2, 3)
    for number in range(6):
        house.gateway.put(f"r{number}", "abw"[number % 3])
    return house


def check_whole(house: House, *engines: str) -> None:
    """The fleet is these engines, and requests are on them alone."""
    assert set(house.machines.alive()) == set(engines) == {str(engine) for engine in house.gateway.usable()}
    assert {str(view.engine) for view in house.gateway.requests.values()} <= set(engines)
    assert not house.gateway.held
    assert not house.plane.routes.draining
    assert not house.plane.routes.expected


async def test_engines_that_end_by_themselves_do_not_end_the_watch_over_them(house: House) -> None:
    async with house.daemon() as switching:
        tending = asyncio.create_task(switching.tend())
        for engine in (A, B):
            house.machines.engines[engine].life = Life.ENDED
            await house.clock.advance(5.0)
            assert not tending.done(), tending.exception()
        check_whole(house, "w")
        tending.cancel()


async def test_an_engine_of_which_nothing_is_left_keeps_no_gpus(house: House) -> None:
    """Somebody has deleted it where it ran: the deployer does not even list it."""
    async with house.daemon() as switching:
        tending = asyncio.create_task(switching.tend())
        del house.machines.engines[A]
        await house.clock.advance(5.0)
        check_whole(house, "b", "w")
        switching.begin(SwitchWish((("tp1", 2), ("tp2", 1))))
        report = await house.until_ended()
        assert report.state is SwitchState.DONE
        check_whole(house, "b", "w", f"{report.id}.0")
        tending.cancel()


async def test_a_look_that_a_switch_has_overtaken_is_not_taken_for_the_truth(house: House) -> None:
    async with house.daemon() as switching:
        listed = switching._deployer.list_engines
        may_answer = asyncio.Event()

        async def slowly() -> object:
            answer = await listed()
            await may_answer.wait()
            return answer

        switching._deployer.list_engines = slowly
        tending = asyncio.create_task(switching.tend())
        await house.clock.advance(2.0)
        switching._deployer.list_engines = listed
        switching.begin(TO_TP2)
        await house.clock.advance(1.0)
        assert "s1.0" in house.machines.engines
        may_answer.set()
        report = await house.until_ended()
        assert report.state is SwitchState.DONE
        check_whole(house, "s1.0", "w")
        tending.cancel()
