"""Interactions between parts of the fabric: callers that disconnect, outdated reports, busy switches."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fabric_harness import ACROSS_RAILS, OVER_CORE, SYNC, Harness, harness, train

from orchestrrl.core.errors import ProblemFaults
from orchestrrl.core.journal.store import EntryKind
from orchestrrl.daemon.wiring import FabricParts
from orchestrrl.fabric.intents import intent_to_json
from orchestrrl.fabric.packet_routing import FabricRouting
from orchestrrl.fabric.periods import PeriodState
from orchestrrl.fabric.rerouting import inline
from orchestrrl.fabric.shared_pods import neighbours
from orchestrrl.rpc.fabric_service import FabricService
from orchestrrl.rpc.pb import fabric_pb2 as pb
from planner.fabric.model import PortPair
from planner.fabric.transition import TransitionStage
from planner.fabric.windows import Window
from planner.model import Hold


class Called:
    """A call's context with the one method that is used."""

    async def send_initial_metadata(self, metadata: object) -> None:
        pass


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Harness]:
    async with harness(tmp_path, within_s=2.0, boundary_within_s=5.0, max_moves_per_stage=2) as made:
        yield made


def service(site: Harness) -> FabricService:
    return FabricService(FabricParts(site.coordinator), site.hub, site.clock)


def announced(site: Harness, *, boundary: bool) -> AsyncIterator[pb.PeriodReport]:
    request = pb.AnnouncePeriodRequest(period="sync", intent_json=intent_to_json(SYNC), boundary=boundary)
    return service(site).AnnouncePeriod(request, cast(Any, Called()))


async def test_boundary_ends_with_its_caller(site: Harness) -> None:
    """Ranks may send again once the caller is gone, so no more changes begin."""
    async with aclosing(cast(Any, announced(site, boundary=True))) as reports:
        assert (await anext(reports)).state == PeriodState.ANNOUNCED
        while not site.sent:
            await site.pass_time(0.001)
    await site.pass_time(3.0)
    (report,) = site.coordinator.reports(8)
    assert (report.state, report.code, report.stages_done) == (PeriodState.KEPT, "withdrawn", 1)
    assert report.stages > 1
    assert len({sent.at_s for sent in site.sent}) == 1


async def test_follower_receives_all_reports(site: Harness) -> None:
    states = []

    async def listen() -> None:
        async for report in announced(site, boundary=True):
            states.append(report.state)

    listening = asyncio.ensure_future(listen())
    while not listening.done():
        await site.pass_time(0.01)
    assert states[-1] == PeriodState.COMMITTED


async def test_window_covers_currently_traced_ranks(site: Harness) -> None:
    """Reports from before a rank joined do not include it."""
    agent = site.agent("n0", range(16))
    await site.pass_time(0.2)
    watch = site.hub.watch({"": frozenset(range(8))}, 0.01)
    await site.pass_time(0.0)
    agent.quiet(5.0, since_s=0.1)
    assert isinstance(watch.window(), Window)
    assert agent.stream is not None
    agent.stream.traces({"": frozenset(range(16)), "other": frozenset({0})})
    assert isinstance(watch.window(), Window)
    agent.stream.traces({"": frozenset(range(17))})
    window = watch.window()
    assert isinstance(window, Hold)
    assert window.code == "host_silent"
    watch.close()


async def test_busy_switch_is_not_changed_after_the_window(tmp_path: Path) -> None:
    async with harness(tmp_path) as site:
        agent = site.agent("n0", range(16))
        await site.pass_time(0.2)
        agent.busy()
        period = site.coordinator.expect(OVER_CORE)
        await site.pass_time(0.3)
        assert period.report.state is PeriodState.WAITING
        core = next(switch.id for switch in site.site.switches if switch.pod is None)
        async with site.circuits._turns[core]:
            agent.quiet(0.2, since_s=0.01)
            until_s = site.clock.now_s() + 0.2
            await site.pass_time(0.19)
            agent.busy()
            await site.pass_time(0.11)
        await site.pass_time(0.1)
        assert site.sent
        assert core not in {sent.switch for sent in site.sent}
        late = [body for body in site.written(EntryKind.CIRCUITS_RESULT) if "kept the switch busy" in body["detail"]]
        assert [(body["switch"], body["done"]) for body in late] == [(core, False)]
        agent.quiet(0.2, since_s=0.01)
        report = await site.over(period)
        assert report.state is PeriodState.COMMITTED
        assert all(isinstance(sent.window, Window) for sent in site.sent if sent.at_s > until_s)
        assert core in {sent.switch for sent in site.sent}


async def test_recorder_announcement_belongs_to_its_job(site: Harness) -> None:
    message = pb.Announcement(rank=0, job="small", period="gradients", intent_json=intent_to_json(OVER_CORE))
    service(site)._announced(message)
    await site.pass_time(0.1)
    (period,) = site.coordinator.active
    assert period.intent.job == "small"
    assert "of small" in period.report.detail


@pytest.mark.parametrize("volume", ["NaN", "Infinity", "1e999", "-1"])
async def test_invalid_volume_is_rejected(site: Harness, volume: str) -> None:
    text = intent_to_json(OVER_CORE).replace("4000000000.0", volume)
    assert volume in text
    with pytest.raises(ProblemFaults, match="bytes_per_rank"):
        site.coordinator.announce("gradients", text)
    assert site.coordinator.reports(8) == []


async def test_jobs_that_share_a_pod_must_pause(site: Harness) -> None:
    """Training jobs with ranks in one PoD share its circuits."""
    mine, other = site.agent("n0", range(16)), site.agent("n1", range(4), job="other")
    await site.pass_time(0.2)
    theirs = train("theirs", (0, 8), (1, 9), job="other")
    other.busy("other")
    waits = site.coordinator.expect(theirs)
    await site.pass_time(0.1)
    site.coordinator.withdraw(waits, "it is only known from now on")
    await site.pass_time(0.1)
    mine.busy()
    period = site.coordinator.expect(OVER_CORE)
    await site.pass_time(0.1)
    mine.quiet(0.8, since_s=0.01)
    await site.pass_time(0.2)
    assert (period.report.state, period.report.code) == (PeriodState.WAITING, "traffic")
    assert site.sent == []
    other.quiet(0.5, "other", since_s=0.01)
    await site.pass_time(0.01)
    assert site.sent
    other.busy("other")
    mine.quiet(10.0, since_s=0.01)
    so_far = len(site.sent)
    await site.pass_time(0.5)
    assert len(site.sent) == so_far  # nor any later stage
    other.leave()
    site.coordinator.withdraw(period, "enough")


@pytest.mark.parametrize("job", ["", "other"])
async def test_sync_waits_for_other_training_jobs(tmp_path: Path, job: str) -> None:
    """The caller is paused, the other jobs are not; the caller's own ranks need no window."""
    async with harness(tmp_path) as site:
        agent = site.agent("n0", range(8), job=job)
        await site.pass_time(0.2)
        agent.busy(job)
        waits = site.coordinator.expect(train("theirs", (0, 8), (1, 9), job=job))
        await site.pass_time(0.1)
        site.coordinator.withdraw(waits, "it is only known from now on")
        period = site.coordinator.expect(SYNC, boundary=True)
        await site.pass_time(0.5)
        assert bool(site.sent) is (job == "")
        agent.quiet(1.0, job, since_s=0.01)
        assert (await site.over(period)).state is PeriodState.COMMITTED


async def test_ended_job_delays_no_other(tmp_path: Path) -> None:
    async with harness(tmp_path) as site:
        other = site.agent("n1", range(4), job="other")
        await site.pass_time(0.1)
        waits = site.coordinator.expect(train("theirs", (0, 8), (1, 9), job="other"))
        await site.pass_time(0.1)
        site.coordinator.withdraw(waits, "it ends")
        assert other.stream is not None
        other.stream.traces({})
        assert (await site.at_boundary(SYNC)).state is PeriodState.COMMITTED


async def test_jobs_in_other_pods_are_ignored(site: Harness) -> None:
    elsewhere = train("theirs", (16, 18), job="other")
    assert neighbours(site.site, OVER_CORE, [elsewhere, OVER_CORE]) == frozenset()
    assert neighbours(site.site, SYNC, [elsewhere]) == {"other"}
    assert neighbours(site.site, OVER_CORE, [train("theirs", (0, 16), job="other")]) == {"other"}


class Packets:
    """The coordinator's `Routing`: records the cross-connects that carry packets."""

    def __init__(self) -> None:
        self.on: frozenset[PortPair] = frozenset()

    async def prepare(self, up: Iterable[PortPair], stages: Sequence[TransitionStage]) -> None:
        pass

    async def drain(self, going: Iterable[PortPair]) -> None:
        self.on -= frozenset(going)

    async def reroute(self, usable: Iterable[PortPair]) -> str:
        self.on = frozenset(usable)
        return ""


async def test_unexpected_exception_leaves_packets_on_existing_circuits(tmp_path: Path) -> None:
    async with harness(tmp_path) as site:
        site.agent("n0", range(16))
        await site.pass_time(0.2)
        await site.stop()
        site.routing = packets = Packets()
        site.start()
        await site.pass_time(0.2)
        assert (await site.in_window(OVER_CORE)).state is PeriodState.COMMITTED
        before = site.up()
        assert packets.on == before
        really = {id: switch.commit for id, switch in site.switches.items()}

        async def fail(diff: Any, expect_revision: int) -> Any:
            raise KeyError("no such port")

        for switch in site.switches.values():
            switch.commit = fail  # type: ignore[method-assign]
        report = await site.in_window(ACROSS_RAILS)
        assert (report.state, report.code) == (PeriodState.FAILED, "internal")
        assert packets.on == before == site.up()
        for id, commit in really.items():
            site.switches[id].commit = commit  # type: ignore[method-assign]
        assert (await site.in_window(ACROSS_RAILS)).state is PeriodState.COMMITTED
        assert packets.on == site.up()


async def test_route_maintenance_survives_exception(site: Harness) -> None:
    requested = 0

    async def look() -> Any:
        nonlocal requested
        requested += 1
        raise KeyError("no such port")

    routing = FabricRouting(
        site.site, {}, cast(Any, SimpleNamespace(routed=None)), look, site.journal, site.clock, offload=inline
    )
    tending = asyncio.ensure_future(routing.maintain())
    await site.pass_time(21.0)
    assert requested == 5
    assert not tending.done()
    tending.cancel()


async def test_clock_update_wakes_watch_only_once(site: Harness) -> None:
    agent = site.agent("n0", range(16))
    watch = site.hub.watch({"": frozenset(range(16))}, 0.01)
    await site.pass_time(0.2)
    assert watch.changed.is_set()
    watch.changed.clear()
    await site.pass_time(9.0)
    assert not watch.changed.is_set()
    agent.leave()
    assert watch.changed.is_set()
    watch.close()
