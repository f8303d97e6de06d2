"""A box that stands: rooms and cables, switches with the panel behind them, and, where asked for, the daemon."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ocs_drivers.base import OcsDriver
from ocs_drivers.faults import DeviceFault, DeviceFaultKind
from ocs_drivers.model import CircuitChange, Connectivity
from ocs_drivers.registry import make_driver
from orchestrrl.core.errors import Permanent
from orchestrrl.fabric.switch_reader import device_pairs
from orchestrrl.lab.box.cabling import PACKET_SIDE, build
from orchestrrl.lab.box.namespaces import FOLDER, batch
from orchestrrl.lab.box.patch_panel import PatchPanel
from orchestrrl.lab.box.plan import Rates, TestbedPlan, plan_of
from orchestrrl.lab.box.switches import TestbedSwitch, start_switches
from orchestrrl.lab.demo.stack import Process
from orchestrrl.rpc.control_client import ControlClient
from orchestrrl.rpc.pb import fabric_pb2
from planner.fabric.masks import Port
from planner.fabric.model import EndpointId, OcsId, PortPair
from planner.fabric.topology import Site

SITE_FILE, CONFIG_FILE = "site.yaml", "orchestrrl.yaml"
# What has been sent on a circuit is in the ToR's queue for that long at most, see `Rates.tbf`.
SETTLE_S = 0.06
POLL_AGAIN_S = 0.5
TOOK_WITHIN_S = 30.0


@dataclass
class Testbed:
    """Made by `standing`. `folder` holds the site's file, the daemon's configuration and all logs."""

    folder: Path
    plan: TestbedPlan
    rates: Rates
    switches: dict[OcsId, TestbedSwitch]
    panel: PatchPanel
    daemon: Process | None = None
    address: str = ""
    _drivers: dict[OcsId, OcsDriver] = field(default_factory=dict)

    @property
    def site(self) -> Site:
        return self.plan.site

    def driver(self, switch: OcsId) -> OcsDriver:
        """Ours, before the daemon has one: some devices allow for one session alone."""
        if self.daemon is not None:
            raise Permanent(f"{switch} is driven by the daemon")
        if switch not in self._drivers:
            ours = self.switches[switch]
            self._drivers[switch] = make_driver(ours.driver, switch, dict(ours.options))
        return self._drivers[switch]

    async def connect(self, circuits: Sequence[PortPair], ups: bool = True) -> None:
        """By the drivers themselves. Returns once packets may take them. Raises Permanent where one did not take."""
        for switch in sorted({pair.switch for pair in circuits}):
            driver = self.driver(switch)
            facts = await driver.facts()
            wanted = [each for pair in circuits if pair.switch == switch for each in device_pairs(facts, pair)]
            change = CircuitChange(connect=tuple(wanted)) if ups else CircuitChange(disconnect=tuple(wanted))
            diff = await driver.plan(change)
            result = await driver.commit(diff, diff.revision)
            if not result.done:
                raise Permanent(f"{switch}: {'; '.join(item.detail for item in result.items if not item.done)}")
        await self.until_carrying(circuits, ups)

    async def until_carrying(self, circuits: Sequence[PortPair], ups: bool = True) -> None:
        for _ in range(int(TOOK_WITHIN_S / 0.005)):
            if all((pair in self.panel.joined) is ups for pair in circuits):
                return
            await asyncio.sleep(0.005)
        raise Permanent(f"the panel has not followed within {TOOK_WITHIN_S:g} s: {', '.join(map(str, circuits))}")

    def inject(self, kind: DeviceFaultKind, port: Port) -> None:
        """At both sides of a port of the site."""
        glass = self.switches[port[0]].model
        sides = {port[1]}
        if glass.facts.connectivity is not Connectivity.ANY_TO_ANY:
            sides.add(port[1] + glass.facts.egress_ports.start - glass.facts.ingress_ports.start)
        for side in sorted(sides):
            glass.inject(DeviceFault(kind, port=side))

    async def pin(self, source: EndpointId, sink: EndpointId, hosts: Sequence[str], interfaces: Sequence[str]) -> None:
        """Host by host, the next of these interfaces: a more specific route than any of the daemon's."""
        lines = [
            f"route replace {host}/32 via {self.plan.addresses[sink]} dev {interfaces[k % len(interfaces)]} onlink"
            for k, host in enumerate(hosts)
        ]
        await batch("ip", self.plan.tors[source], lines)

    async def unpin(self, source: EndpointId, hosts: Sequence[str]) -> None:
        await batch("ip", self.plan.tors[source], [f"route del {host}/32" for host in hosts])

    async def start_daemon(self, **fabric: Any) -> None:
        """The daemon of `orchestrrl daemon`, in a process of its own, which drives this box."""
        await self.close_drivers()
        document = self.configuration(**fabric)
        (self.folder / CONFIG_FILE).write_text(yaml.safe_dump(document, sort_keys=False))
        self.daemon = Process("daemon", ["daemon", "-c", str(self.folder / CONFIG_FILE)], self.folder)
        await self.daemon.address()
        self.address = f"unix:{self.folder / 'daemon.sock'}"
        await self.until_routed()

    async def fabric(self) -> fabric_pb2.FabricStatus:
        """As `orchestrrl fabric status` has it."""
        async with ControlClient(self.address) as client:
            return await client.call(client.fabric.GetFabric, fabric_pb2.GetFabricRequest(limit=1))

    async def command(self, *words: str) -> str:
        """What `orchestrrl ...` prints, asked of this box's daemon. Raises Permanent where it is malformed."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "orchestrrl",
            *words,
            "--daemon",
            self.address,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        if not out:
            raise Permanent(f"orchestrrl {' '.join(words)}: {err.decode(errors='replace').strip()}")
        return out.decode()

    async def until_routed(self) -> None:
        """Packets follow circuits. Raises Permanent where that takes too long."""
        until_s = time.monotonic() + TOOK_WITHIN_S
        while not (await self.fabric()).routes.rerouted_unix_s:
            if time.monotonic() > until_s:
                raise Permanent(f"no routes after {TOOK_WITHIN_S:g} s: see {self.folder / 'daemon.log'}")
            await asyncio.sleep(0.05)

    async def stop_daemon(self) -> None:
        if self.daemon is not None:
            await self.daemon.stop()
            self.daemon = None

    async def close_drivers(self) -> None:
        for driver in self._drivers.values():
            await driver.close()
        self._drivers.clear()

    def configuration(self, **fabric: Any) -> dict[str, Any]:
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
        return {
            "mode": "act",
            "listen": {"address": "127.0.0.1:0", "socket": str(self.folder / "daemon.sock")},
            "journal": {"path": str(self.folder / "journal.sqlite")},
            "fabric": {
                "site": SITE_FILE,
                "routers": routers,
                "rerouting": {"settle_s": SETTLE_S, "poll_s": POLL_AGAIN_S},
                **fabric,
            },
            "ocs": [
                {"id": switch.id, "driver": switch.driver, "options": dict(switch.options)}
                for switch in self.switches.values()
            ],
        }


@asynccontextmanager
async def standing(folder: Path, site: Site, rates: Rates, protocols: Sequence[str]) -> AsyncIterator[Testbed]:
    """`folder` has the site's file. Inside the namespaces of `enter.py`, which take all of it down in the end."""
    plan = plan_of(site)
    await build(plan, rates)
    switches = {each.id: each for each in await start_switches(site, protocols)}
    panel = PatchPanel(plan, {id: each.model for id, each in switches.items()})
    following = asyncio.ensure_future(panel.run())
    box = Testbed(folder, plan, rates, switches, panel)
    try:
        yield box
        if following.done():
            following.result()
    finally:
        await box.stop_daemon()
        await box.close_drivers()
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following
        for each in switches.values():
            await each.stop()
        panel.close()
