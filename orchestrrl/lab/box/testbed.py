"""Start and control a running box: namespaces and cables, switches with the patch panel, and the daemon."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from ocs_drivers.emulators.base import DevicePanel, EmulatedDevice, Emulator
from ocs_drivers.faults import DeviceFault, DeviceFaultKind
from ocs_drivers.model import Connectivity
from orchestrrl.fabric.site import read_site
from orchestrrl.fabric.switch_reader import device_pairs
from orchestrrl.lab.box.cabling import PACKET_SIDE, build
from orchestrrl.lab.box.namespaces import FOLDER, batch
from orchestrrl.lab.box.patch_panel import PatchPanel
from orchestrrl.lab.box.plan import TestbedPlan, plan_of
from orchestrrl.lab.box.run import BoxOrder
from orchestrrl.lab.emulated_switch import GRPC, driver_of, make_switch
from orchestrrl.lab.testbed.processes import beside, until
from orchestrrl.lab.testbed.stack import ANY_PORT, Stack
from planner.fabric.model import EndpointId, OcsId, Port, PortPair
from planner.fabric.topology import Site, Switch

SITE_FILE = "site.yaml"
# Maximum time that packets for a circuit stay in the ToR's queue, see `TestbedPlan.tbf`.
SETTLE_S = 0.06
POLL_AGAIN_S = 0.5
TOOK_WITHIN_S = 30.0


@dataclass(frozen=True, slots=True)
class TestbedSwitch:
    """An emulated switch with its protocol. `driver` and `options` select its driver in the daemon's configuration."""

    protocol: str
    emulator: Emulator
    driver: str
    options: dict[str, Any]

    @property
    def device(self) -> EmulatedDevice:
        return self.emulator.device


class Testbed(Stack):
    """A running box, created by `standing`. `folder` contains the site file, the daemon's configuration and all
    logs."""

    def __init__(
        self, folder: Path, plan: TestbedPlan, switches: dict[OcsId, TestbedSwitch], panel: PatchPanel
    ) -> None:
        super().__init__(folder)
        self.plan = plan
        self.switches = switches
        self.panel = panel

    @property
    def site(self) -> Site:
        return self.plan.site

    def ends_of(self, pair: PortPair) -> list[EndpointId]:
        """Return the two endpoints that a cross-connect joins."""
        ports = self.site.switch[pair.switch].ports
        return sorted(end for end, numbers in ports.items() for number in pair.ports if number in numbers)

    async def connect(self, circuits: Sequence[PortPair], ups: bool = True) -> None:
        """Connect circuits by `orchestrrl ocs`, or disconnect them if `ups` is False, and wait until the panel follows.
        Raises Permanent if a command fails or the panel does not follow in time."""
        for switch in sorted({pair.switch for pair in circuits}):
            facts = self.switches[switch].device.facts
            own = [each for pair in circuits if pair.switch == switch for each in device_pairs(facts, pair)]
            await self.run("ocs", "connect" if ups else "disconnect", switch, *map(str, own))

        async def follows() -> bool:
            return all((pair in self.panel.joined) is ups for pair in circuits)

        await until(follows, f"the panel follows {', '.join(map(str, circuits))}", TOOK_WITHIN_S, 0.005)

    def inject(self, kind: DeviceFaultKind, port: Port) -> None:
        """Inject a fault into the ingress side and the egress side of a port of the site."""
        glass = self.switches[port[0]].device
        sides = {port[1]}
        if glass.facts.connectivity is not Connectivity.ANY_TO_ANY:
            sides.add(port[1] + glass.facts.egress_ports.start - glass.facts.ingress_ports.start)
        for side in sorted(sides):
            glass.inject(DeviceFault(kind, port=side))

    async def pin(self, source: EndpointId, sink: EndpointId, hosts: Sequence[str], interfaces: Sequence[str]) -> None:
        """Route packets from the ToR `source` to `hosts` below the ToR `sink` over `interfaces` in rotation. The routes
        are more specific than the daemon's routes."""
        lines = [
            f"route replace {host}/32 via {self.plan.addresses[sink]} dev {interfaces[k % len(interfaces)]} onlink"
            for k, host in enumerate(hosts)
        ]
        await batch("ip", self.plan.tors[source], lines)

    async def unpin(self, source: EndpointId, hosts: Sequence[str]) -> None:
        await batch("ip", self.plan.tors[source], [f"route del {host}/32" for host in hosts])

    async def drive(self) -> None:
        """Start an `orchestrrl daemon` for this box, and wait until packets are routed over circuits."""
        plan = self.plan
        routers = [
            {
                "tor": tor,
                "driver": "iproute",
                "options": {"prefix": ["nsenter", f"--net={FOLDER / room}"]},
                "address": plan.addresses[tor],
                "prefixes": [plan.prefixes[tor]],
                "interfaces": list(plan.interfaces[tor]),
                "packet_side": {"interface": PACKET_SIDE, "address": plan.packet_side[tor]},
            }
            for tor, room in plan.tors.items()
        ]
        document = {
            "listen": {"address": ANY_PORT, "socket": str(self.folder / "daemon.sock")},
            "fabric": {
                "site": SITE_FILE,
                "routers": routers,
                "rerouting": {"settle_s": SETTLE_S, "poll_s": POLL_AGAIN_S},
            },
            "ocs": [
                {"id": id, "driver": switch.driver, "options": switch.options} for id, switch in self.switches.items()
            ],
        }
        await self.start_daemon(document)

        async def routed() -> bool:
            return bool((await self.fabric()).routes.rerouted_unix_s)

        await until(routed, "packets follow circuits", TOOK_WITHIN_S, 0.05)


@asynccontextmanager
async def standing(order: BoxOrder) -> AsyncIterator[Testbed]:
    """Start a box inside the namespaces of `enter.py`, yield it, and stop it on exit. Raises InvalidOptions if a
    protocol is unknown or its library is missing."""
    folder = Path(order.folder)
    plan = plan_of(read_site(folder / SITE_FILE), order.mbps)
    await build(plan)
    speaking = zip(plan.site.switches, cycle(order.protocols), strict=False)
    switches = {switch.id: await _started(switch, protocol) for switch, protocol in speaking}
    panel = PatchPanel(plan, {id: each.device for id, each in switches.items()})
    try:
        async with beside(panel.run()), Testbed(folder, plan, switches, panel) as box:
            await box.drive()
            yield box
    finally:
        for each in switches.values():
            await each.emulator.stop()
        panel.close()


async def _started(switch: Switch, protocol: str) -> TestbedSwitch:
    ports, delay_s = max(max(numbers) for numbers in switch.ports.values()), switch.device.reconfiguration_s
    emulator = make_switch(protocol, DevicePanel(ports, ports, delay_s))
    driver, options = driver_of(protocol, await emulator.start())
    if protocol != GRPC:  # vendors' protocols do not report the reconfiguration time
        options["reconfiguration_s"] = delay_s
    return TestbedSwitch(protocol, emulator, driver, options)
