"""The optical switches of a box: each an emulated device behind a protocol of its own, as the daemon drives it."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ocs_drivers.cross_connect_model import CrossConnectModel
from ocs_drivers.emulators.base import DevicePanel as Front
from ocs_drivers.emulators.registry import EMULATORS, make_emulator
from ocs_drivers.model import Connectivity
from ocs_drivers.virtual import VirtualSwitch
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.rpc.ocs_server import serve_driver
from planner.fabric.model import OcsId
from planner.fabric.topology import Site, Switch

GRPC = "grpc"
# Each switch speaks the next of these, in the order of the site's file.
PROTOCOLS = ("scpi", "tl1-polatis", "restconf")
# What a driver needs to be told beside where its device is.
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "gnmi": {"tls": False},
    "gnmi-openconfig": {"tls": False, "model": "openconfig"},
    "netconf": {"password": "root", "verify_host_key": False},  # the emulator's own
    "tl1-calient": {"dialect": "calient"},
    "tl1-glimmerglass": {"dialect": "glimmerglass"},
    "tl1-polatis": {"dialect": "polatis"},
}


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
    known = (*EMULATORS, GRPC)
    return [
        f"--protocols: must be of {', '.join(sorted(known))}, got {name!r}" for name in protocols if name not in known
    ]


async def start_switches(site: Site, protocols: Sequence[str]) -> list[TestbedSwitch]:
    """Raises ProblemFaults for a protocol that is not known, or whose library is missing."""
    if faults := protocol_faults(protocols):
        raise ProblemFaults(faults)
    return [await _start(switch, protocols[place % len(protocols)]) for place, switch in enumerate(site.switches)]


async def _start(switch: Switch, protocol: str) -> TestbedSwitch:
    ports = max(max(numbers) for numbers in switch.ports.values())
    if protocol == GRPC:
        served = VirtualSwitch(
            switch.id,
            ports=ports + ports % 2,
            connectivity=Connectivity.ANY_TO_ANY,
            reconfiguration_s=switch.device.reconfiguration_s,
        )
        server, port = await serve_driver(served, "127.0.0.1:0")

        async def stop() -> None:
            await server.stop(None)

        return TestbedSwitch(switch.id, protocol, served.model, GRPC, {"target": f"127.0.0.1:{port}"}, stop)
    front = Front(ingress_ports=ports, egress_ports=ports, reconfiguration_s=switch.device.reconfiguration_s)
    emulator = make_emulator(protocol, front)
    address = await emulator.start()
    # No protocol tells how fast mirrors are, so that a driver has to be told.
    options = {"address": address, "reconfiguration_s": switch.device.reconfiguration_s, **OPTIONS.get(protocol, {})}
    driver = protocol.partition("-")[0]
    return TestbedSwitch(switch.id, protocol, emulator.device.model, driver, options, emulator.stop)
