"""Engines that restart unnoticed by their peer: an agent detects it, and the peer's last report is stale.

The harness checks at every point that no engine serves a version other than the one at the pause barrier.
"""

from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from fabric_harness import Killed
from hypothesis import example, given, settings
from hypothesis import strategies as st
from weights_harness import Harness, played

from orchestrrl.weights.controller.reports import EngineSync, SyncState
from orchestrrl.weights.controller.stale_versions import StaleVersions
from orchestrrl.weights.orders import InstallVersion
from planner.model import EngineId

E1 = EngineId("e1")
# The point in the sync of version 2, the engine, and the delay until its peer queries it.
RESTART = st.tuples(st.integers(0, 79), st.sampled_from(("e0", "e1", "e2")), st.sampled_from((0.2, 3.0, 9.0)))


async def _first(harness: Harness) -> None:
    await harness.pass_time(0.5)
    await harness.report(harness.publish(1))
    await harness.pass_time(2.0)
    harness.check_one_version(1)


def test_stale_report_does_not_reach_the_barrier(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        await _first(harness)
        harness.restart_behind("e1", lag_s=30.0)
        harness.peer("p1").introduce()  # with its stale state
        assert not harness.fence.state.serves(E1)
        await harness.pass_time(10.0)
        harness.check_one_version(1)
        assert [order.version for order in harness.peer("p1").orders if isinstance(order, InstallVersion)] == [1, 1]

    played(tmp_path, scene)


def test_restart_reported_only_to_the_previous_daemon_is_repaired(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        await _first(harness)
        harness.restart_behind("e1", lag_s=30.0)
        harness.kill()
        await harness.pass_time(1.0)
        harness.start()
        assert not harness.fence.state.serves(E1)
        await harness.pass_time(10.0)
        harness.check_one_version(1)

    played(tmp_path, scene)


def test_restarted_daemon_waits_for_peers_before_a_rollback(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        await _first(harness)
        harness.when("p1 has done install", harness.kill)
        sync_id = harness.publish(2)
        await harness.until_killed()
        harness.peer("p1").die()
        harness.start()
        began_s = harness.clock.now_s()
        harness.later(2.6, harness.peer("p1").come_back)
        report = await harness.report(sync_id)
        assert (report.state, report.code) == (SyncState.ABORTED, "restarted")
        assert "publish it again" in report.detail
        assert "the daemon was restarted" in report.notes
        assert {each.state for each in report.engines} == {EngineSync.ROLLED_BACK}
        assert report.ended_s is not None
        assert report.ended_s - began_s < 3.5, "as soon as all are back"
        harness.check_one_version(1)

    played(tmp_path, scene)


def test_restarted_daemon_does_not_wait_for_quarantined_engines(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        await _first(harness)
        harness.engine("e0").fails = 99
        harness.when("after weights ", harness.kill)
        sync_id = harness.publish(2)
        await harness.until_killed()
        harness.peer("p0").die()
        harness.start()
        began_s = harness.clock.now_s()
        report = await harness.report(sync_id)
        assert (report.state, report.code) == (SyncState.DONE, "some_quarantined")
        assert report.ended_s is not None
        assert report.ended_s - began_s < 1.0

    played(tmp_path, scene)


@pytest.mark.parametrize("ends", ["committed", "called off before", "called off in the middle", "taken back by peers"])
def test_unreported_restart_behind_the_barrier_is_detected(tmp_path: Path, ends: str) -> None:
    """No sample was taken, and the peer had queried earlier: engines are queried again before requests resume. The
    harness checks this when the pause barrier opens."""

    async def scene(harness: Harness) -> None:
        await _first(harness)
        last = {
            "committed": "after weights ",
            "called off before": "paused",
            "called off in the middle": "p2 has done install",
            "taken back by peers": "p2 has done install",
        }
        harness.fence.manned = ends != "taken back by peers"

        def happens() -> None:
            if harness.fence.manned:
                harness.restart_unseen("e1")
            else:
                harness.when("p1 has done install", harness.engine("e1").restart)  # when it has its previous version
            if ends != "committed":
                harness.sync.abort("", "")

        harness.when(last[ends], happens)
        report = await harness.report(harness.publish(2))
        assert report.state is (SyncState.DONE if ends == "committed" else SyncState.ABORTED)
        assert harness.fence.state.lease is None
        await harness.settled()
        harness.check_one_version(2 if ends == "committed" else 1)

    played(tmp_path, scene)


def test_restarted_daemon_queries_engines_before_it_opens_a_closed_barrier(
    tmp_path: Path,
) -> None:
    async def scene(harness: Harness) -> None:
        def dies() -> None:
            harness.restart_unseen("e1")
            harness.kill()
            raise Killed

        await _first(harness)
        harness.when("paused", dies)
        harness.publish(2)
        await harness.until_killed()
        harness.start()
        await harness.settled()
        harness.check_one_version(1)

    played(tmp_path, scene)


@pytest.mark.parametrize("version", [1, 2])
def test_restarted_daemon_ends_edges_that_still_run(tmp_path: Path, version: int) -> None:
    async def scene(harness: Harness) -> None:
        await (harness.pass_time(0.5) if version == 1 else _first(harness))
        harness.peer("p1").stalls = True
        sync_id = harness.publish(version)
        await harness.pass_time(1.0)
        assert any(peer.edges for peer in harness.peers.values())
        harness.kill()
        harness.start()
        assert (await harness.report(sync_id)).state is SyncState.ABORTED
        assert not any(peer.edges for peer in harness.peers.values())

    played(tmp_path, scene)


@settings(max_examples=20)
@given(st.lists(RESTART, min_size=1, max_size=3), st.booleans(), st.integers(0, 159))
@example([(70, "e1", 9.0)], True, 159)
def test_engines_restarted_at_any_point_end_with_one_version(
    restarts: list[tuple[int, str, float]], has_gateways: bool, dies_at: int
) -> None:
    """The daemon may die as well."""

    async def scene(harness: Harness) -> None:
        harness.fence.manned = has_gateways
        await _first(harness)
        for at, id, lag_s in restarts:
            harness.at_point[at] = lambda id=id, lag_s=lag_s: harness.restart_behind(id, lag_s)  # type: ignore[misc]
        harness.at_point.setdefault(dies_at, harness.kill)
        harness.counting = True
        with suppress(Killed):
            harness.publish(2)
        for _ in range(40):
            await harness.pass_time(0.25)
            if harness.daemon is None:
                break
        harness.counting = False
        if harness.daemon is None:
            await harness.pass_time(1.0)
            harness.start()
        await harness.settled()
        done = [report.version for report in harness.sync.history(0) if report.state is SyncState.DONE]
        harness.check_one_version(max(done))
        assert (await harness.report(harness.publish(3))).state is SyncState.DONE
        harness.check_one_version(3)

    with TemporaryDirectory() as folder:
        played(Path(folder), scene)


def test_answer_to_an_earlier_query_does_not_clear_a_later_restart() -> None:
    stale = StaleVersions()
    assert stale.of(E1) is None
    stale.restarted(E1)
    asked = stale.of(E1)
    stale.restarted(E1)
    stale.dispel(E1, asked)
    assert E1 in stale
    stale.dispel(E1, stale.of(E1))
    assert E1 not in stale
