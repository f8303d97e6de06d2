"""Foreign circuits on the site's switches stay, are reported in plans, and block no plan."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fabric_harness import ACROSS_RAILS, OVER_CORE, Harness, harness

from ocs_drivers.model import CrossConnect
from orchestrrl.fabric.periods import PeriodState
from planner.fabric.model import PortPair


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Harness]:
    (tmp_path / "site").mkdir()
    async with harness(tmp_path / "site") as site:
        site.agent("n0", range(16))
        yield site


@pytest.fixture
async def replaced(tmp_path: Path) -> PortPair:
    """Return a circuit of one period that the next would take down."""
    (tmp_path / "other").mkdir()
    async with harness(tmp_path / "other") as other:
        other.agent("n0", range(16))
        await other.pass_time(0.1)
        await other.in_window(OVER_CORE)
        before = other.up()
        await other.in_window(ACROSS_RAILS)
        return min(before - other.up())


def patch(site: Harness, pair: PortPair) -> CrossConnect:
    device = CrossConnect(pair.port_a, pair.port_b)
    site.switches[pair.switch].model.add([device])
    return device


async def test_plan_avoids_foreign_circuits_and_reports_remedy(site: Harness, replaced: PortPair) -> None:
    device = patch(site, replaced)
    await site.pass_time(0.1)
    report = await site.in_window(ACROSS_RAILS)
    assert report.state is PeriodState.COMMITTED, report
    assert replaced in site.up()
    (note,) = [note for note in report.notes if note.startswith("foreign circuits")]
    assert f"orchestrrl ocs take-over {replaced.switch} {device}" in note
    await site.circuits.take_over(replaced.switch, [device])
    report = await site.in_window(ACROSS_RAILS)
    assert report.state is PeriodState.COMMITTED, report
    assert not any(note.startswith("foreign circuits") for note in report.notes)
    assert replaced not in site.up()


async def test_fabric_owns_its_circuits_after_driver_restart(site: Harness) -> None:
    await site.pass_time(0.1)
    await site.in_window(OVER_CORE)
    for switch in site.switches.values():
        switch._ownership.release(switch._ownership.pairs)  # as after a restart of its process
    report = await site.in_window(ACROSS_RAILS)
    assert report.state is PeriodState.COMMITTED, report
    assert not any(note.startswith("foreign circuits") for note in report.notes)
