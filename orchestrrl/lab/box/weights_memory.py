"""A version in memory, whole or being filled: what carriers of a box send and receive."""

import hashlib
import random
from collections.abc import Collection

from orchestrrl.lab.weights_in_memory import InMemory
from orchestrrl.weights.model import VersionMap


class TestbedMemory(InMemory):
    """`holds`: shards that are there from the start, of random bytes that `seed` and their names say."""

    def __init__(self, map: VersionMap, holds: Collection[str], seed: int) -> None:
        whole = {s.id: content(seed, s.id, s.bytes) if s.id in holds else s.bytes for s in map.shards}
        super().__init__(map.version, whole)
        self.map = map
        self.received = tuple(shard.id for shard in map.shards if shard.id not in holds)

    def sha256(self) -> str:
        """Of all shards, one behind the other."""
        found = hashlib.sha256()
        for shard in self.map.shards:
            found.update(self.bytes[shard.id])
        return found.hexdigest()


def content(seed: int, shard: str, size: int) -> bytes:
    return random.Random(f"{seed}/{shard}").randbytes(size)


def sha256_of(map: VersionMap, seed: int) -> str:
    """What `TestbedMemory.sha256` is once all has arrived."""
    found = hashlib.sha256()
    for shard in map.shards:
        found.update(content(seed, shard.id, shard.bytes))
    return found.hexdigest()
