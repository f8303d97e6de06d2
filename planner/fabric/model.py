"""The basic types of the fabric: endpoints, circuits and cross-connects. Instances are immutable and validated.

A circuit is full duplex and connects two endpoints. In the aggregation layer of a PoD the endpoints are ToRs and
uplinks; in the core layer they are PoDs. A cross-connect (`PortPair`) carries a circuit: it connects two ports of one
switch.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NewType

EndpointId = NewType("EndpointId", str)  # a ToR, an uplink or a PoD
OcsId = NewType("OcsId", str)  # an optical circuit switch
Pair = tuple[EndpointId, EndpointId]  # two endpoints, the smaller id first
Port = tuple[OcsId, int]


def pair_of(one: EndpointId, other: EndpointId) -> Pair:
    """Return the two endpoints in the order of their ids. Raises ValueError if they are equal."""
    if one == other:
        raise ValueError(f"a circuit must connect two different endpoints, got {one!r} for both")
    return (one, other) if one < other else (other, one)


@dataclass(frozen=True, slots=True, order=True)
class PortPair:
    """One cross-connect: two ports of a switch with light in both directions. The smaller port comes first."""

    switch: OcsId
    port_a: int
    port_b: int

    def __post_init__(self) -> None:
        if not 0 <= self.port_a < self.port_b:
            raise ValueError(f"ports must be >= 0 and in increasing order, got {self.port_a} and {self.port_b}")

    @property
    def ports(self) -> tuple[int, int]:
        return self.port_a, self.port_b

    @property
    def sides(self) -> tuple[Port, Port]:
        """The two ports, each as a (switch, port) pair."""
        return (self.switch, self.port_a), (self.switch, self.port_b)

    def __str__(self) -> str:
        return f"{self.switch}:{self.port_a}-{self.port_b}"


def port_pair(switch: OcsId, one: int, other: int) -> PortPair:
    """Return a PortPair from two ports in any order."""
    return PortPair(switch, min(one, other), max(one, other))


def shared_ports(cross_connects: Iterable[PortPair]) -> dict[Port, int]:
    """Return the ports that several of these cross-connects use, in ascending order, each with the number of uses."""
    uses = Counter(port for each in cross_connects for port in each.sides)
    return {port: count for port, count in sorted(uses.items()) if count > 1}


def partners(cross_connects: Iterable[PortPair]) -> Mapping[Port, Port]:
    """Return a map from each used port to the port to which it is connected."""
    return {one: other for each in cross_connects for one, other in (each.sides, each.sides[::-1])}


@dataclass(frozen=True, slots=True)
class Cabling:
    """The endpoint that is cabled to each port of each switch. An endpoint's fibres may end on several switches."""

    ports: Mapping[OcsId, Mapping[int, EndpointId]]

    @classmethod
    def of(cls, switches: Mapping[OcsId, Mapping[EndpointId, Iterable[int]]]) -> "Cabling":
        """Build a cabling from the ports of each endpoint on each switch. Raises ValueError if a port has two
        endpoints."""
        ports: dict[OcsId, dict[int, EndpointId]] = {}
        for switch, endpoints in switches.items():
            owner = ports.setdefault(switch, {})
            for endpoint, numbers in endpoints.items():
                for port in numbers:
                    if owner.setdefault(port, endpoint) != endpoint:
                        raise ValueError(
                            f"port {port} of {switch} must have one endpoint, got {owner[port]} and {endpoint}"
                        )
        return cls(ports)

    def endpoint(self, switch: OcsId, port: int) -> EndpointId | None:
        return self.ports.get(switch, {}).get(port)

    def ends(self, cross_connect: PortPair) -> Pair | None:
        """Return the two endpoints of a cross-connect; None if one of its ports has no fibre, or if both ports belong
        to one endpoint."""
        one = self.endpoint(cross_connect.switch, cross_connect.port_a)
        other = self.endpoint(cross_connect.switch, cross_connect.port_b)
        return None if one is None or other is None or one == other else pair_of(one, other)
