"""Deadlines of orders on hosts whose clocks are minutes off, with any delay of messages."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from fake_syncs import FakePeers, FakeSyncs

from orchestrrl.core.clock import Clock, VirtualClock, WallClock
from orchestrrl.core.config.schema import LimitSettings
from orchestrrl.core.defects import Defects
from orchestrrl.lab.simulated_engine.server import SimulatedOptions, SimulatedServer
from orchestrrl.rpc.boundary import BoundaryInterceptor
from orchestrrl.rpc.channel import SERVER_OPTIONS
from orchestrrl.rpc.pb import weights_pb2_grpc
from orchestrrl.rpc.weights_service import WeightsService
from orchestrrl.weights.controller.peer_hub import PeerHub, PeerStream
from orchestrrl.weights.model import (
    Peer,
    PeerLocation,
    PeerRole,
)
from orchestrrl.weights.orders import (
    BackendAct,
    CheckVersion,
    InstallVersion,
    Order,
    OrderOutcome,
    PeerOrder,
    ProbeWeights,
)
from orchestrrl.weights.peer.arguments import PeerArguments
from orchestrrl.weights.peer.peer import LOOK_S, run_peer
from orchestrrl.weights.peer.settings import settings_of
from planner.model import EngineId, PeerId

ENGINE = EngineId("e0")
GEN0 = Peer(PeerId("gen0"), PeerRole.ENGINE, "node1", PeerLocation(), {"tcp": "node1:1"})
WITHIN_S = 90.0


class OffClock(WallClock):
    def __init__(self, ahead_s: float) -> None:
        super().__init__()
        self._ahead_s = ahead_s

    def now_s(self) -> float:
        return super().now_s() + self._ahead_s


@asynccontextmanager
async def served(hub: PeerHub | FakePeers) -> AsyncIterator[int]:
    boundary = BoundaryInterceptor(LimitSettings(), Defects(WallClock(), lambda _: None))
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=(boundary,))
    weights_pb2_grpc.add_WeightsServicer_to_server(WeightsService(FakeSyncs(), hub, WallClock()), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


@asynccontextmanager
async def peer_at(port: int, folder: Path, clock: Clock, engines: Sequence[str] = ()) -> AsyncIterator[None]:
    words = PeerArguments(
        "gen0", f"127.0.0.1:{port}", engines=engines, product="simulated", folder=str(folder), host="127.0.0.1",
        transports=["tcp"],
    )  # fmt: skip
    peer = asyncio.ensure_future(run_peer(settings_of(words), clock))
    try:
        yield
    finally:
        peer.cancel()
        await asyncio.wait({peer})


@pytest.mark.parametrize("ahead_s", [-600.0, 600.0])
async def test_peer_keeps_deadlines_with_any_offset_of_its_clock(tmp_path: Path, ahead_s: float) -> None:
    hub, came = PeerHub(WallClock(), generation=1), asyncio.Event()
    hub.listen(lambda *_: came.set())
    async with asyncio.timeout(WITHIN_S), SimulatedServer(SimulatedOptions()) as engine, served(hub) as port:
        async with peer_at(port, tmp_path / "gen0", OffClock(ahead_s), [f"{ENGINE}={engine.url}"]):
            await came.wait()
            now_s = WallClock().now_s()
            in_time = await hub.send_order(GEN0.id, ProbeWeights(ENGINE, (1, 2), 3, now_s + WITHIN_S), WITHIN_S)
            assert (in_time.outcome, len(in_time.tokens)) == (OrderOutcome.DONE, 3), in_time.detail
            late = await hub.send_order(GEN0.id, ProbeWeights(ENGINE, (1, 2), 3, now_s - 1.0), WITHIN_S)
            assert late.outcome is OrderOutcome.FAILED
            assert "the order was not executed, because its deadline passed" in late.detail
            assert abs(hub.ours_s(GEN0.id, now_s + ahead_s) - now_s) < WITHIN_S


async def test_idle_peer_sends_time_stamps(tmp_path: Path) -> None:
    clock, peers = VirtualClock(1000.0), FakePeers()
    async with asyncio.timeout(WITHIN_S), served(peers) as port, peer_at(port, tmp_path / "gen0", clock):
        while not peers.lines or len(peers.lines[0].stamps_s) < 4:
            await clock.advance(LOOK_S)
            await asyncio.sleep(0.001)
        line = peers.lines[0]
        assert line.heard == []
        assert line.stamps_s == sorted(set(line.stamps_s))


async def given(stream: PeerStream) -> PeerOrder:
    return await anext(aiter(stream.orders()))


async def test_converted_deadline_is_never_later_than_the_original() -> None:
    """Covers any delay of the peer's message and of the order."""
    rng = random.Random(3)
    for _ in range(100):
        clock, ahead_s = VirtualClock(1000.0), rng.uniform(-900.0, 900.0)
        hub = PeerHub(clock, 1)
        stream = hub.attach(GEN0)
        until_s = clock.now_s() + 60.0
        asked = asyncio.ensure_future(hub.send_order(GEN0.id, InstallVersion(1, ENGINE, until_s), 100.0))
        for _ in range(rng.randrange(1, 4)):
            said_s = clock.now_s() + ahead_s
            way_s = rng.uniform(0.0, 5.0)
            await clock.advance(way_s)
            stream.stamped(said_s)
            stream.stamped(float("nan"))
        order = (await given(stream)).order
        assert isinstance(order, InstallVersion)
        assert until_s + ahead_s - way_s == pytest.approx(order.valid_until_s)
        asked.cancel()


async def test_repeated_order_is_converted_to_the_peers_new_clock() -> None:
    clock = VirtualClock(1000.0)
    hub = PeerHub(clock, 1)
    first = hub.attach(GEN0)
    first.stamped(1300.0)
    asked = asyncio.ensure_future(hub.send_order(GEN0.id, InstallVersion(1, ENGINE, 1060.0), 100.0))
    await clock.advance(0.0)
    before = await given(first)
    second = hub.attach(GEN0)
    second.stamped(400.0)
    again = await given(second)
    assert before.id == again.id
    assert [each.order for each in (before, again)] == [
        InstallVersion(1, ENGINE, 1360.0),
        InstallVersion(1, ENGINE, 460.0),
    ]
    asked.cancel()


def test_peer_without_time_stamps_has_no_offset() -> None:
    hub = PeerHub(VirtualClock(1000.0), 1)
    assert hub.ours_s(GEN0.id, 900.0) == 900.0
    stream = hub.attach(GEN0)
    assert hub.ours_s(GEN0.id, 900.0) == 900.0
    stream.stamped(700.0)
    assert hub.ours_s(GEN0.id, 600.0) == 900.0


@pytest.mark.parametrize(
    ("order", "moved"),
    [
        (InstallVersion(1, ENGINE, 10.0, anew=True), InstallVersion(1, ENGINE, 15.0, anew=True)),
        (ProbeWeights(ENGINE, (1,), 2, 10.0), ProbeWeights(ENGINE, (1,), 2, 15.0)),
        (BackendAct("p", ENGINE, "a", 1, "{}", True, 10.0), BackendAct("p", ENGINE, "a", 1, "{}", True, 15.0)),
        (CheckVersion(1), CheckVersion(1)),
    ],
)
def test_every_order_with_a_deadline_is_converted(order: Order, moved: Order) -> None:
    assert PeerOrder("o", 1, order).by_clock(5.0) == PeerOrder("o", 1, moved)


def test_all_orders_with_a_deadline_are_covered() -> None:
    timed = {kind for kind in Order.__args__ if "valid_until_s" in kind.__dataclass_fields__}  # type: ignore[attr-defined]
    assert timed == {InstallVersion, ProbeWeights, BackendAct}
