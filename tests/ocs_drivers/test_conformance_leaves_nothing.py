"""A run of the suite without pytest has a budget. It restores the switch, or reports the circuits it could not
remove."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial

import pytest
from stubborn import StubbornSwitch

from ocs_drivers import conformance_run
from ocs_drivers.base import OcsDriver
from ocs_drivers.conformance import carry_out
from ocs_drivers.conformance_run import (
    MOST_CALLS,
    LabConformance,
    LabTestOutcome,
    LabTestState,
    Leftover,
    parse_ports,
    run_suite,
)
from ocs_drivers.emulators.registry import DRIVER_OPTIONS
from ocs_drivers.errors import DriverPermanent
from ocs_drivers.model import CrossConnect
from ocs_drivers.registry import make_driver

MANY_WRITERS = "test_concurrent_writers_all_succeed_with_retries"


@asynccontextmanager
async def lab(
    switch: StubbornSwitch, protocol: str = "scpi", kind: type[LabConformance] = LabConformance
) -> AsyncIterator[LabConformance]:
    address = await switch.emulator.start()
    options = {"address": address, "tune_timeout_s": 0.5, **DRIVER_OPTIONS.get(protocol, {})}
    facts = switch.model.facts
    first = facts.egress_ports[0]
    driver = protocol.partition("-")[0]
    yield kind(partial(make_driver, driver, "lab", options), parse_ports(f"1-4:{first}-{first + 3}"))
    await switch.emulator.stop()


async def outcomes(suite: LabConformance, *only: str) -> list[LabTestOutcome]:
    return [outcome async for outcome in run_suite(suite, only)]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance_run, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(conformance_run, "RESTORE_S", 0.05)


@pytest.mark.parametrize("protocol", ["scpi", "tl1-polatis", "tl1-calient", "calient_rest"])
async def test_missing_circuit_costs_few_commands_and_leaves_no_circuit(protocol: str) -> None:
    switch = StubbornSwitch(protocol, ignores=1)
    async with lab(switch, protocol) as suite:
        (outcome,) = await outcomes(suite, MANY_WRITERS)
    assert outcome.state is LabTestState.FAILED
    assert "the device does not show it" in outcome.detail
    assert switch.up() == []
    assert not suite.leftover
    assert len(switch.emulator.device.setters) <= 16
    assert switch.readings <= 400


class Greedy(LabConformance):
    async def test_plan_sends_nothing(self) -> None:
        async with self.device() as driver:
            await carry_out(driver, await self.pairs(driver, 1))
            while True:
                await driver.cross_connects()


class Hanging(LabConformance):
    def __init__(self, make: Callable[[], OcsDriver], pairs: Sequence[CrossConnect]) -> None:
        super().__init__(make, pairs)
        self.hangs = asyncio.Event()

    async def test_plan_sends_nothing(self) -> None:
        async with self.device() as driver:
            await carry_out(driver, await self.pairs(driver, 1))
            self.hangs.set()
            await asyncio.Event().wait()


async def test_test_fails_beyond_budget_of_calls() -> None:
    switch = StubbornSwitch()
    async with lab(switch, kind=Greedy) as suite:
        (outcome,) = await outcomes(suite, "test_plan_sends_nothing")
    assert f"budget of {MOST_CALLS} driver calls" in outcome.detail
    assert switch.up() == []


async def test_test_fails_beyond_budget_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance_run, "TEST_S", 0.2)
    monkeypatch.setattr(conformance_run, "TEST_CIRCUITS", 0)
    switch = StubbornSwitch()
    async with lab(switch, kind=Hanging) as suite:
        (outcome,) = await outcomes(suite, "test_plan_sends_nothing")
    assert outcome.detail == "exceeded its time budget of 0.2 s"
    assert switch.up() == []


async def lose_a_session() -> None:
    """Wait for a future that is cancelled elsewhere, as a driver does whose session is lost."""
    answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    answer.cancel("the session is lost")
    await answer


class LosingSessions(LabConformance):
    """The suite with a driver that raises CancelledError in the first `loses` attempts to free the ports."""

    loses = 0

    async def test_plan_sends_nothing(self) -> None:
        async with self.device() as driver:
            await carry_out(driver, await self.pairs(driver, 1))
            await lose_a_session()

    async def _free(self) -> Leftover:
        if self.loses:
            self.loses -= 1
            await lose_a_session()
        return await super()._free()


async def test_cancelled_error_of_driver_fails_its_test() -> None:
    switch = StubbornSwitch()
    async with lab(switch, kind=LosingSessions) as suite:
        found = await outcomes(suite, "test_plan_sends_nothing", "test_diff_is_empty_after_commit")
    assert {outcome.name: outcome.state for outcome in found} == {
        "test_plan_sends_nothing": LabTestState.FAILED,
        "test_diff_is_empty_after_commit": LabTestState.PASSED,
    }
    (failed,) = (outcome for outcome in found if outcome.state is LabTestState.FAILED)
    assert failed.detail.startswith("the driver raised CancelledError: the session is lost")
    assert switch.up() == []


@pytest.mark.usefixtures("impatient")
async def test_freeing_ports_is_retried_after_cancelled_error_of_driver() -> None:
    switch = StubbornSwitch()
    async with lab(switch, kind=LosingSessions) as suite:
        assert isinstance(suite, LosingSessions)
        suite.loses = 1
        await outcomes(suite, "test_plan_sends_nothing")
        assert not suite.leftover
        assert switch.up() == []
        suite.loses = 1000
        found = await outcomes(suite, "test_plan_sends_nothing")
    assert found[-1].name == "clean up after test_plan_sends_nothing"
    assert "1:33 (the driver raised CancelledError: the session is lost)" in found[-1].detail


async def test_cancelled_error_of_driver_in_prepare_is_permanent() -> None:
    class LosingTheFirst(LabConformance):
        async def prepare(self) -> None:
            await lose_a_session()

    async with lab(StubbornSwitch(), kind=LosingTheFirst) as suite:
        with pytest.raises(DriverPermanent, match="the driver raised CancelledError: the session is lost"):
            await outcomes(suite, "test_plan_sends_nothing")


async def test_clean_up_of_cancelled_run_survives_cancelled_error_of_driver() -> None:
    class HangingThenLosing(Hanging, LosingSessions):
        loses = 1

    switch = StubbornSwitch()
    async with lab(switch, kind=HangingThenLosing) as suite:
        assert isinstance(suite, HangingThenLosing)
        run = asyncio.create_task(outcomes(suite, "test_plan_sends_nothing"))
        await suite.hangs.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    assert suite.loses == 0
    assert switch.up() == []
    assert not suite.leftover


async def test_cancelled_run_frees_ports() -> None:
    switch = StubbornSwitch()
    async with lab(switch, kind=Hanging) as suite:
        assert isinstance(suite, Hanging)
        run = asyncio.create_task(outcomes(suite, "test_plan_sends_nothing"))
        await suite.hangs.wait()
        assert len(switch.up()) == 1
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    assert switch.up() == []
    assert not suite.leftover


async def test_abandoned_run_frees_ports() -> None:
    class Leaving(LabConformance):
        async def test_plan_sends_nothing(self) -> None:
            driver = await self.make_driver()
            await carry_out(driver, await self.pairs(driver, 3))
            await driver.close()

    switch = StubbornSwitch()
    async with lab(switch, kind=Leaving) as suite:
        async with aclosing(run_suite(suite, ["test_plan_sends_nothing"])) as ended:
            await anext(ended)
            assert len(switch.up()) == 3
    assert switch.up() == []


@pytest.mark.usefixtures("impatient")
async def test_remaining_circuits_are_reported_with_commands_to_remove_them() -> None:
    switch = StubbornSwitch(keeps=2)
    async with lab(switch) as suite:
        found = await outcomes(suite, "test_plan_sends_nothing", "test_diff_is_empty_after_commit")
    assert switch.up() == ["2:34"]
    assert [outcome.state for outcome in found] == [LabTestState.PASSED, LabTestState.PASSED, LabTestState.FAILED]
    assert found[-1].name == "clean up after test_diff_is_empty_after_commit"
    assert "still up: 2:34 (remove 2:34: the device still shows it)" in found[-1].detail
    assert "orchestrrl ocs take-over SWITCH 2:34, then orchestrrl ocs disconnect SWITCH 2:34" in found[-1].detail


@pytest.mark.usefixtures("impatient")
async def test_unreachable_switch_is_not_reported_as_free() -> None:
    switch = StubbornSwitch()
    async with lab(switch, kind=Hanging) as suite:
        assert isinstance(suite, Hanging)
        run = asyncio.create_task(outcomes(suite, "test_plan_sends_nothing"))
        await suite.hangs.wait()
        await switch.emulator.stop()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    assert not suite.leftover.is_read
    assert str(suite.leftover).startswith("may still be up, the switch could not be read: 1:33 (DriverRetryable:")


async def test_second_cancellation_reports_possible_circuits() -> None:
    switch = StubbornSwitch(keeps=1)
    async with lab(switch, kind=Hanging) as suite:
        assert isinstance(suite, Hanging)
        run = asyncio.create_task(outcomes(suite, "test_plan_sends_nothing"))
        await suite.hangs.wait()
        before = len(switch.emulator.device.setters)
        run.cancel()
        while len(switch.emulator.device.setters) == before:  # the ports are being freed
            await asyncio.sleep(0.001)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    assert suite.leftover.up == (CrossConnect(1, 33),)
    assert "1:33" in str(suite.leftover)


async def test_removed_foreign_circuits_are_reported() -> None:
    theirs = CrossConnect(9, 41)

    class Wiping(LabConformance):
        async def test_plan_sends_nothing(self) -> None:
            switch.model.remove([theirs])

    switch = StubbornSwitch()
    switch.model.add([theirs])
    while switch.model.where_does(theirs.ingress_port) is None:  # the switch lists a circuit once it is in place
        await asyncio.sleep(0.001)
    async with lab(switch, kind=Wiping) as suite:
        (outcome,) = await outcomes(suite, "test_plan_sends_nothing")
    assert outcome.state is LabTestState.PASSED
    assert suite.leftover.gone == (theirs,)
    assert "orchestrrl ocs connect SWITCH 9:41" in str(suite.leftover)


@pytest.mark.parametrize("text", ["1-999999999999:5-8", "1,2,3,4:99999999-100000002"])
def test_parse_ports_refuses_numbers_above_limit(text: str) -> None:
    with pytest.raises(ValueError, match="ports <= 99999"):
        parse_ports(text)
