"""The optical switches of a box: each an emulated device behind a protocol of its own, as the daemon drives it."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ocs_drivers.cross_connect_model import CrossConnectModel
from ocs_drivers.emulators.base import DevicePanel, Emulator
from ocs_drivers.emulators.registry import make_emulator
from orchestrrl.lab import emulated_switch
from orchestrrl.lab.emulated_switch import GRPC, GrpcEmulator, driver_of
from planner.fabric.model import OcsId
from planner.fabric.topology import Site, Switch

# Each switch speaks the next of these, in the order of the site's file.
PROTOCOLS = ("scpi", "tl1-polatis", "restconf")


@dataclass(frozen=True, slots=True)
class TestbedSwitch:
    """`driver`, `options`: as the daemon's configuration has them."""

    id: OcsId
    protocol: str
    model: CrossConnectModel
    driver: str
    options: Mapping[str, Any]
    stop: Callable[[], Awaitable[None]]


def protocol_faults(protocols: Sequence[str]) -> list[str]:
    known = sorted(emulated_switch.PROTOCOLS)
    return [f"--protocols: must be of {', '.join(known)}, got {name!r}" for name in protocols if name not in known]


async def start_switches(site: Site, protocols: Sequence[str]) -> list[TestbedSwitch]:
    """Raises InvalidOptions for a protocol that is not known, or whose library is missing."""
    return [await _start(switch, protocols[place % len(protocols)]) for place, switch in enumerate(site.switches)]


async def _start(switch: Switch, protocol: str) -> TestbedSwitch:
    ports = max(max(numbers) for numbers in switch.ports.values())
    panel = DevicePanel(ports, ports, switch.device.reconfiguration_s)
    emulator: Emulator = GrpcEmulator(panel) if protocol == GRPC else make_emulator(protocol, panel)
    driver, options = driver_of(protocol, await emulator.start())
    if protocol != GRPC:  # no protocol of a vendor has how fast mirrors are
        options["reconfiguration_s"] = switch.device.reconfiguration_s
    return TestbedSwitch(switch.id, protocol, emulator.device.model, driver, options, emulator.stop)
