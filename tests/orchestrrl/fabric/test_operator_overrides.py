"""Pins, overrides and masks bind new and waiting periods, and survive a restart of the daemon."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fabric_harness import ACROSS_RAILS, GEN, OVER_CORE, Agent, Harness, harness

from ocs_drivers.faults import DeviceFault, DeviceFaultKind
from orchestrrl.core.errors import Permanent, ProblemFaults
from orchestrrl.fabric.periods import OverrideState, PeriodState
from planner.fabric.model import OcsId, PortPair


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Harness]:
    async with harness(tmp_path) as made:
        yield made


@pytest.fixture
async def agent(site: Harness) -> Agent:
    agent = site.agent("n0", range(16))
    await site.pass_time(0.1)
    return agent


async def test_pin_of_all_circuits_keeps_them(site: Harness, agent: Agent) -> None:
    await site.in_window(OVER_CORE)
    up = site.up()
    site.overrides.pin([], "an experiment runs", 5.0)
    kept = await site.in_window(ACROSS_RAILS)
    assert (kept.state, kept.code) == (PeriodState.KEPT, "pinned")
    assert "an experiment runs" in kept.detail
    assert site.up() == up
    await site.pass_time(5.0)  # it expires
    assert site.overrides.control.state is OverrideState.FREE
    assert (await site.in_window(ACROSS_RAILS)).state is PeriodState.COMMITTED


async def test_pinned_circuits_stay_and_others_avoid_them(site: Harness, agent: Agent) -> None:
    await site.in_window(OVER_CORE)
    pins = {each for each in site.up() if each.switch == "core0" and 4 not in each.ports and 8 not in each.ports}
    site.overrides.pin([str(each) for each in sorted(pins)[:1]], "measured", 0.0)
    assert (await site.in_window(ACROSS_RAILS)).state is PeriodState.COMMITTED
    assert sorted(pins)[0] in site.up()
    site.overrides.release("done")
    assert (await site.in_window(ACROSS_RAILS)).state is PeriodState.COMMITTED


async def test_pin_keeps_circuit_about_to_be_removed(site: Harness, agent: Agent) -> None:
    await site.in_window(OVER_CORE)
    agent.busy()
    period = site.coordinator.expect(ACROSS_RAILS)
    await site.pass_time(0.1)
    assert period.report.state is PeriodState.WAITING
    _, plan = site.plans[-1]
    going = sorted(site.up() - plan.cross_connects)[0]
    site.overrides.pin([str(going)], "still needed", 0.0)
    agent.quiet(1.0)
    await site.over(period)
    assert going in site.up()


async def test_override_binds_all_periods_of_its_job_only(site: Harness, agent: Agent) -> None:
    await site.in_window(OVER_CORE)
    await site.in_window(ACROSS_RAILS)
    agent.quiet(60.0)
    site.coordinator.override("gradients", "as measured", 0.0)
    await site.pass_time(0.5)
    assert site.coordinator.period == "gradients"
    held = await site.in_window(ACROSS_RAILS)
    assert (held.state, held.code) == (PeriodState.COMMITTED, "was_so")
    assert site.coordinator.period == "gradients"
    assert (await site.at_boundary(GEN)).moves > 0
    site.overrides.release("done")
    assert (await site.in_window(ACROSS_RAILS)).moves > 0
    with pytest.raises(Permanent, match="periods with an intent: "):
        site.coordinator.override("nobody's", "", 0.0)


@pytest.mark.parametrize(
    ("mask", "gone"),
    [
        ("port core0:1", lambda each: each.switch == "core0" and 1 in each.ports),
        ("switch core0", lambda each: each.switch == "core0"),
        ("circuit train0/agg0:1-5", lambda each: each.switch == "train0/agg0" and {1, 5} & set(each.ports)),
    ],
)
async def test_circuits_avoid_masked_components(site: Harness, agent: Agent, mask: str, gone) -> None:  # type: ignore[no-untyped-def]
    await site.in_window(OVER_CORE)
    before = site.up()
    assert any(map(gone, before))
    agent.quiet(60.0)
    site.coordinator.mask([mask], "dirty")
    await site.pass_time(0.5)
    assert not any(map(gone, site.up()))
    (latest, *_) = site.coordinator.reports(1)
    assert (latest.period, latest.state) == ("gradients", PeriodState.COMMITTED)
    agent.quiet(60.0)
    site.coordinator.mask([], "cleaned")
    await site.pass_time(0.5)
    assert len(site.up()) == len(before)


async def test_failed_ports_are_avoided_in_next_window(site: Harness, agent: Agent) -> None:
    await site.in_window(OVER_CORE)
    used = next(each for each in sorted(site.up()) if each.switch == "train0/agg0")
    site.fail("train0/agg0", DeviceFault(DeviceFaultKind.FAIL_PORT, used.port_a))
    for _ in range(25):
        agent.quiet(60.0)
        await site.pass_time(0.5)
    assert used not in site.up()
    (latest, *_) = site.coordinator.reports(1)
    assert (latest.period, latest.state) == ("gradients", PeriodState.COMMITTED)
    assert (OcsId("train0/agg0"), used.port_a) in site.coordinator.site_reading.failures.ports


async def test_circuits_of_restarted_switch_are_restored(site: Harness, agent: Agent) -> None:
    await site.in_window(OVER_CORE)
    up = site.up()
    site.fail("core0", DeviceFault(DeviceFaultKind.RESTART))
    assert site.up() < up
    for _ in range(25):
        agent.quiet(60.0)
        await site.pass_time(0.5)
    assert site.up() == up


async def test_circuit_between_ports_without_fibres_is_left_alone(site: Harness, agent: Agent) -> None:
    """A port of the site is connected to one without a fibre, by another controller."""
    from ocs_drivers.model import CrossConnect

    for pair in (CrossConnect(1, 30), CrossConnect(20, 21), CrossConnect(2, 3)):
        site.switches[OcsId("train0/agg0")].model.add([pair])
    assert (await site.in_window(OVER_CORE)).state is PeriodState.COMMITTED
    left = {(each.port_a, each.port_b) for each in site.up() if each.switch == "train0/agg0"}
    assert {(1, 30), (20, 21), (2, 3)} <= left


async def test_overrides_survive_daemon_restart(site: Harness, agent: Agent) -> None:
    await site.in_window(OVER_CORE)
    site.overrides.pin(["core0:1-5"], "", 0.0)
    site.overrides.mask(["nic train0/s0:1", "server gen0/s0"], "")
    times = site.coordinator.times_of_switches()
    await site.stop()
    site.start()
    await site.pass_time(0.1)
    assert site.overrides.control.cross_connects == ("core0:1-5",)
    assert site.overrides.pinned == {PortPair(OcsId("core0"), 1, 5)}
    assert site.overrides.masked == ("nic train0/s0:1", "server gen0/s0")
    assert site.coordinator.period == "gradients"
    assert site.coordinator.times_of_switches() == times
    assert [report.period for report in site.coordinator.reports(9)] == ["gradients"]
    assert site.coordinator.announce("gradients").intent == OVER_CORE


def test_all_faults_are_reported_at_once(site: Harness) -> None:
    with pytest.raises(ProblemFaults) as wrong:
        site.overrides.pin(["core0:1-99", "core9:1-2", "1-2", "core0:1-2", "core0:3-3"], "", -1.0)
    assert wrong.value.faults == [
        "cross_connects[0]: must use ports with a fibre (99 have none), got 'core0:1-99'",
        "cross_connects[1]: must be on a switch of the site, got 'core9:1-2'",
        "cross_connects[2]: must be SWITCH:PORT-PORT, got '1-2'",
        "cross_connects[3]: must join two different endpoints, got 'core0:1-2'",
        "cross_connects[4]: must be SWITCH:PORT-PORT, got 'core0:3-3'",
        "ttl_s: must be >= 0 (0: until released), got -1",
    ]
    with pytest.raises(ProblemFaults, match="port 1 of core0 must be pinned once, got 2 times"):
        site.overrides.pin(["core0:1-5", "core0:1-6"], "", 0.0)
    with pytest.raises(ProblemFaults) as wrong:
        site.overrides.mask(["switch x", "port core0", "nic train0/s0:2", "cable 7", "circuit core0:1-1"], "")
    assert len(wrong.value.faults) == 5
    assert site.overrides.masked == ()
    assert site.overrides.control.state is OverrideState.FREE
