"""Engines that are restarted behind their peer's back: an agent sees it, and what the peer last said is from before.

The house checks at every point that no engine serves by another version than the pause barrier says.
"""

from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from fabric_house import Killed
from hypothesis import example, given, settings
from hypothesis import strategies as st
from weights_house import House, played

from orchestrrl.weights.controller.reports import EngineSync, SyncState
from orchestrrl.weights.controller.stale_versions import StaleVersions
from orchestrrl.weights.orders import InstallVersion
from planner.model import EngineId

E1 = EngineId("e1")
# When in version 2's way, whose engine, and how much later its peer asks it.
RESTART = st.tuples(st.integers(0, 79), st.sampled_from(("e0", "e1", "e2")), st.sampled_from((0.2, 3.0, 9.0)))


async def _first(house: House) -> None:
    await house.pass_time(0.5)
    await house.report(house.publish(1))
    await house.pass_time(2.0)
    house.check_one_version(1)


def test_a_stale_word_is_not_told_to_the_barrier(tmp_path: Path) -> None:
    async def scene(house: House) -> None:
        await _first(house)
        house.restart_behind("e1", lag_s=30.0)
        house.peer("p1").introduce()  # it says what it knows
        assert not house.fence.state.serves(E1)
        await house.pass_time(10.0)
        house.check_one_version(1)
        assert [order.version for order in house.peer("p1").orders if isinstance(order, InstallVersion)] == [1, 1]

    played(tmp_path, scene)


def test_a_restart_that_only_the_daemon_before_heard_of(tmp_path: Path) -> None:
    async def scene(house: House) -> None:
        await _first(house)
        house.restart_behind("e1", lag_s=30.0)
        house.kill()
        await house.pass_time(1.0)
        house.start()
        assert not house.fence.state.serves(E1)
        await house.pass_time(10.0)
        house.check_one_version(1)

    played(tmp_path, scene)


def test_a_daemon_that_comes_back_waits_for_peers_before_it_undoes_what_was_begun(tmp_path: Path) -> None:
    async def scene(house: House) -> None:
        await _first(house)
        house.when("p1 has done install", house.kill)
        sync_id = house.publish(2)
        await house.until_killed()
        house.peer("p1").die()
        house.start()
        began_s = house.clock.now_s()
        house.later(2.6, house.peer("p1").come_back)
        report = await house.report(sync_id)
        assert (report.state, report.code) == (SyncState.ABORTED, "restarted")
        assert "publish it again" in report.detail
        assert "the daemon was restarted" in report.notes
        assert {each.state for each in report.engines} == {EngineSync.ROLLED_BACK}
        assert report.ended_s is not None
        assert report.ended_s - began_s < 3.5, "as soon as all are back"
        house.check_one_version(1)

    played(tmp_path, scene)


def test_a_daemon_that_comes_back_after_the_commit_waits_for_no_engine_that_was_left_out(tmp_path: Path) -> None:
    async def scene(house: House) -> None:
        await _first(house)
        house.engine("e0").fails = 99
        house.when("after weights ", house.kill)
        sync_id = house.publish(2)
        await house.until_killed()
        house.peer("p0").die()
        house.start()
        began_s = house.clock.now_s()
        report = await house.report(sync_id)
        assert (report.state, report.code) == (SyncState.DONE, "some_quarantined")
        assert report.ended_s is not None
        assert report.ended_s - began_s < 1.0

    played(tmp_path, scene)


@pytest.mark.parametrize("ends", ["committed", "called off before", "called off in the middle", "taken back by peers"])
def test_a_restart_that_nobody_saw_behind_the_barrier(tmp_path: Path, ends: str) -> None:
    """No sample was taken, and the peer had asked before: engines are asked again before requests go on. The house
    checks it as the pause barrier opens."""

    async def scene(house: House) -> None:
        await _first(house)
        last = {
            "committed": "after weights ",
            "called off before": "paused",
            "called off in the middle": "p2 has done install",
            "taken back by peers": "p2 has done install",
        }
        house.fence.manned = ends != "taken back by peers"

        def happens() -> None:
            if house.fence.manned:
                house.restart_unseen("e1")
            else:
                house.when("p1 has done install", house.engine("e1").restart)  # of what it had before
            if ends != "committed":
                house.sync.abort("", "")

        house.when(last[ends], happens)
        report = await house.report(house.publish(2))
        assert report.state is (SyncState.DONE if ends == "committed" else SyncState.ABORTED)
        assert house.fence.state.lease is None
        await house.settled()
        house.check_one_version(2 if ends == "committed" else 1)

    played(tmp_path, scene)


def test_a_daemon_that_finds_the_barrier_closed_and_nothing_changed_asks_engines_before_it_opens(
    tmp_path: Path,
) -> None:
    async def scene(house: House) -> None:
        def dies() -> None:
            house.restart_unseen("e1")
            house.kill()
            raise Killed

        await _first(house)
        house.when("paused", dies)
        house.publish(2)
        await house.until_killed()
        house.start()
        await house.settled()
        house.check_one_version(1)

    played(tmp_path, scene)


@pytest.mark.parametrize("version", [1, 2])
def test_a_daemon_that_comes_back_ends_what_is_still_carried(tmp_path: Path, version: int) -> None:
    async def scene(house: House) -> None:
        await (house.pass_time(0.5) if version == 1 else _first(house))
        house.peer("p1").stalls = True
        sync_id = house.publish(version)
        await house.pass_time(1.0)
        assert any(peer.edges for peer in house.peers.values())
        house.kill()
        house.start()
        assert (await house.report(sync_id)).state is SyncState.ABORTED
        assert not any(peer.edges for peer in house.peers.values())

    played(tmp_path, scene)


@settings(max_examples=20)
@given(st.lists(RESTART, min_size=1, max_size=3), st.booleans(), st.integers(0, 159))
@example([(70, "e1", 9.0)], True, 159)
def test_engines_restart_at_any_point_of_a_sync(
    restarts: list[tuple[int, str, float]], has_gateways: bool, dies_at: int
) -> None:
    """The daemon may die, too."""

    async def scene(house: House) -> None:
        house.fence.manned = has_gateways
        await _first(house)
        for at, id, lag_s in restarts:
            house.at_point[at] = lambda id=id, lag_s=lag_s: house.restart_behind(id, lag_s)  # type: ignore[misc]
        house.at_point.setdefault(dies_at, house.kill)
        house.counting = True
        with suppress(Killed):
            house.publish(2)
        for _ in range(40):
            await house.pass_time(0.25)
            if house.daemon is None:
                break
        house.counting = False
        if house.daemon is None:
            await house.pass_time(1.0)
            house.start()
        await house.settled()
        done = [report.version for report in house.sync.history(0) if report.state is SyncState.DONE]
        house.check_one_version(max(done))
        assert (await house.report(house.publish(3))).state is SyncState.DONE
        house.check_one_version(3)

    with TemporaryDirectory() as folder:
        played(Path(folder), scene)


def test_an_answer_dispels_no_later_doubt() -> None:
    stale = StaleVersions()
    assert stale.of(E1) is None
    stale.restarted(E1)
    asked = stale.of(E1)
    stale.restarted(E1)
    stale.dispel(E1, asked)
    assert E1 in stale
    stale.dispel(E1, stale.of(E1))
    assert E1 not in stale
