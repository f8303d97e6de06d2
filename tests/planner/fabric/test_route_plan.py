"""Routes over circuits, checked by tracing packets: none loops, and none with a path is lost."""

import itertools
import random
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.fabric.model import EndpointId
from planner.fabric.route_plan import (
    NextHop,
    PacketRoute,
    PacketSide,
    ReroutingPlan,
    RouteChange,
    RoutedLink,
    RouteStage,
    RouteTable,
    RoutingDomain,
    TorRouter,
    changes,
    fit,
    reroute,
    route_table,
    update,
)

Tables = Mapping[EndpointId, RouteTable]


def drain(domain: RoutingDomain, links: Collection[RoutedLink], going: Collection[RoutedLink]) -> ReroutingPlan:
    """Return the routes without the circuits that are to go down."""
    return reroute(domain, [link for link in links if link not in going])


def lost(plan: Sequence[RouteStage]) -> set[tuple[EndpointId, str]]:
    """Return routes that are removed without a successor, by router and prefix."""
    moves = [move for stage in plan for move in stage.items()]
    return {(name, change.prefix) for name, some in moves for change in some if change.route is None}


def tor(number: int) -> EndpointId:
    return EndpointId(f"tor{number}")


def domain(count: int, with_packet_side: Collection[int] = (), packet_hops: int | None = None) -> RoutingDomain:
    routers = {
        tor(n): TorRouter(
            f"192.0.2.{n}",
            (f"10.0.{n}.0/24",),
            PacketSide("eth0", f"198.51.100.{n}") if n in with_packet_side else None,
        )
        for n in range(1, count + 1)
    }
    return RoutingDomain(routers, packet_hops)


def wire(counts: Mapping[tuple[int, int], int]) -> list[RoutedLink]:
    """Create circuits between pairs of routers; interfaces are numbered from 1 at every router."""
    ports: defaultdict[int, Iterator[int]] = defaultdict(lambda: itertools.count(1))
    return [
        RoutedLink.of(tor(a), f"swp{next(ports[a])}", tor(b), f"swp{next(ports[b])}")
        for (a, b), count in counts.items()
        for _ in range(count)
    ]


def walks(
    where: RoutingDomain, links: Collection[RoutedLink], tables: Tables, start: EndpointId, to: EndpointId
) -> set[str]:
    """Return how packets may end for every choice of next hops: "there", "lost" or "loop"."""
    far_end = {(name, interface): other for link in links for (name, interface), (other, _) in _both(link)}
    prefix = where.routers[to].prefixes[0]
    ends = set()
    on_way = [(start, frozenset([start]))]
    while on_way:
        at, seen = on_way.pop()
        if at == to:
            ends.add("there")
            continue
        route = tables[at].get(prefix)
        if route is None:
            ends.add("lost")
            continue
        for hop in route.next_hops:
            side = where.routers[at].packet_side
            if side and hop.interface == side.interface:
                further = where.by_address()[hop.gateway]
            elif where.by_address()[hop.gateway] == far_end.get((at, hop.interface)):
                further = far_end[at, hop.interface]
            else:
                ends.add("lost")
                continue
            if further in seen:
                ends.add("loop")
            else:
                on_way.append((further, seen | {further}))
    return ends


def _both(link: RoutedLink) -> list[tuple[tuple[EndpointId, str], tuple[EndpointId, str]]]:
    a, b = link.ends
    return [(a, b), (b, a)]


@st.composite
def domains(draw: st.DrawFn) -> RoutingDomain:
    count = draw(st.integers(2, 6))
    sides = draw(st.sets(st.integers(1, count)))
    return domain(count, sides, draw(st.sampled_from([None, 1, 2])))


@st.composite
def wired(draw: st.DrawFn, where: RoutingDomain) -> list[RoutedLink]:
    pairs = list(itertools.combinations(range(1, len(where.routers) + 1), 2))
    return wire(dict(zip(pairs, draw(st.tuples(*(st.integers(0, 2) for _ in pairs))), strict=True)))


def hops_to(where: RoutingDomain, links: Collection[RoutedLink], to: EndpointId) -> dict[EndpointId, int]:
    """Return hop counts by repeatedly relaxing every edge, independent of the code under test."""
    edges = {(link.a, link.b): 1 for link in links}
    for a, b in itertools.combinations(sorted(where.routers), 2):
        if where.routers[a].packet_side and where.routers[b].packet_side:
            edges.setdefault((a, b), where.packet_cost)
    cost = {to: 0}
    for _ in where.routers:
        for (a, b), step in edges.items():
            for one, other in ((a, b), (b, a)):
                if other in cost:
                    cost[one] = min(cost.get(one, 10**6), cost[other] + step)
    return cost


@given(st.data())
def test_packets_arrive_on_a_shortest_path_if_one_exists(data: st.DataObject) -> None:
    where = data.draw(domains())
    links = data.draw(wired(where))
    found = reroute(where, links)
    for to in where.routers:
        cost = hops_to(where, links, to)
        for start in where.routers:
            expected = {"there"} if start in cost else {"lost"}
            assert walks(where, links, found.tables, start, to) == expected
            assert ((start, to) in found.unreachable) is (start not in cost)
            route = found.tables[start].get(where.routers[to].prefixes[0])
            for hop in route.next_hops if route else ():
                further = where.by_address()[hop.gateway]
                is_side = hop.interface == "eth0"
                assert cost[further] + (where.packet_cost if is_side else 1) == cost[start]


def test_weights_follow_number_of_circuits() -> None:
    # From 1 to 4: over 2, with one circuit onwards, and over 3, with three; two circuits lead to each.
    where = domain(4)
    links = wire({(1, 2): 2, (1, 3): 2, (2, 4): 1, (3, 4): 3})
    route = reroute(where, links).tables[tor(1)]["10.0.4.0/24"]
    assert route.next_hops == (
        NextHop("192.0.2.2", "swp1", 1),
        NextHop("192.0.2.2", "swp2", 1),
        NextHop("192.0.2.3", "swp3", 2),
        NextHop("192.0.2.3", "swp4", 2),
    )
    direct = reroute(where, links).tables[tor(4)]["10.0.3.0/24"]
    assert [(hop.interface, hop.weight) for hop in direct.next_hops] == [("swp2", 1), ("swp3", 1), ("swp4", 1)]


def test_packet_side_serves_routers_without_circuits() -> None:
    where = domain(3, {1, 2, 3})
    found = reroute(where, wire({(1, 2): 1}))
    assert found.tables[tor(1)]["10.0.2.0/24"].next_hops == (NextHop("192.0.2.2", "swp1"),)
    assert found.tables[tor(1)]["10.0.3.0/24"].next_hops == (NextHop("198.51.100.3", "eth0"),)
    assert found.on_packet_side == tuple((tor(a), tor(b)) for a, b in ((3, 1), (3, 2), (1, 3), (2, 3)))
    assert found.unreachable == ()


def test_circuits_beyond_hop_limit_yield_to_packet_side() -> None:
    chain = wire({(1, 2): 1, (2, 3): 1, (3, 4): 1})
    for packet_hops, interface in ((None, "swp1"), (2, "eth0")):
        route = reroute(domain(4, {1, 4}, packet_hops), chain).tables[tor(1)]["10.0.4.0/24"]
        assert route.interfaces == {interface}


@given(st.data())
def test_no_point_of_an_update_loops_or_loses_packets(data: st.DataObject) -> None:
    where = data.draw(domains())
    old, new = data.draw(wired(where)), data.draw(wired(where))
    shared = [link for link in old if link in new]
    # As in `drain` and `reroute`: circuits are removed after their routes, and added before their routes.
    for before_links, after_links, live in ((old, shared, old), (shared, new, new)):
        before, after = reroute(where, before_links), reroute(where, after_links)
        plan = update(where, before.tables, after.tables)
        both = {
            (a, b)
            for a, b in itertools.permutations(where.routers, 2)
            if (a, b) not in before.unreachable and (a, b) not in after.unreachable
        }
        final = check_every_point(where, live, before.tables, plan, both, data.draw(st.randoms()))
        assert final == after.tables
        assert {(name, where.owners()[prefix]) for name, prefix in lost(plan)} == set(after.unreachable) - set(
            before.unreachable
        )


@given(st.data())
def test_failed_routers_never_cause_loops(data: st.DataObject) -> None:
    where = data.draw(domains())
    links = data.draw(wired(where))
    going = [link for link in links if data.draw(st.booleans())]
    before, after = reroute(where, links), drain(where, links, going)
    stuck = {
        (name, prefix)
        for name in data.draw(st.sets(st.sampled_from(sorted(where.routers))))
        for prefix in where.owners()
    }
    plan = update(where, before.tables, after.tables, stuck)
    always = set() if lost(plan) else set(itertools.permutations(where.routers, 2)) - set(after.unreachable)
    final = check_every_point(where, links, before.tables, plan, always, data.draw(st.randoms()))
    by_address, owners = where.by_address(), where.owners()

    def waits(name: EndpointId, prefix: str) -> bool:
        """Return whether a change waits for a stuck router on its path."""
        route = after.tables[name].get(prefix)
        if owners[prefix] == name:
            return False
        is_stuck = (name, prefix) in stuck and before.tables[name].get(prefix) != route
        return is_stuck or any(waits(by_address[hop.gateway], prefix) for hop in (route.next_hops if route else ()))

    left = {(name, change.prefix) for name in final for change in changes(final[name], after.tables[name])}
    wanted = {(name, change.prefix) for name in final for change in changes(before.tables[name], after.tables[name])}
    assert left == {key for key in wanted if waits(*key)}


def check_every_point(
    where: RoutingDomain,
    links: Collection[RoutedLink],
    before: Tables,
    stages: Collection[RouteStage],
    served: set[tuple[EndpointId, EndpointId]],
    rng: random.Random,
) -> Tables:
    """Apply the changes of each stage one by one, in random order, and trace all packets at each point."""
    tables = dict(before)
    for stage in stages:
        steps = [(name, change) for name, some in stage.items() for change in some]
        rng.shuffle(steps)
        for name, change in steps:
            tables[name] = changed_by(tables[name], change)
            for a, b in itertools.permutations(where.routers, 2):
                ends = walks(where, links, tables, a, b)
                assert "loop" not in ends
                if (a, b) in served:
                    assert ends == {"there"}
    return tables


def changed_by(table: RouteTable, change: RouteChange) -> RouteTable:
    routes = {prefix: route for prefix, route in table.items() if prefix != change.prefix}
    if change.route:
        routes[change.prefix] = change.route
    return route_table(routes.values())


def test_update_changes_router_next_to_destination_first() -> None:
    where = domain(3)
    before = reroute(where, wire({(1, 3): 1}))
    after = reroute(where, wire({(1, 3): 1, (2, 3): 1, (1, 2): 1}))
    plan = update(where, before.tables, after.tables)
    assert [sorted(stage) for stage in plan] == [[tor(1), tor(2), tor(3)]]
    far = reroute(where, wire({(1, 2): 1, (2, 3): 1}))
    plan = update(where, {name: {} for name in where.routers}, far.tables)
    to_3 = [[name for name, some in stage.items() if any(c.prefix == "10.0.3.0/24" for c in some)] for stage in plan]
    assert to_3 == [[tor(2)], [tor(1)]]


def test_draining_last_circuit_reports_unreachable_pairs() -> None:
    where, links = domain(2), wire({(1, 2): 2})
    assert drain(where, links, links[:1]).unreachable == ()
    gone = drain(where, links, links)
    assert gone.unreachable == ((tor(2), tor(1)), (tor(1), tor(2)))
    plan = update(where, reroute(where, links).tables, gone.tables)
    assert lost(plan) == {(tor(1), "10.0.2.0/24"), (tor(2), "10.0.1.0/24")}
    assert len(plan) == 1


@given(
    st.dictionaries(st.tuples(st.integers(1, 9), st.integers(1, 9)), st.integers(1, 1000), min_size=1),
    st.integers(1, 8),
    st.integers(1, 16),
)
def test_fitted_route_is_close_to_wanted_one(
    weights: Mapping[tuple[int, int], int], max_next_hops: int, max_weight: int
) -> None:
    route = PacketRoute.of("10.0.1.0/24", {(f"192.0.2.{a}", f"swp{b}"): weight for (a, b), weight in weights.items()})
    table = route_table([route])
    fitted = fit(table, max_next_hops, max_weight)["10.0.1.0/24"]
    assert len(fitted.next_hops) <= max_next_hops
    assert max(hop.weight for hop in fitted.next_hops) <= max_weight
    assert {hop.way for hop in fitted.next_hops} <= {hop.way for hop in route.next_hops}
    assert fit(table, 100, 1000) == table
    assert fit(fit(table, max_next_hops, max_weight), max_next_hops, max_weight)["10.0.1.0/24"] == fitted


def test_fit_without_weights_keeps_half_the_interfaces_of_half_share() -> None:
    where = domain(4)
    table = reroute(where, wire({(1, 2): 2, (1, 3): 2, (2, 4): 1, (3, 4): 2})).tables[tor(1)]
    (route,) = (fit(table, 64, 1)["10.0.4.0/24"],)
    assert [hop.gateway for hop in route.next_hops] == ["192.0.2.2", "192.0.2.3", "192.0.2.3"]


def test_invalid_values_are_rejected() -> None:
    for wrong in ("10.0.1.1/24", "10.0.1.0", "fd00::/64", "10.0.1.0/33"):
        with pytest.raises(ValueError, match="prefix"):
            PacketRoute.of(wrong, {("192.0.2.1", "swp1"): 1})
    for interface in ("swp 1", "", "-x", "if7", "a;reboot", "x" * 16):
        with pytest.raises(ValueError, match="interface must match"):
            NextHop("192.0.2.1", interface)
    with pytest.raises(ValueError, match="address"):
        NextHop("tor1", "swp1")
    with pytest.raises(ValueError, match=r"interface .* must be in one circuit"):
        reroute(
            domain(3), [RoutedLink.of(tor(1), "swp1", tor(2), "swp1"), RoutedLink.of(tor(1), "swp1", tor(3), "swp1")]
        )
    with pytest.raises(ValueError, match="packet side"):
        reroute(domain(2, {1}), [RoutedLink.of(tor(1), "eth0", tor(2), "swp1")])
