"""A daemon with the real service whose orders the test chooses, and peers that attach to it as real processes."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from orchestrrl.rpc.channel import SERVER_OPTIONS
from orchestrrl.rpc.order_pieces import pieces_of
from orchestrrl.rpc.pb import weights_pb2 as pb
from orchestrrl.rpc.pb import weights_pb2_grpc
from orchestrrl.weights.model import (
    Peer,
)
from orchestrrl.weights.orders import (
    NEWS,
    CarryEdge,
    CarryEdges,
    EdgeEvent,
    EdgeState,
    Order,
    PeerNews,
    PeerOrder,
    PeerResult,
)
from planner.model import PeerId

WITHIN_S = 90.0  # a deadline for hanging calls
CHUNK = 1024


@dataclass
class Heard:
    """The reports of one peer, over all its streams."""

    news: list[PeerNews] = field(default_factory=list)
    orders: asyncio.Queue[PeerOrder] = field(default_factory=asyncio.Queue)
    attached: int = 0  # number of attaches
    is_attached: bool = False
    peer: Peer | None = None


class FakeDaemon(weights_pb2_grpc.WeightsServicer):
    def __init__(self) -> None:
        self.heard: dict[str, Heard] = {}
        self.generation = 1
        self._number = 0
        self._told = asyncio.Condition()

    async def Attach(
        self, request_iterator: AsyncIterator[pb.PeerMessage], context: Any
    ) -> AsyncIterator[pb.PeerOrder]:
        await context.send_initial_metadata(())
        first = NEWS.validate_json((await anext(aiter(request_iterator))).news_json)
        assert isinstance(first, Peer)
        heard = self.heard.setdefault(first.id, Heard())
        heard.attached += 1
        heard.is_attached = True
        await self._hear(heard, first)
        receiving = asyncio.create_task(self._receive(request_iterator, heard))
        giving: asyncio.Task[PeerOrder] | None = None
        try:
            while True:
                giving = asyncio.create_task(heard.orders.get())
                await asyncio.wait({giving, receiving}, return_when=asyncio.FIRST_COMPLETED)
                if not giving.done():
                    return
                for piece in pieces_of(giving.result()):
                    yield piece
        finally:
            heard.is_attached = False
            receiving.cancel()
            if giving is not None:
                giving.cancel()
            async with self._told:
                self._told.notify_all()

    async def _receive(self, messages: AsyncIterator[pb.PeerMessage], heard: Heard) -> None:
        async for message in messages:
            if message.news_json:
                await self._hear(heard, NEWS.validate_json(message.news_json))

    async def _hear(self, heard: Heard, news: PeerNews) -> None:
        async with self._told:
            heard.news.append(news)
            if isinstance(news, Peer):
                heard.peer = news
            self._told.notify_all()

    async def until(self, peer: str, condition: Callable[[Heard], Any]) -> Any:
        """Wait until `condition` is truthy; return its value."""
        async with self._told:
            found: Any = None

            def holds() -> bool:
                nonlocal found
                found = condition(self.heard[peer]) if peer in self.heard else None
                return bool(found)

            await asyncio.wait_for(self._told.wait_for(holds), WITHIN_S)
            return found

    async def peer(self, name: str, attached: int = 1) -> Peer:
        return await self.until(name, lambda heard: heard.attached >= attached and heard.is_attached and heard.peer)

    def give(self, peer: str, order: Order, id: str = "", generation: int | None = None) -> str:
        self._number += 1
        id = id or f"order{self._number}"
        told = PeerOrder(id, self.generation if generation is None else generation, order)
        self.heard[peer].orders.put_nowait(told)
        return id

    async def ask(self, peer: str, order: Order, id: str = "", generation: int | None = None) -> PeerResult:
        """Send an order to a peer; return its result."""
        before = len(self.heard[peer].news)
        given = self.give(peer, order, id, generation)
        return await self.until(
            peer,
            lambda heard: next(
                (news for news in heard.news[before:] if isinstance(news, PeerResult) and news.id == given), None
            ),
        )

    async def carried(self, peer: str, edges: list[str]) -> list[EdgeEvent]:
        """Wait until these edges have ended at the receiving peer; return its events."""

        def ended(heard: Heard) -> list[EdgeEvent] | None:
            over = [
                news
                for news in heard.news
                if isinstance(news, EdgeEvent)
                and news.is_receiver
                and news.state is not EdgeState.BEGAN
                and news.edge in edges
            ]
            return over if {event.edge for event in over} == set(edges) else None

        return await self.until(peer, ended)


@asynccontextmanager
async def daemon_at(port: int = 0, daemon: FakeDaemon | None = None) -> AsyncIterator[tuple[FakeDaemon, int]]:
    fake = daemon or FakeDaemon()
    server = grpc.aio.server(options=SERVER_OPTIONS)
    weights_pb2_grpc.add_WeightsServicer_to_server(fake, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    assert bound
    await server.start()
    try:
        yield fake, bound
    finally:
        await server.stop(None)


class PeerProcess:
    def __init__(self, name: str, port: int, folder: Path, *options: str, python: str = sys.executable) -> None:
        self.name = name
        self.folder = folder
        self._command = [
            python, "-m", "orchestrrl.weights.peer.main", "--id", name, "--daemon", f"127.0.0.1:{port}",
            "--folder", str(folder), "--host", "127.0.0.1", "--transport", "tcp", "--poll-engines-s", "0.2", *options,
        ]  # fmt: skip
        self._log = folder.with_name(f"{folder.name}.log")
        self.start()

    def start(self) -> None:
        root = Path(__file__).parents[3]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": str(root)}
            )

    def kill(self, number: int = signal.SIGKILL) -> int:
        if self._process.poll() is None:
            self._process.send_signal(number)
        return self._process.wait(WITHIN_S)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")


@asynccontextmanager
async def peers(*started: PeerProcess) -> AsyncIterator[None]:
    try:
        yield
    finally:
        for each in started:
            each.kill()


def edge(
    number: int | str, shard: str, offset: int, size: int, src: str, dst: Peer, rate_gbps: float = 0.0
) -> CarryEdge:
    flow, address = (shard, offset, size, PeerId(src), dst.id), dst.transports["tcp"]
    return CarryEdge(*flow, rate_gbps=rate_gbps, id=f"edge{number}", transport="tcp", address=address)


async def carry(daemon: FakeDaemon, version: int, edges: list[CarryEdge], stall_s: float = 60.0) -> None:
    """Order the edges at both of their endpoints."""
    for peer in sorted({end for each in edges for end in (each.src, each.dst)}):
        own = tuple(each for each in edges if peer in (each.src, each.dst))
        result = await daemon.ask(peer, CarryEdges(version, own, CHUNK, stall_s))
        assert result.outcome == "done", result.detail
