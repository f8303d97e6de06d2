"""Packets follow circuits, in virtual time: the coordinator, virtual switches, and virtual ToRs that light joins."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fabric_house import ACROSS_RAILS, GEN, OVER_CORE, SITE, SYNC, House

from ocs_drivers.model import CircuitState, CrossConnect
from orchestrrl.execute.fabric_glass import Glance
from orchestrrl.execute.fabric_routing import FabricRouting
from orchestrrl.execute.steering import Limits, Steering
from orchestrrl.journal import Journal
from orchestrrl.periods import PeriodState
from orchestrrl.route_drivers.virtual import Fault, FaultKind, VirtualRouterDriver
from orchestrrl.site import read_site
from planner.fabric.light import Lit, fibres_of, interfaces_at, links_up
from planner.fabric.model import EndpointId, OcsId, PortPair
from planner.fabric.steering import Domain, Link, Router

STEP_S = 0.001
LOOK_AGAIN_S = 1.0


async def inline(work: Any) -> Any:
    return work()


class Light:
    """Joins the interfaces of virtual ToRs as the mirrors of virtual switches have it, and looks for packets that are
    sent into the dark."""

    def __init__(self, house: House) -> None:
        self.house = house
        tors = [tor.id for tor in house.site.tors]
        names = {tor: [f"swp{k}" for k, _ in enumerate(fibres_of(house.site, tor), start=1)] for tor in tors}
        self.interfaces = interfaces_at(house.site, names)
        self.routers = {
            tor: VirtualRouterDriver(tor, clock=house.clock, address=f"192.0.2.{n}", interfaces=names[tor])
            for n, tor in enumerate(tors, start=1)
        }
        self.domain = Domain({tor: Router(f"192.0.2.{n}", (f"10.0.{n}.0/24",)) for n, tor in enumerate(tors, start=1)})
        self.dark: list[str] = []  # what was sent where nobody is
        self.joined: dict[Link, Lit] = {}
        self.cut: set[Link] = set()  # fibres that somebody has pulled
        self._lit: tuple[frozenset[PortPair], tuple[Lit, ...]] = (frozenset(), ())

    def up(self) -> frozenset[PortPair]:
        return frozenset(
            PortPair(id, *sorted((each.cross_connect.ingress_port, each.cross_connect.egress_port)))
            for id, switch in self.house.switches.items()
            for each in switch.glass.circuits()
            if each.state is CircuitState.TUNED
        )

    def lit(self) -> tuple[Lit, ...]:
        up = self.up()
        if self._lit[0] != up:
            self._lit = (up, links_up(self.house.site, up, self.interfaces))
        return self._lit[1]

    def links(self) -> frozenset[Link]:
        return frozenset(each.link for each in self.lit())

    def shine(self) -> None:
        lit = {each.link: each for each in self.lit() if each.link not in self.cut}
        for link in [*self.joined]:
            if link not in lit:
                self.routers[link.a].device.part(link.interface_a)
                del self.joined[link]
        for link in lit:
            if link not in self.joined:
                self.routers[link.a].device.join(link.interface_a, self.routers[link.b].device, link.interface_b)
                self.joined[link] = lit[link]
        for tor, driver in self.routers.items():
            for route in driver.device.routes.values():
                self.dark += [f"{tor}: {hop}" for hop in route.next_hops if driver.device.answering(hop) is None]

    async def run(self) -> None:
        while True:
            self.shine()
            await self.house.clock.sleep(STEP_S)


class RoutedHouse(House):
    """Whose coordinator has packets follow circuits."""

    def start(self) -> None:
        self.light = Light(self)
        self.routes = Journal(self._folder / "routes.sqlite", self.clock.now_s())
        self.routing = self.follower = self.following()
        super().start()
        self.tending = asyncio.create_task(self.follower.tend())
        self._tasks += [asyncio.create_task(self.light.run()), self.tending]

    def following(self, unread: frozenset[OcsId] = frozenset()) -> FabricRouting:
        async def look() -> Glance:
            glance = await self.glass.look()
            kept = frozenset(pair for pair in glance.cross_connects if pair.switch not in unread)
            return replace(glance, cross_connects=kept, unread=dict.fromkeys(unread, "no route to host"))

        limits = Limits(link_up_s=0.2, neighbour_s=0.1)
        steering = Steering(self.light.routers, self.light.domain, self.clock, limits)
        return FabricRouting(
            self.site,
            self.light.interfaces,
            steering,
            look,
            self.routes,
            self.clock,
            look_again_s=LOOK_AGAIN_S,
            offload=inline,
        )

    async def during(self, work: Awaitable[Any]) -> None:
        """It needs time that passes."""
        under_way = asyncio.ensure_future(work)
        while not under_way.done():
            await self.pass_time(0.005)
        await under_way

    async def stop(self) -> None:
        await super().stop()
        self.routes.close()

    @property
    def routed(self) -> frozenset[Link]:
        assert self.follower.routed is not None
        return frozenset(self.follower.routed.links)


@asynccontextmanager
async def routed_house(folder: Path) -> AsyncIterator[RoutedHouse]:
    made = RoutedHouse(folder, read_site(SITE))
    made.start()
    made.agent("host", range(16))
    try:
        yield made
    finally:
        await made.stop()


async def test_packets_are_off_circuits_before_they_go_and_on_them_once_they_are_there(tmp_path: Path) -> None:
    async with routed_house(tmp_path) as house:
        lengths = set()
        for intent, boundary in ((OVER_CORE, False), (GEN, True), (ACROSS_RAILS, False), (SYNC, True)):
            report = await (house.at_boundary(intent) if boundary else house.in_window(intent))
            assert (report.state, report.detail) == (PeriodState.COMMITTED, "")
            assert house.routed == house.light.links()
            assert house.follower.routed is not None
            assert house.follower.routed.amiss == ""
            lengths |= {len(lit.over) for lit in house.light.joined.values()}
            # What steering takes is part of what a window has to cover.
            assert all(took.route_s > 0 for commit in report.commits for took in commit.took)
        assert lengths == {1, 3}
        assert house.light.dark == []


async def test_what_cannot_be_drained_stays(tmp_path: Path) -> None:
    async with routed_house(tmp_path) as house:
        await house.in_window(OVER_CORE)
        before, routed, sent = house.light.up(), house.routed, len(house.sent)
        deaf = house.light.routers[EndpointId("train0/r0")].device
        deaf.inject(Fault(FaultKind.UNREACHABLE))
        report = await house.in_window(ACROSS_RAILS)
        assert report.state is PeriodState.KEPT
        assert "train0/r0" in report.detail
        assert (house.light.up(), len(house.sent)) == (before, sent)
        deaf.inject(Fault(FaultKind.REACHABLE))
        await house.pass_time(3 * LOOK_AGAIN_S)
        assert house.routed == routed == house.light.links()
        assert house.follower.routed is not None
        assert house.follower.routed.amiss == ""
        assert house.light.dark == []


async def test_links_that_lose_their_light_are_left_out_until_it_is_back(tmp_path: Path) -> None:
    async with routed_house(tmp_path) as house:
        await house.in_window(OVER_CORE)
        whole = house.routed
        lost = min(whole)
        house.light.cut.add(lost)
        await house.pass_time(2 * LOOK_AGAIN_S)
        house.light.dark.clear()
        assert house.routed == whole - {lost}
        assert house.follower.routed is not None
        assert house.follower.routed.amiss.startswith(f"not used: {lost} (")
        house.light.cut.clear()
        await house.pass_time(3 * LOOK_AGAIN_S)
        assert house.routed == whole
        assert (house.follower.routed.amiss, house.light.dark) == ("", [])


async def test_what_somebody_else_takes_down_is_not_routed_over(tmp_path: Path) -> None:
    async with routed_house(tmp_path) as house:
        await house.in_window(OVER_CORE)
        assert any(len(lit.over) == 3 for lit in house.light.joined.values())
        house.switches[OcsId("core0")].glass.remove(
            [each.cross_connect for each in house.switches[OcsId("core0")].glass.circuits()]
        )
        await house.pass_time(2 * LOOK_AGAIN_S)
        assert house.routed == house.light.links()
        assert all(len(lit.over) == 1 for lit in house.light.joined.values())


async def test_a_switch_that_does_not_answer_keeps_its_packets_over_a_restart(tmp_path: Path) -> None:
    async with routed_house(tmp_path) as house:
        await house.in_window(OVER_CORE)
        whole = house.routed
        await house.pass_time(2 * LOOK_AGAIN_S)  # it is written down
        again = house.following(unread=frozenset({OcsId("core0")}))
        tending = asyncio.create_task(again.tend())
        await house.pass_time(2 * LOOK_AGAIN_S)
        tending.cancel()
        assert again.routed is not None
        assert frozenset(again.routed.links) == whole
        assert house.light.dark == []


@pytest.mark.parametrize("steps", range(5))
async def test_a_daemon_that_died_at_any_point_of_a_change_leaves_no_packet_in_the_dark(
    tmp_path: Path, steps: int
) -> None:
    async with routed_house(tmp_path) as house:
        await house.in_window(OVER_CORE)
        core = house.switches[OcsId("core0")].glass
        one, other = sorted(pair for pair in house.light.up() if pair.switch == "core0")[:2]
        going = [one, other]
        coming = [PortPair(one.switch, one.port_a, other.port_b), PortPair(one.switch, other.port_a, one.port_b)]
        change = (
            lambda: house.follower.drain(going),
            lambda: inline(lambda: core.remove([CrossConnect(*pair.ports) for pair in going])),
            lambda: inline(lambda: core.add([CrossConnect(*pair.ports) for pair in coming])),
            lambda: house.follower.steer((house.light.up() - set(going)) | set(coming)),
        )
        house.tending.cancel()
        for step in change[:steps]:
            await house.during(step())
        again = house.following()
        tending = asyncio.create_task(again.tend())
        await house.pass_time(3 * LOOK_AGAIN_S)
        tending.cancel()
        assert again.routed is not None
        assert frozenset(again.routed.links) == house.light.links()
        assert (again.routed.amiss, house.light.dark) == ("", [])
