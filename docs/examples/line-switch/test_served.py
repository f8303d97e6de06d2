"""Run the conformance suite through `driver: grpc`, against the example driver behind a gRPC server."""

from collections.abc import AsyncIterator

import grpc
import pytest
from line_switch import LineSwitch
from line_switch_emulator import LineEmulator
from test_line_switch import LineHarness

from ocs_drivers.base import OcsDriver
from ocs_drivers.emulators.base import DevicePanel
from ocs_drivers.registry import make_driver
from orchestrrl.rpc.ocs_server import serve_driver


class TestServedLineSwitch(LineHarness):
    @pytest.fixture(autouse=True)
    async def _servers(self) -> AsyncIterator[None]:
        self.served: list[tuple[grpc.aio.Server, LineSwitch]] = []
        yield
        for server, driver in self.served:
            await server.stop(None)
            await driver.close()

    async def make_big(self, ports: int) -> OcsDriver:
        emulator = LineEmulator(DevicePanel(ports, ports, reconfiguration_s=0.002))
        self.emulators.append(emulator)
        driver = LineSwitch("lab1", address=await emulator.start(), command_timeout_s=2.0)
        server, port = await serve_driver(driver, "127.0.0.1:0")
        self.served.append((server, driver))
        return make_driver("grpc", "lab1", {"target": f"127.0.0.1:{port}"})
