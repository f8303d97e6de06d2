"""Packets over circuits on a real kernel: ToRs are namespaces, circuits are veth pairs through a switch of bridges.

UDP packets are counted before, during and after a change of circuits. All traffic is inside the namespaces.
"""

import itertools
import socket
from collections.abc import Iterator, Mapping

import pytest
from namespaces import Lab, Ocs, Stream, laboratory, sent_packets, udp_socket

from orchestrrl.core.clock import WallClock
from orchestrrl.core.config.schema import ReroutingSettings
from orchestrrl.fabric.rerouting import NotDrained, Rerouting
from orchestrrl.fabric.route_drivers.driver import make_driver
from planner.fabric.model import EndpointId, OcsId, port_pair
from planner.fabric.route_plan import PacketSide, RoutedLink, RoutingDomain, TorRouter

OCS = OcsId("ocs")
PORTS = 3  # per ToR


def tor(number: int) -> EndpointId:
    return EndpointId(f"tor{number}")


def port(number: int, interface: int) -> int:
    """Return the switch port to which an interface of a ToR is fibred."""
    return (number - 1) * PORTS + interface


class Site:
    """ToRs 1, 2, ... with three interfaces each, fibred to one switch, and optionally joined by a packet network.
    `waits_s` are the waits for light and for far ends, which can be late on a busy machine."""

    def __init__(self, lab: Lab, tors: int, packet_side: bool = False, waits_s: float = 60.0) -> None:
        self.lab = lab
        self.ocs = Ocs(lab)
        self.namespace: dict[EndpointId, str] = {}
        fibres: dict[int, tuple[EndpointId, str]] = {}
        for n in range(1, tors + 1):
            namespace = self.namespace[tor(n)] = lab.add(f"tor{n}", f"192.0.2.{n}/32", f"10.0.{n}.1/32")
            for i in range(1, PORTS + 1):
                self.ocs.fibre(port(n, i), namespace, f"swp{i}")
                fibres[port(n, i)] = (tor(n), f"swp{i}")
        self.fibres: Mapping[OcsId, Mapping[int, tuple[EndpointId, str]]] = {OCS: fibres}
        if packet_side:
            self._packet_switch()
        sides = {n: PacketSide("eps", f"198.51.100.{n}") if packet_side else None for n in range(1, tors + 1)}
        routers = {tor(n): TorRouter(f"192.0.2.{n}", (f"10.0.{n}.0/24",), sides[n]) for n in range(1, tors + 1)}
        drivers = {
            name: make_driver(
                "iproute", name, {"prefix": ["ip", "netns", "exec", namespace], "command_timeout_s": 60.0}
            )
            for name, namespace in self.namespace.items()
        }
        settings = ReroutingSettings(link_up_s=waits_s, neighbour_s=waits_s)
        self.rerouting = Rerouting(drivers, RoutingDomain(routers), WallClock(), settings)

    def connect(self, *circuits: tuple[int, int]) -> None:
        for a, b in circuits:
            self.ocs.connect(a, b)

    def disconnect(self, *circuits: tuple[int, int]) -> None:
        for a, b in circuits:
            self.ocs.disconnect(a, b)

    def links(self, *circuits: tuple[int, int]) -> tuple[RoutedLink, ...]:
        ends = [(self.fibres[OCS][a], self.fibres[OCS][b]) for a, b in circuits]
        return tuple(sorted(RoutedLink.of(*one, *other) for one, other in ends))

    def _packet_switch(self) -> None:
        switch = self.lab.add("eps")
        self.lab.ip(switch, "link", "add", "br0", "type", "bridge")
        self.lab.ip(switch, "link", "set", "br0", "up")
        for n, namespace in enumerate(self.namespace.values(), start=1):
            self.lab.veth(namespace, "eps", switch, f"p{n}")
            self.lab.ip(switch, "link", "set", f"p{n}", "master", "br0")
            self.lab.ip(namespace, "addr", "add", f"198.51.100.{n}/24", "dev", "eps")


@pytest.fixture
def lab() -> Iterator[Lab]:
    with laboratory() as lab:
        yield lab


def stream(site: Site, source: int, sink: int) -> Stream:
    return Stream((site.namespace[tor(source)], f"10.0.{source}.1"), (site.namespace[tor(sink)], f"10.0.{sink}.1"))


# Circuits as pairs of switch ports: 1-2 twice and 2-3 once; then one 1-2 becomes 1-3.
TWICE_1_2 = ((port(1, 1), port(2, 1)), (port(1, 2), port(2, 2)))
ONCE_2_3 = (port(2, 3), port(3, 1))
THEN_1_3 = (port(1, 2), port(3, 2))


async def test_no_packet_is_lost_if_routes_are_drained_before_the_switch(lab: Lab) -> None:
    site = Site(lab, 3)
    before = (*TWICE_1_2, ONCE_2_3)
    site.connect(*before)
    rerouted = await site.rerouting.reroute(site.links(*before))
    assert rerouted.faults_text == ""
    async with stream(site, 1, 2) as near, stream(site, 1, 3) as far, stream(site, 3, 1) as back:
        await near.more(50)
        for _ in range(2):  # back and forth several times: neighbours resolved before are wrong after
            drained = await site.rerouting.drain(site.links(TWICE_1_2[1]))
            assert drained.unreachable == rerouted.unreachable
            idle = sent_packets(site.namespace[tor(1)])["swp2"]
            await near.more(50)
            assert (
                sent_packets(site.namespace[tor(1)])["swp2"] < idle + 5
            )  # the kernel's packets, such as neighbour discovery
            site.disconnect(TWICE_1_2[1])
            site.connect(THEN_1_3)
            rerouted = await site.rerouting.reroute(site.links(TWICE_1_2[0], ONCE_2_3, THEN_1_3))
            assert rerouted.faults_text == ""
            await near.more(50)
            assert sent_packets(site.namespace[tor(1)])["swp2"] >= idle + 50  # the path to 3 is now direct
            await site.rerouting.drain(site.links(THEN_1_3))
            site.disconnect(THEN_1_3)
            site.connect(TWICE_1_2[1])
            assert (await site.rerouting.reroute(site.links(*before))).faults_text == ""
            await near.more(50)
    for each in (near, far, back):
        assert each.sent > 400
        assert (each.lost, max(each.arrived.values())) == (0, 1)


async def test_without_draining_packets_are_lost(lab: Lab) -> None:
    """Control experiment of the test above: without draining, packets are lost."""
    site = Site(lab, 3)
    before = (*TWICE_1_2, ONCE_2_3)
    site.connect(*before)
    await site.rerouting.reroute(site.links(*before))
    async with stream(site, 1, 2) as near, stream(site, 2, 1) as back:
        await near.more(50)
        site.disconnect(*TWICE_1_2)
        await near.more(50)
    assert near.lost > 0
    assert back.lost > 0


async def test_flows_are_spread_by_the_number_of_circuits(lab: Lab) -> None:
    # From 1 to 3 over 2, which has one circuit to 3, and over 4, which has two: one third and two thirds.
    site = Site(lab, 4)
    circuits = (
        (port(1, 1), port(2, 1)),
        (port(2, 2), port(3, 1)),
        (port(1, 2), port(4, 1)),
        (port(1, 3), port(4, 2)),
        (port(4, 3), port(3, 2)),
    )
    site.connect(*circuits)
    assert (await site.rerouting.reroute(site.links(*circuits))).faults_text == ""
    # To 4 there are two circuits, and no packet uses 2. To 3, both paths finally have one circuit: half and half.
    for sink, expected in (
        (4, {"swp1": 0.0, "swp2": 0.5, "swp3": 0.5}),
        (3, {"swp1": 0.5, "swp2": 0.25, "swp3": 0.25}),
    ):
        flows = 2000
        before = sent_packets(site.namespace[tor(1)])
        for _ in range(flows):
            with udp_socket_of(site, 1) as source:
                source.sendto(b"x", (f"10.0.{sink}.1", 7000))
        after = sent_packets(site.namespace[tor(1)])
        shares = {name: (after[name] - before[name]) / flows for name in expected}
        assert shares == pytest.approx(expected, abs=0.05)


def udp_socket_of(site: Site, number: int) -> socket.socket:
    return udp_socket(site.namespace[tor(number)], f"10.0.{number}.1")


async def test_packets_of_a_failed_circuit_use_the_packet_network(lab: Lab) -> None:
    site = Site(lab, 2, packet_side=True)
    circuit = (port(1, 1), port(2, 1))
    site.connect(circuit)
    rerouted = await site.rerouting.reroute(site.links(circuit))
    assert rerouted.faults_text == ""
    assert rerouted.on_packet_side == ()
    async with stream(site, 1, 2) as near:
        await near.more(50)
        on_packet_side = sent_packets(site.namespace[tor(1)])["eps"]
        site.disconnect(circuit)
        site.rerouting._settings = ReroutingSettings(link_up_s=1.0)  # no wait is needed
        rerouted = await site.rerouting.reroute(site.links(circuit))  # the circuit is reported as up
        assert rerouted.faults_text
        assert tuple(rerouted.left_out) == site.links(circuit)
        assert "is down" in rerouted.faults_text
        assert rerouted.on_packet_side == ((tor(2), tor(1)), (tor(1), tor(2)))
        sent = near.sent
        await near.more(100)
        assert sent_packets(site.namespace[tor(1)])["eps"] >= on_packet_side + 100
    assert set(range(sent, near.sent)) <= set(near.arrived)  # all packets since then
    assert near.lost > 0  # but not packets sent before the failure was detected


async def test_light_from_a_wrong_router_is_not_routed_to(lab: Lab) -> None:
    """The switch joined other ports than recorded: the link is up, and the wrong router is connected."""
    site = Site(lab, 3, waits_s=2.0)  # do not wait for a router that is not connected
    site.connect((port(1, 1), port(3, 1)))
    rerouted = await site.rerouting.reroute(site.links((port(1, 1), port(2, 1))))
    assert rerouted.faults_text
    site.connect((port(2, 1), port(3, 2)))
    rerouted = await site.rerouting.reroute(site.links((port(1, 1), port(2, 1))))
    assert "gets no answer" in rerouted.faults_text
    assert rerouted.unreachable == tuple((a, b) for b, a in itertools.permutations(site.namespace, 2))


async def test_unreachable_router_keeps_its_circuits(lab: Lab) -> None:
    site = Site(lab, 3)
    circuits = (*TWICE_1_2, ONCE_2_3)
    site.connect(*circuits)
    await site.rerouting.reroute(site.links(*circuits))
    drivers = dict(site.rerouting._routers)
    drivers[tor(2)] = make_driver("iproute", tor(2), {"prefix": ["sh", "-c", "exit 255", "x"]})
    site.rerouting._routers = drivers
    with pytest.raises(NotDrained) as refusal:
        await site.rerouting.drain(site.links(TWICE_1_2[1]))
    assert set(refusal.value.routers) == {tor(2)}
