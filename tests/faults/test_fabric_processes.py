"""Tests that circuits of a real daemon follow the windows of real processes. Each process is killed, and the others
continue.

The training processes count their iterations, which must never stop.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from front import until
from traced_job import DEVICE_S, RANKS, TracedJobHarness

from orchestrrl.integrations.instrument.rings import RingReader, list_rings

pytestmark = pytest.mark.alone  # windows are predicted from the regularity of processes

ENOUGH = 4  # commits


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[TracedJobHarness]:
    async with TracedJobHarness(tmp_path) as harness:
        yield harness


async def started(harness: TracedJobHarness) -> None:
    await harness.start_fabric(within_s=2)
    harness.start_tracing()
    for rank in range(RANKS):
        harness.start_rank(rank, announces=rank == 0)
    await committed(harness, ENOUGH)


async def committed(harness: TracedJobHarness, more: int) -> None:
    """Wait for this many further commits in windows."""
    so_far = len(await harness.commits())

    async def there() -> bool:
        return len(await harness.commits()) >= so_far + more

    await until(there)


async def goes_on(harness: TracedJobHarness, rank: int) -> None:
    so_far = harness.iterations(rank)

    async def further() -> bool:
        return harness.iterations(rank) >= so_far + 3

    await until(further)
    assert harness.ranks[rank].running


async def kept_as(harness: TracedJobHarness, code: str) -> None:
    """Wait for a period that ends as kept for this reason."""

    async def reported() -> bool:
        periods = (await harness.plain_fabric())["periods"]
        return any(
            period["state"] == "kept" and period["code"] == "no_window" and f"{code}: " in period["detail"]
            for period in periods
        )

    await until(reported)


async def test_commits_happen_in_windows_while_the_agent_runs(
    harness: TracedJobHarness,
) -> None:
    await started(harness)
    for commit in await harness.commits():
        assert commit["window_opened_unix_s"] <= commit["commanded_unix_s"]
        assert commit["commanded_unix_s"] + commit["needed_s"] <= commit["window_until_unix_s"]
        assert commit["needed_s"] >= DEVICE_S

    harness.agent.kill()
    so_far = len(await harness.commits())
    harness.ranks[0].kill()  # it announces; further periods are announced by hand, one at a time
    for period in ("near", "far"):  # the circuits of one of them are up
        await harness.announce(period)
    await kept_as(harness, "host_gone")
    assert len(await harness.commits()) <= so_far + 1  # one may have been in progress
    await goes_on(harness, 1)

    harness.ranks.pop(0)
    harness.start_tracing()
    harness.start_rank(0, announces=True)
    await committed(harness, ENOUGH)
    (host,) = (await harness.plain_fabric(0))["hosts"]
    assert host["attached"]
    assert host["jobs"] == [{"job": "small", "ranks": [0, 1]}]


async def test_process_killed_in_a_collective_has_no_windows(harness: TracedJobHarness) -> None:
    await started(harness)
    harness.kill_in_a_collective(1)

    async def gone() -> bool:
        (host,) = (await harness.plain_fabric(0))["hosts"]
        return host["jobs"] == [{"job": "small", "ranks": [0]}]

    await until(gone)
    await goes_on(harness, 0)
    so_far = len(await harness.commits())
    await goes_on(harness, 0)
    assert len(await harness.commits()) == so_far
    harness.ranks[0].kill()
    for period in ("near", "far"):  # the circuits of one of them are up
        await harness.announce(period)
    await kept_as(harness, "untraced")


async def test_daemon_killed_during_a_circuit_change_settles_it(harness: TracedJobHarness) -> None:
    await harness.start_switch(0.1)
    await started(harness)
    await harness.while_it_switches()
    harness.daemon.kill()
    for rank in range(RANKS):
        await goes_on(harness, rank)
    await harness.daemon.start()
    await committed(harness, ENOUGH)
    generation = (await harness.status()).generation
    assert generation > 1
    assert harness.unsettled(generation) == []
    assert all(process.running for process in harness.ranks)


async def test_traced_processes_need_neither_agent_nor_daemon(harness: TracedJobHarness) -> None:
    for rank in range(RANKS):
        harness.start_rank(rank, announces=rank == 0)
    for rank in range(RANKS):
        await goes_on(harness, rank)
    assert sorted(reader.header().rank for reader in map(RingReader, list_rings(harness.rings))) == list(range(RANKS))
