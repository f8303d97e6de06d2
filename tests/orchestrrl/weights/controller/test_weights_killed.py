"""Daemon, peers, engines and trainer die at every point of a sync; what comes back ends in one version.

The house checks at each of these points that no engine serves by another version than the pause barrier says.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from fabric_house import Killed
from weights_house import House, played

from orchestrrl.core.errors import OrchestrRLError
from orchestrrl.weights.controller.reports import SyncState

LONG_S = 180.0  # by which all is settled


async def _second_version(house: House, at: int | None, act: Callable[[House], None]) -> list[str]:
    """Version 1 is the fleet's, and 2 is on its way when it happens. Daemons come back after a moment."""
    await house.pass_time(0.5)
    await house.report(house.publish(1))
    await house.pass_time(2.0)
    house.check_one_version(1)
    house.counting = True
    if at is not None:
        house.at_point[at] = lambda: act(house)
    with suppress(Killed):
        house.publish(2)
    for _ in range(60):
        await house.pass_time(0.25)
        if house.daemon is None or house.sync.history(1)[0].over:
            break
    return house.points


def _points(tmp_path: Path) -> list[str]:
    async def scene(house: House) -> list[str]:
        points = await _second_version(house, None, lambda _: None)
        house.check_one_version(2)
        return points

    points: list[str] = played(tmp_path, scene)
    return points


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    found = _points(tmp_path_factory.mktemp("points"))
    assert len(found) > 50
    return found


async def _ends_in_one_version(house: House) -> None:
    for _ in range(round(LONG_S / 5)):
        await house.pass_time(5.0)
        fleet = house.sync.book.fleet
        if all(r.over for r in house.sync.history(0)) and not fleet.quarantined and house.fence.state.lease is None:
            break
    await house.pass_time(5.0)
    done = [report.version for report in house.sync.history(0) if report.state is SyncState.DONE]
    house.check_one_version(max(done))


def test_the_daemon_is_killed_at_every_point(tmp_path: Path, points: list[str]) -> None:
    ends, wrong = set(), []
    for at, what in enumerate(points):
        folder = tmp_path / str(at)
        folder.mkdir()

        async def scene(house: House, at: int = at) -> None:
            await _second_version(house, at, House.kill)
            if house.daemon is not None:
                house.kill()
            house.counting = False
            await house.pass_time(3.0)
            house.start()
            await _ends_in_one_version(house)
            ends.add(house.sync.report().state)
            # And the next version comes through.
            report = await house.report(house.publish(3))
            assert report.state is SyncState.DONE
            house.check_one_version(3)

        try:
            played(folder, scene)
        except (AssertionError, OrchestrRLError, Killed) as failure:
            wrong.append(f"the daemon is killed at {at}: {what}: {failure!r}")
    assert not wrong, "\n".join(wrong)
    assert ends == {SyncState.DONE, SyncState.ABORTED}


def _peer_for(seconds: float, *names: str) -> Callable[[House], None]:
    def act(house: House) -> None:
        for name in names:
            house.peer(name).die()
            house.later(seconds, house.peer(name).come_back)

    return act


def _engine_for(seconds: float, name: str) -> Callable[[House], None]:
    def act(house: House) -> None:
        engine = house.engine(name)
        engine.alive = False
        peer = next(peer for peer in house.peers.values() if engine in peer.engines)
        house.later(seconds, lambda: peer.engine_restarted(engine))

    return act


DEATHS = {
    "a peer for a moment": _peer_for(1.0, "p1"),
    "a peer for longer than it is waited for": _peer_for(12.0, "p1"),
    "two peers": _peer_for(3.0, "p0", "p2"),
    "the trainer's peer for a moment": _peer_for(2.0, "t"),
    "the trainer's peer for good": _peer_for(1e6, "t"),
    "an engine": _engine_for(3.0, "e1"),
    "a peer and its engine": lambda house: (_engine_for(4.0, "e1")(house), _peer_for(2.0, "p1")(house))[0],
}


@pytest.mark.parametrize("death", DEATHS)
def test_somebody_else_dies_at_every_point(tmp_path: Path, points: list[str], death: str) -> None:
    wrong = []
    ends = set()
    for at, what in list(enumerate(points))[sorted(DEATHS).index(death) % 2 :: 2]:
        folder = tmp_path / str(at)
        folder.mkdir()

        async def scene(house: House, at: int = at) -> None:
            await _second_version(house, at, DEATHS[death])
            await _ends_in_one_version(house)
            ends.add(house.sync.report(version=2).state)

        try:
            played(folder, scene)
        except (AssertionError, OrchestrRLError, Killed) as failure:
            wrong.append(f"{death} dies at {at}: {what}: {failure!r}")
    assert not wrong, "\n".join(wrong)
    assert SyncState.DONE in ends
