"""A daemon is killed at every journal entry, and another follows with the same journal and switches."""

from pathlib import Path

import pytest
from fabric_harness import ACROSS_RAILS, GEN, OVER_CORE, SYNC, Harness, harness

from ocs_drivers.faults import DeviceFault, DeviceFaultKind
from orchestrrl.core.journal.kinds import CIRCUIT_CHANGES
from orchestrrl.core.journal.store import EntryKind
from orchestrrl.core.operator_pauses import PauseScope
from orchestrrl.fabric.periods import OverrideState, PeriodState
from planner.fabric.materialize import validate
from planner.fabric.model import OcsId, PortPair
from planner.fabric.plan import FabricState

STEPS = 26  # more entries than the scenario writes


async def lives(site: Harness) -> None:
    """Perform some of each journalled action; every part may be cut off."""
    site.pause_registry.pause(PauseScope.BALANCER, "stays")
    site.overrides.mask(["port core0:1"], "dirty")
    site.overrides.override("gradients", "as measured", 0.0)
    for intent in (OVER_CORE, ACROSS_RAILS, GEN, SYNC):
        for agent in site.agents:
            agent.quiet(60.0)
        period = site.coordinator.expect(intent, boundary=intent in (GEN, SYNC))
        for _ in range(2000):
            if period.report.over:
                break
            await site.pass_time(0.002)
            for agent in site.agents:
                agent.quiet(60.0)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("entry", range(0, STEPS, 1))
async def test_recovery_from_kill_at_every_entry(tmp_path: Path, entry: int, after: bool) -> None:
    async with harness(tmp_path, max_moves_per_stage=8, within_s=2.0, boundary_within_s=5.0) as site:
        site.agent("n0", range(16))
        await site.pass_time(0.1)
        site.journal.kill_after = after
        killed = await site.until_killed(lives(site), entry)
        assert killed == (site.journal.kill_in is not None and site.journal.kill_in < 0)
        await site.kill()
        await site.pass_time(0.1)

        site.start()
        await site.pass_time(6.0)
        assert site.circuits.open == ()
        assert site.journal.open_operations(CIRCUIT_CHANGES) == []
        ports = [(each.switch, port) for each in site.up() for port in each.ports]
        assert len(ports) == len(set(ports))
        # An operator's override is as journalled, or absent.
        assert site.overrides.masked in ((), ("port core0:1",))
        if site.overrides.control.state is OverrideState.OVERRIDDEN:
            assert site.overrides.masked == ("port core0:1",)
            site.overrides.release("continue")
        assert set(site.pause_registry.pauses) <= {PauseScope.BALANCER}

        report = await site.in_window(ACROSS_RAILS)
        assert report.state is PeriodState.COMMITTED, report
        state, plan = site.plans[-1]
        assert site.up() == plan.cross_connects
        assert validate(site.site, FabricState(site.up(), state.failures), site.up()) == ()


async def test_prepared_change_is_closed_as_not_begun(tmp_path: Path) -> None:
    async with harness(tmp_path) as site:
        site.agent("n0", range(16)).busy()
        await site.pass_time(0.1)
        period = site.coordinator.expect(OVER_CORE)
        await site.pass_time(0.2)
        assert period.report.state is PeriodState.WAITING
        await site.kill()
        assert not period.report.over or period.report.code == "stopped"
        site.start()
        await site.pass_time(0.1)
        results = site.written(EntryKind.CIRCUITS_RESULT)
        assert [(result["done"], result["detail"]) for result in results] == [
            (False, "was not begun; the switch is as it was")
        ] * 5
        assert site.up() == frozenset()
        assert site.coordinator.announce("gradients").intent == OVER_CORE


async def test_partly_applied_change_is_completed(tmp_path: Path) -> None:
    """The daemon is killed while mirrors move: half of the circuits were removed, half were added."""
    async with harness(tmp_path) as site:
        site.agent("n0", range(16))
        await site.in_window(OVER_CORE)
        site.fail("core0", DeviceFault(DeviceFaultKind.PARTIAL_COMMIT, items=1))
        site.agents[0].quiet(60.0)
        site.coordinator.expect(ACROSS_RAILS)
        so_far = len(site.sent)
        while len(site.sent) == so_far:
            await site.pass_time(0.0005)
        await site.pass_time(0.001)
        await site.kill()
        site.start()
        await site.pass_time(1.0)
        assert site.circuits.open == ()
        before, after = site.plans[-1][0].current, site.plans[-1][1].cross_connects
        for switch in site.switches:
            of_switch = {each for each in site.up() if each.switch == switch}
            assert of_switch in ({e for e in before if e.switch == switch}, {e for e in after if e.switch == switch})


async def test_cancelled_change_is_not_resumed(tmp_path: Path) -> None:
    """The journal was full when the change was cancelled; once it has space, this is recorded before any other
    action."""
    async with harness(tmp_path) as site:
        core = OcsId("core0")
        change = await site.reader.change_of(core, (), [PortPair(core, 1, 5)])
        operation = await site.circuits.prepare(core, change, 600.0)
        site.journal.full_in = 0
        site.circuits.abandon(operation, "no window")
        assert len(site.journal.open_operations(CIRCUIT_CHANGES)) == 1
        site.journal.full_in = None
        await site.pass_time(6.0)
        assert site.journal.open_operations(CIRCUIT_CHANGES) == []
