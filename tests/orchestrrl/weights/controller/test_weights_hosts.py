"""Engines with ranks on several hosts: one peer installs, and the peers of all hosts must have the bytes."""

from pathlib import Path

from weights_harness import FakePeer, Harness, played

from orchestrrl.weights.controller.reports import SyncState
from orchestrrl.weights.model import (
    PeerRole,
)
from orchestrrl.weights.orders import InstallVersion
from planner.model import EngineId, PeerId

E1 = EngineId("e1")


def _other_host(harness: Harness, folder: str = "") -> FakePeer:
    """Create, without attaching it, a peer on another host with ranks of e1."""
    peer = FakePeer(harness, PeerId("p1b"), PeerRole.ENGINE, ranks_of=(E1,), folder=folder)
    harness.peers[peer.id] = peer
    return peer


def test_all_hosts_have_the_bytes_before_the_installation(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        other = _other_host(harness)
        other.attach()
        lacked: list[bool] = []
        harness.when("p1 is ordered install", lambda: lacked.append(any(other.folders[1].missing.values())))
        assert (await harness.report(harness.publish(1))).state is SyncState.DONE
        harness.check_one_version(1)
        assert lacked == [False]
        assert not [order for order in other.orders if isinstance(order, InstallVersion)]

    played(tmp_path, scene)


def test_engine_is_quarantined_while_one_of_its_hosts_is_detached(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        other = _other_host(harness)
        other.attach()
        await harness.report(harness.publish(1))
        other.die()
        report = await harness.report(harness.publish(2))
        assert report.state is SyncState.DONE
        assert "p1b, of another of its hosts, is not attached" in harness.sync.book.fleet.quarantined[E1]
        assert not harness.fence.state.serves(E1)
        other.come_back()
        await harness.settled()
        harness.check_one_version(2)
        assert not any(other.folders[2].missing.values())

    played(tmp_path, scene)


def test_host_that_dies_during_a_sync_affects_only_its_engine(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        other = _other_host(harness)
        other.attach()
        await harness.report(harness.publish(1))
        harness.when("p1b is ordered carry", other.die)
        report = await harness.report(harness.publish(2))
        assert (report.state, list(harness.sync.book.fleet.quarantined)) == (SyncState.DONE, [E1])
        other.come_back()
        await harness.settled()
        harness.check_one_version(2)

    played(tmp_path, scene)


def test_hosts_with_different_folders_are_reported_with_the_remedy(tmp_path: Path) -> None:
    async def scene(harness: Harness) -> None:
        _other_host(harness, "/dev/shm/other").attach()
        await harness.report(harness.publish(1))
        why = harness.sync.book.fleet.quarantined[E1]
        assert "start its hosts' peers with the same --folder (p1 has , p1b has /dev/shm/other)" in why

    played(tmp_path, scene)
