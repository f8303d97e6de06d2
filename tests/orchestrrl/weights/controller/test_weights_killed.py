"""Daemon, peers, engines and trainer die at every point of a sync; after restarts the fleet has one version.

The harness checks at each point that no engine serves a version other than the one at the pause barrier.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from fabric_harness import Killed
from weights_harness import Harness, played

from orchestrrl.core.errors import OrchestrRLError
from orchestrrl.weights.controller.reports import SyncState

LONG_S = 180.0  # limit until everything has settled


async def _second_version(harness: Harness, at: int | None, act: Callable[[Harness], None]) -> list[str]:
    """Publish version 2 in a fleet with version 1, and call `act` at point `at`; return the points passed."""
    await harness.pass_time(0.5)
    await harness.report(harness.publish(1))
    await harness.pass_time(2.0)
    harness.check_one_version(1)
    harness.counting = True
    if at is not None:
        harness.at_point[at] = lambda: act(harness)
    with suppress(Killed):
        harness.publish(2)
    for _ in range(60):
        await harness.pass_time(0.25)
        if harness.daemon is None or harness.sync.history(1)[0].over:
            break
    return harness.points


def _points(tmp_path: Path) -> list[str]:
    async def scene(harness: Harness) -> list[str]:
        points = await _second_version(harness, None, lambda _: None)
        harness.check_one_version(2)
        return points

    points: list[str] = played(tmp_path, scene)
    return points


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    found = _points(tmp_path_factory.mktemp("points"))
    assert len(found) > 50
    return found


async def _ends_in_one_version(harness: Harness) -> None:
    for _ in range(round(LONG_S / 5)):
        await harness.pass_time(5.0)
        fleet = harness.sync.book.fleet
        if all(r.over for r in harness.sync.history(0)) and not fleet.quarantined and harness.fence.state.lease is None:
            break
    await harness.pass_time(5.0)
    done = [report.version for report in harness.sync.history(0) if report.state is SyncState.DONE]
    harness.check_one_version(max(done))


def test_daemon_killed_at_any_point_ends_with_one_version(tmp_path: Path, points: list[str]) -> None:
    ends, wrong = set(), []
    for at, what in enumerate(points):
        folder = tmp_path / str(at)
        folder.mkdir()

        async def scene(harness: Harness, at: int = at) -> None:
            await _second_version(harness, at, Harness.kill)
            if harness.daemon is not None:
                harness.kill()
            harness.counting = False
            await harness.pass_time(3.0)
            harness.start()
            await _ends_in_one_version(harness)
            ends.add(harness.sync.report().state)
            # The next version must succeed.
            report = await harness.report(harness.publish(3))
            assert report.state is SyncState.DONE
            harness.check_one_version(3)

        try:
            played(folder, scene)
        except (AssertionError, OrchestrRLError, Killed) as failure:
            wrong.append(f"the daemon is killed at {at}: {what}: {failure!r}")
    assert not wrong, "\n".join(wrong)
    assert ends == {SyncState.DONE, SyncState.ABORTED}


def _peer_for(seconds: float, *names: str) -> Callable[[Harness], None]:
    def act(harness: Harness) -> None:
        for name in names:
            harness.peer(name).die()
            harness.later(seconds, harness.peer(name).come_back)

    return act


def _engine_for(seconds: float, name: str) -> Callable[[Harness], None]:
    def act(harness: Harness) -> None:
        engine = harness.engine(name)
        engine.alive = False
        peer = next(peer for peer in harness.peers.values() if engine in peer.engines)
        harness.later(seconds, lambda: peer.engine_restarted(engine))

    return act


DEATHS = {
    "a peer for a moment": _peer_for(1.0, "p1"),
    "a peer for longer than it is waited for": _peer_for(12.0, "p1"),
    "two peers": _peer_for(3.0, "p0", "p2"),
    "the trainer's peer for a moment": _peer_for(2.0, "t"),
    "the trainer's peer for good": _peer_for(1e6, "t"),
    "an engine": _engine_for(3.0, "e1"),
    "a peer and its engine": lambda harness: (_engine_for(4.0, "e1")(harness), _peer_for(2.0, "p1")(harness))[0],
}


@pytest.mark.parametrize("death", DEATHS)
def test_other_process_killed_at_any_point_ends_with_one_version(tmp_path: Path, points: list[str], death: str) -> None:
    wrong = []
    ends = set()
    for at, what in list(enumerate(points))[sorted(DEATHS).index(death) % 2 :: 2]:
        folder = tmp_path / str(at)
        folder.mkdir()

        async def scene(harness: Harness, at: int = at) -> None:
            await _second_version(harness, at, DEATHS[death])
            await _ends_in_one_version(harness)
            ends.add(harness.sync.report(version=2).state)

        try:
            played(folder, scene)
        except (AssertionError, OrchestrRLError, Killed) as failure:
            wrong.append(f"{death} dies at {at}: {what}: {failure!r}")
    assert not wrong, "\n".join(wrong)
    assert SyncState.DONE in ends
