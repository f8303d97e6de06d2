"""Run the conformance suite against the emulator of the example switch, over a real socket."""

from collections.abc import AsyncIterator, Sequence

import pytest
from line_switch_emulator import LineEmulator

from ocs_drivers.base import OcsDriver
from ocs_drivers.conformance import DriverConformance
from ocs_drivers.emulators.base import DevicePanel
from ocs_drivers.faults import DeviceFault
from ocs_drivers.model import CrossConnect
from ocs_drivers.registry import make_driver


class LineHarness(DriverConformance):
    """Provides emulated devices with nothing connected, and injects faults into them."""

    @pytest.fixture(autouse=True)
    async def _emulators(self) -> AsyncIterator[None]:
        self.emulators: list[LineEmulator] = []
        yield
        for emulator in self.emulators:
            await emulator.stop()

    async def make_driver(self) -> OcsDriver:
        return await self.make_big(32)

    async def inject(self, driver: OcsDriver, fault: DeviceFault) -> None:
        self.emulators[-1].device.inject(fault)

    async def make_foreign(self, driver: OcsDriver, pairs: Sequence[CrossConnect]) -> None:
        self.emulators[-1].device.add(pairs)

    async def setters(self, driver: OcsDriver) -> Sequence[str]:
        return self.emulators[-1].device.setters


class TestLineSwitch(LineHarness):
    async def make_big(self, ports: int) -> OcsDriver:
        emulator = LineEmulator(DevicePanel(ports, ports, reconfiguration_s=0.002))
        self.emulators.append(emulator)
        address = await emulator.start()
        return make_driver("line", "lab1", {"address": address, "command_timeout_s": 2.0})
