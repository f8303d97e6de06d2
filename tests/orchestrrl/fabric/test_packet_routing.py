"""Packets follow circuits, in virtual time: the coordinator, virtual switches, and virtual ToRs that light joins."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from fabric_house import ACROSS_RAILS, GEN, OVER_CORE, SITE, SYNC
from routed_house import LOOK_AGAIN_S, RoutedHouse, inline

from ocs_drivers.model import CrossConnect
from orchestrrl.fabric.periods import PeriodState
from orchestrrl.fabric.route_drivers.virtual import RouterFault, RouterFaultKind
from orchestrrl.fabric.site import read_site
from planner.fabric.model import EndpointId, OcsId, PortPair


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
            # What rerouting takes is part of what a window has to cover.
            assert all(took.route_s > 0 for commit in report.commits for took in commit.took)
        assert lengths == {1, 3}
        assert house.light.dark == []


async def test_what_cannot_be_drained_stays(tmp_path: Path) -> None:
    async with routed_house(tmp_path) as house:
        await house.in_window(OVER_CORE)
        before, routed, sent = house.light.up(), house.routed, len(house.sent)
        deaf = house.light.routers[EndpointId("train0/r0")].device
        deaf.inject(RouterFault(RouterFaultKind.UNREACHABLE))
        report = await house.in_window(ACROSS_RAILS)
        assert report.state is PeriodState.KEPT
        assert "train0/r0" in report.detail
        assert (house.light.up(), len(house.sent)) == (before, sent)
        deaf.inject(RouterFault(RouterFaultKind.REACHABLE))
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
        tending = asyncio.create_task(again.maintain())
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
            lambda: house.follower.reroute((house.light.up() - set(going)) | set(coming)),
        )
        house.tending.cancel()
        for step in change[:steps]:
            await house.during(step())
        again = house.following()
        tending = asyncio.create_task(again.maintain())
        await house.pass_time(3 * LOOK_AGAIN_S)
        tending.cancel()
        assert again.routed is not None
        assert frozenset(again.routed.links) == house.light.links()
        assert (again.routed.amiss, house.light.dark) == ("", [])
