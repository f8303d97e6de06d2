"""Run the conformance suite on the virtual switch, small and large, and check its fault schedule."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, ClassVar

import pytest

from ocs_drivers.base import OcsDriver
from ocs_drivers.conformance import DriverConformance, carry_out
from ocs_drivers.faults import DeviceFault, DeviceFaultKind, FaultSchedule, parse_schedule
from ocs_drivers.model import CircuitState, CrossConnect, SwitchEvent
from ocs_drivers.registry import make_driver
from ocs_drivers.virtual import VirtualSwitch
from orchestrrl.core.clock import VirtualClock


@pytest.fixture
async def clock() -> AsyncIterator[VirtualClock]:
    """A virtual clock that advances continuously, as fast as the event loop runs."""
    clock = VirtualClock(1000.0)

    running = asyncio.create_task(_run(clock))
    yield clock
    running.cancel()


async def _run(clock: VirtualClock) -> None:
    while True:
        await clock.advance(0.001)


class TestVirtual(DriverConformance):
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def _time(self, clock: VirtualClock) -> None:
        self.clock = clock

    async def make_driver(self) -> OcsDriver:
        return self._made()

    async def make_big(self, ports: int) -> OcsDriver:
        sides = 1 if self.options.get("connectivity") == "any_to_any" else 2
        return self._made(ports=ports * sides)

    async def make_foreign(self, driver: OcsDriver, pairs: Sequence[CrossConnect]) -> None:
        assert isinstance(driver, VirtualSwitch)
        driver.model.add(pairs)

    async def setters(self, driver: OcsDriver) -> Sequence[str]:
        assert isinstance(driver, VirtualSwitch)
        return driver.model.setters

    def _made(self, **more: Any) -> OcsDriver:
        options = {"command_timeout_s": 0.5, "link_timeout_s": 0.5, **self.options, **more}
        return make_driver("virtual", "ocs1", options, self.clock)

    async def inject(self, driver: OcsDriver, fault: DeviceFault) -> None:
        assert isinstance(driver, VirtualSwitch)
        driver.model.inject(fault)


class TestVirtualAnyToAny(TestVirtual):
    options: ClassVar = {"connectivity": "any_to_any"}


class TestVirtualOneByOne(TestVirtual):
    options: ClassVar = {"bulk": False}


class TestVirtualJitter(TestVirtual):
    options: ClassVar = {"jitter_s": 0.05, "seed": 7, "boot": "restore"}


def switch(clock: VirtualClock, **options: Any) -> VirtualSwitch:
    return VirtualSwitch("ocs1", clock=clock, **options)


async def test_light_follows_mirrors_after_reconfiguration() -> None:
    clock = VirtualClock()
    model = switch(clock).model
    model.add([CrossConnect(3, 17)])
    assert model.where_does(3) is None
    await clock.advance(0.025)
    assert model.where_does(3) == 17
    assert model.where_does(17) == 3
    model.add([CrossConnect(3, 20)])  # silently re-routed, as by many devices
    await clock.advance(0.025)
    assert (model.where_does(3), model.where_does(17)) == (20, None)


async def test_scheduled_faults_occur_and_are_reported(clock: VirtualClock) -> None:
    faults = [{"at_s": 12, "kind": "fail_port", "port": 7}, {"at_s": 20, "kind": "mend_port", "port": 7}]
    driver = switch(clock, faults=faults)
    events = [event async for event in _first(2, driver)]
    assert [(event.text, event.port) for event in events] == [("port 7 failed", 7), ("port 7 enabled", 7)]
    assert 1012.0 <= events[0].at_s < 1012.1
    assert 1020.0 <= events[1].at_s < 1020.1


async def _first(count: int, driver: VirtualSwitch) -> AsyncIterator[SwitchEvent]:
    async with aclosing(driver.watch()) as events:
        async for event in events:
            yield event
            count -= 1
            if not count:
                return


async def test_failed_port_fails_its_circuit(clock: VirtualClock) -> None:
    driver = switch(clock, faults=[{"at_s": 5, "kind": "fail_port", "port": 17}])
    await carry_out(driver, (CrossConnect(3, 17),))
    await clock.sleep(5)
    (circuit,) = (await driver.cross_connects()).circuits
    assert (circuit.state, circuit.link_up) == (CircuitState.FAILED, False)


async def test_same_seed_gives_same_times() -> None:
    async def times(seed: int) -> list[float | None]:
        clock = VirtualClock()
        running = asyncio.create_task(_run(clock))
        result = await carry_out(
            switch(clock, jitter_s=0.5, seed=seed), tuple(CrossConnect(p, p + 16) for p in (1, 2, 3))
        )
        running.cancel()
        return [item.tuned_s for item in result.items]

    assert await times(1) == await times(1) != await times(2)


def test_schedule_is_parsed_from_plain_data() -> None:
    dropped = DeviceFault(DeviceFaultKind.DROP_CONNECTION)
    slow = DeviceFault(DeviceFaultKind.SLOW_ANSWER, delay_s=2.0)
    schedule = FaultSchedule().at(12.0, DeviceFault(DeviceFaultKind.FAIL_PORT, 7)).at(3.0, dropped, slow)
    assert [(at_s, fault.kind, fault.port) for at_s, fault in schedule.due] == [
        (3.0, DeviceFaultKind.DROP_CONNECTION, None),
        (3.0, DeviceFaultKind.SLOW_ANSWER, None),
        (12.0, DeviceFaultKind.FAIL_PORT, 7),
    ]
    plain = [{"at_s": 12, "kind": "fail_port", "port": 7}, {"at_s": 3, "kind": "drop_connection"}]
    assert parse_schedule(plain)[0].due == schedule.due[:1] + schedule.due[2:]
    assert len(parse_schedule([{"at_s": -1}, {"kind": "fail_port"}, "x", {"kind": "restart", "prot": 1}])[1]) == 5
