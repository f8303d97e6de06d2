"""Track attached peers and deliver orders to them. Each order has an id and one result.

A peer that attaches again replaces its old stream and receives its unanswered orders again. The peer carries out each
order only once. Hosts' clocks may differ, so each deadline is converted to the peer's clock. The converted deadline is
never later than the daemon's deadline.
"""

import asyncio
import itertools
import logging
import math
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from orchestrrl.core.clock import Clock
from orchestrrl.core.delivery import REATTACH_S, OpenOrder, OpenOrders, OrderStream
from orchestrrl.core.errors import LimitReached, OrchestrRLError, OutcomeUnknown, ProblemFaults, Retryable, shorten
from orchestrrl.weights.model import Peer, PeerRole
from orchestrrl.weights.orders import ArrivedBytes, EdgeEvent, Order, OrderOutcome, PeerNews, PeerOrder, PeerResult
from planner.model import EngineId, PeerId

logger = logging.getLogger(__name__)

FORGET_AFTER_S = 3600.0  # a detached peer may be dropped after this time to make room for another
# The reports of a peer that a listener receives; None means that the peer has detached.
Heard = Peer | EdgeEvent | ArrivedBytes | None
Listener = Callable[[PeerId, Heard], None]
_Asked = OpenOrder[PeerId, PeerOrder, PeerResult]


@dataclass(frozen=True, slots=True)
class PeerState:
    """The last description that a peer sent of itself, and whether it is attached."""

    peer: Peer
    attached: bool
    last_report_s: float  # of a detached peer: the time at which it detached


class PeerStream:
    """The stream of orders to one peer, from attach to detach."""

    def __init__(self, hub: "PeerHub", peer: PeerId, waiting: Iterable[_Asked]) -> None:
        self.peer = peer
        self._hub = hub
        self.waiting = OrderStream(waiting)
        self.ahead_s = 0.0  # lower bound of the peer's clock minus the daemon's; 0 until the peer sends its time

    async def orders(self) -> AsyncIterator[PeerOrder]:
        """Yield each order as it is queued, until `end` is called or the peer attaches again. Orders whose caller no
        longer waits for the result are skipped."""
        async for asked in self.waiting.orders():
            if asked.is_awaited:
                asked.sends += 1
                yield asked.order.by_clock(self.ahead_s)

    def stamped(self, sent_s: float) -> None:
        """Update the clock offset from `sent_s`, the time on the peer's clock at which the peer sent the message that
        has just arrived. The offset is too low by the message's delay. A converted deadline is therefore at most this
        delay earlier than the daemon's deadline, and never later."""
        if math.isfinite(sent_s):
            self.ahead_s = sent_s - self._hub.now_s()

    def on_news(self, news: PeerNews) -> None:
        """Handle a report from the peer. Reports on an ended stream are ignored, because the peer sends its state again
        on the next stream."""
        if not self.waiting.ended:
            self._hub.on_news(self.peer, news)

    def end(self) -> None:
        """End the stream and mark the peer as detached. A repeated call has no effect."""
        if not self.waiting.ended:
            self.waiting.end()
            self._hub.ended(self)


class PeerHub:
    """The peers of one daemon, and the delivery of orders to them. `generation` is the generation of the daemon's
    journal. Orders wait up to `patience_s` for a detached peer. At most `most_peers` peers are tracked."""

    def __init__(self, clock: Clock, generation: int, patience_s: float = 30.0, most_peers: int = 8192) -> None:
        self._most_peers = most_peers
        self._clock = clock
        self._generation = generation
        self._patience_s = patience_s
        self._numbers = itertools.count(1)
        self._open: OpenOrders[PeerId, PeerOrder, PeerResult] = OpenOrders()
        self.peers: dict[PeerId, PeerState] = {}  # every peer that ever attached
        self._streams: dict[PeerId, PeerStream] = {}  # of those that are attached
        self._by_engine: dict[EngineId, Peer] | None = None  # cache of attached peers by engine; None if invalid
        self._listeners: list[Listener] = []

    def attached(self) -> dict[PeerId, Peer]:
        return {id: state.peer for id, state in self.peers.items() if state.attached}

    def peer_of(self, engine: EngineId) -> Peer | None:
        """Return the attached peer that installs versions into an engine, or None if there is no such peer."""
        if self._by_engine is None:
            attached = sorted(self.attached().items(), reverse=True)
            self._by_engine = {each.engine: peer for _, peer in attached for each in peer.engines}
        return self._by_engine.get(engine)

    def hosts_of(self, engine: EngineId) -> list[PeerId]:
        """Return the peers on the hosts of an engine: the attached peer that installs versions into the engine, and the
        peers of the engine's other hosts, whether attached or not."""
        own = self.peer_of(engine)
        others = [id for id, state in sorted(self.peers.items()) if engine in state.peer.ranks_of]
        return [*([] if own is None else [own.id]), *others]

    def engines_of(self, peers: Iterable[PeerId]) -> list[EngineId]:
        """Return the engines that load bytes from the hosts of these peers. An engine with ranks on several hosts is
        included if at least one of its ranks runs on the host of one of these peers."""
        known = [self.peers[peer].peer for peer in peers if peer in self.peers]
        return [engine for peer in known for engine in (*(each.engine for each in peer.engines), *peer.ranks_of)]

    def why_not_whole(self, engine: EngineId) -> str:
        """Return the reason why an engine with several hosts cannot load a whole version, or an empty string if it
        can."""
        own, attached = self.peer_of(engine), self.attached()
        for id in self.hosts_of(engine) if own is not None else ():
            if id not in attached:
                return f"peer {id}, of another of its hosts, is not attached"
            if own is not None and attached[id].folder != own.folder:
                folders = f"{own.id} has {own.folder}, {id} has {attached[id].folder}"
                return f"its ranks all load from one folder: start its hosts' peers with the same --folder ({folders})"
        return ""

    def now_s(self) -> float:
        return self._clock.now_s()

    def ours_s(self, peer: PeerId, theirs_s: float) -> float:
        """Convert a time on the peer's clock to the daemon's clock. Return the time unchanged if the peer is detached
        or has not sent its time yet."""
        stream = self._streams.get(peer)
        return theirs_s if stream is None else theirs_s - stream.ahead_s

    def listen(self, listener: Listener) -> None:
        """Register `listener`. It is called with every report from a peer except results of orders, with the peer's
        description when a peer attaches, and with None when a peer detaches."""
        self._listeners.append(listener)

    def attach(self, peer: Peer) -> PeerStream:
        """Attach a peer; return its stream. Raises ProblemFaults if the peer's description is inconsistent or claims an
        engine that belongs to another peer, and LimitReached if too many peers are known."""
        if faults := self._faults(peer):
            raise ProblemFaults(faults)
        self._make_room(peer.id)
        peer = self._without_others(peer)
        self.peers[peer.id] = PeerState(peer, attached=True, last_report_s=self._clock.now_s())
        if peer.id in self._streams:
            self._streams[peer.id].waiting.end()
        stream = self._streams[peer.id] = PeerStream(self, peer.id, self._open.to(peer.id))
        self._make_way(peer)
        self._notify(peer.id, peer)
        return stream

    async def send_order(
        self, peer: PeerId, order: Order, within_s: float, patience_s: float | None = None
    ) -> PeerResult:
        """Send an order to a peer and wait up to `within_s` for its result; return the result. If the peer is detached,
        the order waits up to `patience_s` for it to attach. If `patience_s` is None, the hub's own `patience_s`
        applies. Raises Retryable if the order was not sent, and OutcomeUnknown if it was sent but no result arrived."""
        if peer not in self.peers:
            raise Retryable(f"peer {peer} is not attached", REATTACH_S)
        id = f"w{self._generation}-{next(self._numbers)}"
        result: asyncio.Future[PeerResult] = asyncio.get_running_loop().create_future()
        asked = _Asked(peer, PeerOrder(id, self._generation, order), self._clock.now_s() + within_s, result)
        self._open.add(asked)
        if peer in self._streams:
            self._streams[peer].waiting.put(asked)
        patience_s = self._patience_s if patience_s is None else patience_s
        watch = asyncio.ensure_future(self._until_hopeless(asked, within_s, patience_s))
        try:
            either: set[asyncio.Future[Any]] = {result, watch}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if result.done():
                return result.result()
            why = f"peer {peer}: {order.kind}: {watch.result()}"
            raise OutcomeUnknown(why) if asked.sends else Retryable(why, REATTACH_S)
        finally:
            watch.cancel()
            self._open.close(asked)

    async def try_order(self, peer: PeerId, order: Order, within_s: float) -> str:
        """Send an order without waiting for a detached peer. Return the reason why the order was not carried out, or an
        empty string if it was."""
        try:
            result = await self.send_order(peer, order, within_s, 0.0)
        except OrchestrRLError as error:
            return str(error)
        return "" if result.outcome is OrderOutcome.DONE else result.detail or result.outcome

    def close(self) -> None:
        """End every stream, so that peers detect the shutdown at once and attach to the next daemon when it starts."""
        for stream in self._streams.values():
            stream.waiting.end()

    # --- called by streams

    def on_news(self, peer: PeerId, news: PeerNews) -> None:
        state = self.peers[peer] = replace(self.peers[peer], last_report_s=self._clock.now_s())
        if isinstance(news, PeerResult):
            if asked := self._open.find(peer, news.id):
                self._open.close(asked, news)
            return
        if isinstance(news, Peer):
            if faults := self._faults(news) + ([] if news.id == peer else [f"id: must stay {peer}, got {news.id!r}"]):
                logger.error("peer %s sent an invalid report of itself: %s", peer, "; ".join(faults))
                return
            news = self._without_others(news)
            self.peers[peer] = replace(state, peer=news)
            self._make_way(news)
        self._notify(peer, news)

    def ended(self, stream: PeerStream) -> None:
        id = stream.peer
        if self._streams.get(id) is stream:
            del self._streams[id]
            self.peers[id] = PeerState(self.peers[id].peer, attached=False, last_report_s=self._clock.now_s())
            self._notify(id, None)

    # --- inside

    async def _until_hopeless(self, asked: _Asked, within_s: float, patience_s: float) -> str:
        """Wait until the order's result can no longer be expected; return the reason."""
        by_s = asked.over_s
        while True:
            state, now_s = self.peers[asked.destination], self._clock.now_s()
            gone_until_s = state.last_report_s + patience_s
            if now_s >= by_s:
                return f"has not answered within {within_s:g} s"
            if not state.attached and now_s >= gone_until_s:
                return f"has been detached for {now_s - state.last_report_s:.0f} s"
            await self._clock.sleep(min(by_s, max(gone_until_s, now_s + REATTACH_S)) - now_s)

    def _faults(self, peer: Peer) -> list[str]:
        faults = []
        if (peer.engines or peer.ranks_of) and peer.role is not PeerRole.ENGINE:
            faults.append(f"engines: allowed only for peers with role engine, got role {peer.role}")
        for place, engine in enumerate(peer.ranks_of):
            if any(engine == each.engine for each in peer.engines):
                faults.append(f"ranks_of[{place}]: must not be one of the peer's own engines, got {engine!r}")
        others = ((id, its) for id, its in self.attached().items() if id != peer.id and peer.engines)
        taken = {engine.engine: id for id, its in others for engine in its.engines if not engine.given}
        faults += [
            f"engines[{place}].engine: already belongs to peer {taken[each.engine]}, got {each.engine!r}"
            for place, each in enumerate(peer.engines)
            if not each.given and each.engine in taken
        ]
        return faults

    def _make_room(self, peer: PeerId) -> None:
        """Make room for `peer` if the hub is full: drop the peers that detached more than `FORGET_AFTER_S` ago. Raises
        LimitReached if no peer can be dropped."""
        if peer in self.peers or len(self.peers) < self._most_peers:
            return
        gone_s = self._clock.now_s() - FORGET_AFTER_S
        for id, state in list(self.peers.items()):
            if not state.attached and not self._open.to(id) and state.last_report_s < gone_s:
                del self.peers[id]
        if len(self.peers) >= self._most_peers:
            limit = f"the daemon already tracks {self._most_peers} peers (limits.nodes)"
            raise LimitReached(f"id: cannot attach peer {shorten(peer)}: {limit}")

    def _without_others(self, peer: Peer) -> Peer:
        """Return the peer without its assigned engines that now belong to another peer. The daemon sends the peer a new
        assignment afterwards."""
        others = (other for id, other in self.attached().items() if id != peer.id)
        return _yielding(peer, {each.engine for other in others for each in other.engines})

    def _make_way(self, peer: Peer) -> None:
        """Remove the engines of this peer's command line from the assignments of other peers."""
        own = {each.engine for each in peer.engines if not each.given}
        for other, state in self.peers.items() if own else ():
            if other != peer.id and (left := _yielding(state.peer, own)) is not state.peer:
                self.peers[other] = replace(state, peer=left)
                self._notify(other, left if state.attached else None)

    def _notify(self, peer: PeerId, news: Heard) -> None:
        if news is None or isinstance(news, Peer):
            self._by_engine = None
        for listener in self._listeners:
            listener(peer, news)


def _yielding(peer: Peer, taken: Collection[EngineId]) -> Peer:
    """Return the peer without its assigned engines that are in `taken`."""
    lost = [each.engine for each in peer.engines if each.given and each.engine in taken]
    if not lost:
        return peer
    logger.warning("peer %s loses engines that belong to another peer: %s", peer.id, ", ".join(sorted(lost)))
    return replace(peer, engines=tuple(each for each in peer.engines if each.engine not in lost))
