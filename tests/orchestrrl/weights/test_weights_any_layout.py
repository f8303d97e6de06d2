"""Versions from random trainer boxes to random engine shares, with real stores, carriers and sockets in one process:
planned, hashed, carried, interrupted, and planned again for other receivers."""

import itertools
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrrl.core.config.weights import WeightSettings
from orchestrrl.weights.controller.planning import PlannedSync, plan_repair, plan_sync
from orchestrrl.weights.layout import read_layout
from orchestrrl.weights.model import (
    DTYPE_BYTES,
    MODEL_FILE,
    EngineAt,
    HeldVersion,
    Peer,
    PeerLocation,
    PeerRole,
    TensorMeta,
    VersionMap,
)
from orchestrrl.weights.orders import ArrivedBytes, CarryEdge, CarryEdges, EdgeEvent, EdgeState
from orchestrrl.weights.peer.carry import ThreadedCarrier
from orchestrrl.weights.peer.staged import StagedVersion
from orchestrrl.weights.peer.store import VersionStore
from orchestrrl.weights.publication import Publication
from orchestrrl.weights.trainer.boxes import TensorPiece, slices
from orchestrrl.weights.trainer.staging import ArrayCopies, stage
from orchestrrl.weights.transports.tcp import TcpTransport
from planner.model import EngineId, PeerId
from planner.sync_tree.network import NetworkStation, SyncNetwork
from planner.sync_tree.parameters import Box
from planner.sync_tree.shares import EngineShare, needed_boxes

WITHIN_S = 60.0
VERSION = 3
Values = Mapping[str, np.ndarray[Any, Any]]
# Names that TP, PP and EP divide, a scalar, and quantized 8-bit values with their scales.
TENSORS = tuple(
    TensorMeta(name, dtype, shape)
    for name, dtype, shape in [
        ("lm_head.weight", "BF16", (130, 8)),
        ("model.embed_tokens.weight", "BF16", (130, 8)),
        ("model.layers.0.mlp.down_proj.weight", "F8_E4M3", (16, 64)),
        ("model.layers.0.mlp.down_proj.weight_scale_inv", "F32", (2, 4)),
        ("model.layers.0.mlp.up_proj.weight", "BF16", (32, 8)),
        ("model.layers.0.self_attn.q_proj.weight", "F32", (16, 8)),
        ("model.layers.1.mlp.experts.0.up_proj.weight", "BF16", (8, 8)),
        ("model.layers.1.mlp.experts.1.up_proj.weight", "BF16", (8, 8)),
        ("model.layers.1.self_attn.conv.weight", "F32", (4, 3, 5)),
        ("model.norm.weight", "F32", (8,)),
        ("model.scale", "F32", ()),
    ]
)
SHARES = (
    EngineShare(),
    EngineShare(tp=2, tp_ranks=(0,)),
    EngineShare(tp=2, tp_ranks=(1,)),
    EngineShare(tp=4, tp_ranks=(0, 2)),
    EngineShare(pp=2, pp_ranks=(1,)),
    EngineShare(ep=2, ep_ranks=(1,), tp=2, tp_ranks=(1,)),
)


def values_of(seed: int) -> Values:
    """Return a tensor's elements as unsigned integers of their width."""
    rng = np.random.default_rng(seed)
    return {
        each.name: np.frombuffer(rng.bytes(each.bytes), dtype=f"u{DTYPE_BYTES[each.dtype]}").reshape(each.shape)
        for each in TENSORS
    }


@dataclass
class Host:
    """One peer as in its process: a persistent folder, and the state that does not survive a restart."""

    peer: Peer
    folder: Path
    told: dict[str, EdgeEvent] = field(default_factory=dict)
    heard: threading.Condition = field(default_factory=threading.Condition)

    def start(self) -> None:
        self.store = VersionStore(self.folder)
        self.transport = TcpTransport("127.0.0.1")
        self.peer = replace(self.peer, transports={"tcp": self.transport.open()})
        self.carrier = ThreadedCarrier(self.peer.id, {"tcp": self.transport}, self._tell)

    def stop(self) -> None:
        self.carrier.close()
        self.transport.close()
        self.store.close()

    def _tell(self, news: EdgeEvent | ArrivedBytes) -> None:
        if isinstance(news, EdgeEvent) and news.is_receiver and news.state is not EdgeState.BEGAN:
            with self.heard:
                self.told[news.edge] = news
                self.heard.notify_all()

    def until_done(self, edges: Sequence[CarryEdge]) -> None:
        own = {edge.id for edge in edges if edge.dst == self.peer.id}
        with self.heard:
            assert self.heard.wait_for(lambda: own <= self.told.keys(), WITHIN_S), own - self.told.keys()
            assert {self.told[edge].state for edge in own} <= {EdgeState.DONE}, self.told

    def open(self, planned: PlannedSync, map: VersionMap | None = None) -> StagedVersion | None:
        opened = planned.opens.get(self.peer.id)
        if opened is None:
            return None
        sums = {} if map is None else {shard.id: shard.sums for shard in map.shards}
        shards = tuple(replace(shard, sums=sums.get(shard.id, ())) for shard in opened.map.shards)
        return self.store.open(replace(opened, map=replace(opened.map, shards=shards)))

    def check(self, values: Values) -> None:
        """Check that the host has the correct bytes of everything that its engines load."""
        folder = self.store.version(VERSION).install_folder()
        layout = read_layout(folder / MODEL_FILE)
        image = np.fromfile(folder / MODEL_FILE, dtype=np.uint8)
        for name, boxes in needs(self.peer.share).items():
            right = values[name]
            at = layout.places[name]
            found = image[at : at + right.nbytes].view(right.dtype).reshape(right.shape)
            for box in boxes:
                assert (found[slices(box)] == right[slices(box)]).all(), (self.peer.id, name, box)


def needs(share: EngineShare) -> Mapping[str, tuple[Box, ...]]:
    return needed_boxes({each.name: each.shape for each in TENSORS}, share)


def cells(rng: random.Random, shape: Sequence[int]) -> list[Box]:
    """Draw a division of a tensor along some of its axes."""
    found: list[Box] = [()]
    for length in shape:
        cuts = sorted({0, length, *(rng.randrange(length) for _ in range(rng.choice([0, 0, 1, 2])))})
        found = [(*box, cut) for box in found for cut in itertools.pairwise(cuts)]
    return found


def publish(rng: random.Random, hosts: Sequence[Host], values: Values) -> list[Publication]:
    """Draw publications in which one or several ranks have each cell."""
    world = rng.randint(1, 4)
    ranks: list[list[TensorPiece]] = [[] for _ in range(world)]
    for meta in TENSORS:
        for box in cells(rng, meta.shape):
            for rank in rng.sample(range(world), rng.randint(1, min(2, world))):
                ranks[rank].append(TensorPiece(meta, box, values[meta.name][slices(box)]))
    found = []
    for rank, pieces in enumerate(ranks):
        if pieces:
            host = rng.choice(hosts)
            done = stage(host.folder, VERSION, rank, world, pieces, ArrayCopies())
            found.append(Publication(VERSION, rank, world, host.peer.id, done.tensors, done.part.boxes))
    return found


def network(hosts: Sequence[Host]) -> SyncNetwork:
    return SyncNetwork(10.0, {host.peer.id: NetworkStation(f"pod{n % 2}", "tor", 10.0) for n, host in enumerate(hosts)})


def plan(
    hosts: Sequence[Host],
    publications: Sequence[Publication],
    settings: WeightSettings,
) -> tuple[PlannedSync, VersionMap]:
    """Plan a transfer and add all checksums, as the daemon does."""
    planned = plan_sync(VERSION, publications, [host.peer for host in hosts], network(hosts), settings)
    by_id = {host.peer.id: host for host in hosts}
    sums: dict[str, tuple[str, ...]] = {}
    for peer in sorted(set(planned.summed_by.values())):
        staged = by_id[peer].open(planned)
        assert staged is not None
        sums |= staged.sums_of([shard for shard, own in planned.summed_by.items() if own == peer])
    shards = tuple(replace(shard, sums=sums[shard.id]) for shard in planned.map.shards)
    return planned, replace(planned.map, shards=shards)


def give(hosts: Sequence[Host], planned: PlannedSync, settings: WeightSettings) -> None:
    for host in hosts:
        own = tuple(edge for edge in planned.edges if host.peer.id in (edge.src, edge.dst))
        if own:
            staged = host.store.version(VERSION)
            host.carrier.carry(staged, CarryEdges(VERSION, own, settings.chunk_bytes, WITHIN_S))


def peer_of(name: str, role: PeerRole, share: EngineShare = SHARES[0], has_engine: bool = True) -> Peer:
    engines = (EngineAt(EngineId(f"{name}-engine"), "http://x"),) if has_engine else ()
    return Peer(PeerId(name), role, name, PeerLocation(), {}, engines, share)


@contextmanager
def fleet(rng: random.Random, folder: Path) -> Iterator[tuple[list[Host], list[Host]]]:
    """Draw trainer hosts, one of which may serve an engine, and engine hosts."""
    trainers = [
        Host(peer_of(f"train{n}", PeerRole.TRAINER, has_engine=False), folder / f"train{n}")
        for n in range(rng.randint(1, 3))
    ]
    if rng.random() < 0.4:
        trainers[0].peer = peer_of("train0", PeerRole.ENGINE, rng.choice(SHARES))
    engines = [
        Host(peer_of(f"gen{n}", PeerRole.ENGINE, rng.choice(SHARES)), folder / f"gen{n}")
        for n in range(rng.randint(2, 5))
    ]
    hosts = (*trainers, *engines)
    for host in hosts:
        host.start()
    try:
        yield trainers, engines
    finally:
        for host in hosts:  # including those that a test has removed from its lists
            host.stop()


@given(seed=st.integers(0, 2**32))
@settings(max_examples=6)
def test_every_engine_receives_its_bytes(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    rng = random.Random(seed)
    values = values_of(seed)
    own = WeightSettings(chunk_bytes=rng.choice([64, 300, 1024, 1 << 20]), transports=("tcp",))
    with fleet(rng, tmp_path_factory.mktemp("layout")) as (trainers, engines):
        hosts = [*trainers, *engines]
        publications = publish(rng, trainers, values)
        planned, map = plan(hosts, publications, own)
        for host in hosts:
            host.open(planned, map)
        give(hosts, planned, own)
        for host in hosts:
            host.until_done(planned.edges)
            if host.peer.id in planned.opens:
                staged = host.store.version(VERSION)
                staged.check()
                assert not staged.missing()
            if host.peer.engines:
                host.check(values)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=10)
def test_second_attempt_carries_only_missing_bytes(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The first attempt is interrupted after some edges. One receiver is lost and returns, another stays away."""
    rng = random.Random(seed)
    values = values_of(seed)
    own = WeightSettings(chunk_bytes=rng.choice([64, 300, 1024]), transports=("tcp",))
    with fleet(rng, tmp_path_factory.mktemp("layout")) as (trainers, engines):
        hosts = [*trainers, *engines]
        publications = publish(rng, trainers, values)
        first, map = plan(hosts, publications, own)
        for host in hosts:
            host.open(first, map)
        last = rng.randint(0, len(first.plan.waves))
        some = fed([edge for edge in first.edges if edge.wave < last and rng.random() < 0.8], publications)
        give(hosts, replace(first, edges=some), own)
        for host in hosts:
            host.until_done(some)
        for host in hosts:
            host.carrier.end(VERSION)
        lost = rng.choice(hosts)
        lost.stop()
        lost.start()
        held = {}
        for host in hosts:
            if host.peer.id in first.opens:
                staged = host.store.version(VERSION)
                staged.check()
                shards = tuple(shard.id for shard in first.opens[host.peer.id].map.shards)
                held[host.peer.id] = HeldVersion(VERSION, shards, staged.missing())
        again = [host for host in hosts if host in trainers or rng.random() < 0.8]
        receivers, peers = [host.peer.id for host in again if host.peer.engines], [host.peer for host in again]
        second = plan_repair(map, receivers, peers, network(again), own, held=held, name="1")
        second = replace(second, opens={**second.opens, **first.opens})  # like the daemon
        for host in again:
            staged_now = host.open(second, map)
            if staged_now is not None:
                coming = {edge.shard for edge in second.edges if edge.dst == host.peer.id}
                lacks = staged_now.missing().keys() - coming
                assert not lacks, f"{host.peer.id} is thought to have {lacks}"
        give(again, second, own)
        for host in again:
            host.until_done(second.edges)
            if host.peer.engines:
                host.store.version(VERSION).check()
                host.check(values)
        for host in again:  # no byte arrives twice
            missing = held[host.peer.id].missing if host.peer.id in held else {}
            lacking = sum(size for ranges in missing.values() for _, size in ranges)
            assert sum(edge.bytes for edge in second.edges if edge.dst == host.peer.id) == lacking


def fed(edges: Sequence[CarryEdge], publications: Sequence[Publication]) -> tuple[CarryEdge, ...]:
    """Return the edges whose source has staged the bytes or receives all of them."""
    sources = {each.peer for each in publications}
    kept = list(edges)
    while True:
        fine = [
            edge
            for edge in kept
            if edge.src in sources
            or any(
                other.dst == edge.src
                and other.shard == edge.shard
                and other.wave <= edge.wave
                and other.offset <= edge.offset
                and edge.offset + edge.bytes <= other.offset + other.bytes
                for other in kept
            )
        ]
        if len(fine) == len(kept):
            return tuple(fine)
        kept = fine
