"""Periods are committed in windows or at boundaries, or end with a reason."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from fabric_harness import ACROSS_RAILS, GEN, OVER_CORE, SYNC, Agent, Harness, harness, train

from ocs_drivers.model import ChangeMode, CircuitChange, CrossConnect
from orchestrrl.core.errors import Permanent, ProblemFaults
from orchestrrl.core.journal.store import EntryKind
from orchestrrl.core.operator_pauses import PauseScope
from orchestrrl.fabric.intents import intent_to_json
from orchestrrl.fabric.periods import PeriodState
from planner.fabric.intent import Intent
from planner.fabric.materialize import validate
from planner.fabric.model import OcsId, Pair
from planner.fabric.plan import FabricState
from planner.fabric.windows import SwitchTimes, Window
from planner.model import Mode

T = TypeVar("T")


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Harness]:
    async with harness(tmp_path) as made:
        yield made


@pytest.fixture
async def agents(site: Harness) -> tuple[Agent, Agent]:
    """Attach agents to the two PoDs that train; the second host's clock is 7 s ahead."""
    both = site.agent("n0", range(8)), site.agent("n1", range(8, 16), ahead_s=7.0, way_s=0.0002)
    await site.pass_time(0.2)
    return both


async def test_period_is_prepared_ahead_and_committed_when_all_ranks_are_quiet(
    site: Harness, agents: tuple[Agent, Agent]
) -> None:
    for agent in agents:
        agent.busy()
    period = site.coordinator.expect(OVER_CORE)
    await site.pass_time(0.3)
    assert period.report.state is PeriodState.WAITING
    assert len(site.written(EntryKind.CIRCUITS_INTENT)) == 5  # journalled, but nothing sent
    assert site.sent == []
    agents[0].quiet(0.2)
    await site.pass_time(0.01)
    assert site.sent == []
    agents[1].quiet(0.2)
    report = await site.over(period)
    assert (report.state, report.code, report.stages_done) == (PeriodState.COMMITTED, "committed", 1)
    (commit,) = report.commits
    assert commit.window_opened_s is not None
    assert commit.window_until_s is not None
    assert commit.window_opened_s <= commit.commanded_s
    assert commit.usable_s <= commit.window_until_s
    assert {took.switch: took.device_s for took in commit.switch_times} == dict.fromkeys(
        site.switches, pytest.approx(0.025)
    )
    assert all(took.control_s < 0.1 for took in commit.switch_times)
    assert all(isinstance(sent.window, Window) for sent in site.sent)
    assert validate(site.site, FabricState(site.up()), site.up()) == ()
    assert site.coordinator.site_reading.cross_connects == site.up()
    assert site.coordinator.period == "gradients"


async def test_clock_bound_shortens_window(site: Harness) -> None:
    """The commit needs 52.5 ms; the host's clock may be 3 ms early or late."""
    agent = site.agent("n0", range(16), ahead_s=-100.0, way_s=0.003)
    await site.pass_time(0.5)
    period = site.coordinator.expect(OVER_CORE)
    await site.pass_time(0.01)
    for _ in range(3):
        agent.quiet(0.055)
        await site.pass_time(0.06)
        agent.busy()
    assert period.report.state is PeriodState.WAITING
    assert period.report.code in ("window_too_short", "traffic")
    agent.quiet(0.06)
    report = await site.over(period)
    assert report.state is PeriodState.COMMITTED
    opened_s = report.commits[0].window_opened_s
    assert opened_s is not None
    # Used at the latest opening that the host's clock allows.
    assert report.commits[0].commanded_s == pytest.approx(opened_s)


async def test_short_windows_are_never_used(tmp_path: Path) -> None:
    """The device takes 100 ms and windows last 50 ms."""
    async with harness(tmp_path, reconfiguration_s=0.1, within_s=0.5, boundary_within_s=5.0) as site:
        for id in site.switches:
            site.coordinator.times.measured(SwitchTimes(id, 0.001, 0.1, 0.0))
        agent = site.agent("n0", range(16))
        await site.pass_time(0.2)
        period = site.coordinator.expect(OVER_CORE)
        while not period.report.over:
            agent.quiet(0.05)
            await site.pass_time(0.05)
            agent.busy()
            await site.pass_time(0.05)
        assert (period.report.state, period.report.code) == (PeriodState.KEPT, "no_window")
        assert period.report.ended_s == pytest.approx(period.deadline_s)
        assert site.sent == []
        (valid_until_s,) = {intent["valid_until_s"] for intent in site.written(EntryKind.CIRCUITS_INTENT)}
        assert valid_until_s == pytest.approx(period.deadline_s + 5.0)
        results = site.written(EntryKind.CIRCUITS_RESULT)
        assert [result["done"] for result in results] == [False] * 5
        assert "was not begun" in results[0]["detail"]
        assert site.coordinator.counts["kept", "no_window"] == 1


async def test_one_slow_commit_does_not_prevent_later_ones(site: Harness, agents: tuple[Agent, Agent]) -> None:
    """Windows of 90 ms would cover 52.5 ms, but the only measured commit took 100 ms."""
    for id in site.switches:
        site.coordinator.times.measured(SwitchTimes(id, 0.001, 0.1, 0.0))
        site.coordinator.times.measured(SwitchTimes(id, 0.001, 0.03, 0.0))
    periods = []
    while not periods or periods[-1].report.state is not PeriodState.COMMITTED:
        assert len(periods) < 20, periods[-1].report
        periods.append(site.coordinator.expect(OVER_CORE))
        for _ in range(2):
            for agent in agents:
                agent.quiet(0.09)
            await site.pass_time(0.09)
            for agent in agents:
                agent.busy()
            await site.pass_time(0.05)
    assert len(periods) > 1
    (commit,) = periods[-1].report.commits
    assert commit.window_until_s is not None
    assert commit.usable_s <= commit.window_until_s


@pytest.mark.parametrize(
    ("situation", "code"),
    [("nobody", "untraced"), ("one host only", "untraced"), ("gone", "host_gone"), ("silent", "host_silent")],
)
async def test_reason_names_missing_rank_or_host(site: Harness, situation: str, code: str) -> None:
    if situation != "nobody":
        agent = site.agent("n0", range(8))
        agent.quiet(100.0)
    if situation in ("gone", "silent"):
        site.agent("n1", range(8, 16))
    await site.pass_time(0.1)
    period = site.coordinator.expect(OVER_CORE)
    await site.pass_time(0.5)
    if situation == "gone":
        site.agents[1].leave()
    report = await site.over(period)
    assert report.code == "no_window"
    assert f": {code}: " in report.detail
    assert site.up() == frozenset()


async def test_ranks_of_other_job_are_ignored(site: Harness) -> None:
    site.agent("n0", range(16), job="other").quiet(100.0, "other")
    await site.pass_time(0.1)
    report = await site.over(site.coordinator.expect(OVER_CORE))
    assert "untraced" in report.detail
    mine = train("mine", range(0, 16, 2), range(1, 16, 2), job="other")
    assert (await site.in_window(mine)).state is PeriodState.COMMITTED


async def test_existing_circuits_need_no_window(site: Harness, agents: tuple[Agent, Agent]) -> None:
    await site.in_window(OVER_CORE)
    for agent in agents:
        agent.busy()
    again = await site.over(site.coordinator.announce("gradients"))
    assert (again.state, again.code) == (PeriodState.COMMITTED, "was_so")


async def test_newer_announcement_supersedes_with_reason_for_waiting(
    site: Harness, agents: tuple[Agent, Agent]
) -> None:
    agents[0].busy()
    first = site.coordinator.expect(OVER_CORE)
    await site.pass_time(0.1)
    second = site.coordinator.expect(ACROSS_RAILS)
    third = site.coordinator.expect(OVER_CORE)
    await site.pass_time(0.1)
    assert (first.report.state, first.report.code) == (PeriodState.SUPERSEDED, "superseded")
    assert "until then: traffic: " in first.report.detail
    assert second.report.state is PeriodState.SUPERSEDED
    assert third.report.state is PeriodState.WAITING


async def test_generation_goes_first_and_waiting_period_continues(site: Harness, agents: tuple[Agent, Agent]) -> None:
    agents[0].busy()
    gradients = site.coordinator.expect(OVER_CORE)
    await site.pass_time(0.1)
    generation = await site.at_boundary(GEN)
    assert generation.state is PeriodState.COMMITTED
    await site.pass_time(0.1)
    assert gradients.report.state is PeriodState.WAITING
    for agent in agents:
        agent.quiet(1.0)
    assert (await site.over(gradients)).state is PeriodState.COMMITTED


async def test_training_announcement_does_not_supersede_generation(site: Harness, agents: tuple[Agent, Agent]) -> None:
    generation = site.coordinator.expect(GEN, boundary=True)
    for _ in range(3):
        site.coordinator.expect(OVER_CORE)
    assert (await site.over(generation)).state is PeriodState.COMMITTED
    assert site.coordinator.counts["superseded", "superseded"] == 2


@pytest.mark.parametrize("chosen", [GEN, SYNC], ids=["generation", "sync"])
async def test_generation_and_syncs_change_only_at_boundaries(site: Harness, chosen: Intent) -> None:
    kept = await site.over(site.coordinator.expect(chosen))
    assert (kept.state, kept.code) == (PeriodState.KEPT, "no_boundary")
    assert site.sent == []
    done = await site.at_boundary(chosen)
    assert done.state is PeriodState.COMMITTED
    assert {commit.window_opened_s for commit in done.commits} == {None}


async def test_training_changes_in_windows_even_at_boundary(site: Harness, agents: tuple[Agent, Agent]) -> None:
    agents[0].busy()
    period = site.coordinator.expect(OVER_CORE, boundary=True)
    await site.pass_time(0.1)
    assert period.report.state is PeriodState.WAITING
    for agent in agents:
        agent.quiet(1.0)
    assert (await site.over(period)).commits[0].window_opened_s is not None


async def test_ended_boundary_changes_nothing(site: Harness) -> None:
    period = site.coordinator.announce("sync", intent_to_json(SYNC), within_s=0.001, boundary=True)
    site.coordinator.withdraw(period, "the broadcast began")
    assert (period.report.state, period.report.code) == (PeriodState.KEPT, "withdrawn")
    site.coordinator.withdraw(period, "again")
    await site.pass_time(1.0)
    assert site.sent == []
    assert site.coordinator.counts["kept", "withdrawn"] == 1


async def test_remaining_stages_stay_undone_after_withdrawal(tmp_path: Path) -> None:
    async with harness(tmp_path, max_moves_per_stage=2, boundary_within_s=5.0) as site:
        period = site.coordinator.expect(SYNC, boundary=True)
        while not site.sent:
            await site.pass_time(0.001)
        site.coordinator.withdraw(period, "the broadcast began")
        report = await site.over(period)
        assert (report.state, report.code, report.stages_done) == (PeriodState.KEPT, "withdrawn", 1)
        assert f"stages 2 to {report.stages} were left undone" in report.detail
        assert site.coordinator.site_reading.cross_connects == site.up()
        assert (await site.at_boundary(SYNC)).state is PeriodState.COMMITTED


async def test_newer_period_starts_from_remaining_stages(tmp_path: Path) -> None:
    async with harness(tmp_path, max_moves_per_stage=4, within_s=5.0) as site:
        agent = site.agent("n0", range(16))
        await site.pass_time(0.1)
        agent.quiet(60.0)
        first = site.coordinator.expect(OVER_CORE)
        while not site.sent:
            await site.pass_time(0.001)
        second = site.coordinator.expect(ACROSS_RAILS)
        await site.over(second)
        assert first.report.state is PeriodState.SUPERSEDED
        assert 0 < first.report.stages_done < first.report.stages
        assert second.report.state is PeriodState.COMMITTED
        state, plan = site.plans[-1]
        assert plan.cross_connects == site.up()
        assert validate(site.site, state, site.up()) == ()


async def test_dark_pair_is_reported_in_advance(tmp_path: Path) -> None:
    """One ToR has one port left, and its circuit moves to another port of its neighbour."""
    async with harness(tmp_path, max_moves_per_stage=1, boundary_within_s=60.0) as site:
        spent = [f"port gen0/agg0:{port}" for port in (1, 2, 5, 6, 7, 9, 10, 11, 12)]
        site.coordinator.mask([*spent, "port gen0/agg0:3"], "")
        assert (await site.at_boundary(GEN)).state is PeriodState.COMMITTED
        joined = {pair for pair in site.pairs() if "gen0/r0" in pair and "gen0/r1" in pair}
        assert joined
        site.coordinator.mask([*spent, "port gen0/agg0:4"], "")
        period = site.coordinator.expect(GEN, boundary=True)
        dark: set[Pair] = set()
        while not period.report.over:
            if gone := joined - site.pairs():
                assert "briefly without light: gen0/r0 - gen0/r1" in period.report.notes
                dark |= gone
            await site.pass_time(0.001)
        assert (period.report.state, period.report.stages_done) == (PeriodState.COMMITTED, 2)
        assert "briefly without light: gen0/r0 - gen0/r1" in period.report.notes
        assert dark == joined <= site.pairs()


async def test_advise_mode_reports_plan_and_changes_nothing(site: Harness, agents: tuple[Agent, Agent]) -> None:
    site.mode = Mode.ADVISE
    report = await site.in_window(OVER_CORE)
    assert (report.state, report.code) == (PeriodState.KEPT, "advise")
    assert report.moves == 17
    assert report.stages == 1
    assert any(note.startswith("would remove nothing, and add core0:") for note in report.notes)
    assert site.written(EntryKind.CIRCUITS_INTENT) == []
    site.mode = Mode.ACT
    assert (await site.in_window(OVER_CORE)).state is PeriodState.COMMITTED


async def test_pauses_hold_fabric_or_syncs(site: Harness, agents: tuple[Agent, Agent]) -> None:
    site.pause_registry.pause(PauseScope.SYNC, "bad weights")
    kept = await site.at_boundary(SYNC)
    assert (kept.state, kept.code) == (PeriodState.KEPT, "operator_paused")
    assert kept.detail == "an operator paused the sync: bad weights"
    assert (await site.at_boundary(GEN)).state is PeriodState.COMMITTED
    site.pause_registry.pause(PauseScope.FABRIC, "cleaning fibres", ttl_s=1.0)
    assert (await site.in_window(OVER_CORE)).code == "operator_paused"
    await site.pass_time(1.0)
    assert (await site.in_window(OVER_CORE)).state is PeriodState.COMMITTED
    site.pause_registry.resume(PauseScope.SYNC, "fixed")
    assert (await site.at_boundary(SYNC)).state is PeriodState.COMMITTED


async def test_pause_during_wait_prevents_command(site: Harness, agents: tuple[Agent, Agent]) -> None:
    agents[0].busy()
    period = site.coordinator.expect(OVER_CORE)
    await site.pass_time(0.1)
    site.pause_registry.pause(PauseScope.FABRIC, "now")
    for agent in agents:
        agent.quiet(1.0)
    assert (await site.over(period)).code == "operator_paused"
    assert site.sent == []


async def test_foreign_change_of_switch_causes_new_plan(site: Harness, agents: tuple[Agent, Agent]) -> None:
    agents[0].busy()
    period = site.coordinator.expect(OVER_CORE)
    await site.pass_time(0.1)
    pair = CrossConnect(1, 5)
    assert (await _done(site, site.circuits.change("core0", CircuitChange((pair,)), ChangeMode.SAFE))).done
    for agent in agents:
        agent.quiet(1.0)
    report = await site.over(period)
    assert report.state is PeriodState.COMMITTED
    assert validate(site.site, FabricState(site.up()), site.up()) == ()


async def test_period_is_kept_if_switch_changes_before_every_commit(site: Harness, agents: tuple[Agent, Agent]) -> None:
    """Before each commit, core0 gains or loses a cross-connect that does not belong to the site."""
    foreign, glass = CrossConnect(20, 21), site.switches[OcsId("core0")].model
    really = site.switches[OcsId("core0")].commit

    async def commit(diff: object, expect_revision: int) -> object:
        (glass.remove if foreign in {c.cross_connect for c in glass.circuits()} else glass.add)([foreign])
        return await really(diff, expect_revision)  # type: ignore[arg-type]

    site.switches[OcsId("core0")].commit = commit  # type: ignore[method-assign, assignment]
    report = await site.in_window(OVER_CORE)
    assert (report.state, report.code) == (PeriodState.KEPT, "overtaken")
    assert len([sent for sent in site.sent if sent.switch == "core0"]) == 3


async def _done(site: Harness, work: Coroutine[Any, Any, T]) -> T:
    task = asyncio.ensure_future(work)
    while not task.done():
        await site.pass_time(0.005)
    return task.result()


async def test_invalid_announcements_are_rejected(site: Harness) -> None:
    with pytest.raises(Permanent, match="never announced"):
        site.coordinator.announce("gradients")
    for within_s in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ProblemFaults, match="within_s"):
            site.coordinator.announce("gradients", intent_to_json(OVER_CORE), within_s)
    nowhere = await site.over(site.coordinator.expect(train("lost", (900, 901))))
    assert (nowhere.state, nowhere.code) == (PeriodState.KEPT, "nobody_placed")


async def test_planner_exception_ends_one_period_only(
    site: Harness, agents: tuple[Agent, Agent], caplog: pytest.LogCaptureFixture
) -> None:
    really = site.coordinator._materialise
    site.coordinator._materialise = lambda intent, state: 1 / 0  # type: ignore[assignment, return-value]
    report = await site.over(site.coordinator.expect(OVER_CORE))
    assert (report.state, report.code) == (PeriodState.FAILED, "internal")
    site.coordinator._materialise = really
    assert (await site.in_window(OVER_CORE)).state is PeriodState.COMMITTED


async def test_daemon_stop_ends_periods(tmp_path: Path) -> None:
    async with harness(tmp_path) as site:
        site.agent("n0", range(16)).busy()
        waiting = site.coordinator.expect(OVER_CORE)
        await site.pass_time(0.1)
        queued = site.coordinator.expect(GEN)
    assert [each.report.code for each in (waiting, queued)] == ["stopped", "stopped"]


async def test_equal_endings_are_counted_and_not_all_journalled(site: Harness) -> None:
    """A trainer announces three times a second, and no rank is traced."""
    for _ in range(60):
        period = site.coordinator.announce("gradients", intent_to_json(OVER_CORE), within_s=0.3)
        await site.over(period)
    written = site.written(EntryKind.PERIOD)
    assert 2 <= len(written) <= 4
    assert site.coordinator.counts["kept", "no_window"] == 60
    assert len(site.written(EntryKind.PERIOD_INTENT)) == 1
    assert sum(each.get("alike_before", 0) for each in written) + len(written) >= 30
    assert all("commits" not in each for each in written)
