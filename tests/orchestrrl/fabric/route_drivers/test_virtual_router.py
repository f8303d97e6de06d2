"""Run the conformance suite on the virtual router, with several capabilities."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import pytest

from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.errors import OutcomeUnknown, ProblemFaults, Retryable
from orchestrrl.fabric.route_drivers.conformance import ONE, RouteDriverConformance, put
from orchestrrl.fabric.route_drivers.driver import RouterDriver, make_driver
from orchestrrl.fabric.route_drivers.virtual import RouterFault, RouterFaultKind, VirtualRouter, VirtualRouterDriver


@pytest.fixture
async def clock() -> AsyncIterator[VirtualClock]:
    """Return virtual time that advances as fast as the event loop runs."""
    clock = VirtualClock(1000.0)

    async def run() -> None:
        while True:
            await clock.advance(0.001)

    running = asyncio.create_task(run())
    yield clock
    running.cancel()


class TestVirtualRouter(RouteDriverConformance):
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def _time(self, clock: VirtualClock) -> None:
        self.clock = clock

    async def make_driver(self) -> RouterDriver:
        driver = make_driver("virtual", "tor1", self.options, self.clock)
        assert isinstance(driver, VirtualRouterDriver)
        peer = VirtualRouter("192.0.2.2", self.interfaces)
        for interface in self.interfaces:
            driver.device.join(interface, peer, interface)
        return driver

    async def inject(self, driver: RouterDriver, fault: RouterFault) -> None:
        assert isinstance(driver, VirtualRouterDriver)
        driver.device.inject(fault)

    async def others(self, driver: RouterDriver) -> frozenset[str]:
        assert isinstance(driver, VirtualRouterDriver)
        return frozenset(driver.device.foreign)


class TestVirtualWithoutWeights(TestVirtualRouter):
    options: ClassVar = {"max_weight": 1, "max_next_hops": 3, "link_events": False}


async def test_unreachable_router_raises_retryable(clock: VirtualClock) -> None:
    suite = TestVirtualRouter()
    suite.clock = clock
    driver = await suite.make_driver()
    await suite.inject(driver, RouterFault(RouterFaultKind.UNREACHABLE))
    with pytest.raises(Retryable, match="router tor1: reading routes failed: no route to host"):
        await driver.apply([put(suite.route(ONE, 1))])
    await suite.inject(driver, RouterFault(RouterFaultKind.REACHABLE))
    assert await driver.read() == {}


async def test_apply_raises_outcome_unknown_if_router_cannot_be_read_afterwards(clock: VirtualClock) -> None:
    suite = TestVirtualRouter()
    suite.clock = clock
    driver = await suite.make_driver()
    assert isinstance(driver, VirtualRouterDriver)
    send = driver.wire.send

    async def send_and_vanish(*arguments: Any) -> None:
        await send(*arguments)
        driver.device.is_reachable = False

    driver.wire.send = send_and_vanish  # type: ignore[method-assign]
    with pytest.raises(OutcomeUnknown, match="could not be read"):
        await driver.apply([put(suite.route(ONE, 1))])


def test_all_invalid_options_are_reported_at_once() -> None:
    with pytest.raises(ProblemFaults) as faults:
        make_driver("virtual", "tor1", {"max_weight": 0, "interfaces": ["if7"], "max_next_hops": "many"})
    assert len(faults.value.faults) == 3
    with pytest.raises(ProblemFaults, match="must be one of frr, iproute, virtual, got 'juniper'"):
        make_driver("juniper", "tor1")
    with pytest.raises(ProblemFaults, match=r"options.tabel: is not known"):
        make_driver("iproute", "tor1", {"tabel": 7})
    wrong = {"prefix": "ssh tor3", "protocol": 2, "metric": 0, "command_timeout_s": -1}
    with pytest.raises(ProblemFaults) as faults:
        make_driver("iproute", "tor1", wrong)
    assert len(faults.value.faults) == 4
    with pytest.raises(ProblemFaults, match=r"options.distance: .* got 255"):
        make_driver("frr", "tor1", {"distance": 255})
