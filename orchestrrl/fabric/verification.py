"""Hold the fabric against its site's file: circuits on the glass against what was left there, fibres against light.

`verify` changes nothing. With `walk` it lights what is free, one cross-connect after the other, and sees where light
comes out; circuits that are up are not touched, and packets are not led over what it lights. What it sees means is
planner/fabric/cables.py.
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
    """`fibres` that are known to be plugged in where the site says, of `fibres_of_site` (lanes included); `not_seen`:
    why the others are not known."""

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
    """Verifies the fabric of a running daemon; without `routing` its ToRs cannot be asked, only its switches."""

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
        """Raises Permanent where it may not walk, and OrchestrRLError of routers and switches."""
        if walk and self.routing is None:
            raise Permanent("to walk, the ToRs have to be asked for signals: name them in fabric.routers")
        if walk and self.pause_registry.hold(PauseScope.FABRIC) is None:
            raise Permanent("circuits must stand still while fibres are lit: first `orchestrrl fabric pause`")
        site_reading = await self.reader.scan()
        findings = _Findings(reading_faults(await self._book(site_reading), site_reading))
        links = 0
        if self.routing is None:
            findings.not_seen.append("fabric.routers names no ToRs, so that nobody can say where light comes out")
        else:
            links = await self._check_signals(self.routing, site_reading, findings)
            if walk:
                async with self.routing.standing_still():
                    await self._walk(self.routing, site_reading, findings)
        interfaces = self.routing.interfaces if self.routing is not None else {}
        ports = {*interfaces, *(port for lane in self._site.lanes for port in lane.ends)}
        unknown = sorted(ports - findings.good - {fault.port for fault in findings.faults})
        if unknown and self.routing is not None:
            how = "in use or broken" if walk else "no light shows where they end; --walk lights those that are free"
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
        """What should be up: our own circuits, by the journal. Of switches that do not answer, nothing is said."""
        ours: set[PortPair] = set()
        for switch in self._site.switch.keys() - site_reading.unread.keys():
            pairs, _ = site_pairs(switch, await self.reader.facts(switch), self.circuits.owners.owned(switch))
            ours |= pairs
        return frozenset(ours)

    async def _check_signals(self, routing: FabricRouting, site_reading: SiteReading, findings: _Findings) -> int:
        """From light that is there anyway; the number of links."""
        lits = links_up(self._site, site_reading.of_site, routing.interfaces)
        signals, silent = await routing.rerouting.signals()
        findings.not_seen += [f"{tor} does not answer: {why}" for tor, why in sorted(silent.items())]
        expected = {end: far for lit in lits for end, far in (lit.link.ends, lit.link.ends[::-1])}
        wanted = {end: far[0] for end, far in expected.items() if end in signals}
        heard = await routing.rerouting.answering_routers({end: (tor,) for end, tor in wanted.items()})
        # Where the right one is not, who else is? Also where nobody should be.
        odd = [end for end in wanted if wanted[end] not in heard.get(end, ())]
        odd += [end for end in set(routing.interfaces.values()) & signals if end not in expected]
        heard |= await routing.rerouting.answering_routers({end: tuple(self._site.tor) for end in odd})
        seen = ObservedCables(signals, heard, frozenset(silent), frozenset(site_reading.unread))
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
        """Each free lane once, with one of another PoD on the same switch of the core."""
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
                findings.not_seen.append(f"{port_text(one.ends[0])}: no good fibre of a ToR is free beside it")
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
        """The interfaces that have a signal while these are lit, and had none before."""
        before, _ = await routing.rerouting.signals()
        async with self._lit(pairs):
            now = await self._signals(routing, lambda now: now - before >= set(expected))
        came = now - before
        await self._signals(routing, lambda now: not now & came)  # or the next lighting finds them lit already
        return came & set(routing.interfaces.values())

    async def _signals(self, routing: FabricRouting, enough: Callable[[Set[Interface]], bool]) -> Set[Interface]:
        """The interfaces that have a signal, once that is enough, or as they are after `LIGHT_WITHIN_S`."""
        until_s = self.clock.now_s() + LIGHT_WITHIN_S
        while True:
            now, _ = await routing.rerouting.signals()
            if enough(now) or self.clock.now_s() >= until_s:
                return now
            await self.clock.sleep(LOOK_S)

    @asynccontextmanager
    async def _lit(self, pairs: Sequence[PortPair]) -> AsyncIterator[None]:
        """All are darkened in the end, whichever of them fail."""
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
            raise Permanent(f"{pair} could not be {'lit' if is_up else 'darkened'}: {error}") from error
        if not outcome.done:
            raise Permanent(f"{pair} could not be {'lit' if is_up else 'darkened'}: {outcome.detail}")


def reading_faults(book: frozenset[PortPair], site_reading: SiteReading) -> list[CablingFault]:
    """What the switches show, against the circuits that are ours."""
    faults = [CablingFault("silent_switch", switch, why) for switch, why in sorted(site_reading.unread.items())]
    for pair in sorted(book - site_reading.of_site):
        if pair.switch not in site_reading.unread:
            faults.append(CablingFault("missing_circuit", str(pair), "is ours, and not on the switch"))
    faults += [
        CablingFault("unknown_circuit", str(pair), "is up, and nobody here asked for it")
        for pair in sorted(site_reading.of_site - book)
    ]
    for pair in sorted(site_reading.cross_connects - site_reading.of_site):
        faults.append(CablingFault("odd_circuit", str(pair), "is up between ports that the site does not join"))
    for switch, pairs in sorted(site_reading.odd.items()):
        faults += [CablingFault("one_way", f"{switch}:{pair}", "light goes one way only") for pair in sorted(pairs)]
    told = {port for pair in site_reading.cross_connects - site_reading.of_site for port in pair.sides}
    told |= {port for port in site_reading.failures.ports if port[0] in site_reading.odd}
    faults += [
        CablingFault.at_port("failed_port", port, "by the word of its switch")
        for port in sorted(site_reading.failures.ports - told)
    ]
    return faults


def _pairs_of_lanes(site: Site, lanes: Iterable[Lane]) -> list[tuple[Lane, Lane]]:
    """Of different PoDs on one switch of the core; one that is left over goes with one that has been taken."""
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
