"""Tests of killing peers of a weight sync during transfers, and their daemon: received bytes are kept, the rest comes
from peers that have it, and every host ends with the same bytes."""

import itertools
from pathlib import Path

from orchestrrl.weights.model import MODEL_FILE, Peer
from orchestrrl.weights.orders import ArrivedBytes, CheckVersion, EdgeState, EndEdges, OpenVersion, OrderOutcome
from tests.orchestrrl.weights.peer_harness import FakeDaemon, Heard, PeerProcess, carry, daemon_at, edge, peers
from tests.orchestrrl.weights.weight_versions import HALVES, Contents

SLOW_GBPS = 2e-5  # a few kilobytes a second, so that peers can be killed mid-transfer
VERSION = 4


def is_under_way(reported: Heard) -> bool:
    return any(isinstance(news, ArrivedBytes) and news.received_bytes > 0 for news in reported.news)


async def stage(daemon: FakeDaemon, folder: Path, contents: Contents) -> OpenVersion:
    """Stage a version on `train0`; return what receivers are sent."""
    await daemon.peer("train0")
    parts = [contents.stage(folder / f"v{VERSION}", rank, boxes) for rank, boxes in enumerate(HALVES)]
    map = contents.map(VERSION)
    opened = await daemon.ask("train0", OpenVersion(map, tuple(parts)))
    assert opened.outcome is OrderOutcome.DONE, opened.detail
    return OpenVersion(map)


async def send_all(daemon: FakeDaemon, opening: OpenVersion, way: list[str]) -> None:
    """Order a chain of transfers from each peer to the next, forwarded as they arrive."""
    for name in way[1:]:
        await daemon.ask(name, opening)
    edges = []
    for src, dst in itertools.pairwise(way):
        there = await daemon.peer(dst)
        for shard in opening.map.shards:
            edges.append(edge(f"-{shard.id}-{dst}", shard.id, 0, shard.bytes, src, there, SLOW_GBPS))
    await carry(daemon, VERSION, edges, stall_s=60.0)


async def fetch_rest(daemon: FakeDaemon, opening: OpenVersion, src: str, dst: Peer, attempt: str) -> None:
    missing = (await daemon.ask(dst.id, opening)).missing
    edges = [
        edge(f"-{attempt}-{name}-{offset}", name, offset, size, src, dst)
        for name, ranges in missing.items()
        for offset, size in ranges
    ]
    await carry(daemon, VERSION, edges)
    over = await daemon.carried(dst.id, [each.id for each in edges])
    assert all(event.state is EdgeState.DONE for event in over), over


async def is_whole(daemon: FakeDaemon, peer: PeerProcess, contents: Contents) -> None:
    checked = await daemon.ask(peer.name, CheckVersion(VERSION))
    assert (checked.outcome, checked.missing) == (OrderOutcome.DONE, {}), checked.detail
    assert (peer.folder / f"v{VERSION}" / MODEL_FILE).read_bytes() == contents.model_file()


async def test_forwarding_peer_is_killed(tmp_path: Path) -> None:
    contents = Contents(1)
    async with daemon_at() as (daemon, port):
        train, first, second = (PeerProcess(name, port, tmp_path / name) for name in ("train0", "gen0", "gen1"))
        async with peers(train, first, second):
            opening = await stage(daemon, train.folder, contents)
            for name in ("gen0", "gen1"):
                await daemon.peer(name)
            await send_all(daemon, opening, ["train0", "gen0", "gen1"])
            await daemon.until("gen1", is_under_way)
            first.kill()
            await daemon.until("gen0", lambda reported: not reported.is_attached)
            for name in ("train0", "gen1"):
                assert (await daemon.ask(name, EndEdges(VERSION))).outcome is OrderOutcome.DONE
            await fetch_rest(daemon, opening, "train0", await daemon.peer("gen1"), "mended")
            await is_whole(daemon, second, contents)
            first.start()
            again = await daemon.peer("gen0", attached=2)
            assert [held.version for held in again.held] == [VERSION]
            await fetch_rest(daemon, opening, "gen1", again, "late")
            await is_whole(daemon, first, contents)


async def test_trainers_peer_is_killed(tmp_path: Path) -> None:
    contents = Contents(2)
    async with daemon_at() as (daemon, port):
        train, first = (PeerProcess(name, port, tmp_path / name) for name in ("train0", "gen0"))
        async with peers(train, first):
            opening = await stage(daemon, train.folder, contents)
            await daemon.peer("gen0")
            await send_all(daemon, opening, ["train0", "gen0"])
            await daemon.until("gen0", is_under_way)
            train.kill()
            over = await daemon.carried("gen0", [f"edge-{shard.id}-gen0" for shard in opening.map.shards])
            assert (
                EdgeState.BROKEN in {event.state for event in over}
                or not (await daemon.ask("gen0", CheckVersion(VERSION))).missing
            )
            train.start()
            assert (await daemon.peer("train0", attached=2)).held[0].complete
            await daemon.ask("gen0", EndEdges(VERSION))
            await fetch_rest(daemon, opening, "train0", await daemon.peer("gen0"), "mended")
            await is_whole(daemon, first, contents)


async def test_transfers_continue_without_the_daemon(tmp_path: Path) -> None:
    contents = Contents(3)
    async with daemon_at() as (daemon, port):
        train, first = (PeerProcess(name, port, tmp_path / name) for name in ("train0", "gen0"))
        opening = await stage(daemon, train.folder, contents)
        await daemon.peer("gen0")
        await send_all(daemon, opening, ["train0", "gen0"])
        await daemon.until("gen0", is_under_way)
    async with peers(train, first):
        async with daemon_at(port) as (later, _):
            later.generation = 2
            await later.peer("gen0")
            await later.until("gen0", lambda reported: reported.peer.held and reported.peer.held[0].complete)
            await is_whole(later, first, contents)
