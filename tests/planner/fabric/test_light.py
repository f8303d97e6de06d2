"""Links against an oracle without directions, which merges sets of ports connected by light."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

import pytest
from fabric_sites import intents, sites, small_site
from hypothesis import given
from hypothesis import strategies as st

from planner.fabric.light import Interface, Lit, fibres_of, interfaces_at, links_up
from planner.fabric.materialize import materialize
from planner.fabric.model import OcsId, Port, PortPair, port_pair
from planner.fabric.plan import FabricPlan, FabricState
from planner.fabric.route_plan import RoutedLink
from planner.fabric.topology import Site, Tier


def named(site: Site) -> Mapping[Port, Interface]:
    names = {tor.id: [f"swp{k}" for k, _ in enumerate(fibres_of(site, tor.id), start=1)] for tor in site.tors}
    return interfaces_at(site, names)


@st.composite
def patched(draw: st.DrawFn, site: Site) -> frozenset[PortPair]:
    """Draw arbitrary connections of ports; most light reaches no ToR."""
    found: set[PortPair] = set()
    for switch in site.switches:
        order = draw(st.permutations([port for ports in switch.ports.values() for port in ports]))
        used = draw(st.integers(0, len(order) // 2))
        found |= {port_pair(switch.id, *order[2 * k : 2 * k + 2]) for k in range(used)}
    return frozenset(found)


def oracle(
    site: Site, up: Iterable[PortPair], interfaces: Mapping[Port, Interface]
) -> dict[RoutedLink, frozenset[PortPair]]:
    """Return links: a set of connected ports with two ToRs is a link over every cross-connect in it."""
    up = frozenset(up)
    group: dict[Port, set[Port]] = {}

    def join(one: Port, other: Port) -> None:
        merged = group.setdefault(one, {one}) | group.setdefault(other, {other})
        for port in merged:
            group[port] = merged

    for pair in up:
        join((pair.switch, pair.port_a), (pair.switch, pair.port_b))
    for lane in site.lanes:
        join((lane.agg, lane.agg_port), (lane.core, lane.core_port))
    found = {}
    for ports in group.values():
        ends = sorted(interfaces[port] for port in ports if port in interfaces)
        if len(ends) == 2 and ends[0][0] != ends[1][0]:
            found[RoutedLink.of(*ends[0], *ends[1])] = frozenset(p for p in up if (p.switch, p.port_a) in ports)
    return found


def over_links(lit: Iterable[Lit]) -> dict[RoutedLink, frozenset[PortPair]]:
    return {each.link: frozenset(each.over) for each in lit}


@given(st.data())
def test_links_match_connected_ports(data: st.DataObject) -> None:
    site = data.draw(sites())
    up = data.draw(patched(site))
    interfaces = named(site)
    lit = links_up(site, up, interfaces)
    assert over_links(lit) == oracle(site, up, interfaces)
    assert list(lit) == sorted(lit)
    # Removing any part of a link removes this link and no other.
    going = data.draw(st.sets(st.sampled_from(sorted(up)))) if up else set()
    assert links_up(site, up - going, interfaces) == tuple(each for each in lit if not each.goes_over(going))


@given(st.data())
def test_every_circuit_of_a_plan_is_part_of_a_link(data: st.DataObject) -> None:
    site = data.draw(sites())
    intent = data.draw(intents(site))
    plan = materialize(site, intent, FabricState())
    assert isinstance(plan, FabricPlan)
    lit = links_up(site, plan.cross_connects, named(site))
    for pair in plan.cross_connects:
        if site.switch[pair.switch].tier is Tier.CORE:
            assert sum(each.goes_over([pair]) for each in lit) == 1
    by_length = defaultdict(set)
    for each in lit:
        by_length[len(each.over)].add(site.pod_of[each.link.a] == site.pod_of[each.link.b])
    assert by_length.items() <= {1: {True}, 3: {False}}.items()


def test_invalid_cross_connects_are_rejected() -> None:
    site = small_site()
    tor = site.tors[0].id
    with pytest.raises(ValueError, match=r"shorter|longer"):
        interfaces_at(site, {tor: ["swp1"]})
    switch = OcsId(fibres_of(site, tor)[0][0])
    with pytest.raises(ValueError, match="must not share ports"):
        links_up(site, [port_pair(switch, 1, 2), port_pair(switch, 2, 3)], named(site))
