"""A weight version in memory, for tests of transports; peers store versions in files (weights/peer/staged.py)."""

import threading
from collections.abc import Mapping

from orchestrrl.weights.model import Range, ShardMap, VersionMap
from planner.sync_tree.ranges import ByteRanges


class InMemory:
    """Shards with these bytes, or to be received if only a size is given."""

    def __init__(self, version: int, shards: Mapping[str, bytes | int]) -> None:
        self.bytes = {name: bytearray(what) for name, what in shards.items()}
        maps = tuple(ShardMap(name, len(held), ()) for name, held in self.bytes.items())
        self.map = VersionMap(version, (), maps, block_bytes=1)
        self._there = {name: ByteRanges() for name in shards}
        self._changed = threading.Condition()
        for name, what in shards.items():
            if not isinstance(what, int):
                self._there[name].add(0, len(what))

    def view(self, shard: str, offset: int, size: int) -> memoryview | None:
        return memoryview(self.bytes[shard])[offset : offset + size]

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
