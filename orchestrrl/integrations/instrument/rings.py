"""The shared-memory ring to which a traced process writes its communication events: format, writer and reader.

There is one file per process, `<host>-<pid>-<start>-<random>.ring`, in a directory that all processes of a host share
with the agent. The writer never waits for a reader. It makes no system call except to ring the doorbell, a socket that
wakes the reader. For events other than announcements, it rings only if the reader has armed the ring. This module uses
only the standard library. Times are values of `time.monotonic_ns`, the same clock for all processes of a host. Numbers
are native 64-bit integers.

    page 0      header words (the constants below), then the name of the job
    slots       `capacity` slots of 8 words; the newest overwrite the oldest: sequence s is in slot s mod capacity
                sequence + 1 | kind, flags, op, 0 | group | bytes | start_ns | end_ns, 0 while it runs | value | 0
    dictionary  append-only lines of JSON: {"op": 3, "name": "all_reduce"}
    payloads    a few slots for announcements of a trainer: announcement number + 1 | length | bytes

Torn reads: `struct.pack_into` first fills its target with zeros, in unspecified order, then stores word after word.
Therefore:
- The state in the header (numbers in flight and queued, next sequence) is enclosed by two equal numbers and has no word
  that can be 0: counts are stored plus one. A reader reads the last number, the words, then the first number. The state
  is consistent if the numbers are equal and no word is 0. If the reader finds no consistent state, it reports that an
  event is in flight.
- A slot is overwritten before the header is updated. After reading a slot, the reader checks the header: the slot is
  valid if it is not among the next few slots, which threads may be overwriting. So slightly fewer than `capacity` slots
  are readable.
x86 guarantees that stores become visible in order; on other processors a read may fail, very rarely.

Threads and signals: a collective takes no lock. CPython releases the GIL and runs signal handlers only where a function
is entered, a loop repeats or a call returns. Garbage collection, which may run any code, starts only where a container
object is created. Therefore `begin`, `end` and the code that they share update the counts and store them by one call
into C, with none of these operations in between, so that no other thread sees an intermediate state. Other code that
runs between two such updates may store newer counts, so each update reads the counts again. Without a GIL, a lock
encloses each update.
"""

import contextlib
import fcntl
import hashlib
import json
import mmap
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEFAULT_DIRECTORY = Path("/dev/shm/orchestrrl-rings")
DOORBELL = "doorbell"
SUFFIX = ".ring"

DEFAULT_CAPACITY = 8192
DICTIONARY_BYTES = 1 << 17
PAYLOAD_SLOTS = 8
PAYLOAD_BYTES = 3584
_PAYLOAD_SLOT_BYTES = 4096
_PAGE_BYTES = 4096
_SLOT_BYTES = 64
_SPARE_SLOTS = 16
_END_AT = 40  # in a slot
_JOB_AT = 512

MAGIC = int.from_bytes(b"ORRLRING", "little", signed=True)
VERSION = 3

# Header words: first constants, then those that the writer stores, then those that a reader stores.
_MAGIC, _VERSION, _CAPACITY, _PID, _PROCESS_START, _PID_NAMESPACE, _CREATED, _JOB_BYTES = range(8)
_STATE_BEGUN, _IN_FLIGHT, _QUEUED, _HEAD, _STATE_DONE, _RANK, _DICTIONARY_USED, _CLOSED = range(16, 24)
_ARMED = 32  # 0 or 1

# The second word of a slot: kind | flags << 8 | op << 16.
COLLECTIVE, MARK = 1, 2
ASYNCHRONOUS = 1  # the call returns before the operation ends
PAYLOAD = 2  # a mark whose value is the number of a payload

UNKNOWN = -1

_STATE = struct.Struct("@5q")
_STATE_OFFSET = _STATE_BEGUN * 8
_SLOT = struct.Struct("@8q")
# The second word in its parts, to save arithmetic; this order is that of little-endian processors.
_PARTS = struct.Struct("@qBBHIqqqqqq")
_WORD = struct.Struct("@q")
_pack_slot, _pack_state, _pack_word = _PARTS.pack_into, _STATE.pack_into, _WORD.pack_into
_ARMED_OFFSET = _ARMED * 8
_MOST_OPS = 0xFFFF
_STATE_TRIES = 100  # a writer may be killed or preempted in the middle of a store


@dataclass(frozen=True, slots=True)
class RingEvent:
    """A collective or a mark of the trainer. `end_ns` is None while the event runs, and equals `start_ns` for a
    momentary mark."""

    sequence: int
    kind: int  # COLLECTIVE or MARK
    op: str
    group: int  # 0: none
    n_bytes: int
    start_ns: int
    end_ns: int | None
    value: int  # the peer's global rank for p2p, the number of an `iteration`, else UNKNOWN
    flags: int
    payload: bytes | None = None  # of an announcement; None if it was overwritten before it was read

    @property
    def is_collective(self) -> bool:
        return self.kind == COLLECTIVE

    @property
    def asynchronous(self) -> bool:
        return bool(self.flags & ASYNCHRONOUS)


@dataclass(frozen=True, slots=True)
class RingHeader:
    """A snapshot of a ring's header: the job and global rank of the traced process, and the creation time of the
    ring."""

    job: str
    rank: int  # global, UNKNOWN before torch.distributed is initialised
    created_ns: int


def group_id(ranks: Iterable[int], name: str) -> int:
    """Return the id of a process group. The id is the same on all ranks of the group and is never 0. Groups of the same
    ranks have different ids if their names differ."""
    text = ",".join(map(str, sorted(ranks))) + "|" + name
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1 or 1


def readable(capacity: int) -> int:
    """Return how many of the newest events can be read from a ring of `capacity` slots. The oldest slots are left out,
    because a writer may be overwriting them."""
    return capacity - max(1, min(_SPARE_SLOTS, capacity // 8))


class RingWriter:
    """The writer of a ring, in the traced process. Raises ValueError if `capacity` is not a power of two of at least 2,
    and OSError if the ring cannot be created. Later writes do not raise OSError.

    All threads of the process may write. After a fork, the child must call `abandon` and create its own writer.
    """

    def __init__(
        self,
        directory: Path = DEFAULT_DIRECTORY,
        *,
        capacity: int = DEFAULT_CAPACITY,
        job: str = "",
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        if capacity < 2 or capacity & (capacity - 1):
            raise ValueError(f"capacity: must be a power of two of at least 2, got {capacity}")
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._dictionary_at, self._payloads_at, total = _layout(capacity)
        pid, start = os.getpid(), process_start(os.getpid()) or 0
        self.path = directory / f"{socket.gethostname()}-{pid}-{start}-{secrets.token_hex(4)}{SUFFIX}"
        self._capacity, self._mask, self._clock_ns = capacity, capacity - 1, clock_ns
        self._doorbell = str(directory / DOORBELL)
        self._head = self._in_flight = self._queued = self._state = self._payload_head = 0
        self._ops: dict[str, int] = {}
        # For rare operations. Reentrant, because a signal handler may communicate while its thread holds the lock.
        self._lock = threading.RLock()
        about = job[:200].encode()
        self._file = _allocate(self.path.with_suffix(".tmp"), total)
        try:
            # Populate all pages now, so that no collective causes a page fault.
            self._map = mmap.mmap(self._file, total, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            self._words = memoryview(self._map).cast("q")
            constant = {
                _MAGIC: MAGIC,
                _VERSION: VERSION,
                _CAPACITY: capacity,
                _PID: pid,
                _PROCESS_START: start,
                _PID_NAMESPACE: _pid_namespace(),
                _CREATED: clock_ns(),
                _JOB_BYTES: len(about),
                _RANK: UNKNOWN,
            }
            for word, value in constant.items():
                self._words[word] = value
            self._count(0, 0)
            self._map[_JOB_AT : _JOB_AT + len(about)] = about
            self.path.with_suffix(".tmp").rename(self.path)
        except BaseException:
            os.close(self._file)
            self.path.with_suffix(".tmp").unlink(missing_ok=True)
            raise
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        if not getattr(sys, "_is_gil_enabled", lambda: True)():
            for name in ("begin", "end", "_write", "_count"):
                setattr(self, name, _locked(self._lock, getattr(self, name)))

    def op(self, name: str) -> int:
        """Return the code of the operation or mark `name`. `begin` and `issue` require the code of an operation."""
        code = self._ops.get(name)
        if code is None:
            with self._lock:
                code = self._ops.setdefault(name, min(len(self._ops) + 1, _MOST_OPS))
                if code == len(self._ops):
                    self._append_entry({"op": code, "name": name})
        return code

    def begin(self, op: int, group: int = 0, n_bytes: int = 0, flags: int = 0, value: int = UNKNOWN) -> int:
        """Record the start of a collective; return its sequence number, which `end` requires.

        The code of `_count` is inlined here and in `end`, because these two methods determine the cost of tracing.
        """
        now_ns = self._clock_ns()
        sequence = self._head
        self._head = number = sequence + 1
        self._in_flight = in_flight = self._in_flight + 1
        at = _PAGE_BYTES + (sequence & self._mask) * _SLOT_BYTES
        _pack_slot(self._map, at, number, COLLECTIVE, flags, op, 0, group, n_bytes, now_ns, 0, value, 0)
        self._state = state = self._state + 1
        _pack_state(self._map, _STATE_OFFSET, state, self._in_flight + 1, self._queued + 1, self._head + 1, state)
        if in_flight == 1 and self._map[_ARMED_OFFSET]:
            self._ring()
        return sequence

    def end(self, sequence: int) -> None:
        """Record the end of a collective."""
        now_ns = self._clock_ns()
        if self._head - sequence <= self._capacity:
            _pack_word(self._map, _PAGE_BYTES + (sequence & self._mask) * _SLOT_BYTES + _END_AT, now_ns)
        self._in_flight = in_flight = self._in_flight - 1
        self._state = state = self._state + 1
        _pack_state(self._map, _STATE_OFFSET, state, in_flight + 1, self._queued + 1, self._head + 1, state)
        if in_flight == 0 and self._map[_ARMED_OFFSET]:
            self._ring()

    def issue(self, op: int, group: int = 0, n_bytes: int = 0, flags: int = 0, value: int = UNKNOWN) -> int:
        """Record that a collective has been queued on a device; return its sequence number. `started` and `end` later
        record the time during which the collective runs."""
        sequence = self._write(COLLECTIVE, flags, op, group, n_bytes, self._clock_ns(), 0, value)
        self._count(0, 1)
        # From now on it may start at any moment, and the start is detected only later.
        if self._queued == 1 and self._in_flight == 0 and self._words[_ARMED]:
            self._ring()
        return sequence

    def started(self, sequence: int, start_ns: int) -> None:
        """Record that an issued collective started on its device at the time `start_ns`."""
        with self._lock:
            if self._head - sequence <= self._capacity:
                self._words[self._slot_at(sequence) // 8 + 4] = start_ns
        if self._count(1, -1) == 1 and self._words[_ARMED]:
            self._ring()

    def mark(self, name: str) -> int:
        """Record the start of a mark that lasts until `end_mark` is called; return its sequence number."""
        return self._write(MARK, 0, self.op(name), 0, 0, self._clock_ns(), 0, UNKNOWN)

    def end_mark(self, sequence: int) -> None:
        if self._head - sequence <= self._capacity:
            _pack_word(self._map, self._slot_at(sequence) + _END_AT, self._clock_ns())

    def moment(self, name: str, value: int = UNKNOWN) -> None:
        """Record a mark that has a name and a value but no duration."""
        now_ns = self._clock_ns()
        self._write(MARK, 0, self.op(name), 0, 0, now_ns, now_ns, value)

    def announce(self, name: str, payload: bytes) -> None:
        """Record a mark with a payload and ring the doorbell. Raises ValueError if the payload exceeds
        `PAYLOAD_BYTES`."""
        if len(payload) > PAYLOAD_BYTES:
            raise ValueError(f"payload: must have at most {PAYLOAD_BYTES} bytes, got {len(payload)}")
        op = self.op(name)
        with self._lock:
            number = self._payload_head
            at = self._payloads_at + number % PAYLOAD_SLOTS * _PAYLOAD_SLOT_BYTES
            self._words[at // 8] = 0
            self._words[at // 8 + 1] = len(payload)
            self._map[at + 16 : at + 16 + len(payload)] = payload
            self._words[at // 8] = number + 1
            self._payload_head = number + 1
            now_ns = self._clock_ns()
            self._write(MARK, PAYLOAD, op, 0, len(payload), now_ns, now_ns, number)
        self._ring()  # even if not armed: announcements are rare, and must be prepared before the next pause

    def set_rank(self, rank: int) -> None:
        """Store the global rank that this process has in torch.distributed."""
        self._words[_RANK] = rank

    def close(self) -> None:
        """Mark the ring as closed and stop writing. The ring's reader removes the file."""
        with self._lock:
            self._words[_CLOSED] = 1
            self._leave()

    def abandon(self) -> None:
        """Stop using the ring without changing it, as a forked child does with its parent's ring."""
        self._lock = threading.RLock()  # the old lock may be held by a thread that does not exist after the fork
        self._leave()

    def _leave(self) -> None:
        """Release the ring and redirect all later writes to private memory. Such writes occur because a collective may
        end after recording has stopped."""
        if self._file < 0:
            return
        map_, words = self._map, self._words
        # Replace the memory before the old one is unmapped: a thread may be about to write.
        self._map = mmap.mmap(-1, len(map_))
        self._words = memoryview(self._map).cast("q")
        words.release()
        map_.close()
        os.close(self._file)
        self._file = -1
        self._socket.close()

    def _write(
        self, kind: int, flags: int, op: int, group: int, n_bytes: int, start_ns: int, end_ns: int, value: int
    ) -> int:
        sequence = self._head
        self._head = number = sequence + 1
        at = _PAGE_BYTES + (sequence & self._mask) * _SLOT_BYTES
        _pack_slot(self._map, at, number, kind, flags, op, 0, group, n_bytes, start_ns, end_ns, value, 0)
        self._count(0, 0)
        return sequence

    def _count(self, more_in_flight: int, more_queued: int) -> int:
        """Add to the numbers of collectives in flight and queued, and store the state in the header. Return the number
        in flight."""
        self._in_flight = in_flight = self._in_flight + more_in_flight
        self._queued = queued = self._queued + more_queued
        self._state = state = self._state + 1
        _pack_state(self._map, _STATE_OFFSET, state, in_flight + 1, queued + 1, self._head + 1, state)
        return in_flight

    def _slot_at(self, sequence: int) -> int:
        return _PAGE_BYTES + (sequence & self._mask) * _SLOT_BYTES

    def _append_entry(self, entry: Mapping[str, Any]) -> None:
        line = json.dumps(entry).encode() + b"\n"
        used = self._words[_DICTIONARY_USED]
        if used + len(line) <= DICTIONARY_BYTES:  # else the operation has no name
            at = self._dictionary_at + used
            self._map[at : at + len(line)] = line
            self._words[_DICTIONARY_USED] = used + len(line)

    def _ring(self) -> None:
        # Without a listener, or with a full socket, the reader polls the ring instead.
        with contextlib.suppress(OSError):
            self._socket.sendto(b".", self._doorbell)


class RingReader:
    """The reader of one ring, in the agent. Raises OSError if the file is missing, and ValueError if it is not a ring
    of the current version."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            total = os.fstat(self._file).st_size
            if total < _PAGE_BYTES:
                raise ValueError(f"{path} is not a ring: it must have at least {_PAGE_BYTES} bytes, got {total}")
            self._map = mmap.mmap(self._file, total)
            self._words = memoryview(self._map).cast("q")
            self._capacity = self._words[_CAPACITY]
            self._dictionary_at, self._payloads_at, expected = _layout(self._capacity)
            if (self._words[_MAGIC], self._words[_VERSION], expected) != (MAGIC, VERSION, total):
                raise ValueError(
                    f"{path} is not a ring: it must have magic {MAGIC}, version {VERSION} and {expected} bytes,"
                    f" got {self._words[_MAGIC]}, {self._words[_VERSION]} and {total}"
                )
        except BaseException:
            os.close(self._file)
            raise
        self._readable = readable(self._capacity)
        self._job = self._map[_JOB_AT : _JOB_AT + self._words[_JOB_BYTES]].decode()
        self._next = 0
        self._known_head = 0
        self._running: set[int] = set()  # sequences returned before they had ended
        self._ops: dict[int, str] = {}
        self._dictionary_read = 0  # bytes of the dictionary read so far

    def header(self) -> RingHeader:
        return RingHeader(self._job, self._words[_RANK], self._words[_CREATED])

    def events(self) -> tuple[list[RingEvent], int]:
        """Return the events since the last call, sorted by sequence number, and the number of events that were
        overwritten before they were read.

        A running event is returned when it is first seen and again when it has ended.
        """
        head = self._state()[2]
        oldest = max(head - self._readable, 0)
        lost = max(oldest - self._next, 0)
        found: list[RingEvent] = []
        for sequence in (*sorted(self._running), *range(max(self._next, oldest), head)):
            slot = self._slot(sequence)
            if slot is None:
                lost += 1
                self._running.discard(sequence)
                continue
            if slot[5]:
                self._running.discard(sequence)
            elif sequence in self._running:
                continue
            else:
                self._running.add(sequence)
            found.append(self._event(sequence, slot))
        self._next = head
        return found, lost

    @property
    def in_flight(self) -> int:
        return self._state()[0]

    @property
    def communicates(self) -> bool:
        """Return whether a collective is in flight or queued on a device."""
        return any(self._state()[:2])

    @property
    def changes(self) -> int:
        """Return a counter that changes with every event."""
        return self._words[_STATE_DONE]

    def arm(self, armed: bool) -> None:
        """Set whether the process rings the doorbell when its communication starts or stops. Announcements ring it in
        any case."""
        self._words[_ARMED] = int(armed)

    @property
    def alive(self) -> bool:
        """Return whether the writing process exists and has not stopped recording."""
        if self._words[_CLOSED]:
            return False
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            # A child forked outside of Python also holds the lock, so check the process itself.
            if self._words[_PID_NAMESPACE] != _pid_namespace():
                return True
            return process_start(self._words[_PID]) == self._words[_PROCESS_START]
        fcntl.flock(self._file, fcntl.LOCK_UN)
        return False

    def close(self) -> None:
        self._words.release()
        self._map.close()
        os.close(self._file)

    def __enter__(self) -> "RingReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _state(self) -> tuple[int, int, int]:
        """Return the numbers of collectives in flight and queued, and the next sequence number, from a consistent
        state. If no consistent state can be read, the returned number in flight is at least one."""
        words = self._words
        for _ in range(_STATE_TRIES):
            done = words[_STATE_DONE]
            in_flight, queued, head = found = tuple(words[_IN_FLIGHT:_STATE_DONE])
            if words[_STATE_BEGUN] == done and done and all(found):
                self._known_head = head - 1
                return in_flight - 1, queued - 1, head - 1
        return max(in_flight - 1, 1), max(queued - 1, 0), self._known_head

    def _slot(self, sequence: int) -> tuple[int, ...] | None:
        slot = _SLOT.unpack_from(self._map, _PAGE_BYTES + sequence % self._capacity * _SLOT_BYTES)
        return slot if slot[0] == sequence + 1 and 0 < self._state()[2] - sequence <= self._readable else None

    def _event(self, sequence: int, slot: tuple[int, ...]) -> RingEvent:
        _, code, group, n_bytes, start_ns, end_ns, value, _ = slot
        kind, flags, op = code & 0xFF, code >> 8 & 0xFF, code >> 16 & 0xFFFF
        if op not in self._ops:
            self._learn()
        name = self._ops.get(op, f"op{op}")
        payload = self._payload(value) if flags & PAYLOAD else None
        return RingEvent(sequence, kind, name, group, n_bytes, start_ns, end_ns or None, value, flags, payload)

    def _payload(self, number: int) -> bytes | None:
        at = self._payloads_at + number % PAYLOAD_SLOTS * _PAYLOAD_SLOT_BYTES
        length = self._words[at // 8 + 1]
        found = self._words[at // 8] == number + 1 and 0 <= length <= PAYLOAD_BYTES
        payload = self._map[at + 16 : at + 16 + length] if found else None
        return payload if self._words[at // 8] == number + 1 else None

    def _learn(self) -> None:
        used = self._words[_DICTIONARY_USED]
        at = self._dictionary_at
        for line in self._map[at + self._dictionary_read : at + used].splitlines():
            entry = json.loads(line)
            self._ops[entry["op"]] = entry["name"]
        self._dictionary_read = used


class RingDoorbell:
    """The datagram socket through which the processes whose rings are armed wake their reader. A directory has one
    doorbell, and a new doorbell replaces the previous one. Raises OSError if the socket cannot be created."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        made = directory / f"{DOORBELL}.{os.getpid()}"
        made.unlink(missing_ok=True)
        self._socket.bind(str(made))
        made.rename(directory / DOORBELL)

    def fileno(self) -> int:
        """Return the file descriptor on which a reader can wait for signals."""
        return self._socket.fileno()

    def rung(self) -> bool:
        """Receive one signal without waiting; return whether there was a signal. The state of a ring may have changed
        again since the signal was sent."""
        try:
            self._socket.recv(1)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        self._socket.close()


def _layout(capacity: int) -> tuple[int, int, int]:
    """Return the offsets of the dictionary and of the payloads in a ring's file, and the size of the file, in bytes."""
    payloads = _PAGE_BYTES + capacity * _SLOT_BYTES + DICTIONARY_BYTES
    return payloads - DICTIONARY_BYTES, payloads, payloads + PAYLOAD_SLOTS * _PAYLOAD_SLOT_BYTES


def _locked(lock: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    def under_lock(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return call(*args, **kwargs)

    return under_lock


def list_rings(directory: Path = DEFAULT_DIRECTORY) -> list[Path]:
    """Return the paths of the rings in `directory`, of live and dead processes, sorted by name."""
    return sorted(directory.glob(f"*{SUFFIX}"))


def remove_dead(directory: Path = DEFAULT_DIRECTORY, *, older_than_s: float = 0.0) -> list[Path]:
    """Remove the rings of dead processes from `directory`; return the removed paths. Rings that were modified within
    the last `older_than_s` seconds are kept."""
    removed: list[Path] = []
    for path in list_rings(directory):
        with contextlib.suppress(OSError, ValueError):  # another process removed it, or it is not a ring
            if time.time() - path.stat().st_mtime < older_than_s:
                continue
            with RingReader(path) as reader:
                alive = reader.alive
            if not alive:
                path.unlink()
                removed.append(path)
    return removed


def process_start(pid: int) -> int | None:
    """Return the start time of a process in clock ticks after boot, or None if the process does not exist or is a
    zombie."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(fields[18])


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _allocate(path: Path, n_bytes: int) -> int:
    """Create and lock a file of `n_bytes`; return its descriptor. The lock lasts as long as the process.

    The whole file is allocated in advance, because a store to memory that cannot be allocated would kill the process.
    """
    opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(opened, 0, n_bytes)
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(opened)
        path.unlink(missing_ok=True)
        raise
    return opened
