"""Compute every router's routes from the links that are up, and the order of changes from old routes to new ones. Has
no side effects.

Each router forwards packets by its routing table only. All tables follow one metric, in which every next hop is nearer
to the destination than the router itself. Packets therefore never loop. In this metric, a circuit costs 1. The packet
side, which is the electrical network of a site if it has one, costs `packet_hops`. If `packet_hops` is None, the packet
side costs more than any path over circuits. `orchestrrl/fabric/rerouting.py` and `orchestrrl/fabric/route_drivers/`
send the routes to real routers.
"""

import heapq
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from ipaddress import IPv4Address, IPv4Network
from typing import Self

from planner.fabric.model import EndpointId

# Linux interface names, except those that a shell or a router's command line would misread: iproute2 takes a missing
# `if7` as the interface of index 7.
INTERFACE = re.compile(r"(?!if[0-9]+$)[A-Za-z0-9][A-Za-z0-9_.-]{0,14}")


@dataclass(frozen=True, slots=True, order=True)
class NextHop:
    """One next hop of a route. It receives a share of the route's packets in proportion to `weight`. The packets leave
    through `interface` to the router with the address `gateway`."""

    gateway: str
    interface: str
    weight: int = 1

    def __post_init__(self) -> None:
        _check_address(self.gateway)
        _check_interface(self.interface)
        if self.weight < 1:
            raise ValueError(f"weight must be >= 1, got {self.weight}")

    @property
    def way(self) -> tuple[str, str]:
        return self.gateway, self.interface

    def __str__(self) -> str:
        return f"{self.gateway}%{self.interface}*{self.weight}"


@dataclass(frozen=True, slots=True, order=True)
class PacketRoute:
    """One destination prefix and its next hops. The next hops are sorted, and their weights have no common divisor.
    `PacketRoute.of` brings them into this form."""

    prefix: str
    next_hops: tuple[NextHop, ...]

    def __post_init__(self) -> None:
        _check_prefix(self.prefix)
        if not self.next_hops:
            raise ValueError(f"{self.prefix}: a route must have a next hop, got none")
        ways = [hop.way for hop in self.next_hops]
        if ways != sorted(set(ways)):
            raise ValueError(f"{self.prefix}: next hops must differ and be in order, got {_hops_text(self.next_hops)}")
        if math.gcd(*(hop.weight for hop in self.next_hops)) != 1:
            raise ValueError(
                f"{self.prefix}: weights must have no common divisor above 1, got {_hops_text(self.next_hops)}"
            )

    @classmethod
    def of(cls, prefix: str, shares: Mapping[tuple[str, str], int]) -> Self:
        """Build a route from the share of each (gateway, interface). Shares may be any integers > 0."""
        common = math.gcd(*shares.values()) or 1
        return cls(prefix, tuple(NextHop(*way, shares[way] // common) for way in sorted(shares)))

    @property
    def interfaces(self) -> frozenset[str]:
        return frozenset(hop.interface for hop in self.next_hops)

    def __str__(self) -> str:
        return f"{self.prefix} via {_hops_text(self.next_hops)}"


RouteTable = Mapping[str, PacketRoute]  # the routes of one router that its driver owns, by prefix


def route_table(routes: Iterable[PacketRoute]) -> RouteTable:
    """Return the routes by prefix. Raises ValueError if a prefix has two routes."""
    table: dict[str, PacketRoute] = {}
    for route in sorted(routes):
        if route.prefix in table:
            raise ValueError(f"prefix {route.prefix} must have one route, got {table[route.prefix]} and {route}")
        table[route.prefix] = route
    return table


@dataclass(frozen=True, slots=True)
class RouteChange:
    """The change of a router's route for one prefix. If `route` is None, the existing route is removed."""

    prefix: str
    route: PacketRoute | None

    def __str__(self) -> str:
        return str(self.route) if self.route else f"{self.prefix} removed"


@dataclass(frozen=True, slots=True)
class PacketSide:
    """A router's connection to the always-on electrical network: its interface and its address on that network."""

    interface: str
    address: str


@dataclass(frozen=True, slots=True)
class TorRouter:
    """A ToR in its role as a router. It responds to its loopback address, `address`, on every interface. The interfaces
    of circuits therefore need no addresses."""

    address: str
    prefixes: tuple[str, ...]  # of the hosts below it
    packet_side: PacketSide | None = None


@dataclass(frozen=True, slots=True)
class RoutingDomain:
    """All routers whose routes follow the circuits. Addresses and prefixes are unique, which
    `orchestrrl/fabric/config_checks.py` checks. `packet_hops` is the cost of the packet side, in circuits. If it is
    None, the packet side costs more than any path over circuits, so it is used only where no such path exists."""

    routers: Mapping[EndpointId, TorRouter]
    packet_hops: int | None = None

    @property
    def packet_cost(self) -> int:
        return self.packet_hops or len(self.routers)

    def by_address(self) -> dict[str, EndpointId]:
        """Return the owner of each gateway address, which is a router's loopback address or its address on the packet
        side."""
        owner = {router.address: name for name, router in self.routers.items()}
        return owner | {r.packet_side.address: name for name, r in self.routers.items() if r.packet_side}

    def owners(self) -> dict[str, EndpointId]:
        """Return the router that each prefix belongs to."""
        return {prefix: name for name, router in self.routers.items() for prefix in router.prefixes}


@dataclass(frozen=True, slots=True, order=True)
class RoutedLink:
    """A circuit between two routers, given by one interface of each. The router with the smaller id comes first;
    `RoutedLink.of` ensures this order."""

    a: EndpointId
    b: EndpointId
    interface_a: str
    interface_b: str

    def __post_init__(self) -> None:
        _check_interface(self.interface_a)
        _check_interface(self.interface_b)
        if not self.a < self.b:
            raise ValueError(
                f"a circuit must connect two routers, the smaller name first, got {self.a!r} and {self.b!r}"
            )

    @classmethod
    def of(cls, one: EndpointId, interface_one: str, other: EndpointId, interface_other: str) -> Self:
        if one > other:
            one, interface_one, other, interface_other = other, interface_other, one, interface_one
        return cls(one, other, interface_one, interface_other)

    @property
    def ends(self) -> tuple[tuple[EndpointId, str], tuple[EndpointId, str]]:
        return (self.a, self.interface_a), (self.b, self.interface_b)

    def __str__(self) -> str:
        return f"{self.a}/{self.interface_a}-{self.b}/{self.interface_b}"


@dataclass(frozen=True, slots=True)
class ReroutingPlan:
    """The routing table of every router. `unreachable` lists the (from, to) pairs of routers that are not connected by
    any path."""

    tables: Mapping[EndpointId, RouteTable]
    unreachable: tuple[tuple[EndpointId, EndpointId], ...]
    on_packet_side: tuple[tuple[EndpointId, EndpointId], ...]  # (from, to) pairs whose first hop is the packet side


def reroute(domain: RoutingDomain, links: Collection[RoutedLink]) -> ReroutingPlan:
    """Compute the routes of all routers over `links`. A router with several neighbours on shortest paths splits its
    packets in proportion to the capacity through each neighbour. This capacity is the number of circuits to the
    neighbour or the neighbour's own capacity to the destination, whichever is smaller. It is calculated as if the paths
    served no other router."""
    _check_links(domain, links)
    neighbours = _neighbours(domain, links)
    routes: dict[EndpointId, list[PacketRoute]] = {name: [] for name in domain.routers}
    unreachable: list[tuple[EndpointId, EndpointId]] = []
    on_packet_side: list[tuple[EndpointId, EndpointId]] = []
    for destination in sorted(domain.routers):
        distance = _distances(domain, neighbours, destination)
        shares = _shares(domain, neighbours, distance, destination)
        for name in sorted(domain.routers):
            if name == destination:
                continue
            if name not in shares:
                unreachable.append((name, destination))
                continue
            side = domain.routers[name].packet_side
            if side and any(interface == side.interface for _, interface in shares[name]):
                on_packet_side.append((name, destination))
            routes[name] += [PacketRoute.of(prefix, shares[name]) for prefix in domain.routers[destination].prefixes]
    tables = {name: route_table(routes[name]) for name in domain.routers}
    return ReroutingPlan(tables, tuple(unreachable), tuple(on_packet_side))


def fit(table: RouteTable, max_next_hops: int, max_weight: int) -> RouteTable:
    """Return the table closest to `table` that respects a router's limits on next hops and weights. If weights are
    scaled down, the rounding error of each weight is carried over to the next one. A neighbour whose share is split
    over two interfaces therefore keeps at least one of them."""
    return route_table(_fit_route(route, max_next_hops, max_weight) for route in table.values())


def changes(before: RouteTable, after: RouteTable) -> tuple[RouteChange, ...]:
    """Return the changes that turn `before` into `after`, ordered by prefix."""
    prefixes = sorted({*before, *after})
    return tuple(
        RouteChange(prefix, after.get(prefix)) for prefix in prefixes if before.get(prefix) != after.get(prefix)
    )


# Changes that may be made in any order or concurrently. The next stage waits until they are in place.
RouteStage = Mapping[EndpointId, tuple[RouteChange, ...]]


def update(
    domain: RoutingDomain,
    before: Mapping[EndpointId, RouteTable],
    after: Mapping[EndpointId, RouteTable],
    stuck: Collection[tuple[EndpointId, str]] = (),
) -> tuple[RouteStage, ...]:
    """Return stages of changes during which no packet loops, and no packet is lost that has a path both before and
    after. A packet in flight meets old routes, then new routes, and never returns to old ones.

    A route changes only after all routes that its packets meet later have changed. Packets that meet a changed route
    then follow changed routes to the destination. All other packets follow old routes until they meet a changed route.
    Routes that have no replacement are removed last. `before` must be free of loops. Tables missing from `before` are
    treated as empty. `stuck` lists the routes that cannot be changed, as (router, prefix). Routes that depend on these
    routes stay as they are.
    """
    stuck = frozenset(stuck)
    by_address, owners = domain.by_address(), domain.owners()

    @cache
    def level_of(name: EndpointId, prefix: str) -> int | None:
        """Return the number of changes that must be made one after another until this route is in place, including its
        own change if it has one. Return None if the route cannot change."""
        if owners.get(prefix) == name:
            return 0
        route = after.get(name, {}).get(prefix)
        is_changed = before.get(name, {}).get(prefix) != route
        if is_changed and (name, prefix) in stuck:
            return None
        level = 0
        for gateway in {hop.gateway for hop in route.next_hops} if route else ():
            if gateway not in by_address:
                raise ValueError(f"{name}: the gateway of {prefix} must be a router's address, got {gateway}")
            further = level_of(by_address[gateway], prefix)
            if further is None:
                return None
            level = max(level, further)
        return level + is_changed

    by_level: dict[int, dict[EndpointId, list[RouteChange]]] = defaultdict(lambda: defaultdict(list))
    last: dict[EndpointId, list[RouteChange]] = defaultdict(list)
    for name in sorted(after):
        for change in changes(before.get(name, {}), after[name]):
            level = level_of(name, change.prefix)
            if level is None or (name, change.prefix) in stuck:  # a router may have a route to its own prefix
                continue
            if change.route is None:
                last[name].append(change)
            else:
                by_level[level][name].append(change)
    ordered = [by_level[level] for level in sorted(by_level)] + ([last] if last else [])
    return tuple({name: tuple(some) for name, some in stage.items()} for stage in ordered)


# circuits[router][neighbour]: the router's interfaces that lead to the neighbour.
_Neighbours = Mapping[EndpointId, Mapping[EndpointId, list[str]]]


def _neighbours(domain: RoutingDomain, links: Iterable[RoutedLink]) -> _Neighbours:
    found: dict[EndpointId, dict[EndpointId, list[str]]] = {name: {} for name in domain.routers}
    for link in sorted(links):
        found[link.a].setdefault(link.b, []).append(link.interface_a)
        found[link.b].setdefault(link.a, []).append(link.interface_b)
    return found


def _distances(domain: RoutingDomain, neighbours: _Neighbours, destination: EndpointId) -> dict[EndpointId, int]:
    """Return the distance to the destination of every router that can reach it."""
    distance = {destination: 0}
    done: set[EndpointId] = set()
    reached: list[tuple[int, EndpointId]] = [(0, destination)]
    is_first_on_packet_side = True

    def reach(name: EndpointId, cost: int) -> None:
        if cost < distance.get(name, math.inf):
            distance[name] = cost
            heapq.heappush(reached, (cost, name))

    while reached:
        cost, name = heapq.heappop(reached)
        if name in done:
            continue
        done.add(name)
        for neighbour in neighbours[name]:
            reach(neighbour, cost + 1)
        if domain.routers[name].packet_side and is_first_on_packet_side:
            is_first_on_packet_side = False  # all others are one step further than the nearest
            for other, router in domain.routers.items():
                if router.packet_side:
                    reach(other, cost + domain.packet_cost)
    return distance


def _shares(
    domain: RoutingDomain, neighbours: _Neighbours, distance: Mapping[EndpointId, int], destination: EndpointId
) -> dict[EndpointId, dict[tuple[str, str], int]]:
    """Return, by router, the weight of each (gateway, interface), in proportion to the capacity of the paths that
    continue from there to the destination."""
    routers = domain.routers
    width: dict[EndpointId, int] = {}  # in circuits
    shares: dict[EndpointId, dict[tuple[str, str], int]] = {}
    least = min((distance[name] for name in distance if routers[name].packet_side), default=0)
    ends = [router.packet_side for name, router in routers.items() if distance.get(name) == least]
    exits = [end.address for end in ends if end]
    for name in sorted(distance, key=lambda one: (distance[one], one)):
        if name == destination:
            continue
        nearer = distance[name] - 1
        onward = {other: some for other, some in neighbours[name].items() if distance.get(other) == nearer}
        whole = math.lcm(*map(len, onward.values()))  # makes every share an integer
        mine: dict[tuple[str, str], int] = {}
        width[name] = 0
        for other, interfaces in onward.items():
            through = min(len(interfaces), width.get(other, len(interfaces)))
            width[name] += through
            for interface in interfaces:
                mine[routers[other].address, interface] = through * whole // len(interfaces)
        side = routers[name].packet_side
        if side and distance[name] == least + domain.packet_cost:
            width[name] += len(exits)
            mine |= {(address, side.interface): whole for address in exits}
        shares[name] = mine
    return shares


def _fit_route(route: PacketRoute, max_next_hops: int, max_weight: int) -> PacketRoute:
    heaviest = max(hop.weight for hop in route.next_hops)
    if len(route.next_hops) <= max_next_hops and heaviest <= max_weight:
        return route
    hops = sorted(sorted(route.next_hops, key=lambda hop: -hop.weight)[:max_next_hops])
    largest = max(hop.weight for hop in hops)
    if largest <= max_weight:
        return PacketRoute.of(route.prefix, {hop.way: hop.weight for hop in hops})
    fitted: dict[tuple[str, str], int] = {}
    total, given = 0, 0
    for hop in hops:
        total += hop.weight * max_weight
        weight = (2 * total + largest) // (2 * largest) - given  # the rounded total minus the weights assigned before
        given += weight
        if weight:
            fitted[hop.way] = weight
    return PacketRoute.of(route.prefix, fitted)


def _check_links(domain: RoutingDomain, links: Iterable[RoutedLink]) -> None:
    used: dict[tuple[EndpointId, str], RoutedLink] = {}
    for link in links:
        for end in link.ends:
            name, interface = end
            if name not in domain.routers:
                raise ValueError(f"{link}: {name} must be a router of the domain")
            side = domain.routers[name].packet_side
            if side and side.interface == interface:
                raise ValueError(f"{link}: must not use interface {interface}, the packet side of {name}")
            if used.setdefault(end, link) != link:
                raise ValueError(f"interface {interface} of {name} must be in one circuit, got {used[end]} and {link}")


@cache  # the same few values occur in very many routes
def _check_address(address: str) -> None:
    try:
        normal = str(IPv4Address(address))
    except ValueError as error:
        raise ValueError(f"gateway must be an IPv4 address, got {address!r}") from error
    if normal != address:
        raise ValueError(f"gateway must be written as {normal}, got {address!r}")


@cache  # the same few values occur in very many routes
def _check_prefix(prefix: str) -> None:
    try:
        normal = str(IPv4Network(prefix))
    except ValueError as error:
        raise ValueError(f"a prefix must be an IPv4 network such as 10.0.2.0/24, got {prefix!r}") from error
    if normal != prefix:
        raise ValueError(f"a prefix must be written as {normal}, got {prefix!r}")


@cache  # the same few values occur in very many routes
def _check_interface(interface: str) -> None:
    if not INTERFACE.fullmatch(interface):
        raise ValueError(f"an interface must match {INTERFACE.pattern}, got {interface!r}")


def _hops_text(hops: Iterable[NextHop]) -> str:
    return " ".join(map(str, hops))
