"""Tests of weight syncs on real processes, each of which is killed at some point.

In every case the process is started again, all engines end with one version, no request is lost, and each token of each
answer is of the version that the answer reports.
"""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from syncing_fleet import Harness, Marked

DONE = ("done", "done", "")


@pytest.fixture(scope="module")
def whole_harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    harness = Harness(tmp_path_factory.mktemp("syncing"))
    try:
        asyncio.run(harness.open())
        yield harness
    finally:
        harness.close()


@pytest.fixture
async def harness(whole_harness: Harness) -> Harness:
    """Provide a fleet of running processes with one version, at rest."""
    await whole_harness.at_rest()
    return whole_harness


async def again(process: Marked) -> None:
    """Wait until the process reaches its mark, and start it again."""
    await process.until_killed()
    await process.start()


@pytest.mark.smoke
async def test_weight_sync_without_a_failure(harness: Harness) -> None:
    async with harness.requests():
        version = harness.publish()
        assert await harness.trainer.over(version) == DONE
        await harness.brought(version)


# Each step has two entries, begun and done: began, choose (2), prepare (2), fence begun, the pause barrier is ordered
# to close, tear down (2), it is quiet, fence done, install (2), commit begun, weights (the commit), commit done,
# resume begun, the pause barrier opens, resume done, keep (2), ended.
ENTRIES = 22
COMMIT = 15
# A kill before an entry comes after the effects that follow the previous entry.
TELLING = {("entry-after", 12), ("entry-after", COMMIT)}


@pytest.mark.parametrize(
    ("point", "number"),
    [
        pytest.param(point, number, marks=() if (point, number) in TELLING else pytest.mark.slow)
        for number in range(1, ENTRIES + 1)
        for point in ("entry", "entry-after")
    ],
)
async def test_daemon_is_killed(harness: Harness, point: str, number: int) -> None:
    """The trainer waits, and publishes again what was not committed."""
    harness.daemon.mark(point, number=number)
    async with harness.requests():
        version = harness.publish()
        await again(harness.daemon)
        assert await harness.trainer.over(version) == DONE
        await harness.brought(version)


@pytest.mark.parametrize("step", ["install", pytest.param("fence", marks=pytest.mark.slow)])
async def test_daemon_and_trainer_are_killed_at_once(harness: Harness, step: str) -> None:
    """The version is not published again: all engines keep the previous one until a trainer publishes it."""
    before = harness.version
    harness.daemon.mark("entry-after", step=step)
    async with harness.requests():
        version = harness.publish()
        await harness.daemon.until_killed()
        harness.trainer.kill()
        await asyncio.gather(harness.daemon.start(), harness.trainer.start())
        await harness.brought(before)
        assert harness.publish(version) == version
        assert await harness.trainer.over(version) == DONE
        await harness.brought(version)


@pytest.mark.parametrize("kind", ["sync.began", pytest.param("weights", marks=pytest.mark.slow)])
async def test_trainer_is_killed(harness: Harness, kind: str) -> None:
    """Its peer has the bytes."""
    harness.daemon.mark("entry-after", kind=kind, stop=True)
    async with harness.requests():
        version = harness.publish()
        await harness.daemon.until_still()
        harness.trainer.kill()
        harness.daemon.go_on()
        await harness.brought(version)
    await harness.trainer.start()


@pytest.mark.parametrize(
    ("point", "where"),
    [
        ("sent", {"number": 20}),
        pytest.param("order-after", {"kind": "sum"}, marks=pytest.mark.slow),
        pytest.param("order", {"kind": "carry"}, marks=pytest.mark.slow),
    ],
)
async def test_trainers_peer_is_killed(harness: Harness, point: str, where: dict[str, Any]) -> None:
    await check_killed(harness, harness.peers["train0"], point, **where)


@pytest.mark.parametrize(
    ("point", "where"),
    [
        pytest.param("received", {"number": 20}, marks=pytest.mark.slow),
        pytest.param("order", {"kind": "open"}, marks=pytest.mark.slow),
        pytest.param("order-after", {"kind": "check"}, marks=pytest.mark.slow),
        ("order", {"kind": "install"}),
        pytest.param("order-after", {"kind": "install"}, marks=pytest.mark.slow),
        pytest.param("order", {"kind": "probe"}, marks=pytest.mark.slow),
        pytest.param("order-after", {"kind": "probe"}, marks=pytest.mark.slow),
        pytest.param("order", {"kind": "keep"}, marks=pytest.mark.slow),
    ],
)
async def test_an_engines_peer_is_killed(harness: Harness, point: str, where: dict[str, Any]) -> None:
    await check_killed(harness, harness.peers["gen0"], point, **where)


async def check_killed(harness: Harness, process: Marked, point: str, **where: Any) -> None:
    """Check that the peer returns, and that the version is installed even so."""
    process.mark(point, **where)
    async with harness.requests():
        version = harness.publish()
        await again(process)
        assert await harness.trainer.over(version) == DONE
        await harness.brought(version)


async def test_engine_is_killed_while_it_loads(harness: Harness) -> None:
    engine = harness.engines["e1"]
    engine.mark("load")
    async with harness.requests():
        version = harness.publish()
        await again(engine)
        assert (await harness.trainer.over(version))[0] == "done"  # it may be repaired later
        await harness.brought(version)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["order-after", "order"])
async def test_engine_is_killed_around_its_load(harness: Harness, point: str) -> None:
    """It is killed before its peer orders the load, and after the load."""
    peer, engine = harness.peers["gen1"], harness.engines["e2"]
    peer.mark(point, kind="install", stop=True)
    async with harness.requests():
        version = harness.publish()
        await peer.until_still()
        engine.kill()
        await engine.start()
        peer.go_on()
        assert (await harness.trainer.over(version))[0] == "done"  # it may be repaired later
        await harness.brought(version)


@pytest.mark.parametrize("kind", ["weights", pytest.param("sync.ended", marks=pytest.mark.slow)])
async def test_engine_is_killed_after_the_commit(harness: Harness, kind: str) -> None:
    engine = harness.engines["e0"]
    harness.daemon.mark("entry-after", kind=kind, stop=True)
    async with harness.requests():
        version = harness.publish()
        await harness.daemon.until_still()
        engine.kill()
        await engine.start()
        harness.daemon.go_on()
        assert (await harness.trainer.over(version))[0] == "done"  # it may be repaired later
        await harness.brought(version)


@pytest.mark.parametrize(
    "kind",
    ["sync.step", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("sync.began", "barrier", "weights"))],
)
async def test_gateway_is_killed(harness: Harness, kind: str) -> None:
    """It is killed before the pause barrier closes, while it closes, when it is closed, and before it opens. The next
    gateway does not learn the engines' version until it has attached to the daemon: it is the previous one, or the new
    one if peers install before the gateway attaches."""
    where: dict[str, Any] = {"step": "install"} if kind == "sync.step" else {"kind": kind}
    harness.daemon.mark("entry-after", stop=True, **where)
    async with harness.requests(unknown=(harness.version, harness.version + 1)):
        version = harness.publish()
        await harness.daemon.until_still()
        harness.gateway.kill()
        await harness.gateway.start()
        harness.daemon.go_on()
        assert await harness.trainer.over(version) == DONE
        await harness.brought(version)
