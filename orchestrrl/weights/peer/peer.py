"""The process that holds weights on one host: attached to the daemon, with its folder, its transports and its engines.

Without the daemon it holds what it has, and its edges run on. A daemon that comes back is told everything anew.
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
        """With the time of this moment, however long the news have waited."""
        text = "" if news is None else NEWS.dump_json(news).decode()
        return pb.PeerMessage(news_json=text, sent_unix_s=self._clock.now_s())


class PeerOrders:
    """Carries orders out, those that take long beside the others."""

    def __init__(self, store: VersionStore, carrier: ThreadedCarrier, engines: PeerEngines) -> None:
        self._store = store
        self._carrier = carrier
        self._engines = engines
        # Held by who changes which versions there are; who asks for one waits for what was ordered before.
        self._turn = asyncio.Lock()

    def not_done(self, order: PeerOrder, why: NotDone, detail: str, began_s: float) -> PeerResult:
        outcome = OrderOutcome.UNKNOWN if why is NotDone.UNKNOWN else OrderOutcome.FAILED
        logger.warning("order %s (%s): %s: %s", order.id, order.order.kind, outcome, detail)
        return PeerResult(order.id, outcome, detail)

    async def perform(self, order: PeerOrder) -> PeerResult:
        """Raises as what it calls does."""
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
                words = f"{staged.disagreed} blocks did not agree so far"
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
                # Written down first: what it says of itself it says again after a restart.
                await asyncio.to_thread(self._store.note_serving, engines)
                return PeerResult(id, OrderOutcome.DONE, await self._engines.serve(engines))
            case orders.KeepVersions(versions):
                gone = await self._keep(versions)
                return PeerResult(id, OrderOutcome.DONE, f"discarded {', '.join(map(str, gone)) or 'none'}")
            case orders.BackendAct() as asked:
                if asked.changes:  # whatever becomes of it, it has no version of this folder
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
        if is_other:  # until it is there: one that is killed in the middle has neither
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
                # Edges of the plan before write into the same file: what is found in it by its sums has to stay.
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
    """Without the ranges, which change as bytes arrive."""
    return replace(peer, held=tuple(replace(each, missing={} if each.complete else {"": ()}) for each in peer.held))
