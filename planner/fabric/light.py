"""Trace light from ToR to ToR: find the links that packets can use, and the cross-connects of each link. Has no side
effects.

Inside a PoD, one cross-connect is one link. Between PoDs, light passes three cross-connects: a lift from a ToR to a
lane, one in the core, and a drop from the other PoD's lane to a ToR. The link exists only while all three are up.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from planner.fabric.model import EndpointId, Port, PortPair, partners, port_pair
from planner.fabric.route_plan import RoutedLink
from planner.fabric.topology import Site, Tier

Interface = tuple[EndpointId, str]  # a ToR and its name for the interface


@dataclass(frozen=True, slots=True, order=True)
class Lit:
    """A link and the cross-connects that carry its light."""

    link: RoutedLink
    over: tuple[PortPair, ...]  # from end `a` to end `b` of the link

    def goes_over(self, cross_connects: Iterable[PortPair]) -> bool:
        return not set(self.over).isdisjoint(cross_connects)


def fibres_of(site: Site, tor: EndpointId) -> tuple[Port, ...]:
    """Return the switch ports to which a ToR has fibres, ordered by switch, then as the site lists them."""
    return site.fibres[Tier.AGG].get(tor, ())


def interfaces_at(site: Site, names: Mapping[EndpointId, Sequence[str]]) -> Mapping[Port, Interface]:
    """Return the ToR interface at the other end of each port's fibre. `names` lists each ToR's interfaces in the order
    of its fibres. Raises ValueError if a ToR has more or fewer interfaces than fibres."""
    return {
        port: (tor, interface)
        for tor, listed in names.items()
        for port, interface in zip(fibres_of(site, tor), listed, strict=True)
    }


def links_up(site: Site, cross_connects: Iterable[PortPair], interfaces: Mapping[Port, Interface]) -> tuple[Lit, ...]:
    """Return the links that these cross-connects form, sorted. A path that does not end at another ToR is not a link.
    Raises ValueError if two cross-connects share a port."""
    cross_connects = frozenset(cross_connects)
    joined = partners(cross_connects)
    if len(joined) < 2 * len(cross_connects):
        raise ValueError(f"cross-connects must not share ports, got {', '.join(map(str, sorted(cross_connects)))}")
    far_end = {one: other for lane in site.lanes for one, other in (lane.ends, lane.ends[::-1])}
    found: dict[RoutedLink, Lit] = {}
    for start, (tor, interface) in interfaces.items():
        end, over = _follow(start, joined, far_end)
        if end not in interfaces or interfaces[end][0] == tor:
            continue
        link = RoutedLink.of(tor, interface, *interfaces[end])
        if link.ends[0] == (tor, interface):
            found[link] = Lit(link, over)
    return tuple(sorted(found.values()))


def _follow(
    start: Port, joined: Mapping[Port, Port], far_end: Mapping[Port, Port]
) -> tuple[Port, tuple[PortPair, ...]]:
    """Return the last port that light from the port `start` reaches, and the cross-connects on its path."""
    over: list[PortPair] = []
    at = start
    while at in joined:
        over.append(port_pair(*at, joined[at][1]))
        at = joined[at]
        if at not in far_end:
            break
        at = far_end[at]
    return at, tuple(over)
