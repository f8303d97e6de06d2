"""A version in memory and a carrier of it, for measuring and testing how bytes move; what peers hold is in files
(store.py)."""

import ctypes
import threading
from collections.abc import Collection, Iterable, Mapping
from queue import SimpleQueue

from orchestrrl.weights.model import Range, ShardMap, VersionMap
from orchestrrl.weights.orders import ArrivedBytes, CarryEdges, EdgeEvent, EdgeState
from orchestrrl.weights.peer.carry import ThreadedCarrier
from orchestrrl.weights.ranges import ByteRanges
from orchestrrl.weights.transports.base import make_transport
from planner.model import PeerId


class InMemory:
    """Shards of these bytes or, where only a size is given, to be received. Without `has_views`, as if none of it lay
    in one piece."""

    def __init__(self, version: int, shards: Mapping[str, bytes | int], has_views: bool = True) -> None:
        self.bytes = {name: bytearray(what) for name, what in shards.items()}
        maps = tuple(ShardMap(name, len(held), ()) for name, held in self.bytes.items())
        self.map = VersionMap(version, (), maps, block_bytes=1)
        self._has_views = has_views
        self._there = {name: ByteRanges() for name in shards}
        self._changed = threading.Condition()
        for name, what in shards.items():
            if not isinstance(what, int):
                self._there[name].add(0, len(what))

    def forget(self, shards: Iterable[str] | None = None) -> None:
        """As if nothing of these, or of all, had arrived."""
        with self._changed:
            for name in self.bytes if shards is None else shards:
                self._there[name] = ByteRanges()

    def wipe(self, shards: Collection[str]) -> None:
        """Overwrite these with zeros, and forget them."""
        for name in shards:
            held = self.bytes[name]
            ctypes.memset((ctypes.c_char * len(held)).from_buffer(held), 0, len(held))
        self.forget(shards)

    def view(self, shard: str, offset: int, size: int) -> memoryview | None:
        return memoryview(self.bytes[shard])[offset : offset + size] if self._has_views else None

    def read(self, shard: str, offset: int, into: memoryview) -> None:
        into[:] = memoryview(self.bytes[shard])[offset : offset + len(into)]

    def write(self, shard: str, offset: int, data: memoryview) -> None:
        memoryview(self.bytes[shard])[offset : offset + len(data)] = data

    def arrived(self, shard: str, offset: int, size: int) -> None:
        with self._changed:
            self._there[shard].add(offset, size)
            self._changed.notify_all()

    def wait(self, shard: str, offset: int, size: int, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._there[shard].covers(offset, size), timeout_s)

    def missing(self) -> dict[str, tuple[Range, ...]]:
        with self._changed:
            gaps = {name: there.gaps(len(self.bytes[name])) for name, there in self._there.items()}
        return {name: ranges for name, ranges in gaps.items() if ranges}


class BlockingCarrier:
    """The product's carrier and transports of one peer, whose orders return once they are carried out."""

    def __init__(self, peer: PeerId, host: str, transports: Iterable[str]) -> None:
        self._transports = {name: make_transport(name, host) for name in transports}
        self.addresses = {name: transport.open() for name, transport in self._transports.items()}
        self._ended: SimpleQueue[EdgeEvent] = SimpleQueue()
        self._carrier = ThreadedCarrier(peer, self._transports, self._on_news)

    def carry(self, staged: InMemory, order: CarryEdges) -> list[EdgeEvent]:
        """Return the end of each edge."""
        self._carrier.carry(staged, order)
        return [self._ended.get() for _ in order.edges]

    def end(self, version: int) -> None:
        self._carrier.end(version)

    def close(self) -> None:
        self._carrier.close()
        for transport in self._transports.values():
            transport.close()

    def _on_news(self, news: EdgeEvent | ArrivedBytes) -> None:
        if isinstance(news, EdgeEvent) and news.state is not EdgeState.BEGAN:
            self._ended.put(news)
