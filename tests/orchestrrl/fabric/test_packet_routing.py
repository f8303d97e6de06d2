"""Packets follow circuits in virtual time: the coordinator, virtual switches, and virtual ToRs connected by light."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from fabric_harness import ACROSS_RAILS, GEN, OVER_CORE, SITE, SYNC
from routed_harness import POLL_AGAIN_S, RoutedHarness, inline

from ocs_drivers.model import CrossConnect
from orchestrrl.fabric.periods import PeriodState
from orchestrrl.fabric.route_drivers.virtual import RouterFault, RouterFaultKind
from orchestrrl.fabric.site import read_site
from planner.fabric.model import EndpointId, OcsId, PortPair


@asynccontextmanager
async def routed_harness(folder: Path) -> AsyncIterator[RoutedHarness]:
    made = RoutedHarness(folder, read_site(SITE))
    made.start()
    made.agent("host", range(16))
    try:
        yield made
    finally:
        await made.stop()


async def test_packets_leave_circuits_before_removal_and_use_new_ones(tmp_path: Path) -> None:
    async with routed_harness(tmp_path) as harness:
        lengths = set()
        for intent, boundary in ((OVER_CORE, False), (GEN, True), (ACROSS_RAILS, False), (SYNC, True)):
            report = await (harness.at_boundary(intent) if boundary else harness.in_window(intent))
            assert (report.state, report.detail) == (PeriodState.COMMITTED, "")
            assert harness.routed == harness.light.links()
            assert harness.follower.routed is not None
            assert harness.follower.routed.faults_text == ""
            lengths |= {len(lit.over) for lit in harness.light.joined.values()}
            # The time of rerouting is part of the window's need.
            assert all(took.route_s > 0 for commit in report.commits for took in commit.switch_times)
        assert lengths == {1, 3}
        assert harness.light.dark == []


async def test_circuits_that_cannot_be_drained_stay(tmp_path: Path) -> None:
    async with routed_harness(tmp_path) as harness:
        await harness.in_window(OVER_CORE)
        before, routed, sent = harness.light.up(), harness.routed, len(harness.sent)
        deaf = harness.light.routers[EndpointId("train0/r0")].device
        deaf.inject(RouterFault(RouterFaultKind.UNREACHABLE))
        report = await harness.in_window(ACROSS_RAILS)
        assert report.state is PeriodState.KEPT
        assert "train0/r0" in report.detail
        assert (harness.light.up(), len(harness.sent)) == (before, sent)
        deaf.inject(RouterFault(RouterFaultKind.REACHABLE))
        await harness.pass_time(3 * POLL_AGAIN_S)
        assert harness.routed == routed == harness.light.links()
        assert harness.follower.routed is not None
        assert harness.follower.routed.faults_text == ""
        assert harness.light.dark == []


async def test_links_without_light_are_left_out_until_it_returns(tmp_path: Path) -> None:
    async with routed_harness(tmp_path) as harness:
        await harness.in_window(OVER_CORE)
        whole = harness.routed
        lost = min(whole)
        harness.light.cut.add(lost)
        await harness.pass_time(2 * POLL_AGAIN_S)
        harness.light.dark.clear()
        assert harness.routed == whole - {lost}
        assert harness.follower.routed is not None
        assert harness.follower.routed.faults_text.startswith(f"not used: {lost} (")
        harness.light.cut.clear()
        await harness.pass_time(3 * POLL_AGAIN_S)
        assert harness.routed == whole
        assert (harness.follower.routed.faults_text, harness.light.dark) == ("", [])


async def test_circuit_removed_by_others_is_not_routed_over(tmp_path: Path) -> None:
    async with routed_harness(tmp_path) as harness:
        await harness.in_window(OVER_CORE)
        assert any(len(lit.over) == 3 for lit in harness.light.joined.values())
        harness.switches[OcsId("core0")].model.remove(
            [each.cross_connect for each in harness.switches[OcsId("core0")].model.circuits()]
        )
        await harness.pass_time(2 * POLL_AGAIN_S)
        assert harness.routed == harness.light.links()
        assert all(len(lit.over) == 1 for lit in harness.light.joined.values())


async def test_silent_switch_keeps_its_packets_over_restart(tmp_path: Path) -> None:
    async with routed_harness(tmp_path) as harness:
        await harness.in_window(OVER_CORE)
        whole = harness.routed
        await harness.pass_time(2 * POLL_AGAIN_S)  # journalled
        again = harness.following(unread=frozenset({OcsId("core0")}))
        tending = asyncio.create_task(again.maintain())
        await harness.pass_time(2 * POLL_AGAIN_S)
        tending.cancel()
        assert again.routed is not None
        assert frozenset(again.routed.links) == whole
        assert harness.light.dark == []


@pytest.mark.parametrize("steps", range(5))
async def test_daemon_death_during_change_leaves_no_packet_in_the_dark(tmp_path: Path, steps: int) -> None:
    async with routed_harness(tmp_path) as harness:
        await harness.in_window(OVER_CORE)
        core = harness.switches[OcsId("core0")].model
        one, other = sorted(pair for pair in harness.light.up() if pair.switch == "core0")[:2]
        going = [one, other]
        coming = [PortPair(one.switch, one.port_a, other.port_b), PortPair(one.switch, other.port_a, one.port_b)]
        change = (
            lambda: harness.follower.drain(going),
            lambda: inline(lambda: core.remove([CrossConnect(*pair.ports) for pair in going])),
            lambda: inline(lambda: core.add([CrossConnect(*pair.ports) for pair in coming])),
            lambda: harness.follower.reroute((harness.light.up() - set(going)) | set(coming)),
        )
        harness.tending.cancel()
        for step in change[:steps]:
            await harness.during(step())
        again = harness.following()
        tending = asyncio.create_task(again.maintain())
        await harness.pass_time(3 * POLL_AGAIN_S)
        tending.cancel()
        assert again.routed is not None
        assert frozenset(again.routed.links) == harness.light.links()
        assert (again.routed.faults_text, harness.light.dark) == ("", [])
