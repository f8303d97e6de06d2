"""The process that holds weights on one host: attached to the daemon, with its folder, its transports and its engines.

Without the daemon it holds what it has, and its edges run on. A daemon that comes back is told everything anew.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import grpc
from pydantic import ValidationError

from orchestrrl.core.clock import Clock, stop
from orchestrrl.core.delivery import Outbox, ReceivedOrders
from orchestrrl.core.errors import OrchestrRLError, Permanent
from orchestrrl.rpc.channel import Established, first_of, stay_connected
from orchestrrl.rpc.order_pieces import OrderAssembler
from orchestrrl.rpc.pb import weights_pb2 as pb
from orchestrrl.rpc.pb import weights_pb2_grpc
from orchestrrl.weights.model import Peer
from orchestrrl.weights.orders import NEWS, ArrivedBytes, EdgeEvent, PeerNews, PeerOrder, PeerResult
from orchestrrl.weights.peer.carry import ThreadedCarrier
from orchestrrl.weights.peer.engines import PeerEngines
from orchestrrl.weights.peer.orders import PeerOrders
from orchestrrl.weights.peer.settings import PeerSettings
from orchestrrl.weights.peer.store import VersionStore
from orchestrrl.weights.transports.base import Transport, make_transport

logger = logging.getLogger(__name__)

REMEMBERED = 512  # results of orders that are over
MOST_UNSENT = 65536  # news that wait for a daemon; older ones are dropped, since it is told everything anew
LOOK_S = 0.5  # how often it is seen whether edges have completed a version
STAMP_S = 5.0  # the daemon is told so often what time it is here: clocks drift apart by less than a millisecond in it


async def run_peer(settings: PeerSettings, clock: Clock) -> None:
    """Until cancelled. Raises Permanent where the folder or all transports cannot be had."""
    # Hashed before it attaches, though that may take a while: by what it says then that it holds it is decided what is
    # carried to it. What it did not know of yet would be carried again.
    store = await asyncio.to_thread(VersionStore, Path(settings.peer.folder))
    transports: dict[str, Transport] = {}
    try:
        addresses = open_transports(settings, transports)
        link = PeerLink(settings, store, transports, addresses, clock)
        try:
            await link.run()
        finally:
            await link.close()
    finally:
        for transport in transports.values():
            transport.close()
        store.close()


def open_transports(settings: PeerSettings, opened: dict[str, Transport]) -> dict[str, str]:
    """Where each listens: those that can be had here. Raises Permanent where none can."""
    addresses, why = {}, []
    for name in settings.transports:
        try:
            transport = make_transport(name, settings.address)
            addresses[name] = transport.open()
            opened[name] = transport
        except (OrchestrRLError, OSError) as error:
            why.append(str(error))
            logger.info("transport %s is not to be had here: %s", name, error)
    if not opened:
        raise Permanent(f"no transport can be had here: {'; '.join(why)}")
    return addresses


class PeerLink:
    """Attached to the daemon: news one way, orders the other."""

    def __init__(
        self,
        settings: PeerSettings,
        store: VersionStore,
        transports: Mapping[str, Transport],
        addresses: Mapping[str, str],
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._store = store
        self._addresses = addresses
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._outbox: Outbox[PeerNews | None] = Outbox(MOST_UNSENT)  # None: the time alone
        self._reported: Peer | None = None  # as the daemon knows this peer, without what changes all the time
        given = store.serving if settings.peer.serves else {}
        self._engines = PeerEngines(settings.engines, settings.product, clock, self._poll, given)
        self._carrier = ThreadedCarrier(settings.peer.id, transports, self._on_news, clock.now_s)
        orders = PeerOrders(store, self._carrier, self._engines, clock, self._poll)
        self._orders = ReceivedOrders(orders.perform, orders.not_done, clock, REMEMBERED)
        self._running: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        await self._engines.refresh()
        stays = stay_connected(
            self._settings.daemon,
            self._converse,
            clock=self._clock,
            name=f"peer {self._settings.peer.id}",
        )
        await first_of(stays, self._engines.watch(self._settings.poll_engines_s), self._watch())

    async def close(self) -> None:
        await stop(*self._running)
        await self._orders.close()
        await asyncio.to_thread(self._carrier.close)
        await self._engines.close()

    def introduction(self) -> Peer:
        return replace(self._as_is(), free_bytes=self._store.free_bytes)

    def _as_is(self) -> Peer:
        return replace(
            self._settings.peer,
            transports=self._addresses,
            engines=self._engines.report,
            held=self._store.held,
        )

    async def _converse(self, channel: grpc.aio.Channel, established: Established) -> None:
        call = weights_pb2_grpc.WeightsStub(channel).Attach()
        try:
            await call.wait_for_connection()
            for news in [news for news in self._outbox.items if isinstance(news, Peer)]:
                self._outbox.items.remove(news)  # this tells it as it is now
            peer = self.introduction()
            self._reported = _lasting(peer)
            await call.write(self._message(peer))
            established()
            logger.info("peer %s: attached to %s", self._settings.peer.id, self._settings.daemon)
            await first_of(self._receive(call), self._outbox.write_all(lambda news: call.write(self._message(news))))
        finally:
            self._reported = None
            call.cancel()

    async def _receive(self, call: grpc.aio.StreamStreamCall[pb.PeerMessage, pb.PeerOrder]) -> None:
        joining = OrderAssembler()
        async for message in call:
            try:
                order = joining.add(message)
            except ValidationError as error:
                # A daemon of another release: it learns nothing from an answer without an id.
                logger.error("an order that cannot be read is left: %s", error)
                continue
            if order is None:
                continue
            task = asyncio.create_task(self._carry_out(order))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _carry_out(self, order: PeerOrder) -> None:
        self._put(await self._orders.result(order))

    def _on_news(self, news: EdgeEvent | ArrivedBytes) -> None:
        """From any thread."""
        self._loop.call_soon_threadsafe(self._put, news)

    def _put(self, news: PeerNews) -> None:
        if isinstance(news, PeerResult | EdgeEvent):
            self._poll()  # what the daemon hears of a result, it finds in what the peer says of itself
        last = self._outbox.items[-1] if self._outbox.items else None
        if isinstance(news, ArrivedBytes) and isinstance(last, ArrivedBytes) and last.version == news.version:
            self._outbox.items.pop()
        self._outbox.put(news)

    def _poll(self) -> None:
        """Say what has changed of this peer."""
        if self._reported is None:
            return
        lasting = _lasting(self._as_is())
        if lasting != self._reported:
            self._reported = lasting
            self._outbox.put(self.introduction())

    async def _watch(self) -> None:
        stamped_s = self._clock.now_s()
        while True:
            await self._clock.sleep(LOOK_S)
            self._poll()
            if self._reported is not None and not self._outbox.items and self._clock.now_s() - stamped_s >= STAMP_S:
                stamped_s = self._clock.now_s()
                self._outbox.put(None)

    def _message(self, news: PeerNews | None) -> pb.PeerMessage:
        """With the time of this moment, however long the news have waited."""
        text = "" if news is None else NEWS.dump_json(news).decode()
        return pb.PeerMessage(news_json=text, sent_unix_s=self._clock.now_s())


def _lasting(peer: Peer) -> Peer:
    """Without what changes as bytes arrive: ranges, and room."""
    held = tuple(replace(each, missing={} if each.complete else {"": ()}) for each in peer.held)
    return replace(peer, held=held, free_bytes=0)
