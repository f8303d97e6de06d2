"""What one edge says over its link: pieces of a range, announced, and signs of life where there is none to send.

An announcement is 8 bytes: how many pieces follow it, 0 for a sign of life. Both ends cut the range into the same
pieces, so nothing else is said, and the end is where the range ends. A sender whose own bytes are late (they come from
further up the tree) gives signs of life; one that has died gives none, and only so it is told from the other.
"""

import hashlib
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, takewhile
from typing import Protocol

from orchestrrl.weights.model import Range, VersionMap
from orchestrrl.weights.orders import CarryEdge, EdgeEvent
from orchestrrl.weights.transports.base import IncomingLink, LinkBroken, OutgoingLink, PendingChunk

ANNOUNCEMENT = struct.Struct("!II")  # pieces; and the number of the first, to be sure
MOST_PIECES = 8  # announced at once
IN_FLIGHT = 2
LONGEST_BEAT_S = 0.5
LEAST_PIECE_BYTES = 64 * 1024
PIECE_S = 0.05  # a paced edge sends in pieces that take so long, so that it is seldom quiet and never bursts
BEATS = 4  # in the time after which silence is death

Pieces = Sequence[tuple[int, int]]


class LocalVersion(Protocol):
    """A version on this host, whole or being filled. May be used from many threads; `peer/staged.py` has it."""

    map: VersionMap

    def view(self, shard: str, offset: int, size: int) -> memoryview | None:
        """The bytes themselves, where they lie in one piece in a file; else None. To be written to where the version
        is received."""
        ...

    def read(self, shard: str, offset: int, into: memoryview) -> None:
        """Bytes that are there, wherever they lie."""
        ...

    def write(self, shard: str, offset: int, data: memoryview) -> None:
        """The same the other way round; `arrived` has to be told."""
        ...

    def arrived(self, shard: str, offset: int, size: int) -> None:
        """These are there now, by `write` or through `view`: who waits for them goes on."""
        ...

    def wait(self, shard: str, offset: int, size: int, timeout_s: float) -> bool:
        """Whether all of it is there, by then."""
        ...

    def missing(self) -> dict[str, tuple[Range, ...]]:
        """By shard, in order; shards of which nothing is missing are left out."""
        ...


class EdgeEnded(Exception):
    """The edge was let go of meanwhile."""


@dataclass(eq=False)
class EdgeRun:
    """An edge at one of its ends. What has no lock of its own is written by the edge's thread alone.

    `on_began` is called when pieces are about to come or go, `on_moved` with the bytes of each piece that is through.
    """

    version: int
    edge: CarryEdge
    is_receiver: bool
    staged: LocalVersion
    chunk_bytes: int
    stall_s: float
    on_began: Callable[["EdgeRun"], None]
    on_moved: Callable[["EdgeRun", int], None]
    let_go: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None
    link: IncomingLink | OutgoingLink | None = None
    moved_bytes: int = 0
    began_s: float = 0.0
    outcome: EdgeEvent | None = None

    @property
    def link_key(self) -> str:
        """Both ends make it of the same edge: one of another plan, though it is named alike, is another link."""
        edge = self.edge
        what = (edge.shard, edge.offset, edge.bytes, edge.src, edge.dst, piece_bytes(edge.rate_gbps, self.chunk_bytes))
        return f"{self.version}/{edge.id}/{hashlib.blake2s(repr(what).encode(), digest_size=8).hexdigest()}"

    @property
    def pieces(self) -> Pieces:
        """Offsets into the shard, and sizes."""
        step = piece_bytes(self.edge.rate_gbps, self.chunk_bytes)
        end = self.edge.offset + self.edge.bytes
        # At multiples of the chunk from the shard's start on, as what arrives elsewhere is cut too.
        cuts = [self.edge.offset, *range((self.edge.offset // step + 1) * step, end, step), end]
        return [(start, stop - start) for start, stop in pairwise(cuts)]

    @property
    def beat_s(self) -> float:
        return min(LONGEST_BEAT_S, self.stall_s / BEATS)

    def pause(self, seconds: float = 0.0) -> None:
        """Wait. Raises EdgeEnded."""
        if self.let_go.is_set() or (seconds > 0 and self.let_go.wait(seconds)):
            raise EdgeEnded


def piece_bytes(rate_gbps: float, chunk_bytes: int) -> int:
    """What an edge sends at a time: a chunk, or less of it where the rate is low. Both ends cut alike."""
    if not rate_gbps:
        return chunk_bytes
    return min(chunk_bytes, max(LEAST_PIECE_BYTES, int(rate_gbps * 1e9 / 8 * PIECE_S)))


class Pacer:
    """A bucket of tokens, of which `burst_bytes` fit in. What is taken beyond them has to be waited for, beforehand."""

    def __init__(self, rate_gbps: float, burst_bytes: int) -> None:
        if rate_gbps < 0:
            raise ValueError(f"rate_gbps must be >= 0, got {rate_gbps}")
        self._bytes_per_s = rate_gbps * 1e9 / 8
        self._burst_bytes = burst_bytes
        self._tokens = float(burst_bytes)
        self._at_s: float | None = None

    def take(self, size: int, now_s: float) -> float:
        """Seconds to wait before these bytes are sent; 0 without a rate."""
        if not self._bytes_per_s:
            return 0.0
        passed_s = max(0.0, now_s - self._at_s) if self._at_s is not None else 0.0
        self._at_s = now_s
        self._tokens = min(self._burst_bytes, self._tokens + passed_s * self._bytes_per_s) - size
        return max(0.0, -self._tokens / self._bytes_per_s)


class _Flight:
    """The pieces that are on their way over a link. One that does not lie in one place of a file goes through memory
    that is used again."""

    def __init__(self, run: EdgeRun) -> None:
        self.pieces = run.pieces
        self.most_bytes = max((size for _, size in self.pieces), default=0)
        self._run = run
        self._free: list[memoryview] = []
        self._pending: deque[tuple[PendingChunk, Callable[[], None], memoryview | None]] = deque()

    def view(self, offset: int, size: int) -> tuple[memoryview, memoryview | None]:
        """Return where a piece is, or is to be, and the same once more where that is such memory."""
        view = self._run.staged.view(self._run.edge.shard, offset, size)
        if view is not None:
            return view, None
        buffer = (self._free.pop() if self._free else memoryview(bytearray(self.most_bytes)))[:size]
        return buffer, buffer

    def add(self, pending: PendingChunk, landed: Callable[[], None], buffer: memoryview | None = None) -> None:
        self._pending.append((pending, landed, buffer))

    def land(self, most: int) -> None:
        """Wait until at most so many are on their way."""
        while len(self._pending) > most:
            pending, landed, buffer = self._pending.popleft()
            pending.wait(self._run.stall_s)
            landed()
            if buffer is not None:
                whole = buffer.obj
                assert isinstance(whole, bytearray)
                self._free.append(memoryview(whole))


def send(link: OutgoingLink, run: EdgeRun) -> None:
    """All of the edge, as its bytes come to be here. Raises LinkBroken, EdgeEnded, and what reading raises."""
    flight, number = _Flight(run), 0
    staged, shard, pieces = run.staged, run.edge.shard, flight.pieces
    pacer = Pacer(run.edge.rate_gbps, flight.most_bytes)

    def announce(count: int) -> None:
        flight.add(link.send(memoryview(ANNOUNCEMENT.pack(count, number))), lambda: None)

    while number < len(pieces):
        coming = pieces[number : number + MOST_PIECES]
        ready = list(takewhile(lambda piece: staged.wait(shard, *piece, 0.0), coming))
        if not ready:
            flight.land(0)  # before anything is waited for that may take long
            if not staged.wait(shard, *pieces[number], run.beat_s):
                run.pause()
                announce(0)
                flight.land(0)
            continue
        run.on_began(run)
        announce(len(ready))
        for offset, size in ready:
            run.pause(pacer.take(size, time.monotonic()))
            flight.land(IN_FLIGHT - 1)
            view, buffer = flight.view(offset, size)
            if buffer is not None:
                staged.read(shard, offset, buffer)
            flight.add(link.send(view), partial(run.on_moved, run, size), buffer)
        number += len(ready)
    flight.land(0)


def receive(link: IncomingLink, run: EdgeRun) -> None:
    """All of the edge. Raises LinkBroken, EdgeEnded, and what writing raises."""
    flight, number = _Flight(run), 0
    staged, shard, pieces = run.staged, run.edge.shard, flight.pieces
    heard = memoryview(bytearray(ANNOUNCEMENT.size))

    def landed(offset: int, size: int, buffer: memoryview | None) -> None:
        if buffer is not None:
            staged.write(shard, offset, buffer)
        staged.arrived(shard, offset, size)
        run.on_moved(run, size)

    announced = link.receive(heard)
    while number < len(pieces):
        announced.wait(run.stall_s)
        run.pause()
        count, first = ANNOUNCEMENT.unpack(heard)
        if first != number or count > min(len(pieces) - number, MOST_PIECES):
            raise LinkBroken(
                f"the sender announces {count} pieces from {first} on, of {len(pieces)}: {number} are next"
            )
        if count:
            run.on_began(run)
        for offset, size in pieces[number : number + count]:
            flight.land(IN_FLIGHT - 1)
            view, buffer = flight.view(offset, size)
            flight.add(link.receive(view), partial(landed, offset, size, buffer), buffer)
        number += count
        if number < len(pieces):
            announced = link.receive(heard)  # beside the last pieces, so that they are not waited for in between
        flight.land(0)
