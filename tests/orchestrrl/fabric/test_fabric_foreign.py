"""Circuits on the site's glass that somebody else made: they stay, the plan says so, and nothing is blocked by them."""

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
    """A circuit of one period that the next would take down."""
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


async def test_the_plan_goes_around_what_is_not_ours_and_says_how_it_would_be(
    site: Harness, replaced: PortPair
) -> None:
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


async def test_what_the_fabric_made_is_ours_when_the_driver_has_forgotten_it(site: Harness) -> None:
    await site.pass_time(0.1)
    await site.in_window(OVER_CORE)
    for switch in site.switches.values():
        switch._ownership.release(switch._ownership.pairs)  # as if its process had been started anew
    report = await site.in_window(ACROSS_RAILS)
    assert report.state is PeriodState.COMMITTED, report
    assert not any(note.startswith("foreign circuits") for note in report.notes)
