"""Follow the light from ToR to ToR: which links packets have, and over which cross-connects each goes. Pure.

Inside a PoD one cross-connect is one link. Between PoDs light goes from a ToR over a lift to a lane, over the core to a
lane of the other PoD, and over a drop to a ToR there: packets see one link, once all three cross-connects are up, and
it is gone as soon as one of them is.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from planner.fabric.model import EndpointId, Port, PortPair, partners, port_pair
from planner.fabric.route_plan import RoutedLink
from planner.fabric.topology import Site, Tier

Interface = tuple[EndpointId, str]  # a ToR, and what it calls the interface


@dataclass(frozen=True, slots=True, order=True)
class Lit:
    """A link, and what carries its light."""

    link: RoutedLink
    over: tuple[PortPair, ...]  # from its end `a` to its end `b`

    def goes_over(self, cross_connects: Iterable[PortPair]) -> bool:
        return not set(self.over).isdisjoint(cross_connects)


def fibres_of(site: Site, tor: EndpointId) -> tuple[Port, ...]:
    """The ports that a ToR is fibred to, by switch and as listed there."""
    return site.fibres[Tier.AGG].get(tor, ())


def interfaces_at(site: Site, names: Mapping[EndpointId, Sequence[str]]) -> Mapping[Port, Interface]:
    """What is behind each port that a ToR is fibred to. `names`: of each ToR's interfaces, in the order of its fibres.
    Raises ValueError where there are not as many."""
    return {
        port: (tor, interface)
        for tor, listed in names.items()
        for port, interface in zip(fibres_of(site, tor), listed, strict=True)
    }


def links_up(site: Site, cross_connects: Iterable[PortPair], interfaces: Mapping[Port, Interface]) -> tuple[Lit, ...]:
    """The links that these cross-connects make, in order. Light that ends in the dark, or at the ToR that it comes
    from, makes none. Raises ValueError where two cross-connects share a port."""
    cross_connects = frozenset(cross_connects)
    joined = partners(cross_connects)
    if len(joined) < 2 * len(cross_connects):
        raise ValueError(f"a port is used twice by {', '.join(map(str, sorted(cross_connects)))}")
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
    """The last port that light from a port gets to, and the cross-connects on its way."""
    over: list[PortPair] = []
    at = start
    while at in joined:
        over.append(port_pair(*at, joined[at][1]))
        at = joined[at]
        if at not in far_end:
            break
        at = far_end[at]
    return at, tuple(over)
