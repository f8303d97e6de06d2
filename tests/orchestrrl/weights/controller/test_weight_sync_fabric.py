"""A weight sync over an optical fabric: the sync controller and the fabric coordinator together, in virtual time."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import weights_harness
from fabric_harness import GEN, harness
from weights_harness import Harness

from orchestrrl.core.operator_pauses import PauseScope
from orchestrrl.daemon.weight_circuits import CircuitsForSyncs, Peers
from orchestrrl.weights.controller.reports import SyncPhase, SyncReport, SyncState
from orchestrrl.weights.model import Peer, PeerLocation

GPUS: Mapping[str, int] = {"t": 0, "p0": 16, "p1": 19, "p2": 24}  # one training PoD; two generating PoDs


async def brought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paused: bool) -> tuple[SyncReport, bool, bool]:
    """Return the report, whether engines got their circuits back, and whether the core's were the sync's meanwhile."""
    async with harness(tmp_path) as fabric:
        await fabric.at_boundary(GEN)
        before = fabric.up()
        tors = [tor.id for tor in fabric.site.tors]

        def circuits(_: Any, peers: Peers) -> CircuitsForSyncs:
            return CircuitsForSyncs(fabric.coordinator, peers, packet_tors=tors, packet_gbps=10.0)

        monkeypatch.setattr(weights_harness, "PacketNetwork", circuits)
        (tmp_path / "weights").mkdir()
        weights = Harness(tmp_path / "weights")
        weights.clock = fabric.clock
        for name, gpu in GPUS.items():
            fake = weights.peer(name)

            def introduced(gpu: int = gpu, told: Any = fake.peer) -> Peer:
                made: Peer = told()
                return replace(made, place=PeerLocation(gpu=gpu))

            fake.peer = introduced  # type: ignore[method-assign]
        if paused:
            fabric.pause_registry.pause(PauseScope.FABRIC, "not today", 0.0)
        weights.start()
        try:
            await weights.pass_time(0.5)
            id = weights.publish(1)
            had_circuits = False
            while not (report := weights.sync.report(id)).over:
                await fabric.pass_time(0.02)
                joined = {fabric.coordinator.site.cabling.ends(each) for each in fabric.up(lit=True)}
                had_circuits |= {("gen0", "train0"), ("gen1", "train0")} <= joined
            weights.check_one_version(1)
            return report, fabric.up() >= before, had_circuits
        finally:
            weights.kill()
            for peer in weights.peers.values():
                peer.die()


async def test_sync_brings_up_circuits_and_restores_those_of_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, restored, had_circuits = await brought(tmp_path, monkeypatch, paused=False)
    assert (report.state, report.code) == (SyncState.DONE, "done")
    phases = [each.phase for each in report.phases]
    carried = (SyncPhase.WINDOW, SyncPhase.CIRCUITS, SyncPhase.PHASE_A, SyncPhase.PHASE_B)
    ways = (*carried, SyncPhase.TEAR_DOWN, SyncPhase.INSTALL)
    assert [phase for phase in phases if phase in ways] == list(ways)
    assert had_circuits, (report.notes, report.slowest)
    assert restored
    assert "generation: committed (committed)" in report.notes


async def test_sync_uses_the_packet_network_if_circuits_may_not_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, restored, had_circuits = await brought(tmp_path, monkeypatch, paused=True)
    assert (report.state, report.code) == (SyncState.DONE, "done")
    assert restored
    assert not had_circuits
    assert any("joined only by the packet side" in note for note in report.notes)
