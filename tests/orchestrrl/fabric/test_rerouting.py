"""Rerouting on virtual routers: failures are named, dependent changes wait, and packets are traced at each point."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.config.schema import ReroutingSettings
from orchestrrl.core.errors import Permanent
from orchestrrl.fabric.rerouting import NotDrained, Rerouting
from orchestrrl.fabric.route_drivers.virtual import RouterFault, RouterFaultKind, VirtualRouter, VirtualRouterDriver
from planner.fabric.model import EndpointId
from planner.fabric.route_plan import RoutedLink, RoutingDomain, TorRouter

SETTINGS = ReroutingSettings(link_up_s=0.1, neighbour_s=0.1)


def tor(number: int) -> EndpointId:
    return EndpointId(f"tor{number}")


def link(a: int, interface_a: int, b: int, interface_b: int) -> RoutedLink:
    return RoutedLink.of(tor(a), f"swp{interface_a}", tor(b), f"swp{interface_b}")


@pytest.fixture
async def clock() -> AsyncIterator[VirtualClock]:
    """Return virtual time that advances as fast as the event loop runs."""
    clock = VirtualClock(1000.0)

    async def run() -> None:
        while True:
            await clock.advance(0.001)

    running = asyncio.create_task(run())
    yield clock
    running.cancel()


class Harness:
    """Virtual ToRs, and the circuits between them."""

    def __init__(self, clock: VirtualClock, count: int, **options: Any) -> None:
        self.clock = clock
        self.drivers = {
            tor(n): VirtualRouterDriver(tor(n), clock=clock, address=f"192.0.2.{n}", **options)
            for n in range(1, count + 1)
        }
        routers = {tor(n): TorRouter(f"192.0.2.{n}", (f"10.0.{n}.0/24",)) for n in range(1, count + 1)}
        self.domain = RoutingDomain(routers)
        self.rerouting = self.restarted()

    def restarted(self) -> Rerouting:
        return Rerouting(self.drivers, self.domain, self.clock, SETTINGS)

    def device(self, number: int) -> VirtualRouter:
        return self.drivers[tor(number)].device

    def connect(self, *links: RoutedLink) -> None:
        for one in links:
            self.drivers[one.a].device.join(one.interface_a, self.drivers[one.b].device, one.interface_b)

    def disconnect(self, *links: RoutedLink) -> None:
        for one in links:
            self.drivers[one.a].device.part(one.interface_a)

    def arrives(self, start: int, to: int) -> bool:
        """Return whether a packet arrives for every choice of next hops."""
        by_address = {driver.device.address: driver.device for driver in self.drivers.values()}
        on_way = [(self.device(start), frozenset[str]())]
        while on_way:
            at, seen = on_way.pop()
            if at.address == f"192.0.2.{to}":
                continue
            hops = at.ways(f"10.0.{to}.9")
            if not hops or at.address in seen or any(at.answering(hop) is None for hop in hops):
                return False
            on_way += [(by_address[hop.gateway], seen | {at.address}) for hop in hops]
        return True


RING = (link(1, 1, 2, 1), link(2, 2, 3, 1), link(3, 2, 1, 2))


async def test_drain_change_and_reroute(clock: VirtualClock) -> None:
    harness = Harness(clock, 3)
    harness.connect(*RING)
    assert (await harness.rerouting.reroute(RING)).faults_text == ""
    pairs = [(a, b) for a in (1, 2, 3) for b in (1, 2, 3) if a != b]
    drained = await harness.rerouting.drain(RING[:1])
    assert (drained.unreachable, drained.failed) == ((), {})
    assert drained.links == tuple(sorted(RING[1:]))
    harness.disconnect(RING[0])
    assert all(harness.arrives(a, b) for a, b in pairs)
    again = link(1, 1, 3, 3)
    harness.connect(again)
    rerouted = await harness.rerouting.reroute([*RING[1:], again])
    assert rerouted.faults_text == ""
    assert [hop.interface for hop in harness.device(1).ways("10.0.3.1")] == ["swp1", "swp2"]
    assert all(harness.arrives(a, b) for a, b in pairs)
    sends = [driver.wire.sends for driver in harness.drivers.values()]
    assert await harness.rerouting.reroute([*RING[1:], again]) == replace(rerouted, at_s=clock.now_s())
    assert [driver.wire.sends for driver in harness.drivers.values()] == sends


async def test_pair_that_loses_its_last_path_is_reported(clock: VirtualClock) -> None:
    harness = Harness(clock, 2)
    harness.connect(RING[0])
    await harness.rerouting.reroute(RING[:1])
    drained = await harness.rerouting.drain(RING[:1])
    assert sorted(drained.unreachable) == [(tor(1), tor(2)), (tor(2), tor(1))]
    assert harness.device(1).routes == {}


async def test_drain_is_refused_before_first_reroute(clock: VirtualClock) -> None:
    harness = Harness(clock, 3)
    harness.connect(*RING)
    with pytest.raises(Permanent, match="`reroute` first"):
        await harness.rerouting.drain(RING[:1])
    await harness.rerouting.reroute(RING)
    restarted, sends = harness.restarted(), [driver.wire.sends for driver in harness.drivers.values()]
    await restarted.reroute(RING)
    assert [driver.wire.sends for driver in harness.drivers.values()] == sends  # found in the earlier state
    await restarted.drain(RING[:1])
    assert harness.device(1).ways("10.0.2.1")[0].interface == "swp2"


@pytest.mark.parametrize("fault", [RouterFaultKind.UNREACHABLE, RouterFaultKind.DROP_COMMAND])
async def test_router_that_cannot_be_drained_stops_commit(clock: VirtualClock, fault: RouterFaultKind) -> None:
    harness = Harness(clock, 3)
    harness.connect(*RING)
    await harness.rerouting.reroute(RING)
    harness.device(2).inject(RouterFault(fault))
    with pytest.raises(NotDrained, match="tor2") as refusal:
        await harness.rerouting.drain(RING[:1])
    # Without tor2's confirmation no router may rely on it; tor1 would send it the packets that it sends back.
    assert tor(2) in refusal.value.routers
    assert harness.rerouting.routed is not None
    assert harness.rerouting.routed.links == tuple(sorted(RING))
    assert harness.rerouting.routed.failed == refusal.value.routers
    assert all(harness.arrives(a, b) for a in (1, 2, 3) for b in (1, 2, 3) if a != b)
    harness.device(2).inject(RouterFault(RouterFaultKind.REACHABLE))
    assert (await harness.rerouting.reroute(RING)).faults_text == ""
    await harness.rerouting.drain(RING[:1])


async def test_router_with_lost_answer_is_judged_by_its_state(clock: VirtualClock) -> None:
    harness = Harness(clock, 3)
    harness.connect(*RING)
    await harness.rerouting.reroute(RING)
    harness.device(2).inject(RouterFault(RouterFaultKind.DROP_CONNECTION))
    assert (await harness.rerouting.drain(RING[:1])).failed == {}


async def test_irrelevant_router_does_not_stop_drain(clock: VirtualClock) -> None:
    harness = Harness(clock, 4)
    links = (*RING, link(3, 3, 4, 1))
    harness.connect(*links)
    await harness.rerouting.reroute(links)
    harness.device(4).inject(RouterFault(RouterFaultKind.UNREACHABLE))
    drained = await harness.rerouting.drain(RING[:1])
    assert set(drained.failed) == {tor(4)}


async def test_routers_behind_failed_one_keep_their_routes(clock: VirtualClock) -> None:
    # The new chain is 1-2-3-4. Until 2 has its route, 1 must not send it packets for 3.
    harness = Harness(clock, 4)
    chain = (link(1, 1, 2, 1), link(2, 2, 3, 1), link(3, 2, 4, 1))
    harness.connect(*chain)
    harness.device(2).inject(RouterFault(RouterFaultKind.DROP_COMMAND))
    rerouted = await harness.rerouting.reroute(chain)
    assert set(rerouted.failed) == {tor(2)}
    assert harness.device(1).ways("10.0.3.1") == ()
    assert harness.arrives(3, 4)
    assert (await harness.rerouting.reroute(chain)).faults_text == ""
    assert all(harness.arrives(a, b) for a in (1, 2, 3, 4) for b in (1, 2, 3, 4) if a != b)


async def test_circuits_without_light_or_with_wrong_router_are_left_out(clock: VirtualClock) -> None:
    harness = Harness(clock, 3)
    harness.connect(RING[1], link(3, 2, 2, 3))  # the second is actually 3-1
    rerouted = await harness.rerouting.reroute(RING)
    assert set(rerouted.left_out) == {RING[0], RING[2]}
    assert rerouted.links == (RING[1],)
    assert harness.arrives(2, 3)


async def test_weights_fit_router_limits(clock: VirtualClock) -> None:
    harness = Harness(clock, 4, max_weight=1)
    links = (link(1, 1, 2, 1), link(1, 2, 2, 2), link(1, 3, 3, 1), link(1, 4, 3, 2), link(2, 3, 4, 1), link(3, 3, 4, 2))
    more = (*links, link(3, 4, 4, 3))
    harness.connect(*more)
    assert (await harness.rerouting.reroute(more)).faults_text == ""
    assert [hop.interface for hop in harness.device(1).ways("10.0.4.1")] == ["swp1", "swp3", "swp4"]


async def test_impossible_links_are_rejected_before_any_request(clock: VirtualClock) -> None:
    harness = Harness(clock, 2)
    with pytest.raises(ValueError, match="must be a router of the domain"):
        await harness.rerouting.reroute([link(1, 1, 9, 1)])
    with pytest.raises(ValueError, match="routers must be those of the domain"):
        Rerouting({}, harness.domain, clock, SETTINGS)
