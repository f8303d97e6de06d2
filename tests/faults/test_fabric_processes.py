"""Circuits of a real daemon follow the windows of real processes; each of them is killed, and the others go on.

The processes keep their own count of iterations: what nothing here may ever stop.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from ringing_house import DEVICE_S, RANKS, RingingHouse, ringing_house, until

from orchestrrl.integrations.instrument.rings import RingReader, list_rings
from orchestrrl.rpc.control_client import ControlClient
from orchestrrl.rpc.pb import control_pb2

pytestmark = pytest.mark.alone  # windows are foretold from how regularly processes work

ENOUGH = 4  # commits


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[RingingHouse]:
    async with ringing_house(tmp_path) as house:
        yield house


async def started(house: RingingHouse) -> None:
    await house.start_daemon(within_s=2)
    house.start_agent()
    for rank in range(RANKS):
        house.start_rank(rank, announces=rank == 0)
    await committed(house, ENOUGH)


async def committed(house: RingingHouse, more: int) -> None:
    """Wait for so many commits in windows, beyond those so far."""
    so_far = len(await house.commits())

    async def there() -> bool:
        return len(await house.commits()) >= so_far + more

    await until(there)


async def goes_on(house: RingingHouse, rank: int) -> None:
    so_far = house.iterations(rank)

    async def further() -> bool:
        return house.iterations(rank) >= so_far + 3

    await until(further)
    assert house.ranks[rank].poll() is None


async def kept_as(house: RingingHouse, code: str) -> None:
    """Wait for a period that is given up because of that."""

    async def told() -> bool:
        periods = (await house.fabric())["periods"]
        return any(
            period["state"] == "kept" and period["code"] == "no_window" and f"{code}: " in period["detail"]
            for period in periods
        )

    await until(told)


async def test_commits_are_made_in_windows_until_the_agent_dies_and_again_when_it_is_back(house: RingingHouse) -> None:
    await started(house)
    for commit in await house.commits():
        assert commit["window_opened_unix_s"] <= commit["commanded_unix_s"]
        assert commit["commanded_unix_s"] + commit["needed_s"] <= commit["window_until_unix_s"]
        assert commit["needed_s"] >= DEVICE_S

    assert house.agent is not None
    house.agent.kill()
    so_far = len(await house.commits())
    house.ranks[0].kill()  # it announces; what follows is announced by hand, one at a time
    house.ranks[0].wait()
    for period in ("near", "far"):  # the circuits of one of them are up
        await house.announce(period)
    await kept_as(house, "host_gone")
    assert len(await house.commits()) <= so_far + 1  # one may have been under way
    await goes_on(house, 1)

    house.ranks.pop(0)
    house.start_agent()
    house.start_rank(0, announces=True)
    await committed(house, ENOUGH)
    (host,) = (await house.fabric(0))["hosts"]
    assert host["attached"]
    assert host["jobs"] == [{"job": "small", "ranks": [0, 1]}]


async def test_a_process_that_is_killed_in_a_collective_has_no_windows(house: RingingHouse) -> None:
    await started(house)
    house.kill_in_a_collective(1)

    async def gone() -> bool:
        (host,) = (await house.fabric(0))["hosts"]
        return host["jobs"] == [{"job": "small", "ranks": [0]}]

    await until(gone)
    await goes_on(house, 0)
    so_far = len(await house.commits())
    await goes_on(house, 0)
    assert len(await house.commits()) == so_far
    house.ranks[0].kill()
    house.ranks[0].wait()
    for period in ("near", "far"):  # the circuits of one of them are up
        await house.announce(period)
    await kept_as(house, "untraced")


async def test_a_daemon_that_is_killed_while_a_switch_switches_settles_it(house: RingingHouse) -> None:
    house.start_switch(0.1)
    await started(house)
    assert house.daemon is not None
    await house.while_it_switches()
    house.daemon.kill()
    for rank in range(RANKS):
        await goes_on(house, rank)
    await house.daemon.restart()
    await committed(house, ENOUGH)
    async with ControlClient(house.address) as client:
        generation = (await client.ask(client.control.GetStatus, control_pb2.GetStatusRequest())).generation
    assert generation > 1
    assert house.unsettled(generation) == []
    assert all(process.poll() is None for process in house.ranks)


async def test_traced_processes_need_neither_agent_nor_daemon(house: RingingHouse) -> None:
    for rank in range(RANKS):
        house.start_rank(rank, announces=rank == 0)
    for rank in range(RANKS):
        await goes_on(house, rank)
    assert sorted(reader.header().rank for reader in map(RingReader, list_rings(house.rings))) == list(range(RANKS))
