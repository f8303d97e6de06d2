"""A successful sync, and the KV transfer bandwidth during it."""

from pathlib import Path

import pytest
from weights_harness import Harness, played

from orchestrrl.core.journal.store import EntryKind
from orchestrrl.weights.controller.reports import EngineSync, SyncPhase, SyncState
from planner.sync_tree.network import LeftForMoves


def test_version_reaches_every_engine_and_requests_resume(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        await harness.pass_time(0.5)
        assert harness.sync.status().sync is None
        for version in (1, 2, 3):
            report = await harness.report(harness.publish(version))
            assert (report.state, report.code) == (SyncState.DONE, "done"), report
            harness.check_one_version(version)
            assert {each.state for each in report.engines} == {EngineSync.SERVES}
            assert [each.install_s for each in report.engines] == pytest.approx([0.2, 0.2, 0.2])
            phases = [each.phase for each in report.phases]
            for phase in (SyncPhase.PLAN, SyncPhase.PHASE_B, SyncPhase.FENCE, SyncPhase.INSTALL, SyncPhase.RESUME):
                assert phase in phases
            assert all(each.ended_s is not None for each in report.phases)
            assert report.bytes == 192
            assert report.carried_bytes == 3 * 192
            assert report.slowest
            status = harness.sync.status()
            assert (status.committed, status.sync, status.quarantined) == (version, report, ())
        assert harness.daemon is not None
        entries = harness.daemon.journal.since(0, (EntryKind.SYNC_STEP,), limit=99)
        bodies = [(entry.subject, entry.body) for entry in entries if entry.body["step"] != "tear down"]
        assert [(sync_id, body["step"], body["state"], body["engines"]) for sync_id, body in bodies] == [
            (report.id, step, state, ["e0", "e1", "e2"] if step == "install" else [])
            for report in reversed(harness.sync.history(0))
            for step in ("choose", "prepare", "fence", "install", "commit", "resume", "keep")
            for state in ("running", "done")
        ]
        await harness.pass_time(2.0)
        for peer in harness.peers.values():
            assert sorted(peer.folders) == [3]
        assert [(each.id, each.attached, each.engines, each.versions) for each in harness.sync.status().peers] == [
            *((f"p{n}", True, (f"e{n}",), (3,)) for n in range(3)),
            ("t", True, (), (3,)),
        ]

    played(tmp_path, scene)


def test_kv_transfers_share_engine_nics_with_a_running_sync(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        assert harness.sync.left_for_moves == LeftForMoves()
        sync_id = harness.publish(1)
        while harness.sync.left_for_moves == LeftForMoves():
            assert not harness.sync.report(sync_id).over
            await harness.clock.advance(0.05)
        assert harness.sync.report(sync_id).state is SyncState.CARRYING
        assert harness.sync.left_for_moves == LeftForMoves(1 / 3, ("weight sync",))
        await harness.report(sync_id)
        assert harness.sync.left_for_moves == LeftForMoves()

    played(tmp_path, scene)
