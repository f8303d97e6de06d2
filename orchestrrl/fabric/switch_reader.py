"""Read the switches of a site, and convert between cross-connects of the site and cross-connects of the devices.

A port of the site is a duplex pair of fibres. On a device that connects any two ports, a port of the site is one device
port. On a device with an ingress and an egress side, port n of the site is the n-th port of each side. A cross-connect
of the site then consists of two cross-connects of the device, one per direction.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from ocs_drivers.base import OcsDriver
from ocs_drivers.errors import DriverError
from ocs_drivers.model import CircuitChange, CircuitState, Connectivity, CrossConnect, PortStatus, SwitchFacts
from orchestrrl.core.clock import Clock, within
from orchestrrl.core.errors import Permanent
from orchestrrl.fabric.circuit_owners import CircuitOwners
from planner.fabric.model import OcsId, PortPair, port_pair
from planner.fabric.plan import FabricFailures
from planner.fabric.topology import Site

logger = logging.getLogger(__name__)

ANSWER_WITHIN_S = 5.0

# Pairs that are up, one-way cross-connects, failed ports, foreign pairs; or why the switch could not be read.
_Seen = tuple[set[PortPair], set[CrossConnect], set[int], set[PortPair]] | str


def device_pairs(facts: SwitchFacts, wanted: PortPair) -> tuple[CrossConnect, ...]:
    """Return the device's cross-connects that together form the site's cross-connect `wanted`."""
    if facts.connectivity is Connectivity.ANY_TO_ANY:
        return (facts.normal(CrossConnect(wanted.port_a, wanted.port_b)),)
    offset = _offset(facts)
    return (CrossConnect(wanted.port_a, wanted.port_b + offset), CrossConnect(wanted.port_b, wanted.port_a + offset))


def _offset(facts: SwitchFacts) -> int:
    """Return the difference between the two numbers that the device has for a port: the number of the port's egress
    side minus the number of its ingress side."""
    return facts.egress_ports.start - facts.ingress_ports.start


def site_pairs(
    switch: OcsId, facts: SwitchFacts, present: Iterable[CrossConnect]
) -> tuple[set[PortPair], set[CrossConnect]]:
    """Convert the device's cross-connects in `present`. Return the site's cross-connects that they form, and the
    device's cross-connects that do not form a cross-connect of the site, such as one-way cross-connects."""
    present = set(present)
    if facts.connectivity is Connectivity.ANY_TO_ANY:
        return {port_pair(switch, each.ingress_port, each.egress_port) for each in present}, set()
    offset = _offset(facts)
    found: set[PortPair] = set()
    odd: set[CrossConnect] = set()
    for each in present:
        one, other = each.ingress_port, each.egress_port - offset
        if one != other and CrossConnect(other, one + offset) in present:
            found.add(port_pair(switch, one, other))
        else:
            odd.add(each)
    return found, odd


@dataclass(frozen=True, slots=True)
class SiteReading:
    """The state of all switches at one instant. `of_site` contains those `cross_connects` that join two endpoints of
    the site. Other cross-connects are not changed, and their ports are treated as failed. `odd` contains the
    cross-connects that are up in one direction only. Their ports are also treated as failed. `unread` maps each switch
    that could not be read to the reason. The circuits of these switches are unknown. `foreign` contains the
    cross-connects in `of_site` that the daemon does not own. Foreign circuits carry packets like other circuits, but
    are not changed."""

    cross_connects: frozenset[PortPair] = frozenset()
    failures: FabricFailures = field(default_factory=FabricFailures)
    odd: Mapping[OcsId, frozenset[CrossConnect]] = field(default_factory=dict)
    unread: Mapping[OcsId, str] = field(default_factory=dict)
    of_site: frozenset[PortPair] = frozenset()
    foreign: frozenset[PortPair] = frozenset()


class SwitchReader:
    """Reads the site's switches. `drivers` must contain a driver for each switch."""

    def __init__(self, site: Site, drivers: Mapping[OcsId, OcsDriver], clock: Clock, owners: CircuitOwners) -> None:
        self._site = site
        self._owners = owners
        self._drivers = drivers
        self._clock = clock
        self._silent: dict[OcsId, asyncio.Task[_Seen]] = {}  # reads that have not finished yet
        self._facts: dict[OcsId, SwitchFacts] = {}

    def of_site(self, cross_connects: Iterable[PortPair]) -> frozenset[PortPair]:
        return frozenset(pair for pair in cross_connects if self._site.cabling.ends(pair) is not None)

    def device_pairs(self, wanted: PortPair) -> tuple[CrossConnect, ...]:
        """Return the device's cross-connects that together form the site's cross-connect `wanted`. The switch must have
        been read before this call."""
        return device_pairs(self._facts[wanted.switch], wanted)

    async def scan(self) -> SiteReading:
        """Read all switches and return their state. A switch that does not answer within `ANSWER_WITHIN_S` seconds is
        treated as failed. No circuits are planned on it, and its existing circuits stay. Later scans do not wait for
        that switch until it has answered or its driver has raised an error."""
        self._silent = {switch: reads for switch, reads in self._silent.items() if not reads.done()}
        reads = {
            switch.id: asyncio.ensure_future(self._read_switch(switch.id))
            for switch in self._site.switches
            if switch.id not in self._silent
        }
        try:
            if reads:
                with suppress(Permanent):  # raised for late ones
                    await within(self._clock, ANSWER_WITHIN_S, asyncio.wait(reads.values()))
        except asyncio.CancelledError:
            for each in reads.values():
                each.cancel()
            raise
        self._silent |= {switch: each for switch, each in reads.items() if not each.done()}
        seen: dict[OcsId, _Seen] = dict.fromkeys(self._site.switch, f"did not answer within {ANSWER_WITHIN_S:g} s")
        return self._site_reading(seen | {switch: each.result() for switch, each in reads.items() if each.done()})

    def _site_reading(self, seen: Mapping[OcsId, "_Seen"]) -> SiteReading:
        cross_connects: set[PortPair] = set()
        failed_ports: set[tuple[OcsId, int]] = set()
        foreign: set[PortPair] = set()
        odd: dict[OcsId, frozenset[CrossConnect]] = {}
        unread: dict[OcsId, str] = {}
        for switch, found in seen.items():
            if isinstance(found, str):
                unread[switch] = found
                continue
            pairs, strange, ports, not_ours = found
            cross_connects |= pairs
            foreign |= not_ours
            failed_ports |= {(switch, port) for port in ports}
            if strange:
                odd[switch] = frozenset(strange)
        of_site = self.of_site(cross_connects)
        failed_ports |= {port for pair in cross_connects - of_site for port in pair.sides}
        failures = FabricFailures(ports=frozenset(failed_ports), switches=frozenset(unread))
        return SiteReading(frozenset(cross_connects), failures, odd, unread, of_site, of_site & foreign)

    async def change_of(self, switch: OcsId, remove: Iterable[PortPair], add: Iterable[PortPair]) -> CircuitChange:
        """Convert those cross-connects in `remove` and `add` that are on this switch to a change of device
        cross-connects. Raises DriverError if the switch does not answer."""
        facts = await self.facts(switch)
        connect, disconnect = (
            tuple(each for pair in sorted(p for p in pairs if p.switch == switch) for each in device_pairs(facts, pair))
            for pairs in (add, remove)
        )
        return CircuitChange(connect, disconnect)

    async def facts(self, switch: OcsId) -> SwitchFacts:
        if switch not in self._facts:
            self._facts[switch] = await self._drivers[switch].facts()
        return self._facts[switch]

    async def _read_switch(self, switch: OcsId) -> "_Seen":
        try:
            facts, driver = await self.facts(switch), self._drivers[switch]
            reading, states = await self._owners.read(switch), await driver.ports()
        except DriverError as error:
            return str(error)
        except Exception as error:  # a fault of one driver must not affect other switches
            logger.exception("switch %s cannot be read", switch)
            return f"{type(error).__name__}: {error}"
        pairs, odd = site_pairs(switch, facts, reading.cross_connects)
        offset = _offset(facts)
        faulty = {state.port for state in states if state.status is not PortStatus.ENABLED}
        broken = {port if port in facts.ingress_ports else port - offset for port in faulty}
        # A one-way cross-connect blocks its ports, owned or foreign. A failed one carries nothing, even if its ports
        # report no fault.
        for each in odd | {each.cross_connect for each in reading.circuits if each.state is CircuitState.FAILED}:
            broken |= {each.ingress_port, each.egress_port - offset}
        not_ours = {pair for pair in pairs if not reading.foreign.isdisjoint(device_pairs(facts, pair))}
        return pairs, odd, broken, not_ours
