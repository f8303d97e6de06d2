"""The service Weights over gRPC, with fake peers that carry no bytes: refusals, streams, and bounds."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import get_args

import grpc
import pytest
from fake_syncs import PEERS, FakePeers, FakeSyncs, carrying, done
from pydantic import ValidationError

from orchestrrl.core.clock import VirtualClock, WallClock
from orchestrrl.core.config.schema import LimitSettings
from orchestrrl.core.defects import Defects
from orchestrrl.rpc.boundary import BoundaryInterceptor
from orchestrrl.rpc.channel import CHANNEL_OPTIONS, MESSAGE_BYTES, SERVER_OPTIONS
from orchestrrl.rpc.codecs.weights import STATUS, SYNC
from orchestrrl.rpc.order_pieces import OrderAssembler, pieces_of
from orchestrrl.rpc.pb import weights_pb2 as pb
from orchestrrl.rpc.pb import weights_pb2_grpc
from orchestrrl.rpc.weights_service import WeightsService
from orchestrrl.weights.controller.peer_hub import PeerHub
from orchestrrl.weights.controller.reports import SyncReport, SyncState
from orchestrrl.weights.model import (
    HeldVersion,
    Peer,
    PeerLocation,
    PeerRole,
    ShardMap,
    StagedPart,
    TensorMeta,
    VersionMap,
)
from orchestrrl.weights.orders import (
    NEWS,
    ORDER,
    ArrivedBytes,
    BackendAct,
    CarryEdge,
    CarryEdges,
    CheckVersion,
    EdgeEvent,
    EdgeState,
    EndEdges,
    InstallVersion,
    KeepVersions,
    OpenVersion,
    Order,
    OrderOutcome,
    PeerNews,
    PeerOrder,
    PeerResult,
    ProbeWeights,
    QueryVersion,
    RestEngine,
    ServeEngines,
    SumShards,
)
from orchestrrl.weights.publication import PUBLICATION, Publication
from planner.model import EngineId, PeerId

DEADLINE_S = 120.0
PEER = Peer(PeerId("gen0"), PeerRole.ENGINE, "node1", PeerLocation(pod="gen0"), {"tcp": "node1:7300"})
PUBLICATION_8 = Publication(8, 0, 1, PeerId("train0"), (TensorMeta("w", "F32", (4, 4)),), {"w": (((0, 4), (0, 4)),)})


@dataclass
class Harness:
    syncs: FakeSyncs
    peers: FakePeers
    clock: VirtualClock
    weights: "weights_pb2_grpc.WeightsAsyncStub"


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    syncs, peers, clock = FakeSyncs(committed=7), FakePeers(), VirtualClock()
    boundary = BoundaryInterceptor(LimitSettings(), Defects(WallClock(), lambda _: None))
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=(boundary,))
    weights_pb2_grpc.add_WeightsServicer_to_server(WeightsService(syncs, peers, clock), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with asyncio.timeout(DEADLINE_S):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) as channel:
            yield Harness(syncs, peers, clock, weights_pb2_grpc.WeightsStub(channel))
    await server.stop(0)


async def until(is_so: Callable[[], object]) -> None:
    while not is_so():
        await asyncio.sleep(0.005)


def news(what: PeerNews) -> pb.PeerMessage:
    return pb.PeerMessage(news_json=NEWS.dump_json(what).decode())


# --- Peers


class PlayedPeer:
    """The client side of an Attach stream."""

    def __init__(self, weights: "weights_pb2_grpc.WeightsAsyncStub") -> None:
        self._outgoing: asyncio.Queue[pb.PeerMessage | None] = asyncio.Queue()
        self.call = weights.Attach(self._messages())

    def tell(self, message: pb.PeerMessage | None) -> None:
        self._outgoing.put_nowait(message)

    async def order(self) -> PeerOrder | None:
        """Return the next order; None at the end of the stream."""
        joining, order = OrderAssembler(), None
        while order is None:
            message = await self.call.read()
            if message is grpc.aio.EOF:
                return None
            order = joining.add(message)
        return order

    async def _messages(self) -> AsyncIterator[pb.PeerMessage]:
        while (message := await self._outgoing.get()) is not None:
            yield message


async def test_orders_are_sent_and_messages_received(harness: Harness) -> None:
    peer = PlayedPeer(harness.weights)
    peer.tell(news(PEER))
    await until(lambda: harness.peers.lines)
    (line,) = harness.peers.lines
    assert line.peer == PEER
    order = PeerOrder("o1", 3, CheckVersion(8))
    line.outgoing.put_nowait(order)
    assert await peer.order() == order
    told: list[PeerNews] = [
        PeerResult("o1", OrderOutcome.DONE, missing={"s0": ((0, 4096),)}),
        EdgeEvent(8, "a1", EdgeState.BROKEN, True, 4096, 1000.0, 1001.0, "nothing came for 10 s"),
        ArrivedBytes(8, 4096),
        replace(PEER, folder="/tmp/other"),
    ]
    for each in told:
        peer.tell(news(each))
    await until(lambda: len(line.heard) == len(told))
    assert line.heard == told
    peer.tell(None)
    assert await peer.order() is None
    assert line.ended.is_set()


async def test_time_of_a_message_is_handled_before_its_content(harness: Harness) -> None:
    peer = PlayedPeer(harness.weights)
    for stamp_s, what in ((100.0, news(PEER)), (101.0, pb.PeerMessage()), (102.0, news(ArrivedBytes(8, 1)))):
        what.sent_unix_s = stamp_s
        peer.tell(what)
    peer.tell(news(ArrivedBytes(8, 2)))
    await until(lambda: harness.peers.lines and len(harness.peers.lines[0].heard) == 2)
    assert harness.peers.lines[0].stamps_s == [100.0, 101.0, 102.0]
    peer.tell(None)


async def test_dead_peer_is_detached(harness: Harness) -> None:
    peer = PlayedPeer(harness.weights)
    peer.tell(news(PEER))
    await until(lambda: harness.peers.lines)
    peer.call.cancel()
    await harness.peers.lines[0].ended.wait()


async def test_invalid_message_does_not_end_stream(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    peer = PlayedPeer(harness.weights)
    peer.tell(news(PEER))
    peer.tell(pb.PeerMessage(news_json='{"id": "o1", "outcome": "splendid"}'))
    peer.tell(news(ArrivedBytes(8, 1)))
    await until(lambda: harness.peers.lines and harness.peers.lines[0].heard)
    assert harness.peers.lines[0].heard == [ArrivedBytes(8, 1)]
    assert "PeerResult.outcome" in caplog.text
    assert "Arrived.version" not in caplog.text  # not meant as such a message
    peer.tell(None)


@pytest.mark.parametrize(
    ("first", "code", "words"),
    [
        (news(ArrivedBytes(8, 1)), grpc.StatusCode.INVALID_ARGUMENT, "must describe the peer"),
        (pb.PeerMessage(news_json="{"), grpc.StatusCode.INVALID_ARGUMENT, "Invalid JSON"),
        (
            pb.PeerMessage(news_json='{"id": "x", "role": "spare", "host": "h", "place": {}, "transports": {}}'),
            grpc.StatusCode.INVALID_ARGUMENT,
            "Peer.role: should be 'trainer' or 'engine', got 'spare'",
        ),
        (news(replace(PEER, host="node2")), grpc.StatusCode.FAILED_PRECONDITION, "on another host already"),
    ],
)
async def test_peer_without_description_is_refused(
    harness: Harness, first: pb.PeerMessage, code: grpc.StatusCode, words: str
) -> None:
    harness.peers.attach(PEER)
    peer = PlayedPeer(harness.weights)
    peer.tell(first)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await peer.order()
    assert refused.value.code() is code
    assert words in str(refused.value.details())
    assert len(harness.peers.lines) == 1
    peer.tell(None)


def opens(shards: int) -> OpenVersion:
    maps = tuple(ShardMap(f"s{number}", 1, (), ("0" * 16,) * 64) for number in range(shards))
    return OpenVersion(VersionMap(8, (), maps, 4096))


async def test_large_order_is_sent_in_pieces_before_the_next(harness: Harness) -> None:
    peer = PlayedPeer(harness.weights)
    peer.tell(news(PEER))
    await until(lambda: harness.peers.lines)
    (line,) = harness.peers.lines
    orders = [PeerOrder("o1", 1, opens(8_000)), PeerOrder("o2", 1, opens(56_000)), PeerOrder("o3", 1, CheckVersion(8))]
    assert [len(ORDER.dump_json(each)) > MESSAGE_BYTES for each in orders] == [False, True, False]
    for each in orders:
        line.outgoing.put_nowait(each)
    for each in orders:
        assert await peer.order() == each
    peer.tell(None)


def every_kind() -> list[PeerOrder]:
    """Return one of each kind, with values that need escaping in JSON."""
    box = ((0, 2), (0, 3))
    map = VersionMap(1, (TensorMeta('a"\\\u00e9\U0001f600', "F32", (2, 3)),), (ShardMap("s", 1, ()),), 4096)
    engine = EngineId("e\n0")
    edge = CarryEdge("s", 0, 1, PeerId("a"), PeerId("b"), id="x", transport="tcp", address="b:1")
    orders: list[Order] = [
        OpenVersion(map, (StagedPart(0, {map.tensors[0].name: (box,)}),), ("s",)), SumShards(1, ("s",)), EndEdges(1),
        CarryEdges(1, (edge,), 4096, 1.0), CheckVersion(1), InstallVersion(1, engine, 1.5, True), QueryVersion(engine),
        KeepVersions((1,)),
        ProbeWeights(engine, (1,), 1, 1.5), RestEngine(engine, True), BackendAct("p", engine, "a", 1, "{}", True, 1.5),
        ServeEngines({engine: "http://e"}),
    ]  # fmt: skip
    assert {type(each) for each in orders} == set(get_args(Order))
    return [PeerOrder(f'o"{number}', number, each) for number, each in enumerate(orders)]


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_pieces_of_any_size_are_reassembled(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrrl.rpc.order_pieces.PIECE_CHARACTERS", size)
    joining = OrderAssembler()
    for order in every_kind():
        pieces = [pb.PeerOrder.FromString(piece.SerializeToString()) for piece in pieces_of(order)]
        assert "".join(piece.order_json for piece in pieces) == ORDER.dump_json(order).decode()
        assert all(len(piece.order_json) <= size for piece in pieces)
        *before, last = (joining.add(piece) for piece in pieces)
        assert last == order
        assert not any(before)


def test_invalid_pieces_do_not_affect_next_order() -> None:
    joining = OrderAssembler()
    joining.add(pb.PeerOrder(order_json='{"id":', continues=True))
    with pytest.raises(ValidationError):
        joining.add(pb.PeerOrder(order_json="}"))
    (piece,) = pieces_of(PeerOrder("o", 1, CheckVersion(1)))
    assert joining.add(piece) == PeerOrder("o", 1, CheckVersion(1))


# --- Trainers


def published(publication: Publication) -> pb.PublishRequest:
    return pb.PublishRequest(publication_json=PUBLICATION.dump_json(publication).decode())


async def test_publisher_receives_reports_until_the_end(harness: Harness) -> None:
    call = harness.weights.Publish(published(PUBLICATION_8))
    first = SYNC.from_pb(await call.read())
    assert (first.version, first.state) == (8, SyncState.PUBLISHING)
    assert harness.syncs.published == [PUBLICATION_8]
    harness.syncs.change(carrying(8))
    assert SYNC.from_pb(await call.read()) == carrying(8)
    harness.syncs.change(done(8))
    assert SYNC.from_pb(await call.read()) == done(8)
    assert await call.read() is grpc.aio.EOF


async def test_publication_of_dropped_sync_is_refused(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a version that was published so long ago that its report is no longer stored."""
    monkeypatch.setattr(harness.syncs, "publish", lambda _: "s1-1")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await harness.weights.Publish(published(PUBLICATION_8)).read()
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_publisher_disconnect_does_not_end_sync(harness: Harness) -> None:
    call = harness.weights.Publish(published(PUBLICATION_8))
    report = SYNC.from_pb(await call.read())
    call.cancel()
    await until(lambda: harness.syncs.followed == 0)
    assert not harness.syncs.report(report.id).over
    assert harness.syncs.asked == []


async def test_invalid_publication_is_refused_with_all_faults(harness: Harness) -> None:
    text = PUBLICATION.dump_json(PUBLICATION_8).decode()
    cases = {
        text.replace('"rank":0', '"rank":3').replace('"version":8', '"version":-1'): [
            "version: must be >= 0, got -1",
            "rank: must be >= 0 and less than the world size (1), got 3",
        ],
        text.replace('"version":8', '"version":"new"').replace('"world":1', '"world":[]'): ["version: ", "world: "],
        text.replace('"version":8', '"version":7'): ["version: must be above 7, got 7"],
        "nonsense": ["(document): Invalid JSON"],
    }
    for each, faults in cases.items():
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await harness.weights.Publish(pb.PublishRequest(publication_json=each)).read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        lines = str(refused.value.details()).splitlines()
        assert len(lines) == len(faults)
        assert all(line.startswith(fault) for line, fault in zip(lines, faults, strict=True))


async def test_thousands_of_faults_are_summarized(harness: Harness) -> None:
    """More would not fit into the header of a refusal."""
    boxes = ",".join(f'"layers.{number}.{"x" * 300}": [[[0, 1]]]' for number in range(5_000))
    text = PUBLICATION.dump_json(PUBLICATION_8).decode().replace('"boxes":{', f'"boxes":{{{boxes},')
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await harness.weights.Publish(pb.PublishRequest(publication_json=text)).read()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    lines = str(refused.value.details()).splitlines()
    assert lines[0].startswith("boxes.layers.0.xxx")
    assert len(lines) < 50
    assert lines[-1] == f"(message): has {5001 - len(lines)} more faults"


# --- Operators


def later(report: SyncReport, arrived_bytes: int) -> SyncReport:
    return replace(report, arrived_bytes=arrived_bytes)


async def test_watch_reports_steps_at_once_and_bytes_at_intervals(harness: Harness) -> None:
    harness.syncs.change(carrying(8))
    call = harness.weights.WatchSync(pb.GetSyncRequest(version=8))
    assert SYNC.from_pb(await call.read()) == carrying(8)
    for number in range(1000):
        harness.syncs.change(later(carrying(8), number))
    prepared = replace(carrying(8), state=SyncState.PREPARED)
    harness.syncs.change(prepared)
    assert SYNC.from_pb(await call.read()) == prepared
    await harness.clock.advance(1.0)
    harness.syncs.change(later(prepared, 5))
    assert SYNC.from_pb(await call.read()) == later(prepared, 5)
    harness.syncs.change(done(8))
    assert SYNC.from_pb(await call.read()) == done(8)
    assert await call.read() is grpc.aio.EOF


async def test_ended_sync_is_reported_once(harness: Harness) -> None:
    harness.syncs.change(done(8))
    reports = [SYNC.from_pb(each) async for each in harness.weights.WatchSync(pb.GetSyncRequest())]
    assert reports == [done(8)]


async def test_syncs_are_found_by_id_version_or_as_newest(harness: Harness) -> None:
    for version in (6, 7, 8):
        harness.syncs.change(done(version))
    for request, version in (
        (pb.GetSyncRequest(), 8),
        (pb.GetSyncRequest(version=6), 6),
        (pb.GetSyncRequest(sync_id="sync-7"), 7),
    ):
        assert SYNC.from_pb(await harness.weights.GetSync(request)) == done(version)
    listed = await harness.weights.ListSyncs(pb.ListSyncsRequest(limit=2))
    assert [SYNC.from_pb(each) for each in listed.syncs] == [replace(done(v), slowest=()) for v in (8, 7)]


async def test_list_is_limited_by_message_size(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in range(50):
        harness.syncs.change(done(version))
    monkeypatch.setattr("orchestrrl.rpc.weights_service.MESSAGE_BYTES", 4096)
    listed = await harness.weights.ListSyncs(pb.ListSyncsRequest())
    assert listed.ByteSize() < 4096
    versions = [each.version for each in listed.syncs]
    assert versions == list(range(49, 49 - len(versions), -1))
    assert len(versions) > 5


async def test_unknown_syncs_are_not_found(harness: Harness) -> None:
    harness.syncs.change(done(8))
    for method in (
        harness.weights.GetSync(pb.GetSyncRequest(version=0)),
        harness.weights.GetSync(pb.GetSyncRequest(sync_id="x")),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await method
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await harness.weights.WatchSync(pb.GetSyncRequest(version=0)).read()
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_status_is_returned_with_and_without_publications(harness: Harness) -> None:
    empty = STATUS.from_pb(await harness.weights.GetWeights(pb.GetWeightsRequest()))
    assert empty == harness.syncs.status()
    harness.syncs.change(carrying(8))
    harness.syncs.peers = PEERS
    assert STATUS.from_pb(await harness.weights.GetWeights(pb.GetWeightsRequest())) == harness.syncs.status()


async def test_abort_and_install_succeed_or_give_a_reason(harness: Harness) -> None:
    harness.syncs.change(carrying(8))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await harness.weights.InstallSync(pb.InstallSyncRequest(reason="now"))
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    harness.syncs.change(replace(carrying(8), state=SyncState.PREPARED))
    fencing = await harness.weights.InstallSync(pb.InstallSyncRequest(sync_id="sync-8", reason="now"))
    assert fencing.state == "fencing"
    aborted = await harness.weights.AbortSync(pb.AbortSyncRequest(sync_id="sync-8", reason="wrong weights"))
    assert (aborted.state, aborted.code, aborted.detail) == ("aborted", "operator", "wrong weights")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await harness.weights.AbortSync(pb.AbortSyncRequest())
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "sync-8 is over" in str(refused.value.details())


# --- With the daemon's hub


@pytest.fixture
async def served() -> AsyncIterator[tuple[PeerHub, "weights_pb2_grpc.WeightsAsyncStub"]]:
    hub = PeerHub(WallClock(), generation=3)
    boundary = BoundaryInterceptor(LimitSettings(), Defects(WallClock(), lambda _: None))
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=(boundary,))
    weights_pb2_grpc.add_WeightsServicer_to_server(WeightsService(FakeSyncs(), hub, WallClock()), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with asyncio.timeout(DEADLINE_S):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) as channel:
            yield hub, weights_pb2_grpc.WeightsStub(channel)
    hub.close()
    await server.stop(0)


async def test_order_reaches_reattached_peer(
    served: tuple[PeerHub, "weights_pb2_grpc.WeightsAsyncStub"],
) -> None:
    hub, weights = served
    first = PlayedPeer(weights)
    first.tell(news(PEER))
    await until(lambda: PEER.id in hub.peers)
    asked = asyncio.ensure_future(hub.send_order(PEER.id, CheckVersion(8), DEADLINE_S))
    before = await first.order()
    assert before is not None
    first.call.cancel()
    await until(lambda: not hub.peers[PEER.id].attached)
    second = PlayedPeer(weights)
    second.tell(news(PEER))
    assert await second.order() == before
    second.tell(news(PeerResult(before.id, OrderOutcome.DONE, detail="as it should be")))
    assert (await asked).detail == "as it should be"
    second.tell(None)
    assert await second.order() is None


async def test_large_publication_reaches_peer(
    served: tuple[PeerHub, "weights_pb2_grpc.WeightsAsyncStub"],
) -> None:
    hub, weights = served
    peer = PlayedPeer(weights)
    peer.tell(news(PEER))
    await until(lambda: PEER.id in hub.peers)
    names = sorted(f"model.layers.{n // 1000}.mlp.experts.{n % 1000}.barrier_up_proj.weight" for n in range(60_000))
    tensors = tuple(TensorMeta(name, "BF16", (2048, 7168)) for name in names)
    parts = tuple(
        StagedPart(rank, dict.fromkeys(names, (((rank * 128, rank * 128 + 128), (0, 7168)),))) for rank in range(16)
    )
    opening = OpenVersion(VersionMap(8, tensors, (ShardMap("s", 1, ()),), 4096), parts)
    asked = asyncio.ensure_future(hub.send_order(PEER.id, opening, DEADLINE_S))
    order = await peer.order()
    assert order is not None
    assert order.order == opening
    peer.tell(news(PeerResult(order.id, OrderOutcome.DONE)))
    assert (await asked).outcome is OrderOutcome.DONE
    assert hub.peers[PEER.id].attached
    peer.tell(None)
    assert await peer.order() is None


# --- Numbers beyond the range of the journal and protobuf


@pytest.mark.parametrize(
    ("was", "now", "fault"),
    [
        ('"version":8', f'"version":{2**64}', f"version: must be <= {2**63 - 1}, got {2**64}"),
        ('"version":8', f'"version":{2**63}', f"version: must be <= {2**63 - 1}, got {2**63}"),
        ('"world":1', f'"world":{2**62}', f"world: must be <= {2**20}, got {2**62}"),
        ('"began_s":0.0', '"began_s":NaN', "began_s: must be >= 0 and <= 253402300799, got nan"),
        ('"gather_s":0.0', '"gather_s":1e308', "gather_s: must be >= 0 and <= 253402300799, got 1e+308"),
        ('"offload_s":0.0', '"offload_s":-1', "offload_s: must be >= 0 and <= 253402300799, got -1.0"),
        ('"shape":[4,4]', f'"shape":[{2**40},{2**40}]', f"tensors[0]: w: must have at most {2**50} bytes"),
        ('"probe":[]', f'"probe":[{2**31}]', "probe[0]: should be less than 2147483648"),
        ('"run":""', '"run":"\\ud800"', "(document): Invalid JSON"),
    ],
)
async def test_publication_with_numbers_out_of_range_is_refused(
    harness: Harness, was: str, now: str, fault: str
) -> None:
    text = PUBLICATION.dump_json(PUBLICATION_8).decode()
    assert was in text
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await harness.weights.Publish(pb.PublishRequest(publication_json=text.replace(was, now))).read()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert str(refused.value.details()).startswith(fault)
    assert not harness.syncs.published


def test_all_faults_in_numbers_of_a_publication_are_reported() -> None:
    with pytest.raises(ValueError, match=r"version: .*world: .*began_s: .*gather_s: ") as caught:
        replace(PUBLICATION_8, version=2**64, world=2**62, began_s=float("nan"), gather_s=-1.0)
    assert caught.value.args[0].count("; ") == 3  # each once


@pytest.mark.parametrize(
    ("news_of", "was", "now"),
    [
        (ArrivedBytes(8, 1), '"received_bytes":1', f'"received_bytes":{2**64}'),
        (ArrivedBytes(8, 1), '"received_bytes":1', '"received_bytes":-1'),
        (EdgeEvent(8, "a", EdgeState.DONE, True, 1, 1.0), '"bytes":1', f'"bytes":{2**63}'),
        (EdgeEvent(8, "a", EdgeState.DONE, True, 1, 1.0), '"began_s":1.0', '"began_s":NaN'),
        (EdgeEvent(8, "a", EdgeState.DONE, True, 1, 1.0), '"ended_s":0.0', '"ended_s":Infinity'),
        (replace(PEER, held=(HeldVersion(8, ("s0",)),)), '"version":8', f'"version":{2**64}'),
        (PEER, '"nic_gbps":0.0', '"nic_gbps":NaN'),
    ],
)
def test_message_with_numbers_out_of_range_is_invalid(news_of: PeerNews, was: str, now: str) -> None:
    text = NEWS.dump_json(news_of).decode()
    assert was in text
    with pytest.raises(ValidationError):
        NEWS.validate_json(text.replace(was, now, 1))
