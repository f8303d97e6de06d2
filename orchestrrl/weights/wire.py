"""What one edge says over its link: pieces of a range, announced, and signs of life where there is none to send.

An announcement is 8 bytes: how many pieces follow it, 0 for a sign of life. Both ends cut the range into the same
pieces, so nothing else is said, and the end is where the range ends. A sender whose own bytes are late (they come from
further up the tree) gives signs of life; one that has died gives none, and only so it is told from the other.
"""

import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from orchestrrl.weights.model import Range, VersionMap
from orchestrrl.weights.orders import CarryEdge
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


@dataclass(frozen=True, slots=True)
class WireDirection:
    """An edge, as both of its ends see it. `began` is told of pieces that are about to come or go, `moved` each one's
    bytes when it is through; `pause` waits, and raises Ended."""

    staged: LocalVersion
    edge: CarryEdge
    chunk_bytes: int
    stall_s: float
    began: Callable[[], None]
    moved: Callable[[int], None]
    pause: Callable[[float], None]
    steady_s: Callable[[], float]

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


class _Buffers:
    """Memory for pieces that do not lie in one place of a file: at most as many as are in flight."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._free: list[memoryview] = []

    def take(self, size: int) -> memoryview:
        return (self._free.pop() if self._free else memoryview(bytearray(self._size)))[:size]

    def give(self, used: memoryview) -> None:
        whole = used.obj
        assert isinstance(whole, bytearray)
        self._free.append(memoryview(whole))


def send(link: OutgoingLink, way: WireDirection) -> None:
    """All of the edge, as its bytes come to be here. Raises LinkBroken, Ended, and what reading raises."""
    pieces = way.pieces
    pacer = Pacer(way.edge.rate_gbps, max((size for _, size in pieces), default=0))
    flight: deque[tuple[PendingChunk, int, memoryview | None]] = deque()
    buffers = _Buffers(max((size for _, size in pieces), default=0))

    def land(most: int) -> None:
        while len(flight) > most:
            pending, size, buffer = flight.popleft()
            pending.wait(way.stall_s)
            if buffer is not None:
                buffers.give(buffer)
            if size:
                way.moved(size)

    def announce(count: int, first: int) -> None:
        flight.append((link.send(memoryview(ANNOUNCEMENT.pack(count, first))), 0, None))

    number = 0
    while number < len(pieces):
        ready = _ready(way, pieces, number)
        if not ready:
            land(0)  # before anything is waited for that may take long
            if not way.staged.wait(way.edge.shard, *pieces[number], way.beat_s):
                way.pause(0.0)
                announce(0, number)
                land(0)
            continue
        way.began()
        announce(ready, number)
        for offset, size in pieces[number : number + ready]:
            way.pause(pacer.take(size, way.steady_s()))
            land(IN_FLIGHT - 1)
            view, buffer = way.staged.view(way.edge.shard, offset, size), None
            if view is None:
                view = buffer = buffers.take(size)
                way.staged.read(way.edge.shard, offset, view)
            flight.append((link.send(view), size, buffer))
        number += ready
    land(0)


def _ready(way: WireDirection, pieces: Pieces, number: int) -> int:
    """How many of the next ones are here."""
    ready = 0
    for offset, size in pieces[number : number + MOST_PIECES]:
        if not way.staged.wait(way.edge.shard, offset, size, 0.0):
            break
        ready += 1
    return ready


def receive(link: IncomingLink, way: WireDirection) -> None:
    """All of the edge. Raises LinkBroken, Ended, and what writing raises."""
    pieces = way.pieces
    buffers = _Buffers(max((size for _, size in pieces), default=0))
    heard = memoryview(bytearray(ANNOUNCEMENT.size))
    flight: deque[tuple[PendingChunk, tuple[int, int], memoryview | None]] = deque()

    def land(most: int) -> None:
        while len(flight) > most:
            pending, (offset, size), buffer = flight.popleft()
            pending.wait(way.stall_s)
            if buffer is not None:
                way.staged.write(way.edge.shard, offset, buffer)
                buffers.give(buffer)
            way.staged.arrived(way.edge.shard, offset, size)
            way.moved(size)

    number = 0
    announced = link.receive(heard)
    while number < len(pieces):
        announced.wait(way.stall_s)
        way.pause(0.0)
        count, first = ANNOUNCEMENT.unpack(heard)
        if first != number or count > min(len(pieces) - number, MOST_PIECES):
            raise LinkBroken(
                f"the sender announces {count} pieces from {first} on, of {len(pieces)}: {number} are next"
            )
        if count:
            way.began()
        for offset, size in pieces[number : number + count]:
            land(IN_FLIGHT - 1)
            view, buffer = way.staged.view(way.edge.shard, offset, size), None
            if view is None:
                view = buffer = buffers.take(size)
            flight.append((link.receive(view), (offset, size), buffer))
        number += count
        if number < len(pieces):
            announced = link.receive(heard)  # beside the last pieces, so that they are not waited for in between
        land(0)
