"""The conformance suite against an emulator, over real sockets and in real time. No test waits for a time limit."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from steady_clock import SteadyClock

from ocs_drivers.base import OcsDriver
from ocs_drivers.conformance import DriverConformance
from ocs_drivers.emulators.base import DevicePanel, EmulatedDevice, Emulator
from ocs_drivers.emulators.registry import make_emulator
from ocs_drivers.faults import DeviceFault
from ocs_drivers.model import CrossConnect
from ocs_drivers.registry import make_driver

PATIENCE_S = 60.0


class ImpatientClock(SteadyClock):
    """Real time, except that a sleep of `PATIENCE_S` or longer ends as soon as a device holds back an answer. Time
    limits can thus be generous without any test waiting for one."""

    def __init__(self, devices: list[EmulatedDevice]) -> None:
        super().__init__()
        self._devices = devices

    async def sleep(self, duration_s: float) -> None:
        if duration_s < PATIENCE_S:
            await super().sleep(duration_s)
            return
        stalled = [asyncio.create_task(device.holding_back.wait()) for device in self._devices]
        try:
            await asyncio.wait(stalled, timeout=duration_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in stalled:
                task.cancel()
            for device in self._devices:
                device.holding_back.clear()  # do not shorten the next command's limit


class EmulatedConformance(DriverConformance):
    """Base class for suites such as `class TestScpi(EmulatedConformance)`, which set the attributes below."""

    driver: ClassVar[str]
    protocol: ClassVar[str]
    options: ClassVar[dict[str, Any]] = {}  # of the driver, besides its address
    panel: ClassVar[DevicePanel] = DevicePanel(reconfiguration_s=0.002)
    quirks: ClassVar[dict[str, Any]] = {}  # of the emulator

    @pytest.fixture(autouse=True)
    async def _emulators(self) -> AsyncIterator[None]:
        self.emulators: list[Emulator] = []
        yield
        for emulator in self.emulators:
            await emulator.stop()

    async def make_driver(self) -> OcsDriver:
        return await self._made(self.panel)

    async def make_big(self, ports: int) -> OcsDriver:
        return await self._made(replace(self.panel, ingress_ports=ports, egress_ports=ports))

    async def make_foreign(self, driver: OcsDriver, pairs: Sequence[CrossConnect]) -> None:
        self.emulators[-1].device.add(pairs)

    async def setters(self, driver: OcsDriver) -> Sequence[str]:
        return self.emulators[-1].device.setters

    async def _made(self, panel: DevicePanel) -> OcsDriver:
        emulator = make_emulator(self.protocol, panel, **self.quirks)
        address = await emulator.start()
        self.emulators.append(emulator)
        clock = ImpatientClock([each.device for each in self.emulators])
        limits = {"command_timeout_s": PATIENCE_S, "lock_timeout_s": 50.0, "tune_timeout_s": 1.0, "link_timeout_s": 0.5}
        return make_driver(self.driver, "ocs1", {"address": address, **limits, **self.options}, clock)

    async def inject(self, driver: OcsDriver, fault: DeviceFault) -> None:
        self.emulators[-1].device.inject(fault)
