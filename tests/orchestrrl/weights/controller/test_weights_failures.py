"""Failures during a weight sync, their outcomes, and their reports."""

from dataclasses import replace
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from weights_harness import START_S, TENSORS, FakePeer, Harness, played

from orchestrrl.core.errors import Permanent, ProblemFaults, Retryable
from orchestrrl.core.operator_pauses import PauseRegistry, PauseScope
from orchestrrl.daemon.weight_circuits import PacketNetwork
from orchestrrl.weights import controller
from orchestrrl.weights.controller.actions import BroughtUp
from orchestrrl.weights.controller.reports import EngineSync, SyncPhase, SyncState
from orchestrrl.weights.model import TensorMeta
from orchestrrl.weights.orders import CarryEdges, RestEngine
from orchestrrl.weights.publication import Publication
from planner.model import EngineId
from planner.sync_tree.shares import EngineShare


async def first(harness: Harness) -> None:
    await harness.pass_time(0.5)
    await harness.report(harness.publish(1))
    await harness.pass_time(1.0)
    harness.check_one_version(1)


def test_engine_that_fails_to_install_is_quarantined_and_repaired_later(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        await first(harness)
        harness.engine("e1").fails = 2
        report = await harness.report(harness.publish(2))
        assert (report.state, report.code, report.attempt) == (SyncState.DONE, "some_quarantined", 2)
        assert {e.engine: e.state for e in report.engines}[EngineId("e1")] is EngineSync.QUARANTINED
        assert not harness.fence.state.serves(EngineId("e1"))
        await harness.pass_time(20.0)
        harness.check_one_version(2)

    played(tmp_path, scene)


def test_peer_that_returns_with_another_share_receives_that_share(tmp_path: Path) -> None:
    """The bytes from the first attempt belong to its earlier share."""

    async def scene(harness: Harness) -> None:
        await first(harness)
        peer = next(peer for peer in harness.peers.values() if peer.engines)
        peer.share = EngineShare(tp=2, tp_ranks=(0,))
        peer.die()
        peer.come_back()
        await harness.pass_time(1.0)
        harness.fence.refuses = 1
        syncing = harness.publish(2)
        while harness.fence.refuses:
            await harness.pass_time(0.1)
        peer.die()
        peer.share = EngineShare(tp=2, tp_ranks=(1,))
        peer.come_back()
        report = await harness.report(syncing)
        assert (report.state, report.attempt) == (SyncState.DONE, 2)
        assert report.carried_bytes > 0, "the peer had only bytes of another share"

    played(tmp_path, scene)


def test_all_engines_are_rolled_back_after_the_last_attempt(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        await first(harness)
        for engine in harness.engines.values():
            engine.fails = 1
        report = await harness.report(harness.publish(2))
        assert (report.state, report.code) == (SyncState.ABORTED, "install_failed")
        assert "out of memory" in report.detail
        harness.check_one_version(1)
        assert {version for peer in harness.peers.values() for version in peer.folders} == {1}  # space is free again

    played(tmp_path, scene, attempts=1)


def test_engine_with_partial_weights_gets_no_requests(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        await first(harness)
        harness.engine("e0").fails, harness.engine("e0").spoils = 3, True  # neither the new nor the old version loads
        report = await harness.report(harness.publish(2))
        assert report.state is SyncState.ABORTED
        assert {e.engine: e.state for e in report.engines}[EngineId("e0")] is EngineSync.QUARANTINED
        assert harness.engine("e0").weights is None
        assert not harness.fence.state.serves(EngineId("e0"))
        assert harness.fence.state.serves(EngineId("e1"))
        await harness.pass_time(20.0)
        harness.check_one_version(1)

    played(tmp_path, scene, attempts=1)


def test_bytes_with_wrong_checksums_are_sent_again(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        await first(harness)
        harness.peer("p1").rots = 1
        report = await harness.report(harness.publish(2))
        assert (report.state, report.mended_edges > 0) == (SyncState.DONE, True), report
        assert any("did not match" in note for note in report.notes)
        harness.check_one_version(2)
        orders = [order for peer in harness.peers.values() for order in peer.orders if isinstance(order, CarryEdges)]
        mended = [edge for order in orders for edge in order.edges if ".m" in edge.id]
        assert {edge.phase for edge in mended} == {"B"}, "inside one PoD"
        harness.peer("p1").rots = 1000
        report = await harness.report(harness.publish(3))
        assert (report.state, report.code) == (SyncState.ABORTED, "corrupt")
        harness.check_one_version(2)

    played(tmp_path, scene)


def test_sync_waits_for_an_engine_whose_peer_is_briefly_detached(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        await first(harness)
        harness.peer("p1").die()
        sync_id = harness.publish(2)
        await harness.pass_time(1.0)
        assert harness.sync.report(sync_id).detail == "waiting: e1 may attach again"
        harness.peer("p1").come_back()
        await harness.pass_time(0.5)
        assert harness.sync.report(sync_id).detail == ""
        report = await harness.report(sync_id)
        assert (report.code, report.attempt) == ("done", 1)

    played(tmp_path, scene)


def test_peer_with_a_new_address_after_circuits_receives_its_bytes_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Circuits that differ from the plan cause a new plan with the peers' current state."""

    async def scene(harness: Harness) -> None:
        await first(harness)
        p1, introduced = harness.peer("p1"), harness.peer("p1").peer

        async def bring_up(self: PacketNetwork, *_: Any, **__: Any) -> BroughtUp:
            p1.die()
            monkeypatch.setattr(p1, "peer", lambda: replace(introduced(), transports={"tcp": "p1:2"}))
            p1.come_back()
            return BroughtUp(self.network(), ("p1 is connected in another way",))

        monkeypatch.setattr(PacketNetwork, "bring_up", bring_up)
        report = await harness.report(harness.publish(2))
        assert (report.code, report.attempt) == ("done", 1)
        edges = [e for order in p1.orders if isinstance(order, CarryEdges) for e in order.edges]
        assert {e.address for e in edges if e.dst == "p1" and e.id.startswith(report.id)} == {"p1:2"}

    played(tmp_path, scene)


def test_peer_that_returns_is_ordered_its_running_edges_again(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        def ordered(peer: FakePeer) -> set[str]:
            orders = [order for order in peer.orders if isinstance(order, CarryEdges) and order.version == 2]
            return {edge.id for order in orders for edge in order.edges}

        await first(harness)
        p1 = harness.peer("p1")
        p1.stalls = True
        sync_id = harness.publish(2)
        while not (before := ordered(p1)):
            await harness.pass_time(0.1)
        p1.die()
        p1.orders.clear()
        p1.stalls = False
        p1.come_back()
        assert (await harness.report(sync_id)).state is SyncState.DONE
        assert ordered(p1) >= before
        harness.check_one_version(2)

    played(tmp_path, scene)


def test_sync_aborts_if_a_peer_makes_no_progress(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        await first(harness)
        harness.peer("p1").stalls = True
        report = await harness.report(harness.publish(2), within_s=300.0)
        assert (report.state, report.code) == (SyncState.ABORTED, "bytes_lost")
        harness.check_one_version(1)
        harness.peer("p1").stalls = False
        assert (await harness.report(harness.publish(2))).state is SyncState.DONE

    played(tmp_path, scene, attempts=1)


def test_engine_with_another_probe_answer_is_quarantined(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        await first(harness)
        harness.engine("e2").odd = True
        report = await harness.report(harness.publish(2))
        assert (report.state, report.code, report.attempt) == (SyncState.DONE, "some_quarantined", 2)
        assert any("probe_differs" in note for note in report.notes)
        await harness.pass_time(30.0)
        assert set(harness.sync.book.fleet.quarantined) == {"e2"}  # repairs fail, because its answer still differs
        assert not harness.fence.state.serves(EngineId("e2"))
        harness.engine("e2").odd = False
        await harness.pass_time(70.0)
        harness.check_one_version(2)

    played(tmp_path, scene)


def test_sync_aborts_if_engines_differ_from_the_trainers_expected_tokens(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        await first(harness)
        report = await harness.report(harness.publish(2, probe=(5, 6), expected=(7, 7)))
        assert (report.state, report.code) == (SyncState.ABORTED, "probe_differs")
        assert "probe_differs" in " ".join(report.notes)
        harness.check_one_version(1)
        assert (await harness.report(harness.publish(3, probe=(5, 6), expected=(3, 3)))).state is SyncState.DONE

    played(tmp_path, scene)


def test_failed_first_version_quarantines_changed_engines(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        harness.engine("e0").alive = False
        await harness.pass_time(0.5)
        harness.engine("e1").fails = 1
        report = await harness.report(harness.publish(1))
        assert (report.state, report.code) == (SyncState.ABORTED, "install_failed")
        assert set(harness.sync.book.fleet.quarantined) == {"e2"}, "e1 still has its initial weights"
        assert harness.fence.state.lease is None
        harness.peer("p0").engine_restarted(harness.engine("e0"))
        assert [e for e in harness.engines if harness.fence.state.serves(e)] == ["e0", "e1"]
        assert (await harness.report(harness.publish(1))).code == "done"
        harness.check_one_version(1)

    played(tmp_path, scene, attempts=1)


def test_fleet_that_cannot_be_paused_keeps_its_version(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        await first(harness)
        harness.fence.refuses = 5
        report = await harness.report(harness.publish(2))
        assert (report.state, report.code) == (SyncState.ABORTED, "not_quiet")
        harness.check_one_version(1)

    played(tmp_path, scene)


@pytest.mark.parametrize("closes", [True, False])
def test_lease_expires_while_engines_are_changed(tmp_path: Path, closes: bool) -> None:
    """Peers pause these engines if the pause barrier cannot be closed again."""

    async def scene(harness: Harness) -> None:
        await first(harness)
        sync_id = harness.publish(2)
        await harness.until(sync_id, SyncState.INSTALLING)
        lease = harness.fence.state.lease
        assert lease is not None
        state = harness.fence._state
        harness.fence._state = type(state)(opened=state.opened, versions={}, newest=None)  # as when it expires
        harness.fence.refuses = 0 if closes else 1
        harness.peer("p0").orders.clear()
        report = await harness.report(sync_id)
        assert report.state is SyncState.DONE  # in the second attempt
        assert report.attempt == 2
        assert "the lease of the pause barrier expired" in " ".join(report.notes)
        assert any("could not be closed again: e0 is not quiet" in note for note in report.notes) is not closes
        rests = [order.at_rest for order in harness.peer("p0").orders if isinstance(order, RestEngine)]
        assert rests == ([] if closes else [True, False])
        harness.check_one_version(2)

    played(tmp_path, scene)


def test_restarted_and_late_engines_get_the_version(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        late = harness.engines.pop(EngineId("e2"))
        harness.peer("p2").engines.clear()
        await first(harness)
        harness.peer("p1").engine_restarted(harness.engine("e1"))
        assert not harness.fence.state.serves(EngineId("e1"))
        harness.peer("p0").folders.clear()
        harness.engines[late.id] = late
        harness.peer("p2").engines.append(late)
        harness.peer("p2").introduce()
        await harness.pass_time(30.0)
        harness.check_one_version(1)

    played(tmp_path, scene)


def test_engines_are_repaired_one_after_another_without_delay(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        await first(harness)
        for engine in harness.engines:
            harness.restart(engine)
        harness.counting, began_s = True, harness.clock.now_s()
        while not all(harness.fence.state.serves(engine) for engine in harness.engines):
            await harness.clock.advance(0.05)
        assert harness.clock.now_s() - began_s < 2.0, "0.6 s each"
        installs = [what for what in harness.points if "install" in what]
        assert installs == [f"p{n} {what} install" for n in range(3) for what in ("is ordered", "has done")]

    played(tmp_path, scene)


@pytest.mark.parametrize("stray", [1, 3, 1000])
def test_repair_drains_requests_that_bypassed_the_gateway(tmp_path: Path, stray: int) -> None:
    """Requests finish with their original weights, or are aborted after several attempts."""

    async def scene(harness: Harness) -> None:
        await first(harness)
        harness.restart("e1")
        harness.engine("e1").stray = stray
        await harness.pass_time(0.5)
        assert harness.engine("e1").weights == (1 if stray == 1 else -1)
        await harness.settled()
        harness.check_one_version(1)
        rests = [order for order in harness.peer("p1").orders if isinstance(order, RestEngine) and order.at_rest]
        assert [order.ends for order in rests] == [False] * min(stray, 6) + [True] * (stray > 6)
        assert harness.clock.now_s() - START_S < 200

    played(tmp_path, scene)


def test_engine_with_a_request_during_its_repair_is_resumed(tmp_path: Path) -> None:
    """A running request blocks the probe; the complete weights serve it, and the next attempt finds the engine idle."""

    async def scene(harness: Harness) -> None:
        await first(harness)
        harness.restart("e1")
        engine = harness.engine("e1")
        while engine.weights != 1:
            await harness.clock.advance(0.05)
        engine.stray = 1
        await harness.pass_time(0.5)
        assert not harness.fence.state.serves(engine.id)
        assert not engine.resting
        await harness.settled()
        harness.check_one_version(1)

    played(tmp_path, scene)


def test_peers_pause_engines_without_a_gateway(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        harness.fence.manned = False
        await first(harness)
        assert [order.at_rest for order in harness.peer("p0").orders if isinstance(order, RestEngine)] == [True, False]
        harness.engine("e1").fails = 1
        report = await harness.report(harness.publish(2))
        assert report.code == "install_failed"
        harness.check_one_version(1)
        rests = [order.at_rest for order in harness.peer("p0").orders if isinstance(order, RestEngine)]
        assert rests == [True, False, True, True, False], "paused before each change of weights"

    played(tmp_path, scene, attempts=1)


def test_version_with_next_pause_installs_behind_another_holders_barrier(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        await first(harness)
        sync_id = harness.publish(2, install="next_pause")
        await harness.pass_time(30.0)
        assert harness.sync.report(sync_id).state is SyncState.PREPARED
        lease = harness.fence.close_by("somebody")
        asked = harness.task(harness.sync.before_resume(harness.clock.now_s() + 60.0))
        await harness.pass_time(5.0)
        assert asked.result() == (2, ())
        assert harness.fence.state.versions == dict.fromkeys(harness.engines, 2), "reported before the barrier opens"
        harness.fence._put(harness.fence.state.resumed(lease, harness.clock.now_s(), harness.now(), 2, ()))
        report = await harness.report(sync_id)
        assert report.state is SyncState.DONE
        harness.check_one_version(2)
        assert SyncPhase.NEXT_PAUSE in [each.phase for each in report.phases]

    played(tmp_path, scene)


def test_borrowed_barrier_opens_with_the_old_version_after_a_failure(
    tmp_path: Path,
) -> None:
    async def scene(harness: Harness) -> None:
        await first(harness)
        harness.engine("e0").fails = 1
        harness.publish(2, install="next_pause")
        await harness.pass_time(10.0)
        lease = harness.fence.close_by("somebody", 20.0)
        asked = harness.task(harness.sync.before_resume(harness.clock.now_s() + 60.0))
        await harness.pass_time(5.0)
        assert asked.result() == (None, ())
        assert harness.fence.state.versions == dict.fromkeys(harness.engines, 1), "they were rolled back"
        harness.fence._put(harness.fence.state.resumed(lease, harness.clock.now_s(), harness.now(), None, ()))
        await harness.pass_time(5.0)
        assert harness.sync.report(version=2).state is SyncState.PREPARED  # the second attempt waits for the next pause
        lease = harness.fence.close_by("somebody", 20.0)
        harness.task(harness.sync.before_resume(harness.clock.now_s() + 60.0))
        await harness.clock.advance(0.15)  # during the installation
        harness.fence._put(harness.fence.state.resumed(lease, harness.clock.now_s(), harness.now(), None, ()))
        await harness.pass_time(20.0)
        harness.check_one_version(1)

    played(tmp_path, scene)


@pytest.mark.parametrize("where", ["go_back", "resume"])
def test_internal_error_does_not_block_the_holder_of_a_borrowed_barrier(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wrong(*_: object) -> None:
        raise KeyError("a defect")

    async def scene(harness: Harness) -> None:
        await first(harness)
        harness.publish(2, install="next_pause")
        await harness.pass_time(10.0)
        harness.engine("e0").fails = int(where == "go_back")
        harness.fence.close_by("somebody")
        with monkeypatch.context() as patched:
            patched.setattr(f"orchestrrl.weights.controller.installing.Installing.{where}", wrong)
            asked = harness.task(harness.sync.before_resume(harness.clock.now_s() + 60.0))
            await harness.pass_time(2.0)
        assert asked.result() == (None if where == "go_back" else 2, ())

    played(tmp_path, scene)


@pytest.mark.parametrize(
    ("where", "is_restarted"),
    [
        ("installing.Installing.go_back", False),
        ("installing.Installing.go_back", True),
        ("controller.PeerAssignments.run", False),
        ("controller.EngineRepairs.one", False),
    ],
)
def test_failed_work_is_retried_every_tenth_of_the_patience(
    tmp_path: Path, where: str, is_restarted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers a rollback in its own run, a rollback by a restarted daemon, the assignment of engines, and repairs."""
    real = attrgetter(where)(controller)
    at_s: list[float] = []

    async def scene(harness: Harness) -> None:
        async def not_yet(*arguments: Any) -> Any:
            at_s.append(harness.clock.now_s())
            if len(at_s) <= 2:
                raise Retryable("not yet", 1.0) if "go_back" in where else KeyError("a defect")
            return await real(*arguments)

        await first(harness)
        monkeypatch.setattr(f"orchestrrl.weights.controller.{where}", not_yet)
        if where == "controller.EngineRepairs.one":
            harness.restart("e1")
        else:
            if where == "installing.Installing.go_back" and not is_restarted:
                harness.engine("e0").fails = 1
            else:
                harness.when("p1 has done install", harness.kill)
            harness.publish(2)
        await harness.pass_time(5.0)
        if harness.daemon is None:
            harness.start()
        await harness.settled()
        harness.check_one_version(1)
        assert [after_s - before_s for before_s, after_s in pairwise(at_s)] == pytest.approx([0.5, 0.5])
        assert harness.sync.defects == (0 if "go_back" in where else 2)

    played(tmp_path, scene, attempts=1)


def test_version_published_during_a_repair_takes_precedence(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        await first(harness)
        harness.restart("e1")
        harness.when("p1 is ordered check", lambda: harness.publish(2))  # type: ignore[arg-type]
        await harness.pass_time(1.0)
        assert (await harness.report(harness.publish(2))).code == "done"
        harness.check_one_version(2)

    played(tmp_path, scene)


def test_newer_version_replaces_a_waiting_one_and_install_now_installs_it(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        await first(harness)
        with pytest.raises(Permanent, match="no version is waiting"):
            harness.sync.install_now("", "")
        two = harness.publish(2, install="next_pause")
        await harness.pass_time(10.0)
        three = harness.publish(3, install="next_pause")
        await harness.pass_time(10.0)
        assert harness.sync.report(two).state is SyncState.SUPERSEDED
        harness.sync.install_now(three, "now")
        assert (await harness.report(three)).state is SyncState.DONE
        harness.check_one_version(3)

    played(tmp_path, scene)


def test_newest_of_several_queued_versions_is_synced(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        await first(harness)
        two = harness.publish(2)
        await harness.until(two, SyncState.INSTALLING)
        three, four = harness.publish(3), harness.publish(4)
        report = harness.sync.report(three)
        assert (report.state, report.detail) == (SyncState.SUPERSEDED, "version 4 was published")
        assert (await harness.report(two)).state is SyncState.DONE
        await harness.until(four, SyncState.INSTALLING)
        five = harness.publish(5)
        harness.sync.abort(five, "enough")
        report = harness.sync.report(five)
        assert (report.state, report.code, report.detail) == (SyncState.ABORTED, "operator", "enough")
        assert (await harness.report(four)).state is SyncState.DONE
        await harness.pass_time(2.0)
        harness.check_one_version(4)

    played(tmp_path, scene)


def test_unreachable_peer_is_not_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_way(*_: object, **__: object) -> None:
        raise ProblemFaults(["p1: has no transport that the trainer's peer has"])

    async def scene(harness: Harness) -> None:
        await first(harness)
        monkeypatch.setattr("orchestrrl.weights.controller.carrying.plan_sync", no_way)
        report = await harness.report(harness.publish(2))
        assert (report.state, report.code, report.attempt) == (SyncState.ABORTED, "unreachable", 1)
        assert report.detail == "p1: has no transport that the trainer's peer has"
        harness.check_one_version(1)

    played(tmp_path, scene)


def test_internal_error_before_the_commit_aborts_without_retry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def wrong(*_: object) -> None:
        raise KeyError("a defect")

    async def scene(harness: Harness) -> None:
        await first(harness)
        monkeypatch.setattr("orchestrrl.weights.controller.installing.Installing.install", wrong)
        report = await harness.report(harness.publish(2))
        assert (report.state, report.code, report.attempt) == (SyncState.ABORTED, "internal", 1)
        assert "unexpected exception: KeyError" in report.detail
        harness.check_one_version(1)

    played(tmp_path, scene)


def test_install_now_also_applies_to_the_next_attempt(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        await first(harness)
        sync_id = harness.publish(2, install="next_pause")
        await harness.pass_time(10.0)
        harness.engine("e1").fails = 1
        harness.sync.install_now(sync_id, "now")
        report = await harness.report(sync_id)
        assert (report.state, report.attempt) == (SyncState.DONE, 2)
        await harness.settled()
        harness.check_one_version(2)

    played(tmp_path, scene)


def test_operator_can_abort_before_the_commit(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        await first(harness)
        for version, state in enumerate([SyncState.CARRYING, SyncState.FENCING, SyncState.INSTALLING], 2):
            sync_id = harness.publish(version)
            await harness.until(sync_id, state)
            harness.sync.abort(sync_id, "enough")
            report = await harness.report(sync_id)
            assert (report.state, report.code, report.detail) == (SyncState.ABORTED, "operator", "enough")
            assert "attempt 1: operator: enough" in report.notes
            assert not any(peer.edges for peer in harness.peers.values()), "no edges are left"
            harness.check_one_version(1)
        with pytest.raises(Permanent, match="has already ended with state aborted"):
            harness.sync.abort(sync_id, "again")

    played(tmp_path, scene)


def test_repeated_publication_returns_the_same_sync_and_other_content_is_rejected(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        await first(harness)
        two = harness.publish(2, began_s=START_S)
        assert harness.publish(2, began_s=START_S + 1) == two
        with pytest.raises(Permanent, match="already syncs version 2 with other content"):
            harness.publish(2, run="another start")
        await harness.report(two)
        assert harness.publish(2) == two
        with pytest.raises(Permanent, match="is already committed with other content"):
            harness.publish(2, run="another start")
        assert (await harness.report(harness.publish(1, run="back to a checkpoint"))).state is SyncState.DONE
        harness.check_one_version(1)

    played(tmp_path, scene)


def test_ranks_must_agree_and_publish_in_time(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        await harness.pass_time(0.5)
        boxes = {tensor.name: (tensor.whole,) for tensor in TENSORS}
        a, b = TENSORS
        word = Publication(1, 0, 2, harness.trainer.id, (a,), {"a": boxes["a"]})
        sync_id = harness.sync.publish(word)
        other = TensorMeta("a", "F32", (4, 4))
        with pytest.raises(ProblemFaults) as refused:
            harness.sync.publish(Publication(1, 1, 3, harness.trainer.id, (other,), {}, backend="pigeons"))
        assert len(refused.value.faults) == 4
        assert harness.sync.report(sync_id).published == (0,)
        with pytest.raises(ProblemFaults, match="has published version 1 with other content"):
            harness.sync.publish(Publication(1, 0, 2, harness.trainer.id, (b,), {"b": boxes["b"]}))
        assert harness.sync.publish(Publication(1, 1, 2, harness.trainer.id, (b,), {"b": boxes["b"]})) == sync_id
        assert (await harness.report(sync_id)).state is SyncState.DONE
        harness.check_one_version(1)
        late = harness.sync.publish(Publication(2, 0, 2, harness.trainer.id, (a,), {"a": boxes["a"]}))
        report = await harness.report(late, within_s=200.0)
        assert (report.state, report.code) == (SyncState.ABORTED, "trainer_lost")

    played(tmp_path, scene)


def test_operator_pause_holds_a_sync_and_is_reported(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        await first(harness)
        assert harness.daemon is not None
        pause_registry: PauseRegistry = harness.pause_registry
        pause_registry.pause(PauseScope.SYNC, "look first")
        sync_id = harness.publish(2)
        await harness.pass_time(30.0)
        report = harness.sync.report(sync_id)
        assert report.state is SyncState.PLANNING
        assert "look first" in report.detail
        pause_registry.resume(PauseScope.SYNC, "")
        assert (await harness.report(sync_id)).state is SyncState.DONE
        sync_id = harness.publish(3, install="next_pause")
        await harness.pass_time(10.0)
        pause_registry.pause(PauseScope.SYNC, "not now")
        harness.sync.install_now(sync_id, "")
        await harness.pass_time(5.0)
        report = harness.sync.report(sync_id)
        assert report.state is SyncState.PREPARED, "engines are not paused for it"
        assert "not now" in report.detail
        pause_registry.resume(PauseScope.SYNC, "")
        assert (await harness.report(sync_id)).state is SyncState.DONE

    played(tmp_path, scene)
