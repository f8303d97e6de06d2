"""Peers as processes under a daemon that uses the real service: transfers, restarts during transfers, orders delivered
twice, and orders of daemons that have ended."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from peer_harness import CHUNK, FakeDaemon, PeerProcess, carry, daemon_at, edge, peers
from weight_versions import HALVES, SHARDS, Contents

from orchestrrl.lab.simulated_engine.server import SimulatedOptions, SimulatedServer
from orchestrrl.weights.model import MODEL_FILE, PeerRole
from orchestrrl.weights.orders import (
    CarryEdges,
    CheckVersion,
    EdgeState,
    EndEdges,
    InstallVersion,
    KeepVersions,
    OpenVersion,
    OrderOutcome,
    ProbeWeights,
    QueryVersion,
    RestEngine,
    SumShards,
)
from planner.model import EngineId

ENGINE = EngineId("e0")


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[tuple[FakeDaemon, int]]:
    async with daemon_at() as (daemon, port):
        yield daemon, port


async def publish(daemon: FakeDaemon, folder: Path, contents: Contents, version: int) -> OpenVersion:
    """Publish as two trainer ranks on `train0` and the daemon do. Return the version map with sums for receivers."""
    parts = [contents.stage(folder / f"v{version}", rank, boxes) for rank, boxes in enumerate(HALVES)]
    map = contents.map(version, with_sums=False)
    opened = await daemon.ask("train0", OpenVersion(map, tuple(parts)))
    assert (opened.outcome, opened.missing) == (OrderOutcome.DONE, {}), opened.detail
    summed = await daemon.ask("train0", SumShards(version, tuple(SHARDS)))
    known = replace(map, shards=tuple(replace(shard, sums=summed.sums[shard.id]) for shard in map.shards))
    assert known == contents.map(version)
    return OpenVersion(known)


@pytest.mark.smoke
async def test_version_is_assembled_from_trainer_parts_for_an_engine(
    harness: tuple[FakeDaemon, int], tmp_path: Path
) -> None:
    daemon, port = harness
    async with SimulatedServer(SimulatedOptions()) as server:
        first = PeerProcess("train0", port, tmp_path / "train0", "--pod", "train", "--tor", "t0", "--nic-gbps", "100")
        second = PeerProcess(
            "gen0",
            port,
            tmp_path / "gen0",
            "--engine",
            f"e0={server.url}",
            "--engine-kind",
            "simulated",
            "--site-gpu",
            "3",
        )
        async with peers(first, second):
            train, gen = await daemon.peer("train0"), await daemon.peer("gen0")
            assert (train.role, train.place.pod, train.place.nic_gbps) == (PeerRole.TRAINER, "train", 100.0)
            assert (gen.role, gen.place.gpu, gen.engines[0].installed) == (PeerRole.ENGINE, 3, None)
            contents = Contents(1)
            opening = await publish(daemon, first.folder, contents, 4)
            opened = await daemon.ask("gen0", opening)
            assert sorted(opened.missing) == sorted(SHARDS)
            edges = [edge(n, shard.id, 0, shard.bytes, "train0", gen) for n, shard in enumerate(opening.map.shards)]
            await carry(daemon, 4, edges)
            over = await daemon.carried("gen0", [each.id for each in edges])
            assert {event.state for event in over} == {EdgeState.DONE}
            checked = await daemon.ask("gen0", CheckVersion(4))
            assert (checked.outcome, checked.missing) == (OrderOutcome.DONE, {})
            assert (second.folder / "v4" / MODEL_FILE).read_bytes() == contents.model_file()
            await daemon.until("gen0", lambda received: received.peer.held and received.peer.held[0].complete)

            late = await daemon.ask("gen0", InstallVersion(4, ENGINE, time.time() - 1))
            assert late.outcome is OrderOutcome.FAILED
            assert "the order was not executed, because its deadline passed" in late.detail
            until_s = time.time() + 600
            assert (await daemon.ask("gen0", RestEngine(ENGINE, True))).detail == "e0 is paused"
            installed = await daemon.ask("gen0", InstallVersion(4, ENGINE, until_s))
            assert installed.outcome is OrderOutcome.DONE, installed.detail
            assert installed.loaded_sum
            await daemon.until("gen0", lambda received: received.peer.engines[0].installed == 4)
            assert (await daemon.ask("gen0", QueryVersion(ENGINE))).detail == "e0 has version 4"
            probed = await daemon.ask("gen0", ProbeWeights(ENGINE, (1, 2, 3), 5, until_s))
            assert len(probed.tokens) == 5, probed.detail
            assert (await daemon.ask("gen0", RestEngine(ENGINE, False))).outcome is OrderOutcome.DONE
            again = await daemon.ask("gen0", InstallVersion(4, ENGINE, until_s))
            assert again.detail == "e0 already has version 4"
            assert again.loaded_sum == installed.loaded_sum
            assert (
                await daemon.ask("gen0", RestEngine(ENGINE, True, 30.0))
            ).detail == "e0 is paused"  # no edge may end
            assert (await daemon.ask("gen0", RestEngine(ENGINE, True, ends=True))).detail == "e0 is paused"
            assert (await daemon.ask("gen0", RestEngine(ENGINE, False))).outcome is OrderOutcome.DONE
            again = await daemon.ask("gen0", InstallVersion(4, ENGINE, until_s, anew=True))
            assert again.detail.startswith("e0 loaded version 4 in"), again.detail
            # A restarted trainer has other weights of the same version number.
            other = Contents(99)
            anew = await publish(daemon, first.folder, other, 4)
            opened = await daemon.ask("gen0", anew)
            assert sorted(opened.missing) == sorted(SHARDS)
            edges = [edge(f"n{n}", shard.id, 0, shard.bytes, "train0", gen) for n, shard in enumerate(anew.map.shards)]
            await carry(daemon, 4, edges)
            await daemon.carried("gen0", [each.id for each in edges])
            replaced = await daemon.ask("gen0", InstallVersion(4, ENGINE, until_s))
            assert replaced.detail.startswith("e0 loaded version 4 in"), replaced.detail
            assert replaced.loaded_sum not in ("", installed.loaded_sum)
            kept = await daemon.ask("gen0", KeepVersions(()))
            assert kept.detail == "discarded 4"
            await daemon.until("gen0", lambda received: not received.peer.held)


async def test_killed_receiver_resumes_from_stored_ranges(harness: tuple[FakeDaemon, int], tmp_path: Path) -> None:
    daemon, port = harness
    first, second = PeerProcess("train0", port, tmp_path / "train0"), PeerProcess("gen0", port, tmp_path / "gen0")
    async with peers(first, second):
        await daemon.peer("train0")
        gen = await daemon.peer("gen0")
        contents = Contents(2)
        opening = await publish(daemon, first.folder, contents, 4)
        await daemon.ask("gen0", opening)
        half = [edge(n, shard.id, 0, CHUNK, "train0", gen) for n, shard in enumerate(opening.map.shards)]
        await carry(daemon, 4, half)
        await daemon.carried("gen0", [each.id for each in half])
        second.kill()
        await daemon.until("gen0", lambda received: not received.is_attached)
        # In the meantime a block on its disk is corrupted.
        file = second.folder / "v4" / MODEL_FILE
        image = bytearray(file.read_bytes())
        place = image.index(contents.wire(opening.map.shards[-1])[:CHUNK])
        image[place] ^= 1
        file.write_bytes(image)
        second.start()

        gen = await daemon.peer("gen0", attached=2)
        (held,) = gen.held
        expected = {shard.id: ((CHUNK, shard.bytes - CHUNK),) for shard in opening.map.shards[:-1]}
        expected[opening.map.shards[-1].id] = ((0, opening.map.shards[-1].bytes),)
        assert held.missing == expected
        opened = await daemon.ask("gen0", opening)
        assert opened.missing == held.missing
        edges = [
            edge(f"again-{name}", name, offset, size, "train0", gen)
            for name, ranges in opened.missing.items()
            for offset, size in ranges
        ]
        await daemon.ask("train0", EndEdges(4))
        await carry(daemon, 4, edges)
        assert {event.state for event in await daemon.carried("gen0", [each.id for each in edges])} == {EdgeState.DONE}
        assert (await daemon.ask("gen0", CheckVersion(4))).missing == {}
        assert file.read_bytes() == contents.model_file()


async def test_killed_trainer_peer_keeps_its_parts(harness: tuple[FakeDaemon, int], tmp_path: Path) -> None:
    daemon, port = harness
    first = PeerProcess("train0", port, tmp_path / "train0")
    async with peers(first):
        await daemon.peer("train0")
        opening = await publish(daemon, first.folder, Contents(3), 9)
        first.kill()
        await daemon.until("train0", lambda received: not received.is_attached)
        first.start()
        train = await daemon.peer("train0", attached=2)
        assert [(held.version, held.complete, held.staged_by) for held in train.held] == [(9, True, (0, 1))]
        summed = await daemon.ask("train0", SumShards(9, tuple(SHARDS)))
        assert summed.sums == {shard.id: shard.sums for shard in opening.map.shards}


async def test_orders_are_executed_once_and_old_daemons_are_ignored(tmp_path: Path) -> None:
    async with daemon_at() as (daemon, port):
        peer = PeerProcess("gen0", port, tmp_path / "gen0")
        async with peers(peer):
            await daemon.peer("gen0")
            opening = OpenVersion(Contents(4).map(1))
            first = await daemon.ask("gen0", opening, id="a")
            again = await daemon.ask("gen0", KeepVersions(()), id="a")  # delivered twice, with other contents
            assert again == first
            assert (peer.folder / "v1").exists()
            daemon.generation = 3
            assert (await daemon.ask("gen0", CheckVersion(1))).outcome is OrderOutcome.DONE
            stale = await daemon.ask("gen0", KeepVersions(()), generation=2)
            assert stale.outcome is OrderOutcome.FAILED
            assert stale.detail == "generation 2 is superseded by generation 3"
            assert (peer.folder / "v1").exists()
    # A newer daemon starts at the same address: everything is reported to it again.
    peer = PeerProcess("gen0", port, tmp_path / "gen0")
    async with peers(peer), daemon_at(port) as (later, _):
        shown = await later.peer("gen0")
        assert [held.version for held in shown.held] == [1]


async def test_peer_outlives_its_daemon(tmp_path: Path) -> None:
    async with daemon_at() as (daemon, port):
        peer = PeerProcess("gen0", port, tmp_path / "gen0")
        await daemon.peer("gen0")
        await daemon.ask("gen0", OpenVersion(Contents(5).map(1)))
    async with peers(peer):
        async with daemon_at(port) as (later, _):
            shown = await later.peer("gen0")
            assert [held.version for held in shown.held] == [1]
            result = await later.ask("gen0", CheckVersion(1), id="order2")
            assert result.outcome is OrderOutcome.DONE


async def test_invalid_orders_are_rejected_with_all_errors(harness: tuple[FakeDaemon, int], tmp_path: Path) -> None:
    daemon, port = harness
    peer = PeerProcess("gen0", port, tmp_path / "gen0")
    async with peers(peer):
        gen = await daemon.peer("gen0")
        map = Contents(6).map(1)
        shards = tuple(replace(shard, bytes=shard.bytes + 1) for shard in map.shards)
        refused = await daemon.ask("gen0", OpenVersion(replace(map, shards=shards)))
        assert refused.outcome is OrderOutcome.FAILED
        assert refused.detail.count(".bytes: must be the size of its slices") == len(shards)
        checked = await daemon.ask("gen0", CheckVersion(1))
        assert checked.detail == "version 1 is not stored on this peer; its versions are none"
        await daemon.ask("gen0", OpenVersion(map))
        rows = next(shard for shard in map.shards if shard.id == "rows")
        wrong = (
            edge(1, "missing", 0, 1, "gen1", gen),
            edge(2, "rows", rows.bytes, 1, "gen1", gen),
            edge(3, "rows", -1, 1, "gen1", gen),
        )
        refused = await daemon.ask("gen0", CarryEdges(1, wrong, 0, 1.0))
        assert refused.outcome is OrderOutcome.FAILED
        for words in ("chunk_bytes: must be > 0", "edges.edge1.shard:", "edges.edge2:", "edges.edge3:"):
            assert words in refused.detail
        assert "does not serve engine 'e0'" in (await daemon.ask("gen0", RestEngine(ENGINE, True))).detail
        outside = await daemon.ask(
            "gen0", OpenVersion(replace(map, version=2), (Contents(6).stage(tmp_path, 0, HALVES[0]),))
        )
        assert "cannot read the part of rank 0" in outside.detail


async def test_peer_stops_on_sigterm_and_reports_a_folder_in_use(
    harness: tuple[FakeDaemon, int], tmp_path: Path
) -> None:
    daemon, port = harness
    first = PeerProcess("gen0", port, tmp_path / "gen0")
    second: PeerProcess | None = None
    async with peers(first):
        await daemon.peer("gen0")
        second = PeerProcess("gen1", port, tmp_path / "gen0")
        assert await asyncio.to_thread(second._process.wait, 60) == 1
        assert "is in use by the peer with process id" in second.log
        assert "Traceback" not in second.log
        assert await asyncio.to_thread(first.kill, signal.SIGTERM) == 0
    assert "Traceback" not in first.log


def run(*arguments: str, blocked: str = "") -> subprocess.CompletedProcess[str]:
    """Run a peer with some modules blocked from import."""
    program = (
        f"import sys; [sys.modules.__setitem__(name, None) for name in {blocked!r}.split()];"
        " from orchestrrl.weights.peer.main import main; sys.exit(main(sys.argv[1:]))"
    )
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)


def test_all_errors_are_reported_at_once() -> None:
    words = (
        "--id a/b --daemon nowhere --engine e0 --engine-kind sglang --transport pigeon --site-gpu 1 --pod p --tp 2"
        " --tp-rank 2 --folder here --nic-gbps nan"
    )
    result = run(*words.split())
    assert result.returncode == 2
    options = ("id", "daemon", "engine[0]", "engine-kind", "transport", "site-gpu", "tp", "folder", "nic-gbps")
    for option in options:
        assert f"--{option}" in result.stderr, option
    assert "Traceback" not in result.stderr


def test_peer_runs_without_optional_packages() -> None:
    result = run("--help", blocked="typer rich yaml ortools scipy statsmodels matplotlib numba psutil torch click")
    assert result.returncode == 0, result.stderr
    assert "orchestrrl-client" in result.stdout
