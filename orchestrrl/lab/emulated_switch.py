"""Emulated optical switches that implement the vendors' protocols, and an emulator that serves the gRPC service
`OcsDriver`."""

from typing import Any

from ocs_drivers.base import DeviceClock
from ocs_drivers.driver import SwitchDriver
from ocs_drivers.emulators.base import DevicePanel, EmulatedDevice, Emulator
from ocs_drivers.emulators.registry import DRIVER_OPTIONS, EMULATORS, make_emulator
from ocs_drivers.errors import InvalidOptions
from ocs_drivers.virtual import VirtualSwitchWire

GRPC = "grpc"  # not a vendor's protocol: the service of custom drivers
PROTOCOLS = (*sorted(EMULATORS), GRPC)
EMULATED = "emulated"


def make_switch(protocol: str, panel: DevicePanel, **quirks: Any) -> Emulator:
    """Create an emulated switch. Raises InvalidOptions if the protocol, the panel or a quirk is invalid."""
    if protocol != GRPC:
        return make_emulator(protocol, panel, **quirks)
    if quirks:
        raise InvalidOptions([f"{name}: grpc has no quirks" for name in quirks])
    return GrpcEmulator(panel)


def driver_of(protocol: str, address: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of the driver for an emulator at `address`."""
    options = {"target": address} if protocol == GRPC else {"address": address, **DRIVER_OPTIONS.get(protocol, {})}
    return protocol.partition("-")[0], options


class GrpcEmulator:
    """An `Emulator` that serves the gRPC service `OcsDriver`."""

    def __init__(self, panel: DevicePanel, clock: DeviceClock | None = None) -> None:
        self.device = EmulatedDevice(panel.facts("OrchestrRL", "virtual", EMULATED, "1"), panel, clock)
        self._server: Any = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        from orchestrrl.rpc.ocs_server import serve_driver  # imported here: no other protocol needs gRPC

        driver = SwitchDriver(EMULATED, VirtualSwitchWire(self.device), clock=self.device.clock)
        host = f"[{host}]" if ":" in host else host
        try:
            self._server, port = await serve_driver(driver, f"{host}:{port}")
        except RuntimeError as error:
            raise OSError(str(error)) from error
        return f"{host}:{port}"

    async def stop(self) -> None:
        await self._server.stop(None)
