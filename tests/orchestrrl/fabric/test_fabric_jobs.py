"""Periods of several jobs wait for windows concurrently; one at a time changes circuits."""

from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import pytest
from fabric_harness import GEN, Agent, Harness, harness, train
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.core.errors import Permanent
from orchestrrl.fabric.intents import intent_to_json
from orchestrrl.fabric.period_queue import AnnouncedPeriod
from orchestrrl.fabric.periods import PeriodState
from planner.fabric.intent import TrafficOperation
from planner.fabric.windows import Window

FIRST = train("first", (0, 3), (4, 7), job="one", operation=TrafficOperation.EP)  # in train0 only
SECOND = train("second", (8, 11), (12, 15), job="other", operation=TrafficOperation.EP)  # in train1 only
FIRST_NEXT = train("next", (0, 2), (4, 6), job="one")
SECOND_NEXT = train("next", (8, 10), (12, 14), job="other")


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Harness]:
    async with harness(tmp_path, within_s=10.0, boundary_within_s=5.0) as made:
        yield made


@pytest.fixture
async def one(site: Harness) -> Agent:
    return site.agent("a", range(8), "one")


@pytest.fixture
async def other(site: Harness) -> Agent:
    return site.agent("b", range(8, 16), "other")


async def test_busy_job_delays_no_other_job(site: Harness, one: Agent, other: Agent) -> None:
    await site.pass_time(0.5)
    one.busy("one")
    waits = site.coordinator.expect(FIRST)
    await site.pass_time(0.2)
    other.busy("other")
    comes = site.coordinator.expect(SECOND)
    await site.pass_time(0.2)
    assert [each.report.state for each in site.coordinator.active] == [PeriodState.WAITING] * 2
    assert {report.period for report in site.coordinator.reports(8)} == {"first", "second"}
    other.quiet(0.5, "other")
    report = await site.over(comes, 1.0)
    assert report.state is PeriodState.COMMITTED
    assert not waits.report.over
    # A plan made before the other job changed circuits is made again and committed in its own window.
    one.quiet(0.5, "one")
    assert (await site.over(waits, 1.0)).state is PeriodState.COMMITTED
    assert site.coordinator.active == ()


async def test_simultaneous_windows_are_used_in_sequence(site: Harness, one: Agent, other: Agent) -> None:
    await site.pass_time(0.5)
    one.busy("one")
    other.busy("other")
    periods = [site.coordinator.expect(each) for each in (FIRST, SECOND)]
    await site.pass_time(0.5)
    one.quiet(2.0, "one")
    other.quiet(2.0, "other")
    reports = [await site.over(each, 1.0) for each in periods]
    assert [report.state for report in reports] == [PeriodState.COMMITTED] * 2
    spans = sorted((commit.commanded_s, commit.usable_s) for report in reports for commit in report.commits)
    assert all(before[1] <= after[0] for before, after in pairwise(spans))


async def test_boundary_runs_first_and_alone(site: Harness, one: Agent, other: Agent) -> None:
    await site.pass_time(0.5)
    one.busy("one")
    other.busy("other")
    waiting = [site.coordinator.expect(each) for each in (FIRST, SECOND)]
    await site.pass_time(0.2)
    urgent = site.coordinator.expect(GEN, boundary=True)
    assert (await site.over(urgent, 1.0)).state is PeriodState.COMMITTED
    assert not any(each.report.over for each in waiting)
    one.quiet(2.0, "one")
    other.quiet(2.0, "other")
    for each in waiting:
        assert (await site.over(each, 1.0)).state is PeriodState.COMMITTED


async def test_superseded_period_ends_and_newer_one_replaces_it(site: Harness, one: Agent, other: Agent) -> None:
    await site.pass_time(0.5)
    one.busy("one")
    other.busy("other")
    first, second = site.coordinator.expect(FIRST), site.coordinator.expect(SECOND)
    await site.pass_time(0.2)
    newer = site.coordinator.expect(FIRST_NEXT)
    await site.pass_time(0.2)
    assert first.report.state is PeriodState.SUPERSEDED
    assert set(site.coordinator.active) == {second, newer}


async def test_daemon_stop_ends_each_period_once(site: Harness, one: Agent, other: Agent) -> None:
    await site.pass_time(0.5)
    one.busy("one")
    other.busy("other")
    periods = [site.coordinator.expect(each) for each in (FIRST, SECOND, SECOND_NEXT)]
    await site.pass_time(0.2)
    for task in site._tasks:
        task.cancel()
    await site.pass_time(0.1)
    assert [each.report.code for each in periods] == ["stopped", "superseded", "stopped"]


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["announce", "announce", "quiet", "quiet", "busy", "boundary", "pause"]),
            st.booleans(),
            st.floats(0.01, 0.3),
        ),
        min_size=5,
        max_size=25,
    )
)
async def test_jobs_change_circuits_one_at_a_time_in_their_own_windows(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, bool, float]]
) -> None:
    async with harness(tmp_path_factory.mktemp("site"), within_s=1.0, boundary_within_s=2.0) as site:
        agents = {"one": site.agent("a", range(8), "one"), "other": site.agent("b", range(8, 16), "other")}
        turns = {"one": [FIRST, FIRST_NEXT], "other": [SECOND, SECOND_NEXT]}
        periods: list[AnnouncedPeriod] = []
        for what, first, duration_s in steps:
            job = "one" if first else "other"
            match what:
                case "announce":
                    turns[job].reverse()
                    periods.append(site.coordinator.expect(turns[job][0]))
                case "quiet":
                    agents[job].quiet(duration_s, job)
                case "busy":
                    agents[job].busy(job)
                case "boundary":
                    periods.append(site.coordinator.expect(GEN, boundary=True))
            await site.pass_time(duration_s)
        for agent, job in zip(agents.values(), agents, strict=True):
            agent.busy(job)
        reports = [await site.over(each) for each in periods]
        assert all(isinstance(sent.window, Window) for sent in site.sent if sent.trains)
        spans = sorted((commit.commanded_s, commit.usable_s) for report in reports for commit in report.commits)
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
        assert len(spans) == sum(report.stages_done for report in reports)
        ids = [report.id for report in site.coordinator.reports(1000)]
        assert len(ids) == len(set(ids))


async def test_jobs_may_use_equal_period_names(site: Harness, one: Agent, other: Agent) -> None:
    fabric = site.coordinator
    await site.pass_time(0.5)
    for intent in (FIRST_NEXT, SECOND_NEXT):
        fabric.announce("next", intent_to_json(intent))
    one.quiet(60.0, "one")
    other.quiet(60.0, "other")
    await site.pass_time(0.5)
    for job, ranks in (("one", range(8)), ("other", range(8, 16))):
        again = fabric.announce("next", job=job)  # as a recorder does, which sends the job but no intent
        assert again.intent.ranks <= set(ranks)
        assert (await site.over(again)).job == job
    with pytest.raises(Permanent, match=r"was announced by several jobs \('one', 'other'\); name one of them"):
        fabric.announce("next")
    with pytest.raises(Permanent, match="of job 'third' was never announced"):
        fabric.announce("next", job="third")
    # The operator's override names one of them.
    with pytest.raises(Permanent, match="several jobs"):
        fabric.override("next", "test reason", 0.0)
    control = fabric.override("next", "test reason", 0.0, "other")
    assert (control.period, control.job) == ("next", "other")
    assert fabric._bound(SECOND) == SECOND_NEXT
    assert fabric._bound(FIRST) == FIRST


async def test_equal_period_names_survive_restart(site: Harness, one: Agent, other: Agent) -> None:
    for intent in (FIRST_NEXT, SECOND_NEXT):
        site.coordinator.expect(intent)
    await site.pass_time(0.1)
    site.coordinator.override("next", "test reason", 0.0, "one")
    await site.kill()
    site.start()
    assert site.coordinator.announce("next", job="other").intent == SECOND_NEXT
    assert site.coordinator._bound(FIRST) == FIRST_NEXT


async def test_period_name_of_one_job_needs_no_job(site: Harness, one: Agent) -> None:
    site.coordinator.expect(FIRST)
    assert site.coordinator.announce("first").intent == FIRST
    nobodys = train("second", (8, 11), (12, 15))
    site.coordinator.expect(nobodys)
    # an unnamed job's period is available to all
    assert site.coordinator.announce("second", job="one").intent == nobodys


async def test_unannounced_job_is_awaited_if_its_servers_are_known(site: Harness, one: Agent) -> None:
    silent = site.agent("train0/s3", range(2), "silent")  # a server of the PoD
    site.agent("away", range(2), "elsewhere")
    site.agent("gen0/s0", range(2), "engine")
    await site.pass_time(0.5)
    silent.busy("silent")
    one.quiet(5.0, "one")
    period = site.coordinator.expect(FIRST)
    await site.pass_time(0.5)
    assert period.report.state is PeriodState.WAITING
    assert "train0/s3" in period.report.detail
    assert any(note.endswith("as their circuits are unknown: elsewhere") for note in period.report.notes)
    silent.quiet(5.0, "silent")
    one.quiet(5.0, "one")
    assert (await site.over(period, 1.0)).state is PeriodState.COMMITTED


async def test_window_above_risk_limit_is_not_used(tmp_path: Path) -> None:
    for most_risk, code in ((0.005, "no_window"), (0.01, "committed")):
        folder = tmp_path / code
        folder.mkdir()
        async with harness(folder, within_s=1.0, most_risk=most_risk) as site:
            agent = site.agent("a", range(8), "one")
            await site.pass_time(0.5)
            agent.quiet(5.0, "one")  # at a risk of 1 %
            period = site.coordinator.expect(FIRST)
            for _ in range(3):
                await site.pass_time(0.4)
                agent.quiet(5.0, "one")
            report = await site.over(period, 2.0)
            assert report.code == code
            if code == "committed":
                assert {commit.risk for commit in report.commits} == {0.01}
            else:
                assert "window_risky" in report.detail
