"""The protocol by which the sender and the receiver of an edge transfer a byte range over a link. The sender announces
and sends pieces of the range, and sends keepalives while no piece is ready.

An announcement has 8 bytes: the number of pieces that follow, which is 0 for a keepalive, and the index of the first
piece. Both endpoints cut the range into the same pieces, so no further metadata is sent. The transfer ends after the
last piece. A sender that is itself waiting for bytes from another peer sends keepalives; a dead sender sends none.
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

ANNOUNCEMENT = struct.Struct("!II")  # number of pieces, and number of the first one as a check
MOST_PIECES = 8  # per announcement
IN_FLIGHT = 2
LONGEST_BEAT_S = 0.5
LEAST_PIECE_BYTES = 64 * 1024
PIECE_S = 0.05  # duration of one piece on a paced edge: short gaps and no bursts
BEATS = 4  # keepalives within `stall_s`, after which a silent sender counts as dead

Pieces = Sequence[tuple[int, int]]


class LocalVersion(Protocol):
    """A version of the weights on this host, complete or being received. Its methods are thread-safe. They are
    implemented in `peer/staged.py`."""

    map: VersionMap

    def view(self, shard: str, offset: int, size: int) -> memoryview | None:
        """Return a view of `size` bytes of the shard at `offset`, or None if they are not contiguous in a file. The
        view is writable if the version is being received."""
        ...

    def read(self, shard: str, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes of the shard at `offset`. They must have arrived, but need not be contiguous in a
        file."""
        ...

    def write(self, shard: str, offset: int, data: memoryview) -> None:
        """Write `data` to the shard at `offset`. The caller must call `arrived` afterwards."""
        ...

    def arrived(self, shard: str, offset: int, size: int) -> None:
        """Mark a range of the shard as received and wake waiting readers. The range must have been filled by `write` or
        through `view`."""
        ...

    def wait(self, shard: str, offset: int, size: int, timeout_s: float) -> bool:
        """Wait up to `timeout_s` until the whole range of the shard has arrived; return whether it has arrived."""
        ...

    def missing(self) -> dict[str, tuple[Range, ...]]:
        """Return the missing ranges of each incomplete shard, sorted by offset."""
        ...


class EdgeEnded(Exception):
    """Raised in the thread of an edge after another thread has ended the edge."""


@dataclass(eq=False)
class EdgeRun:
    """The state of an edge at one of its endpoints.

    `on_began` is called before pieces are sent or received. `on_moved` is called with the size of each completed piece.
    The lock in `peer/carry.py` guards `thread`, `link` and `outcome`. Only the edge's thread writes `moved_bytes` and
    `began_s`.
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
        """The key with which the sender dials and the receiver accepts the link. It contains a digest of the edge, so
        that an edge of another plan with the same id has another key."""
        edge = self.edge
        what = (edge.shard, edge.offset, edge.bytes, edge.src, edge.dst, piece_bytes(edge.rate_gbps, self.chunk_bytes))
        return f"{self.version}/{edge.id}/{hashlib.blake2s(repr(what).encode(), digest_size=8).hexdigest()}"

    @property
    def pieces(self) -> Pieces:
        """The offset in the shard and the size of each piece, both in bytes."""
        step = piece_bytes(self.edge.rate_gbps, self.chunk_bytes)
        end = self.edge.offset + self.edge.bytes
        # Cut at multiples of the piece size from the start of the shard, as the edges of other peers do.
        cuts = [self.edge.offset, *range((self.edge.offset // step + 1) * step, end, step), end]
        return [(start, stop - start) for start, stop in pairwise(cuts)]

    @property
    def beat_s(self) -> float:
        return min(LONGEST_BEAT_S, self.stall_s / BEATS)

    def pause(self, seconds: float = 0.0) -> None:
        """Wait for `seconds`. Raises EdgeEnded immediately if the edge has been ended or is ended during the wait."""
        if self.let_go.is_set() or (seconds > 0 and self.let_go.wait(seconds)):
            raise EdgeEnded


def piece_bytes(rate_gbps: float, chunk_bytes: int) -> int:
    """Return the size of one piece in bytes: `chunk_bytes`, or fewer bytes at a low rate. Both endpoints compute the
    same size."""
    if not rate_gbps:
        return chunk_bytes
    return min(chunk_bytes, max(LEAST_PIECE_BYTES, int(rate_gbps * 1e9 / 8 * PIECE_S)))


class Pacer:
    """A token bucket that is filled at `rate_gbps` and has a capacity of `burst_bytes`. A sender that needs more bytes
    than the bucket contains must wait."""

    def __init__(self, rate_gbps: float, burst_bytes: int) -> None:
        if rate_gbps < 0:
            raise ValueError(f"rate_gbps must be >= 0, got {rate_gbps}")
        self._bytes_per_s = rate_gbps * 1e9 / 8
        self._burst_bytes = burst_bytes
        self._tokens = float(burst_bytes)
        self._at_s: float | None = None

    def take(self, size: int, now_s: float) -> float:
        """Take `size` bytes from the bucket; return the time, in seconds, to wait before they are sent. The time is 0
        if the edge has no rate limit."""
        if not self._bytes_per_s:
            return 0.0
        passed_s = max(0.0, now_s - self._at_s) if self._at_s is not None else 0.0
        self._at_s = now_s
        self._tokens = min(self._burst_bytes, self._tokens + passed_s * self._bytes_per_s) - size
        return max(0.0, -self._tokens / self._bytes_per_s)


class _Flight:
    """The pieces in flight on a link. A piece that is not contiguous in a file is copied through a reused buffer."""

    def __init__(self, run: EdgeRun) -> None:
        self.pieces = run.pieces
        self.most_bytes = max((size for _, size in self.pieces), default=0)
        self._run = run
        self._free: list[memoryview] = []
        self._pending: deque[tuple[PendingChunk, Callable[[], None], memoryview | None]] = deque()

    def view(self, offset: int, size: int) -> tuple[memoryview, memoryview | None]:
        """Return the memory for a piece and the reused buffer that contains it. The buffer is None if the memory is in
        a file."""
        view = self._run.staged.view(self._run.edge.shard, offset, size)
        if view is not None:
            return view, None
        buffer = (self._free.pop() if self._free else memoryview(bytearray(self.most_bytes)))[:size]
        return buffer, buffer

    def add(self, pending: PendingChunk, landed: Callable[[], None], buffer: memoryview | None = None) -> None:
        self._pending.append((pending, landed, buffer))

    def land(self, most: int) -> None:
        """Wait until at most `most` pieces are in flight."""
        while len(self._pending) > most:
            pending, landed, buffer = self._pending.popleft()
            pending.wait(self._run.stall_s)
            landed()
            if buffer is not None:
                whole = buffer.obj
                assert isinstance(whole, bytearray)
                self._free.append(memoryview(whole))


def send(link: OutgoingLink, run: EdgeRun) -> None:
    """Send all bytes of the edge as they become available. Raises LinkBroken if the link breaks, EdgeEnded if another
    thread ends the edge, and any error that occurs when the bytes are read."""
    flight, number = _Flight(run), 0
    staged, shard, pieces = run.staged, run.edge.shard, flight.pieces
    pacer = Pacer(run.edge.rate_gbps, flight.most_bytes)

    def announce(count: int) -> None:
        flight.add(link.send(memoryview(ANNOUNCEMENT.pack(count, number))), lambda: None)

    while number < len(pieces):
        coming = pieces[number : number + MOST_PIECES]
        ready = list(takewhile(lambda piece: staged.wait(shard, *piece, 0.0), coming))
        if not ready:
            flight.land(0)  # complete the pieces in flight before a wait that may be long
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
    """Receive all bytes of the edge. Raises LinkBroken if the link breaks, EdgeEnded if another thread ends the edge,
    and any error that occurs when the bytes are written."""
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
                f"the sender announced {count} pieces beginning with piece {first}, expected at most"
                f" {min(len(pieces) - number, MOST_PIECES)} pieces beginning with piece {number}"
            )
        if count:
            run.on_began(run)
        for offset, size in pieces[number : number + count]:
            flight.land(IN_FLIGHT - 1)
            view, buffer = flight.view(offset, size)
            flight.add(link.receive(view), partial(landed, offset, size, buffer), buffer)
        number += count
        if number < len(pieces):
            announced = link.receive(heard)  # issued before the last pieces have landed, to avoid a gap
        flight.land(0)
