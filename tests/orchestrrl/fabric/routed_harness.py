"""The site harness with packet routing, on virtual ToRs that light connects: `RoutedHarness`."""

import asyncio
from dataclasses import replace
from typing import Any

from fabric_harness import Harness

from ocs_drivers.model import CircuitState
from orchestrrl.core.config.schema import ReroutingSettings
from orchestrrl.core.journal.store import Journal
from orchestrrl.fabric.packet_routing import FabricRouting
from orchestrrl.fabric.rerouting import Rerouting
from orchestrrl.fabric.route_drivers.virtual import VirtualRouterDriver
from orchestrrl.fabric.switch_reader import SiteReading
from planner.fabric.light import Interface, Lit, fibres_of, interfaces_at, links_up
from planner.fabric.model import OcsId, Port, PortPair
from planner.fabric.route_plan import RoutedLink, RoutingDomain, TorRouter

STEP_S = 0.001
POLL_AGAIN_S = 1.0


async def inline(work: Any) -> Any:
    return work()


class Light:
    """Connects the interfaces of virtual ToRs according to the mirrors of virtual switches, and detects packets sent
    into the dark."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        tors = [tor.id for tor in harness.site.tors]
        names = {tor: [f"swp{k}" for k, _ in enumerate(fibres_of(harness.site, tor), start=1)] for tor in tors}
        self.interfaces = interfaces_at(harness.site, names)
        self.routers = {
            tor: VirtualRouterDriver(tor, clock=harness.clock, address=f"192.0.2.{n}", interfaces=names[tor])
            for n, tor in enumerate(tors, start=1)
        }
        self.domain = RoutingDomain(
            {tor: TorRouter(f"192.0.2.{n}", (f"10.0.{n}.0/24",)) for n, tor in enumerate(tors, start=1)}
        )
        self.dark: list[str] = []  # packets sent to interfaces without a far end
        self.joined: dict[RoutedLink, Lit] = {}
        self.cut: set[RoutedLink] = set()  # fibres that were unplugged
        self.broken: set[Port] = set()  # ports whose fibre blocks light
        self.plugged = dict(self.interfaces)  # the fibre actually plugged in at each port
        self.own: set[Interface] = set()
        self._lit: tuple[frozenset[PortPair], tuple[Lit, ...]] = (frozenset(), ())

    def up(self) -> frozenset[PortPair]:
        return frozenset(
            PortPair(id, *sorted((each.cross_connect.ingress_port, each.cross_connect.egress_port)))
            for id, switch in self.harness.switches.items()
            for each in switch.model.circuits()
            if each.state is CircuitState.TUNED
        )

    def lit(self) -> tuple[Lit, ...]:
        up = self.up()
        if self._lit[0] != up:
            lits = links_up(self.harness.site, up, self.plugged)
            ports = {lit: {(pair.switch, port) for pair in lit.over for port in pair.ports} for lit in lits}
            self._lit = (up, tuple(lit for lit in lits if self.broken.isdisjoint(ports[lit])))
        return self._lit[1]

    def back(self) -> set[Interface]:
        """Loop a ToR's light back to itself."""
        found: set[Interface] = set()
        for pair in self.up():
            one, other = ends = [(pair.switch, port) for port in pair.ports]
            if self.broken.isdisjoint(ends) and self.plugged.keys() >= set(ends):
                same = self.plugged[one][0] == self.plugged[other][0]
                found |= {self.plugged[one], self.plugged[other]} if same else set()
        return found

    def swap(self, one: Port, other: Port) -> None:
        """Swap two fibres."""
        self.plugged[one], self.plugged[other] = self.plugged[other], self.plugged[one]
        self._lit = (frozenset(), ())

    def links(self) -> frozenset[RoutedLink]:
        return frozenset(each.link for each in self.lit())

    def shine(self) -> None:
        lit = {each.link: each for each in self.lit() if each.link not in self.cut}
        for link in [*self.joined]:
            if link not in lit:
                self.routers[link.a].device.part(link.interface_a)
                del self.joined[link]
        back = self.back()
        for tor, interface in back ^ self.own:
            self.routers[tor].device.set_signal(interface, (tor, interface) in back)
        self.own = back
        for link in lit:
            if link not in self.joined:
                self.routers[link.a].device.join(link.interface_a, self.routers[link.b].device, link.interface_b)
                self.joined[link] = lit[link]
        for tor, driver in self.routers.items():
            for route in driver.device.routes.values():
                self.dark += [f"{tor}: {hop}" for hop in route.next_hops if driver.device.answering(hop) is None]

    async def run(self) -> None:
        while True:
            self.shine()
            await self.harness.clock.sleep(STEP_S)


class RoutedHarness(Harness):
    """A site harness whose coordinator routes packets over circuits."""

    def start(self) -> None:
        self.light = Light(self)
        self.routes = Journal(self._folder / "routes.sqlite", self.clock.now_s())
        self.routing = self.follower = self.following()
        super().start()
        self.tending = asyncio.create_task(self.follower.maintain())
        self._tasks += [asyncio.create_task(self.light.run()), self.tending]

    def following(self, unread: frozenset[OcsId] = frozenset()) -> FabricRouting:
        async def look() -> SiteReading:
            site_reading = await self.reader.scan()
            kept = frozenset(pair for pair in site_reading.cross_connects if pair.switch not in unread)
            return replace(site_reading, cross_connects=kept, unread=dict.fromkeys(unread, "no route to host"))

        settings = ReroutingSettings(link_up_s=0.2, neighbour_s=0.1)
        rerouting = Rerouting(self.light.routers, self.light.domain, self.clock, settings)
        return FabricRouting(
            self.site,
            self.light.interfaces,
            rerouting,
            look,
            self.routes,
            self.clock,
            poll_s=POLL_AGAIN_S,
            offload=inline,
        )

    async def stop(self) -> None:
        await super().stop()
        self.routes.close()

    @property
    def routed(self) -> frozenset[RoutedLink]:
        assert self.follower.routed is not None
        return frozenset(self.follower.routed.links)
