"""Sync plans, executed byte by byte in memory: every peer must get the bytes that its engines load."""

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrrl.core.config.weights import WeightSettings
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.weights.controller.planning import PlannedSync, plan_repair, plan_sync
from orchestrrl.weights.model import (
    EngineAt,
    HeldVersion,
    Peer,
    PeerLocation,
    PeerRole,
    Range,
    StagedPart,
    TensorMeta,
    VersionMap,
)
from orchestrrl.weights.orders import CarryEdge
from orchestrrl.weights.publication import Publication
from planner.model import EngineId, PeerId
from planner.sync_tree.model import Unreachable
from planner.sync_tree.network import NetworkStation, PairLink, SyncNetwork
from planner.sync_tree.parameters import Box
from planner.sync_tree.shares import EngineShare, needed_boxes

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
SETTINGS = WeightSettings(chunk_bytes=2048, hop_latency_s=1e-5)
TENSORS = tuple(
    TensorMeta(name, dtype, shape)
    for name, dtype, shape in [
        ("lm_head.weight", "BF16", (130, 8)),
        ("model.embed_tokens.weight", "BF16", (130, 8)),
        ("model.layers.0.mlp.down_proj.weight", "BF16", (8, 32)),
        ("model.layers.0.mlp.up_proj.weight", "BF16", (32, 8)),
        ("model.layers.0.self_attn.k_proj.weight", "F32", (16, 8)),
        ("model.layers.0.self_attn.q_proj.weight", "F32", (16, 8)),
        ("model.layers.1.mlp.experts.0.up_proj.weight", "BF16", (8, 8)),
        ("model.layers.1.mlp.experts.1.up_proj.weight", "BF16", (8, 8)),
        ("model.norm.weight", "F32", (8,)),
        ("model.scale", "F32", ()),
    ]
)


def trainer(number: int, **more: Any) -> Peer:
    return peer(f"trainer{number}", PeerRole.TRAINER, **more)


def peer(name: str, role: PeerRole = PeerRole.ENGINE, **more: Any) -> Peer:
    engines = (EngineAt(EngineId(f"{name}-engine"), "http://x"),) if role is PeerRole.ENGINE else ()
    transports = {each: f"{name}:{each}" for each in more.pop("transports", ("gloo", "tcp"))}
    return Peer(PeerId(name), role, name, PeerLocation(), transports, more.pop("engines", engines), **more)


def staged(rank: int, at: Peer, boxes: Mapping[str, tuple[Box, ...]] | None = None, world: int = 1) -> Publication:
    own = {tensor.name: (tensor.whole,) for tensor in TENSORS} if boxes is None else boxes
    return Publication(3, rank, world, at.id, tuple(each for each in TENSORS if each.name in own), own)


def network(peers: Iterable[Peer], pods: int = 2, **more: Any) -> SyncNetwork:
    return SyncNetwork(
        10.0,
        {each.id: NetworkStation(f"pod{place % pods}", f"tor{place % 3}", 10.0) for place, each in enumerate(peers)},
        **more,
    )


# An executor of plans: the bytes that each peer has of each tensor, numbered; 0 is a hole.


def whole(tensor: TensorMeta) -> Bytes:
    """Return numbered bytes of a whole tensor, as [elements, bytes of an element]; none is 0."""
    rng = np.random.default_rng(len(tensor.name))
    return rng.integers(1, 256, (*tensor.shape, tensor.bytes // max(1, int(np.prod(tensor.shape)))), dtype=np.uint8)


def at(box: Box) -> tuple[slice, ...]:
    return tuple(slice(first, last) for first, last in box)


class Host:
    def __init__(self) -> None:
        self.file: dict[str, Bytes] = {each.name: np.zeros_like(whole(each)) for each in TENSORS}
        self.staged: dict[str, Bytes] = {each.name: np.zeros_like(whole(each)) for each in TENSORS}

    def stage(self, parts: Iterable[StagedPart]) -> None:
        for part in parts:
            for name, boxes in part.boxes.items():
                for box in boxes:
                    self.staged[name][at(box)] = whole(next(each for each in TENSORS if each.name == name))[at(box)]

    def of(self, version: VersionMap, shard: str) -> Bytes:
        """Return the bytes of a shard from the tensors of a peer."""
        slices = next(each for each in version.shards if each.id == shard).slices
        found = [np.maximum(self.file[each.parameter], self.staged[each.parameter])[at(each.box)] for each in slices]
        return np.concatenate([each.ravel() for each in found])

    def put(self, version: VersionMap, shard: str, offset: int, data: Bytes) -> None:
        own = next(each for each in version.shards if each.id == shard)
        for each in own.slices:
            first, last = max(offset, each.offset), min(offset + len(data), each.offset + each.bytes)
            if first < last:
                box = self.file[each.parameter][at(each.box)]
                flat = box.ravel()
                flat[first - each.offset : last - each.offset] = data[first - offset : last - offset]
                self.file[each.parameter][at(each.box)] = flat.reshape(box.shape)

    def open(self, planned: PlannedSync, own: PeerId) -> None:
        opened = planned.opens[own]
        self.stage(opened.parts)
        for shard in opened.at_home:
            self.put(opened.map, shard, 0, self.of(opened.map, shard))


def carry(planned: PlannedSync, hosts: Mapping[PeerId, Host], edges: Iterable[CarryEdge] | None = None) -> None:
    """Execute the waves in order, and in each wave the edges as their bytes become available."""
    waves: dict[int, list[CarryEdge]] = defaultdict(list)
    for edge in planned.edges if edges is None else edges:
        waves[edge.wave].append(edge)
    for _, own in sorted(waves.items()):
        while own:
            ready = [edge for edge in own if sent(planned, hosts, edge).all()]
            assert ready, "edges wait for each other"
            for edge in ready:
                data = sent(planned, hosts, edge)
                version = planned.opens[edge.dst].map
                assert not hosts[edge.dst].of(version, edge.shard)[edge.offset : edge.offset + edge.bytes].any(), (
                    "it is there already"
                )
                hosts[edge.dst].put(version, edge.shard, edge.offset, data)
                own.remove(edge)


def sent(planned: PlannedSync, hosts: Mapping[PeerId, Host], edge: CarryEdge) -> Bytes:
    data = hosts[edge.src].of(planned.map, edge.shard)[edge.offset : edge.offset + edge.bytes]
    assert len(data) == edge.bytes
    return data


def arrived(host: Host, peer: Peer) -> None:
    """Check that a peer has the correct bytes of everything that its engines load."""
    for name, boxes in needs(peer).items():
        tensor = next(each for each in TENSORS if each.name == name)
        for box in boxes:
            assert (host.file[name][at(box)] == whole(tensor)[at(box)]).all(), (peer.id, name, box)


def needs(peer: Peer) -> dict[str, tuple[Box, ...]]:
    return needed_boxes({each.name: each.shape for each in TENSORS}, peer.share)


def chance(rng: random.Random) -> tuple[list[Publication], list[Peer]]:
    """Draw trainer ranks with whole tensors, rows or columns, some duplicated, and engines with shares."""
    hosts = [trainer(number) for number in range(rng.randint(1, 3))]
    if rng.random() < 0.4:
        hosts[0] = replace(hosts[0], engines=(EngineAt(EngineId("beside"), "http://x"),))
    world = rng.choice([1, 2, 4])
    axis = rng.choice([0, 1])
    publications = []
    for replica in range(rng.randint(1, 2)):
        for rank in range(world):
            boxes = {each.name: box for each in TENSORS if (box := _part(each, axis, rank, world))}
            publications.append(staged(replica * world + rank, rng.choice(hosts), boxes, 2 * world))
    shares = [
        EngineShare(),
        EngineShare(tp=2, tp_ranks=(rng.randrange(2),)),
        EngineShare(pp=2, pp_ranks=(rng.randrange(2),)),
    ]
    shares += [EngineShare(tp=4, tp_ranks=(0, 2)), EngineShare(ep=2, ep_ranks=(1,), tp=2, tp_ranks=(1,))]
    engines = [peer(f"engines{number}", share=rng.choice(shares)) for number in range(rng.randint(1, 5))]
    return publications, [*hosts, *engines]


def _part(tensor: TensorMeta, axis: int, rank: int, world: int) -> tuple[Box, ...]:
    if not tensor.shape:
        return (tensor.whole,) if rank == 0 else ()
    axis = min(axis, len(tensor.shape) - 1)
    each = -(-tensor.shape[axis] // world)
    first, last = min(tensor.shape[axis], rank * each), min(tensor.shape[axis], (rank + 1) * each)
    return ((*tensor.whole[:axis], (first, last), *tensor.whole[axis + 1 :]),) if first < last else ()


seeds = st.integers(0, 2**32)


@given(seeds)
@settings(max_examples=15)
def test_plan_brings_every_engine_its_bytes(seed: int) -> None:
    rng = random.Random(seed)
    publications, peers = chance(rng)
    planned = plan_sync(3, publications, peers, network(peers, rng.choice([1, 2, 4])), SETTINGS)
    hosts = {each.id: Host() for each in peers}
    for each in planned.opens:
        hosts[each].open(planned, each)
    carry(planned, hosts)
    for each in peers:
        if each.engines:
            arrived(hosts[each.id], each)
    assert len({edge.id for edge in planned.edges}) == len(planned.edges) == len(planned.planned_s)
    for shard, holder in planned.summed_by.items():
        assert shard in {each.id for each in planned.opens[holder].map.shards}
    assert set(planned.summed_by) == {shard.id for shard in planned.map.shards}
    assert planned.map.bytes == sum(each.bytes for each in TENSORS)
    for edge in planned.edges:
        assert edge.address == f"{edge.dst}:tcp"
        assert edge.rate_gbps == 0


@given(seeds)
@settings(max_examples=15)
def test_second_attempt_brings_only_missing_bytes(seed: int) -> None:
    """Some edges of the first attempt carried no or only part of their bytes, and one engine's peer has detached."""
    rng = random.Random(seed)
    publications, peers = chance(rng)
    first = plan_sync(3, publications, peers, network(peers), SETTINGS)
    hosts = {each.id: Host() for each in peers}
    for each in first.opens:
        hosts[each].open(first, each)
    carry(first, hosts)
    again = [each for each in peers if each.role is PeerRole.TRAINER or rng.random() < 0.8]
    held: dict[PeerId, HeldVersion] = {}
    for each in again:
        if each.id not in first.opens:
            continue
        missing: dict[str, tuple[Range, ...]] = {}
        for edge in first.edges if each.engines else ():
            if edge.dst == each.id and edge.shard not in missing and rng.random() < 0.5:
                start = rng.randrange(edge.bytes)
                missing[edge.shard] = ((edge.offset + start, rng.randint(1, edge.bytes - start)),)
                hosts[each.id].put(
                    first.map, edge.shard, edge.offset + start, np.zeros(missing[edge.shard][0][1], np.uint8)
                )
        shards = tuple(shard.id for shard in first.opens[each.id].map.shards)
        held[each.id] = HeldVersion(3, shards, missing)
    receivers = [each.id for each in again if each.engines]
    lacking = sum(size for each in held.values() for ranges in each.missing.values() for _, size in ranges)
    second = plan_repair(first.map, receivers, again, network(again), SETTINGS, held=held, name="1")
    assert not second.summed_by
    carry(second, hosts)
    for each in again:
        if each.engines:
            arrived(hosts[each.id], each)
    assert not {edge.id for edge in first.edges} & {edge.id for edge in second.edges}
    assert sum(edge.bytes for edge in second.edges) == lacking


@given(seeds)
@settings(max_examples=15)
def test_repair_plan_brings_only_missing_ranges(seed: int) -> None:
    rng = random.Random(seed)
    peers = [peer(f"engines{number}", share=rng.choice([EngineShare(), EngineShare(tp=2)])) for number in range(4)]
    peers[0] = replace(peers[0], share=EngineShare())
    source = trainer(0)
    fleet = plan_sync(3, [staged(0, source)], [source, *peers], network([source, *peers]), SETTINGS)
    hosts, held = {each.id: Host() for each in peers}, {}
    for place, each in enumerate(peers):
        shards = fleet.opens[each.id].map.shards
        missing: dict[str, tuple[Range, ...]] = {}
        for shard in shards:
            hosts[each.id].put(fleet.map, shard.id, 0, _right(fleet.map, shard.id))
            if place and rng.random() < 0.7:
                start = rng.randrange(shard.bytes)
                missing[shard.id] = ((start, rng.randint(1, shard.bytes - start)),)
                hosts[each.id].put(fleet.map, shard.id, start, np.zeros(missing[shard.id][0][1], dtype=np.uint8))
        held[each.id] = HeldVersion(3, tuple(shard.id for shard in shards), missing)
    if rng.random() < 0.5:  # one has lost everything
        hosts[peers[3].id] = Host()
        del held[peers[3].id]
    lacking = sum(_lacked(hosts[each.id], each) for each in peers)
    peers = [replace(each, held=(held[each.id],) if each.id in held else ()) for each in peers]
    receivers = [each.id for each in peers[1:]]
    repair = plan_repair(fleet.map, receivers, peers, network(peers), SETTINGS, held=held, name="7")
    assert set(repair.opens) == set(receivers)
    carry(repair, hosts)
    for each in peers:
        arrived(hosts[each.id], each)
    assert sum(edge.bytes for edge in repair.edges) == lacking


def _right(version: VersionMap, shard: str) -> Bytes:
    host = Host()
    host.stage([StagedPart(0, {each.name: (each.whole,) for each in TENSORS})])
    return host.of(version, shard)


def _lacked(host: Host, peer: Peer) -> int:
    return sum(int((host.file[name][at(box)] == 0).sum()) for name, boxes in needs(peer).items() for box in boxes)


def test_repair_plan_reports_ranges_that_no_peer_has() -> None:
    source, one, other = trainer(0), peer("a"), peer("b")
    fleet = plan_sync(3, [staged(0, source)], [source, one, other], network([source, one, other]), SETTINGS)
    shard = fleet.map.shards[0]
    held = {each.id: HeldVersion(3, (shard.id,), {shard.id: ((10, 5),)}) for each in (one, other)}
    with pytest.raises(Unreachable, match=f"no attached peer has these bytes: {shard.id} from byte 10 to 15"):
        plan_repair(fleet.map, [one.id], [one, other], network([one, other]), SETTINGS, held=held)


def test_plan_reports_all_faults_at_once() -> None:
    source, one = trainer(0), peer("a")
    away = staged(1, trainer(9), world=2)
    with pytest.raises(ProblemFaults) as caught:
        plan_sync(3, [staged(0, source), away], [source, one, peer("b")], network([source, one]), SETTINGS)
    assert caught.value.faults == [
        "publications[1].peer: is not attached, got 'trainer9'",
        "peers.b: has no station in the network: configure its location",
    ]


def test_plan_reports_bytes_that_no_trainer_has() -> None:
    source, one = trainer(0), peer("a")
    half = staged(0, source, {"model.norm.weight": (((0, 4),),)})
    with pytest.raises(ProblemFaults, match=r"tensors.model.norm.weight: no endpoint holds box \(\(4, 8\),\)"):
        plan_sync(3, [half], [source, one], network([source, one]), SETTINGS)


def test_plan_uses_the_first_common_transport_or_reports_its_lack() -> None:
    source, one, other = trainer(0, transports=("tcp", "nccl")), peer("a", transports=("gloo", "tcp")), peer("b")
    wide, narrow = peer("d", transports=("gloo", "tcp", "nccl")), peer("e", transports=("gloo",))
    for peers, expected in (
        ([source, one], "a:tcp"),
        ([one, other], "b:tcp"),
        ([source, wide], "d:nccl"),
        ([one, narrow], "e:gloo"),
    ):
        planned = plan_sync(3, [staged(0, peers[0])], peers, network(peers), SETTINGS)
        assert {edge.address for edge in planned.edges} == {expected}
    with pytest.raises(ProblemFaults) as caught:
        plan_sync(
            3, [staged(0, source)], [source, peer("c", transports=("gloo",))], network([source, peer("c")]), SETTINGS
        )
    assert caught.value.faults == [
        "peers.c.transports: must have one of nccl, tcp, gloo in common with trainer0, got gloo and nccl, tcp"
    ]


def test_edges_have_rates_if_the_network_is_limited() -> None:
    source, one = trainer(0), peer("a")
    peers = [source, one]
    free = plan_sync(3, [staged(0, source)], peers, network(peers), SETTINGS)
    half = plan_sync(3, [staged(0, source)], peers, network(peers), WeightSettings(chunk_bytes=2048, rate_share=0.5))
    limited = plan_sync(3, [staged(0, source)], peers, network(peers, boundary_circuits={"pod0": 1}), SETTINGS)
    assert {edge.rate_gbps for edge in free.edges} == {0.0}
    assert 0 < max(edge.rate_gbps for edge in half.edges) <= 5.0 * (1 + 1e-9)
    assert 0 < max(edge.rate_gbps for edge in limited.edges) <= 10.0 * (1 + 1e-9)
    assert half.plan.lower_bound_s == pytest.approx(2 * free.plan.lower_bound_s)


def test_adjacent_pieces_form_one_edge() -> None:
    peers = [trainer(0), *(peer(f"e{number}") for number in range(6))]
    planned = plan_sync(3, [staged(0, peers[0])], peers, network(peers, 1), SETTINGS)
    ends: dict[Any, int] = {}
    for edge in sorted(planned.edges, key=lambda each: each.offset):
        way = edge.wave, edge.shard, edge.src, edge.dst
        assert ends.get(way) != edge.offset
        ends[way] = edge.offset + edge.bytes


def test_plan_without_receivers_has_no_edges() -> None:
    source = trainer(0)
    planned = plan_sync(3, [staged(0, source)], [source], network([source]), SETTINGS)
    assert (planned.edges, planned.plan.waves, planned.plan.estimate_s) == ((), (), 0.0)
    assert planned.opens[source.id].parts


def test_plan_uses_only_existing_pairs_of_pods() -> None:
    peers = [trainer(0), *(peer(f"e{number}") for number in range(4))]
    stations = {each.id: NetworkStation(f"pod{-(-place // 2)}", "tor", 10.0) for place, each in enumerate(peers)}
    links = {
        ("pod0", "pod1"): PairLink(1, 5.0),
        ("pod1", "pod2"): PairLink(2, 10.0),
        ("pod0", "elsewhere"): PairLink(9, 9.0),
    }
    planned = plan_sync(3, [staged(0, peers[0])], peers, SyncNetwork(10.0, stations, pairs=links), SETTINGS)
    crossing = [edge for edge in planned.edges if edge.phase == "A"]
    ways = {(stations[edge.src].pod, stations[edge.dst].pod) for edge in crossing}
    assert ways == {("pod0", "pod1"), ("pod1", "pod2")}
    assert all(0 < edge.rate_gbps <= 5.0 * (1 + 1e-9) for edge in crossing if stations[edge.src].pod == "pod0")
    cut = SyncNetwork(10.0, stations, pairs={("pod0", "pod1"): PairLink(1, 5.0)})
    with pytest.raises(Unreachable, match="PoD pod2"):
        plan_sync(3, [staged(0, peers[0])], peers, cut, SETTINGS)
