"""The good way of a version, and who may say what of it."""

from pathlib import Path

from weights_house import House, played

from orchestrrl.sync_reports import EngineSync, SyncPhase, SyncState


def test_a_version_reaches_every_engine_and_requests_go_on_by_it(tmp_path: Path) -> None:
    async def scene(house: House) -> None:
        await house.pass_time(0.5)
        for version in (1, 2, 3):
            report = await house.report(house.publish(version))
            assert (report.state, report.code) == (SyncState.DONE, "done"), report
            house.check_one_version(version)
            assert {each.state for each in report.engines} == {EngineSync.SERVES}
            phases = [each.phase for each in report.phases]
            for phase in (SyncPhase.PLAN, SyncPhase.PHASE_B, SyncPhase.FENCE, SyncPhase.INSTALL, SyncPhase.RESUME):
                assert phase in phases
            assert all(each.ended_s is not None for each in report.phases)
            assert report.bytes == 192
            assert report.carried_bytes == 3 * 192
            assert report.slowest
        await house.pass_time(2.0)
        for peer in house.peers.values():
            assert sorted(peer.folders) == [3]

    played(tmp_path, scene)
