"""Find miswired cables: compare the ToRs' observations with the site's cabling and the switches' cross-connects. Has no
side effects.

A switch controls its mirrors, but cannot detect which fibre is plugged into a port. If the wrong fibre is plugged in,
its light arrives at a different interface. That interface has an unexpected signal, or an unexpected router answers
there.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from planner.fabric.light import Interface, Lit, links_up
from planner.fabric.model import EndpointId, OcsId, Port, PortPair, port_pair
from planner.fabric.topology import Site

WRONG_CABLE = "wrong_cable"
DARK = "dark"
STRAY = "stray_light"
STRANGER = "stranger"


@dataclass(frozen=True, slots=True, order=True)
class CablingFault:
    """A cabling fault. `where` is a port as `SWITCH:PORT`, or an interface as `TOR/INTERFACE`. `what` describes the
    fault."""

    kind: str
    where: str
    what: str
    port: Port | None = field(default=None, compare=False)  # the port that `where` names, if it is one

    @classmethod
    def at_port(cls, kind: str, port: Port, what: str) -> "CablingFault":
        return cls(kind, port_text(port), what, port)


@dataclass(frozen=True, slots=True)
class ObservedCables:
    """The ToRs' observations: the interfaces with a signal, and the routers that answer at each interface. ToRs in
    `silent` did not report, so it is unknown whether their interfaces have a signal. Switches in `unread` were not
    read, so unexpected light may come from them."""

    signals: frozenset[Interface]
    answering: Mapping[Interface, frozenset[EndpointId]]
    silent: frozenset[EndpointId] = frozenset()
    unread: frozenset[OcsId] = frozenset()


# The ends of links that the switches form, with the port of each and the far end.
_Ends = Mapping[Interface, tuple[Port, Interface]]


def faults_seen(
    site: Site, interfaces: Mapping[Port, Interface], up: Iterable[PortPair], seen: ObservedCables
) -> tuple[CablingFault, ...]:
    """Find cabling faults by the light of the existing circuits (`up`). If two cables of one ToR lead to the same other
    ToR, this function cannot distinguish the cables, but a walk (`traced`) can."""
    ends = _ends(links_up(site, up, interfaces), interfaces)
    dark = {here for here in ends.keys() - seen.signals if here[0] not in seen.silent}
    strays = (seen.signals & set(interfaces.values())) - ends.keys()
    faults: list[CablingFault] = []
    explained: set[Interface] = set()
    for here in sorted(dark):
        port, far = ends[here]
        found = [
            stray
            for stray in sorted(strays)
            if far[0] in seen.answering.get(stray, ()) and stray[0] in seen.answering.get(far, ())
        ]
        if len(found) == 1:
            strays -= {found[0]}
            explained |= {here, far, found[0]}
            faults.append(wrong_cable(port, here, found[0]))
    for here in sorted(dark - explained):
        port, far = ends[here]
        there = "has none either" if far in dark else "has one" if far in seen.signals else "does not answer"
        faults.append(CablingFault.at_port(DARK, port, f"no signal at {text(here)}, {text(far)} {there}"))
    faults += _strangers(ends, seen, explained)
    faults += [
        CablingFault(
            STRAY,
            text(stray),
            f"has a signal, but no cross-connect sends it one{_responders_text(seen, stray)}",
        )
        for stray in sorted(strays)
        if not seen.unread
    ]
    return tuple(faults)


def _strangers(ends: _Ends, seen: ObservedCables, explained: set[Interface]) -> list[CablingFault]:
    """Return the faults of interfaces at which an unexpected router, or no router, answers."""
    return [
        CablingFault.at_port(
            STRANGER,
            port,
            f"{far[0]} should answer at {text(here)}{_responders_text(seen, here) or ': no router answers'}",
        )
        for here, (port, far) in sorted(ends.items())
        if here in seen.signals and here not in explained and far[0] not in seen.answering.get(here, ())
    ]


def walk(interfaces: Mapping[Port, Interface], free: Iterable[Port]) -> tuple[PortPair, ...]:
    """Return the cross-connects of a walk, which lights the free ports by making one cross-connect after the other. On
    each switch, the cross-connects form a ring of the free fibres. Each fibre is thus lit together with two other
    fibres, of other ToRs if possible. Two swapped cables are detected only if each of them is also lit with a third
    fibre."""
    by_switch: dict[OcsId, dict[EndpointId, list[Port]]] = {}
    for port in sorted(free):
        if port in interfaces:
            by_switch.setdefault(port[0], {}).setdefault(interfaces[port][0], []).append(port)
    pairs: list[PortPair] = []
    for switch, tors in by_switch.items():
        turns = zip_longest(*tors.values())
        ring = [port for turn in turns for port in turn if port is not None]
        ends = ring if len(ring) > 2 else ring[:-1]
        pairs += [port_pair(switch, ring[place][1], ring[(place + 1) % len(ring)][1]) for place in range(len(ends))]
    return tuple(pairs)


def traced(
    lightings: Sequence[tuple[PortPair, frozenset[Interface]]], interfaces: Mapping[Port, Interface]
) -> tuple[frozenset[Port], tuple[CablingFault, ...]]:
    """Evaluate a walk. `lightings` has each cross-connect of the walk with the interfaces that had a signal while it
    was up. Returns the ports whose fibre ends at the correct interface, and the faults of all other ports."""
    came: dict[Port, list[frozenset[Interface]]] = {}
    partners: dict[Port, list[Port]] = {}
    for pair, lit in lightings:
        for port, partner in (pair.sides, pair.sides[::-1]):
            came.setdefault(port, []).append(lit)
            partners.setdefault(port, []).append(partner)
    found = _found(came, partners)
    # Two fibres that were only lit with each other are indistinguishable. If one of the two ends is where the site
    # places it, it is taken as correct.
    for pair, lit in lightings:
        ends = {port: interfaces[port] for port in pair.sides}
        if len(lit) == 2 and ends.keys().isdisjoint(found) and (as_should_be := lit & set(ends.values())):
            sound = {port: end for port, end in ends.items() if end in as_should_be}
            rest = iter(lit - as_should_be)
            found |= {port: sound[port] if port in sound else next(rest) for port in ends}
    good = frozenset(port for port, end in found.items() if end == interfaces[port])
    faults = [wrong_cable(port, interfaces[port], found[port]) for port in sorted(found.keys() - good)]
    for port in sorted(came.keys() - found.keys()):
        seen_at = sorted(frozenset().union(*came[port]))
        where = f"it arrives at {', '.join(map(text, seen_at))}" if seen_at else "it arrives nowhere"
        faults.append(CablingFault.at_port(DARK, port, f"its light does not reach {text(interfaces[port])}: {where}"))
    return good, tuple(faults)


def _found(
    came: Mapping[Port, Sequence[frozenset[Interface]]], partners: Mapping[Port, Sequence[Port]]
) -> dict[Port, Interface]:
    """Locate the interface at the far end of each port's fibre. This is the only interface that has a signal whenever
    the port is lit, or the only one left in a lighting once the interface of the partner port is excluded. Ports
    without such an interface are omitted."""
    found: dict[Port, Interface] = {}
    for port, lit in came.items():
        some = [each for each in lit if each]
        common = frozenset.intersection(*some) if len(some) > 1 else frozenset()
        if len(common) == 1:
            found[port] = next(iter(common))
    while True:
        more: dict[Port, Interface] = {}
        for port, lit in came.items():
            for partner, each in zip(partners[port], lit, strict=True):
                rest = each - {found[partner]} if partner in found and found[partner] in each else frozenset()
                if port not in found and len(rest) == 1:
                    more[port] = next(iter(rest))
        if not more:
            return found
        found |= more


def wrong_cable(port: Port, expected: Interface, found: Interface) -> CablingFault:
    return CablingFault.at_port(
        WRONG_CABLE, port, f"its fibre ends at {text(found)}, but should end at {text(expected)}"
    )


def text(interface: Interface) -> str:
    return f"{interface[0]}/{interface[1]}"


def port_text(port: Port) -> str:
    return f"{port[0]}:{port[1]}"


def _ends(lits: Sequence[Lit], interfaces: Mapping[Port, Interface]) -> _Ends:
    port_of = {interface: port for port, interface in interfaces.items()}
    return {here: (port_of[here], far) for lit in lits for here, far in (lit.link.ends, lit.link.ends[::-1])}


def _responders_text(seen: ObservedCables, here: Interface) -> str:
    routers = sorted(seen.answering.get(here, ()))
    return f": {', '.join(routers)} answers there" if routers else ""
