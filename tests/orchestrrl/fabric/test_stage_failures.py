"""Switches that disobey, packets that stay on circuits, and a full journal."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fabric_harness import ACROSS_RAILS, GEN, OVER_CORE, SYNC, Harness, harness

from ocs_drivers.errors import CircuitConflict
from ocs_drivers.faults import DeviceFault, DeviceFaultKind
from ocs_drivers.model import CircuitChange, CircuitDiff, Connectivity, CrossConnectReading
from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.errors import Permanent, Retryable
from orchestrrl.core.journal.kinds import CIRCUIT_CHANGES
from orchestrrl.core.journal.store import EntryKind
from orchestrrl.fabric.circuit_executor import CircuitExecutor
from orchestrrl.fabric.periods import PeriodState
from planner.fabric.materialize import validate
from planner.fabric.model import OcsId, PortPair
from planner.fabric.plan import FabricState
from planner.fabric.transition import TransitionStage

CORE = OcsId("core0")


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Harness]:
    async with harness(tmp_path) as made:
        made.agent("n0", range(16))
        await made.pass_time(0.1)
        yield made


def sound(site: Harness) -> bool:
    """Check that no change is open and that readings match the devices."""
    assert site.circuits.open == ()
    assert site.journal.open_operations(CIRCUIT_CHANGES) == []
    assert site.coordinator.site_reading.cross_connects == site.up()
    ports = [(each.switch, port) for each in site.up() for port in each.ports]
    assert len(ports) == len(set(ports))
    return True


@pytest.mark.parametrize(
    "fault",
    [
        DeviceFault(DeviceFaultKind.PARTIAL_COMMIT, items=1),
        DeviceFault(DeviceFaultKind.PARTIAL_COMMIT, items=1, silent=True),
        DeviceFault(DeviceFaultKind.DROP_CONNECTION),
        DeviceFault(DeviceFaultKind.DROP_COMMAND),
        DeviceFault(DeviceFaultKind.SLOW_ANSWER, delay_s=0.3),
        DeviceFault(DeviceFaultKind.SLOW_ANSWER, delay_s=0.8),
        DeviceFault(DeviceFaultKind.RESTART),
    ],
    ids=lambda fault: f"{fault.kind}{'-silent' if fault.silent else ''}{fault.delay_s or ''}",
)
@pytest.mark.parametrize("connectivity", list(Connectivity))
async def test_transient_fault_does_not_prevent_circuits(
    tmp_path: Path, fault: DeviceFault, connectivity: Connectivity
) -> None:
    async with harness(tmp_path, connectivity=connectivity) as site:
        site.agent("n0", range(16))
        await site.in_window(OVER_CORE)
        site.fail("core0", fault)
        report = await site.in_window(ACROSS_RAILS)
        assert report.state is PeriodState.COMMITTED, report
        assert sound(site)
        assert site.plans[-1][1].cross_connects == site.up()


async def test_failed_stage_is_not_repeated_outside_a_window(site: Harness) -> None:
    """The switch accepts and does nothing, which takes a while to detect."""
    await site.in_window(OVER_CORE)
    before, so_far = site.up(), len(site.sent)
    for switch in site.switches:
        site.fail(switch, DeviceFault(DeviceFaultKind.PARTIAL_COMMIT, items=0, silent=True))
    period = site.coordinator.expect(ACROSS_RAILS)
    while len(site.sent) == so_far:
        await site.pass_time(0.001)
    site.agents[0].busy()
    await site.pass_time(1.0)
    assert site.up() == before
    assert period.report.state is PeriodState.WAITING
    (commit,) = period.report.commits
    assert "nothing took effect, the switch is as it was" in commit.detail
    site.agents[0].quiet(10.0)
    assert (await site.over(period)).state is PeriodState.COMMITTED
    assert sound(site)


async def test_stuck_mirror_is_rolled_back_reported_and_avoided(site: Harness) -> None:
    site.fail("core0", DeviceFault(DeviceFaultKind.STICK_MIRROR, 1))
    report = await site.in_window(OVER_CORE)
    assert (report.state, report.code) == (PeriodState.COMMITTED, "committed")
    failed, *rest = report.commits
    assert not failed.done
    assert "core0: add " in failed.detail
    assert "rolled back, the switch is as it was" in failed.detail
    assert all(commit.done for commit in rest)
    assert any(note.startswith("ports not used for 60 s, because no circuit came up there: ") for note in report.notes)
    assert sound(site)
    assert not any(1 in each.ports for each in site.up() if each.switch == CORE)
    await site.pass_time(60.0)
    site.fail("core0", DeviceFault(DeviceFaultKind.MEND_PORT, 1))
    assert (await site.in_window(OVER_CORE)).state is PeriodState.COMMITTED
    assert any(1 in each.ports for each in site.up() if each.switch == CORE)


async def test_disobedient_switch_fails_period_and_keeps_circuits(site: Harness) -> None:
    await site.in_window(OVER_CORE)
    glass = site.switches[CORE].model
    for port in range(1, 33):
        glass.inject(DeviceFault(DeviceFaultKind.STICK_MIRROR, port))
    before = {each for each in site.up() if each.switch == CORE}
    report = await site.in_window(ACROSS_RAILS)
    assert (report.state, report.code) == (PeriodState.FAILED, "switch_failed")
    assert {each for each in site.up() if each.switch == CORE} == before
    assert sound(site)
    assert site.coordinator.period == ""  # neither state


async def test_unreachable_switch_is_left_alone(site: Harness) -> None:
    await site.in_window(OVER_CORE)
    before = {each for each in site.up() if each.switch == CORE}
    wire = site.switches[CORE]._wire
    really = wire.open

    async def open() -> None:
        from ocs_drivers.errors import DriverRetryable as NoRoute

        raise NoRoute("no route to host")

    wire.open = open  # type: ignore[method-assign]
    await site.switches[CORE].close()
    report = await site.in_window(ACROSS_RAILS)
    assert report.state is PeriodState.COMMITTED
    assert CORE in site.coordinator.site_reading.unread
    assert {each for each in site.up() if each.switch == CORE} == before
    wire.open = really  # type: ignore[method-assign]
    assert (await site.in_window(OVER_CORE)).state is PeriodState.COMMITTED
    assert sound(site)


async def test_refusal_of_one_switch_prevents_changes_on_others(site: Harness) -> None:
    async def plan(*_: object) -> CircuitDiff:
        raise CircuitConflict(["locked by another session"], device=CORE)

    site.switches[CORE].plan = plan  # type: ignore[assignment, method-assign]
    report = await site.in_window(OVER_CORE)
    assert (report.state, report.code) == (PeriodState.KEPT, "switch_refused")
    assert report.detail == "core0: locked by another session"
    results = site.written(EntryKind.CIRCUITS_RESULT)
    why = "was not begun: another switch could not be prepared: core0: locked by another session"
    assert {(body["done"], body["detail"]) for body in results} == {(False, why)}
    assert site.up() == set()
    assert sound(site)


async def test_hanging_switch_delays_only_one_scan(site: Harness) -> None:
    hangs = asyncio.Event()
    switch = site.switches[CORE]
    really = switch.cross_connects

    async def cross_connects() -> CrossConnectReading:
        await hangs.wait()
        return await really()

    switch.cross_connects = cross_connects  # type: ignore[method-assign]
    first = await site.at_boundary(GEN)
    second = await site.at_boundary(SYNC)
    assert first.ended_s is not None
    assert second.ended_s is not None
    assert first.ended_s - first.announced_s >= 5.0  # once
    assert second.ended_s - second.announced_s < 0.5
    assert site.coordinator.site_reading.unread == {CORE: "did not answer within 5 s"}
    hangs.set()
    await site.pass_time(0.01)
    assert (await site.in_window(OVER_CORE)).state is PeriodState.COMMITTED
    assert site.coordinator.site_reading.unread == {}
    assert sound(site)


async def test_switch_lost_while_period_waits_is_planned_around(site: Harness) -> None:
    site.agents[0].busy()
    period = site.coordinator.expect(OVER_CORE)
    await site.pass_time(0.1)
    site.fail("core0", DeviceFault(DeviceFaultKind.FAIL_PORT, 1))
    site.agents[0].quiet(10.0)
    report = await site.over(period)
    assert report.state is PeriodState.COMMITTED
    assert sound(site)
    assert not any(1 in each.ports for each in site.up() if each.switch == CORE)


async def test_pairs_left_dark_by_failure_are_reported(site: Harness) -> None:
    """Rollback fails too: the port fails while the change waits for a mirror."""
    await site.at_boundary(GEN)
    glass = site.switches[OcsId("gen0/agg0")].model
    for port in range(1, 13):
        glass.inject(DeviceFault(DeviceFaultKind.STICK_MIRROR, port))
    before = site.pairs()
    report = await site.at_boundary(SYNC)
    text = " ".join(report.notes) + report.detail
    dark = before - site.pairs()
    assert all(f"{a} - {b}" in text or (a, b) not in _wanted(site) for a, b in dark)
    assert report.state in (PeriodState.FAILED, PeriodState.COMMITTED)


def _wanted(site: Harness) -> set[object]:
    return {site.coordinator.site.cabling.ends(each) for each in site.plans[-1][1].cross_connects}


@dataclass
class Router:
    """Moves packets off and onto circuits. Refuses `refuses` times; takes `drain_s`."""

    clock: VirtualClock
    drain_s: float = 0.001
    refuses: int = 0
    breaks: int = 0
    prepared: int = 0
    on: frozenset[PortPair] = frozenset()
    texts: list[str] = field(default_factory=list)

    async def prepare(self, up: Iterable[PortPair], stages: Sequence[TransitionStage]) -> None:
        self.prepared += 1

    async def drain(self, going: Iterable[PortPair]) -> None:
        await self.clock.sleep(self.drain_s)
        self.on -= frozenset(going)
        self.texts.append("drain")
        if self.refuses:
            self.refuses -= 1
            raise Retryable("not drained: tor1", 1.0)

    async def reroute(self, usable: Iterable[PortPair]) -> str:
        await self.clock.sleep(0.002)
        self.texts.append("reroute")
        if self.breaks:
            self.breaks -= 1
            raise Permanent("no router answers")
        self.on = frozenset(usable)
        return ""


@pytest.fixture
async def routed(tmp_path: Path) -> AsyncIterator[Harness]:
    async with harness(tmp_path) as made:
        made.routing = Router(made.clock)
        await made.stop()
        made.start()
        made.agent("n0", range(16))
        yield made


def router(site: Harness) -> Router:
    assert isinstance(site.routing, Router)
    return site.routing


async def test_packets_leave_before_circuits_and_return_after(routed: Harness) -> None:
    await routed.in_window(OVER_CORE)
    assert router(routed).texts == ["reroute"]
    report = await routed.in_window(ACROSS_RAILS)
    assert router(routed).texts == ["reroute", "drain", "reroute"]
    assert router(routed).on == routed.up()
    assert report.commits[0].switch_times[0].route_s == pytest.approx(0.003)
    assert router(routed).prepared == 2


async def test_undrained_circuits_are_not_touched(routed: Harness) -> None:
    await routed.in_window(OVER_CORE)
    before, so_far = routed.up(), len(routed.sent)
    router(routed).refuses = 9
    report = await routed.in_window(ACROSS_RAILS)
    assert (report.state, report.code) == (PeriodState.KEPT, "not_drained")
    assert routed.up() == before
    assert len(routed.sent) == so_far
    assert router(routed).on == before  # the routes that were moved off them are restored
    assert routed.journal.open_operations(CIRCUIT_CHANGES) == []
    router(routed).refuses = 1
    assert (await routed.in_window(ACROSS_RAILS)).state is PeriodState.COMMITTED


async def test_window_that_ends_during_drain_is_not_used(routed: Harness) -> None:
    await routed.in_window(OVER_CORE)
    before = routed.up()
    router(routed).drain_s = 0.3
    period = routed.coordinator.expect(ACROSS_RAILS)
    for _ in range(3):
        routed.agents[0].quiet(0.2)
        await routed.pass_time(0.1)
        routed.agents[0].busy()
        await routed.pass_time(0.4)
    report = await routed.over(period)
    assert (report.state, report.code) == (PeriodState.KEPT, "window_passed")
    assert routed.up() == before == router(routed).on


async def test_failed_routers_are_reported(routed: Harness) -> None:
    router(routed).breaks = 1
    report = await routed.in_window(OVER_CORE)
    assert report.state is PeriodState.COMMITTED
    assert "packets cannot be rerouted: no router answers" in report.detail


@pytest.mark.parametrize("entries", range(17))
async def test_full_journal_stops_new_changes(site: Harness, entries: int) -> None:
    """Entries of a period: its intent, five changes, the owned circuits and the result of each, and its end."""
    site.journal.full_in = entries
    try:
        period = site.coordinator.expect(OVER_CORE)
    except Permanent:
        assert entries == 0
    else:
        site.agents[0].quiet(60.0)
        report = await site.over(period)
        assert report.state is (PeriodState.COMMITTED if entries >= 16 else PeriodState.FAILED)
        if entries < 6:
            assert site.sent == []
            assert report.code == "not_recorded"
    site.journal.full_in = None
    await site.pass_time(6.0)  # open changes are closed, or were found carried out
    assert site.circuits.open == ()
    assert site.journal.open_operations(CIRCUIT_CHANGES) == []
    assert (await site.in_window(OVER_CORE)).state is PeriodState.COMMITTED
    assert validate(site.site, FabricState(site.up()), site.up()) == ()


async def test_journal_is_not_written_between_window_and_command(site: Harness) -> None:
    site.agents[0].busy()
    period = site.coordinator.expect(OVER_CORE)
    await site.pass_time(0.1)
    site.journal.full_in = 0
    opened_s = site.clock.now_s()
    site.agents[0].quiet(10.0, since_s=0.01)
    report = await site.over(period)
    assert [(sent.at_s, sent.switch) for sent in site.sent] == [(opened_s, switch) for switch in sorted(site.switches)]
    assert (report.state, report.code) == (PeriodState.FAILED, "not_recorded")


async def test_prepared_change_is_committed_once(site: Harness) -> None:
    executor: CircuitExecutor = site.circuits
    change = await site.reader.change_of(CORE, (), [PortPair(CORE, 1, 5)])
    operation = await executor.prepare(CORE, change, 60.0)
    outcome = _run(site, executor.commit(operation))
    assert (await outcome).done
    with pytest.raises(CircuitConflict, match="already begun or been abandoned"):
        await executor.commit(operation)
    executor.abandon(operation, "too late")
    assert [body["done"] for body in site.written(EntryKind.CIRCUITS_RESULT)] == [True]

    empty = await executor.prepare(CORE, change, 60.0)
    outcome = await executor.commit(empty)
    assert (outcome.done, outcome.detail) == (True, "already in effect")
    just_in_time = await executor.prepare(CORE, CircuitChange(disconnect=change.connect), 1.0)
    await site.pass_time(1.0)
    assert (await _run(site, executor.commit(just_in_time, begin_by_s=just_in_time.valid_until_s))).done
    late = await executor.prepare(CORE, change, 1.0)
    await site.pass_time(2.0)
    with pytest.raises(CircuitConflict, match="expired"):
        await executor.commit(late)
    assert [body["done"] for body in site.written(EntryKind.CIRCUITS_RESULT)] == [True, True, False]
    assert site.up() == set()


async def _run(site: Harness, work):  # type: ignore[no-untyped-def]
    task = asyncio.ensure_future(work)
    while not task.done():
        await site.pass_time(0.005)
    return task.result()
