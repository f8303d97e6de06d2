"""Verify the fabric: compare circuits with the journal, and use light to verify that fibres are plugged in as the
site's file describes.

Without `walk`, `verify` changes nothing. With `walk`, free ports are connected by one test circuit after another, to
find where light arrives. Existing circuits are not changed, and no packets use the test circuits.
`planner/fabric/cables.py` interprets the observations.
"""

from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence, Set
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from ocs_drivers.errors import DriverError
from ocs_drivers.model import ChangeMode, CircuitChange
from orchestrrl.core.clock import Clock
from orchestrrl.core.errors import Permanent, few
from orchestrrl.core.operator_pauses import PauseRegistry, PauseScope
from orchestrrl.fabric.circuit_executor import CircuitExecutor
from orchestrrl.fabric.coordinator import CircuitCoordinator
from orchestrrl.fabric.packet_routing import FabricRouting
from orchestrrl.fabric.switch_reader import SiteReading, SwitchReader, site_pairs
from planner.fabric import cables
from planner.fabric.cables import DARK, CablingFault, ObservedCables, port_text
from planner.fabric.light import Interface, links_up
from planner.fabric.model import OcsId, Port, PortPair, port_pair
from planner.fabric.topology import Lane, Site

LIGHT_WITHIN_S = 2.0
LOOK_S = 0.02
LISTED = 6


@dataclass(frozen=True, slots=True)
class VerificationReport:
    """The result of a verification. `links` is the number of links between ToRs over the site's `circuits`.
    `fibres_of_site` is the number of fibres to verify, including the fibres of lanes, and `fibres` is the number of
    those that are verified to be plugged in as the site describes. `not_seen` lists the reasons why the others could
    not be verified."""

    faults: tuple[CablingFault, ...]
    circuits: int
    links: int
    fibres: int
    fibres_of_site: int
    not_seen: tuple[str, ...] = ()


@dataclass
class _Findings:
    faults: list[CablingFault] = field(default_factory=list)
    good: set[Port] = field(default_factory=set)
    not_seen: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class FabricVerifier:
    """Verifies the fabric of a running daemon. If `routing` is None, switches are read, but the signals of ToRs are
    not."""

    fabric: CircuitCoordinator
    routing: FabricRouting | None
    circuits: CircuitExecutor
    reader: SwitchReader
    pause_registry: PauseRegistry
    clock: Clock

    @property
    def _site(self) -> Site:
        return self.fabric.site

    async def verify(self, walk: bool) -> VerificationReport:
        """Verify circuits and fibres. If `walk` is True, also verify the fibres of free ports with test circuits.
        Raises Permanent if a walk is requested while the fabric is not paused or no ToRs are configured. Raises
        OrchestrRLError if an operation on a switch or router fails."""
        if walk and self.routing is None:
            raise Permanent("a walk requires the signals of the ToRs; list the ToRs in fabric.routers")
        if walk and self.pause_registry.hold(PauseScope.FABRIC) is None:
            raise Permanent("the fabric must be paused while a walk lights fibres; run `orchestrrl fabric pause` first")
        site_reading = await self.reader.scan()
        findings = _Findings(reading_faults(await self._book(site_reading), site_reading))
        links = 0
        if self.routing is None:
            findings.not_seen.append("fabric.routers lists no ToRs, so it is unknown where light arrives")
        else:
            links = await self._check_signals(self.routing, site_reading, findings)
            if walk:
                async with self.routing.standing_still():
                    await self._walk(self.routing, site_reading, findings)
        interfaces = self.routing.interfaces if self.routing is not None else {}
        ports = {*interfaces, *(port for lane in self._site.lanes for port in lane.ends)}
        unknown = sorted(ports - findings.good - {fault.port for fault in findings.faults})
        if unknown and self.routing is not None:
            how = "in use or broken" if walk else "no light shows where they end; --walk lights free ones"
            findings.not_seen.append(f"{how}: {few([port_text(port) for port in unknown], LISTED, ', ')}")
        return VerificationReport(
            tuple(dict.fromkeys(findings.faults)),
            len(site_reading.of_site),
            links,
            len(ports & findings.good),
            len(ports),
            tuple(findings.not_seen),
        )

    async def _book(self, site_reading: SiteReading) -> frozenset[PortPair]:
        """Return the circuits that should be up, which are those that the journal lists as owned. Switches that do not
        answer are skipped."""
        ours: set[PortPair] = set()
        for switch in self._site.switch.keys() - site_reading.unread.keys():
            pairs, _ = site_pairs(switch, await self.reader.facts(switch), self.circuits.owners.owned(switch))
            ours |= pairs
        return frozenset(ours)

    async def _check_signals(self, routing: FabricRouting, site_reading: SiteReading, findings: _Findings) -> int:
        """Verify fibres by the light of existing circuits, add the results to `findings`, and return the number of
        links between ToRs."""
        lits = links_up(self._site, site_reading.of_site, routing.interfaces)
        signals, silent = await routing.rerouting.signals()
        findings.not_seen += [f"{tor} does not answer: {why}" for tor, why in sorted(silent.items())]
        expected = {end: far for lit in lits for end, far in (lit.link.ends, lit.link.ends[::-1])}
        wanted = {end: far[0] for end, far in expected.items() if end in signals}
        answering = await routing.rerouting.answering_routers({end: (tor,) for end, tor in wanted.items()})
        # Find which router answers instead, also where none should.
        odd = [end for end in wanted if wanted[end] not in answering.get(end, ())]
        odd += [end for end in set(routing.interfaces.values()) & signals if end not in expected]
        answering |= await routing.rerouting.answering_routers({end: tuple(self._site.tor) for end in odd})
        seen = ObservedCables(signals, answering, frozenset(silent), frozenset(site_reading.unread))
        faults = cables.faults_seen(self._site, routing.interfaces, site_reading.of_site, seen)
        findings.faults += faults
        bad = {fault.port for fault in faults}
        for lit in lits:
            ports = {port for pair in lit.over for port in pair.sides}
            if ports.isdisjoint(bad) and not any(tor in silent for tor, _ in lit.link.ends):
                findings.good |= ports
        return len(lits)

    async def _walk(self, routing: FabricRouting, site_reading: SiteReading, findings: _Findings) -> None:
        used = {port for pair in site_reading.cross_connects for port in pair.sides}
        barred = used | site_reading.failures.ports | self.fabric.overrides.failures.ports
        switches = site_reading.failures.switches | self.fabric.overrides.failures.switches
        free = [port for port in routing.interfaces if port not in barred and port[0] not in switches]
        lightings = []
        for pair in cables.walk(routing.interfaces, free):
            ends = {routing.interfaces[port] for port in pair.sides}
            lightings.append((pair, frozenset(await self._came(routing, [pair], ends))))
        good, faults = cables.traced(lightings, routing.interfaces)
        findings.good |= good
        findings.faults += faults
        await self._walk_lanes(routing, barred, switches, findings)

    async def _walk_lanes(
        self, routing: FabricRouting, barred: Collection[Port], switches: Collection[OcsId], findings: _Findings
    ) -> None:
        """Verify each free lane by a test circuit over this lane and a lane of another PoD on the same core switch.
        Lanes on `switches` or with ports in `barred` are not free."""
        lanes = [
            lane
            for lane in sorted(self._site.lanes)
            if not {lane.agg, lane.core} & set(switches) and not set(lane.ends) & set(barred)
        ]
        good: dict[OcsId, Port] = {}  # the first of each switch
        for port in sorted(findings.good & routing.interfaces.keys() - set(barred)):
            good.setdefault(port[0], port)
        for one, other in _pairs_of_lanes(self._site, lanes):
            here, there = good.get(one.agg), good.get(other.agg)
            if one.agg == other.agg or here is None or there is None:
                findings.not_seen.append(f"{port_text(one.ends[0])}: no verified ToR fibre on its switch is free")
                continue
            path = [
                port_pair(one.agg, here[1], one.agg_port),
                port_pair(one.core, one.core_port, other.core_port),
                port_pair(other.agg, there[1], other.agg_port),
            ]
            ends = {routing.interfaces[here], routing.interfaces[there]}
            (first, up), (last, down) = one.ends, other.ends
            if await self._came(routing, path, ends) == ends:
                findings.good |= {first, up, last, down}
            else:
                what = f"no light gets from it over {port_text(up)} and {port_text(down)}"
                what += f" to {port_text(last)}: one of the two lanes ends elsewhere, or is broken"
                findings.faults.append(CablingFault.at_port(DARK, first, what))

    async def _came(
        self, routing: FabricRouting, pairs: Sequence[PortPair], expected: Collection[Interface]
    ) -> Set[Interface]:
        """Connect these cross-connects temporarily, and return the interfaces of ToRs that gain a signal meanwhile. The
        wait for signals ends early when all `expected` interfaces have gained one."""
        before, _ = await routing.rerouting.signals()
        async with self._lit(pairs):
            now = await self._signals(routing, lambda now: now - before >= set(expected))
        came = now - before
        # otherwise the next lighting would start with them lit
        await self._signals(routing, lambda now: not now & came)
        return came & set(routing.interfaces.values())

    async def _signals(self, routing: FabricRouting, enough: Callable[[Set[Interface]], bool]) -> Set[Interface]:
        """Wait until `enough` returns True for the set of interfaces with a signal, for at most `LIGHT_WITHIN_S`
        seconds. Return the last set."""
        until_s = self.clock.now_s() + LIGHT_WITHIN_S
        while True:
            now, _ = await routing.rerouting.signals()
            if enough(now) or self.clock.now_s() >= until_s:
                return now
            await self.clock.sleep(LOOK_S)

    @asynccontextmanager
    async def _lit(self, pairs: Sequence[PortPair]) -> AsyncIterator[None]:
        """Connect the cross-connects for the duration of the block. All of them are disconnected at the end, even after
        errors."""
        async with AsyncExitStack() as dark:
            for pair in pairs:
                dark.push_async_callback(self._change, pair, is_up=False)
                await self._change(pair, is_up=True)
            yield

    async def _change(self, pair: PortPair, is_up: bool) -> None:
        change: CircuitChange = await self.reader.change_of(
            pair.switch, [] if is_up else [pair], [pair] if is_up else []
        )
        try:
            outcome = await self.circuits.change(pair.switch, change, ChangeMode.SAFE)
        except DriverError as error:
            raise Permanent(f"cross-connect {pair} could not be {'lit' if is_up else 'darkened'}: {error}") from error
        if not outcome.done:
            raise Permanent(f"cross-connect {pair} could not be {'lit' if is_up else 'darkened'}: {outcome.detail}")


def reading_faults(book: frozenset[PortPair], site_reading: SiteReading) -> list[CablingFault]:
    """Compare the readings of the switches with `book`, the circuits that the daemon owns, and return the faults."""
    faults = [CablingFault("silent_switch", switch, why) for switch, why in sorted(site_reading.unread.items())]
    for pair in sorted(book - site_reading.of_site):
        if pair.switch not in site_reading.unread:
            faults.append(CablingFault("missing_circuit", str(pair), "is owned by this daemon, but not on the switch"))
    faults += [
        CablingFault("unknown_circuit", str(pair), "is up, but was not made by this daemon")
        for pair in sorted(site_reading.of_site - book)
    ]
    for pair in sorted(site_reading.cross_connects - site_reading.of_site):
        faults.append(CablingFault("odd_circuit", str(pair), "is up between ports that the site does not connect"))
    for switch, pairs in sorted(site_reading.odd.items()):
        faults += [CablingFault("one_way", f"{switch}:{pair}", "is up in one direction only") for pair in sorted(pairs)]
    explained = {port for pair in site_reading.cross_connects - site_reading.of_site for port in pair.sides}
    explained |= {port for port in site_reading.failures.ports if port[0] in site_reading.odd}
    faults += [
        CablingFault.at_port("failed_port", port, "reported by its switch")
        for port in sorted(site_reading.failures.ports - explained)
    ]
    return faults


def _pairs_of_lanes(site: Site, lanes: Iterable[Lane]) -> list[tuple[Lane, Lane]]:
    """Return pairs of lanes of different PoDs on the same core switch. If no unpaired lane fits, a lane is paired with
    a lane that is already in another pair. Lanes are left out only if their core switch has lanes of only one PoD."""
    by_core: dict[OcsId, list[Lane]] = {}
    for lane in lanes:
        by_core.setdefault(lane.core, []).append(lane)
    pairs: list[tuple[Lane, Lane]] = []
    for some in by_core.values():
        left = sorted(some, key=lambda lane: (site.pod_of[lane.uplink], lane))
        while left:
            one = left.pop(0)
            pod = site.pod_of[one.uplink]
            other = next((lane for lane in (*left, *some) if site.pod_of[lane.uplink] != pod), None)
            if other is not None:
                pairs.append((one, other))
            if other in left:
                left.remove(other)
    return pairs
