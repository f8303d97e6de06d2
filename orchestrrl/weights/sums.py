"""Sums of a shard's blocks: xxh3_64, in hexadecimal. Hashing runs outside the interpreter's lock, so in threads."""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import local

import numpy as np
import xxhash

from orchestrrl.weights.base import LocalVersion
from orchestrrl.weights.model import Range

MOST_THREADS = 8


def sum_of(data: memoryview) -> str:
    return xxhash.xxh3_64_hexdigest(data)


@dataclass(frozen=True, slots=True)
class BlockSums:
    """What went through it, for reports."""

    bytes: int
    seconds: float

    def __str__(self) -> str:
        rate = f", {self.bytes / self.seconds / 1e9:.1f} GB/s" if self.seconds > 0 else ""
        return f"{self.bytes / 1e9:.3f} GB in {self.seconds:.3f} s{rate}"


def blocks_of(shard_bytes: int, block_bytes: int) -> list[Range]:
    return [(offset, min(block_bytes, shard_bytes - offset)) for offset in range(0, shard_bytes, block_bytes)]


class SumTask:
    """Hashes blocks of a version; each thread has one block of memory for those that are scattered. It does not hold
    the version: one that is discarded gives its memory back at once, and not when cycles are looked for."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._own = local()

    def block(self, staged: LocalVersion, shard: str, offset: int, size: int) -> str:
        """The sum of any range that is no longer than a block."""
        data = staged.view(shard, offset, size)
        if data is None:
            data = self._scratch()[:size]
            staged.read(shard, offset, data)
        return sum_of(data)

    def blocks(
        self,
        staged: LocalVersion,
        wanted: Sequence[tuple[str, int, int]],
        on_block: Callable[[str, int, int, str], None],
    ) -> BlockSums:
        """`on_block` gets shard, offset, size and sum of each, from several threads."""
        began_s = time.perf_counter()

        def hashed(blocks: Iterable[tuple[str, int, int]]) -> int:
            done = 0
            for shard, offset, size in blocks:
                on_block(shard, offset, size, self.block(staged, shard, offset, size))
                done += size
            return done

        count = min(MOST_THREADS, os.cpu_count() or 1, len(wanted))
        if count <= 1:
            return BlockSums(hashed(wanted), time.perf_counter() - began_s)
        each = -(-len(wanted) // count)  # neighbours in one thread: pages are read ahead
        with ThreadPoolExecutor(count, "sums") as pool:
            shares = [wanted[first : first + each] for first in range(0, len(wanted), each)]
            return BlockSums(sum(pool.map(hashed, shares)), time.perf_counter() - began_s)

    def _scratch(self) -> memoryview:
        memory: memoryview | None = getattr(self._own, "memory", None)
        if memory is None:
            memory = self._own.memory = np.empty(self._block_bytes, dtype=np.uint8).data
        return memory
