"""The weight peer of one host: it attaches to the daemon and owns a folder, transports and engine connections.

While the daemon is down, the peer keeps its versions, and its edges continue. Whenever the peer attaches to a daemon,
it sends its full state.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import assert_never

import grpc
from pydantic import ValidationError

from orchestrrl.core.clock import Clock, stop
from orchestrrl.core.delivery import NotDone, Outbox, ReceivedOrders
from orchestrrl.core.errors import OrchestrRLError, Permanent
from orchestrrl.engines.base import LoadedWeights
from orchestrrl.rpc.channel import Established, first_of, stay_connected
from orchestrrl.rpc.order_pieces import OrderAssembler
from orchestrrl.rpc.pb import weights_pb2 as pb
from orchestrrl.rpc.pb import weights_pb2_grpc
from orchestrrl.weights import orders
from orchestrrl.weights.model import Peer
from orchestrrl.weights.orders import NEWS, ArrivedBytes, EdgeEvent, OrderOutcome, PeerNews, PeerOrder, PeerResult
from orchestrrl.weights.peer.carry import ThreadedCarrier
from orchestrrl.weights.peer.engines import PeerEngines
from orchestrrl.weights.peer.settings import PeerSettings
from orchestrrl.weights.peer.staged import StagedVersion
from orchestrrl.weights.peer.store import VersionStore
from orchestrrl.weights.transports.base import Transport, make_transport
from planner.model import EngineId

logger = logging.getLogger(__name__)

REMEMBERED = 512  # stored results of completed orders
MOST_UNSENT = 65536  # reports that wait for a daemon; the oldest are dropped, since a full report follows at attach
LOOK_S = 0.5  # interval of checks whether edges have completed a version
STAMP_S = 5.0  # interval of time stamps for the daemon: clocks drift by less than a millisecond within it


async def run_peer(settings: PeerSettings, clock: Clock) -> None:
    """Run a peer until cancelled. Raises Permanent if the folder is unusable or no transport is available."""
    # Stored bytes are hashed before the peer attaches, though it may take long: the daemon plans transfers by the first
    # report, so bytes missing in it would be sent again.
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
    """Open the available transports and add them to `opened`; return their addresses by name. Raises Permanent if no
    transport is available."""
    addresses, why = {}, []
    for name in settings.transports:
        try:
            transport = make_transport(name, settings.address)
            addresses[name] = transport.open()
            opened[name] = transport
        except (OrchestrRLError, OSError) as error:
            why.append(str(error))
            logger.info("transport %s is not available: %s", name, error)
    if not opened:
        raise Permanent(f"no transport is available: {'; '.join(why)}")
    return addresses


class PeerLink:
    """The peer's connection to the daemon: it sends reports and receives orders."""

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
        self._outbox: Outbox[PeerNews | None] = Outbox(MOST_UNSENT)  # None: only a time stamp
        self._reported: Peer | None = None  # last reported state, without the ranges that change with every byte
        given = store.state.serving if settings.peer.serves else {}
        self._engines = PeerEngines(settings.engines, settings.product, clock, self._poll, given)
        self._carrier = ThreadedCarrier(settings.peer.id, transports, self._on_news, clock.now_s)
        performer = PeerOrders(store, self._carrier, self._engines)
        self._orders = ReceivedOrders(performer.perform, performer.not_done, clock, REMEMBERED)
        self._running: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        await self._engines.refresh()
        stays = stay_connected(
            self._settings.daemon, self._converse, clock=self._clock, name=f"peer {self._settings.peer.id}"
        )
        await first_of(stays, self._engines.watch(self._settings.poll_engines_s), self._watch())

    async def close(self) -> None:
        await stop(*self._running)
        await self._orders.close()
        await asyncio.to_thread(self._carrier.close)
        await self._engines.close()

    def introduction(self) -> Peer:
        return replace(
            self._settings.peer, transports=self._addresses, engines=self._engines.report, held=self._store.held
        )

    async def _converse(self, channel: grpc.aio.Channel, established: Established) -> None:
        call = weights_pb2_grpc.WeightsStub(channel).Attach()
        try:
            await call.wait_for_connection()
            for news in [news for news in self._outbox.items if isinstance(news, Peer)]:
                self._outbox.items.remove(news)  # the new report replaces it
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
                # The daemon is probably of another release. Without the order's id no result can be sent.
                logger.error("ignored an order that cannot be parsed: %s", error)
                continue
            if order is None:
                continue
            task = asyncio.create_task(self._carry_out(order))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _carry_out(self, order: PeerOrder) -> None:
        self._put(await self._orders.result(order))

    def _on_news(self, news: EdgeEvent | ArrivedBytes) -> None:
        """Queue a report from the carrier for the daemon. This method may be called from any thread."""
        self._loop.call_soon_threadsafe(self._put, news)

    def _put(self, news: PeerNews) -> None:
        if isinstance(news, PeerResult | EdgeEvent):
            self._poll()  # the peer's state must reach the daemon before a result that depends on it
        last = self._outbox.items[-1] if self._outbox.items else None
        if isinstance(news, ArrivedBytes) and isinstance(last, ArrivedBytes) and last.version == news.version:
            self._outbox.items.pop()
        self._outbox.put(news)

    def _poll(self) -> None:
        """Queue a report of this peer's state if the state has changed since the last report."""
        if self._reported is None:
            return
        peer = self.introduction()
        if (lasting := _lasting(peer)) != self._reported:
            self._reported = lasting
            self._outbox.put(peer)

    async def _watch(self) -> None:
        stamped_s = self._clock.now_s()
        while True:
            await self._clock.sleep(LOOK_S)
            self._poll()
            if self._reported is not None and not self._outbox.items and self._clock.now_s() - stamped_s >= STAMP_S:
                stamped_s = self._clock.now_s()
                self._outbox.put(None)

    def _message(self, news: PeerNews | None) -> pb.PeerMessage:
        """Return the message that contains a report and the current time as its timestamp. If `news` is None, the
        message contains only the timestamp."""
        text = "" if news is None else NEWS.dump_json(news).decode()
        return pb.PeerMessage(news_json=text, sent_unix_s=self._clock.now_s())


class PeerOrders:
    """The part of the peer that carries out the daemon's orders. An order that takes long runs concurrently with other
    orders."""

    def __init__(self, store: VersionStore, carrier: ThreadedCarrier, engines: PeerEngines) -> None:
        self._store = store
        self._carrier = carrier
        self._engines = engines
        # Held while versions are opened or discarded, so that a lookup waits for earlier orders.
        self._turn = asyncio.Lock()

    def not_done(self, order: PeerOrder, why: NotDone, detail: str, began_s: float) -> PeerResult:
        outcome = OrderOutcome.UNKNOWN if why is NotDone.UNKNOWN else OrderOutcome.FAILED
        logger.warning("order %s (%s): %s: %s", order.id, order.order.kind, outcome, detail)
        return PeerResult(order.id, outcome, detail)

    async def perform(self, order: PeerOrder) -> PeerResult:
        """Carry out an order; return its result. Raises an OrchestrRLError if the order fails."""
        id = order.id
        match order.order:
            case orders.OpenVersion() as asked:
                staged = await self._open(asked)
                return PeerResult(id, OrderOutcome.DONE, missing=staged.missing())
            case orders.SumShards(version, shards):
                found = await asyncio.to_thread((await self._version(version)).sums_of, shards)
                return PeerResult(id, OrderOutcome.DONE, sums=found)
            case orders.CarryEdges() as asked:
                staged = await self._version(asked.version)
                await asyncio.to_thread(self._carrier.carry, staged, asked)
                return PeerResult(id, OrderOutcome.DONE)
            case orders.EndEdges(version, edges):
                await asyncio.to_thread(self._carrier.end, version, edges)
                return PeerResult(id, OrderOutcome.DONE)
            case orders.CheckVersion(version):
                staged = await self._version(version)
                await asyncio.to_thread(staged.check)
                if not staged.missing() and await self._engines.take_sums():
                    await asyncio.to_thread(staged.take_content_sum)
                words = f"{staged.disagreed} blocks had wrong checksums so far"
                return PeerResult(id, OrderOutcome.DONE, words, missing=staged.missing())
            case orders.InstallVersion(version, engine, by_s, anew):
                loaded, words = await self._install(await self._version(version), engine, by_s, anew=anew)
                return PeerResult(id, OrderOutcome.DONE, words, loaded_sum=loaded.sum, is_read_back=loaded.is_read_back)
            case orders.QueryVersion(engine):
                return PeerResult(id, OrderOutcome.DONE, await self._engines.refresh_one(engine))
            case orders.ProbeWeights(engine, prompt_ids, max_tokens, by_s):
                tokens = await self._engines.go_on(engine, prompt_ids, max_tokens, by_s)
                return PeerResult(id, OrderOutcome.DONE, tokens=tokens)
            case orders.RestEngine(engine, at_rest, drain_s, ends):
                words = await self._engines.rest(engine, at_rest, drain_s, ends=ends)
                return PeerResult(id, OrderOutcome.DONE, words)
            case orders.ServeEngines(engines):
                # Stored first, so that the peer reports the same engines after a restart.
                await asyncio.to_thread(self._store.note_serving, engines)
                return PeerResult(id, OrderOutcome.DONE, await self._engines.serve(engines))
            case orders.KeepVersions(versions):
                gone = await self._keep(versions)
                return PeerResult(id, OrderOutcome.DONE, f"discarded {', '.join(map(str, gone)) or 'none'}")
            case orders.BackendAct() as asked:
                if asked.changes:  # in any outcome, the engine has no version of this folder
                    await asyncio.to_thread(self._store.note_installed, asked.engine, "")
                return PeerResult(id, OrderOutcome.DONE, result_json=await self._engines.act(asked))
            case other:
                assert_never(other)

    async def _install(
        self, staged: StagedVersion, engine: EngineId, by_s: float, *, anew: bool
    ) -> tuple[LoadedWeights, str]:
        folder = await asyncio.to_thread(staged.install_folder)
        identity = await asyncio.to_thread(lambda: staged.identity)
        is_other = anew or self._store.state.installed.get(engine) != identity
        if is_other:  # cleared until the load is done: a peer killed during it must not report either version
            await asyncio.to_thread(self._store.note_installed, engine, "")
        known_sum = await asyncio.to_thread(staged.content_sum)
        loaded, words = await self._engines.install(
            engine, staged.map.version, folder, by_s, is_other=is_other, known_sum=known_sum
        )
        await asyncio.to_thread(self._store.note_installed, engine, identity)
        return loaded, words

    async def _open(self, order: orders.OpenVersion) -> StagedVersion:
        async with self._turn:
            before = self._store.versions.get(order.map.version)
            if before is not None and not await asyncio.to_thread(before.is_same, order):
                # Edges of an earlier plan write into the same file. End them before its blocks are verified.
                await asyncio.to_thread(self._carrier.end, order.map.version)
            return await asyncio.to_thread(self._store.open, order)

    async def _keep(self, versions: tuple[int, ...]) -> list[int]:
        async with self._turn:
            for version in self._store.versions.keys() - set(versions):
                await asyncio.to_thread(self._carrier.end, version)
            return await asyncio.to_thread(self._store.keep, versions)

    async def _version(self, version: int) -> StagedVersion:
        async with self._turn:
            return self._store.version(version)


def _lasting(peer: Peer) -> Peer:
    """Return the peer's state without the missing ranges of versions, which change whenever bytes arrive."""
    return replace(peer, held=tuple(replace(each, missing={} if each.complete else {"": ()}) for each in peer.held))
