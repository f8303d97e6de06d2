"""The shared memory through which a traced process tells when it communicates: its format, its writer, its reader.

One file per process, `<host>-<pid>-<start>.ring`, in a directory that all processes of a host and its agent share. The
writer never waits for a reader and makes no system call but for the doorbell, which a reader switches on. Standard
library only. Times are `time.monotonic_ns`, the same clock for all processes of a host; numbers are 64 bits, native.

    page 0      header words (the constants below), then the name of the job
    slots       `capacity` slots of 8 words, the newest overwrite the oldest: sequence s is in s mod capacity
                sequence + 1 | kind, flags, op, 0 | group | bytes | start_ns | end_ns, 0 while it runs | value | 0
    dictionary  append-only lines of JSON: {"op": 3, "name": "all_reduce"}
    payloads    a few slots for what a trainer announces: sequence + 1 | length | bytes

Torn readings. `struct.pack_into` first fills with zeros, in an order of its own, then stores word after word, so:
- The state in the header (how many are in flight and queued, the next sequence) lies between two equal
  numbers and has no word that may be 0: counts are stored plus one. A reader takes the last, the words, then the
  first; equal numbers and no 0 are one state. Where it finds none, it says that something is in flight.
- A slot is overwritten before the header says so. What a reader has taken counts if by the header it looks at then the
  slot was not yet next, nor the one of the next few threads: so a few slots less than `capacity` can be read.
That stores are seen in their order is what x86 promises; on other processors it may fail, once in a very long time.

Threads and signals. A collective pays no lock. CPython hands the GIL over, and runs handlers of signals, only where a
function is entered, a loop turns or a call returns; collecting garbage, which may run anything, needs an object made
that can hold others. `begin`, `end` and what they share therefore count, and store what they counted by one call into
C, with nothing of that between: no other thread sees half of it, and whoever comes between two such steps stores later
numbers, which the next step reads anew. Where Python has no GIL, a lock is put around them.
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

# Header words. First what never changes, then what the writer stores, then what a reader stores.
_MAGIC, _VERSION, _CAPACITY, _PID, _PROCESS_START, _PID_NAMESPACE, _CREATED, _JOB_BYTES = range(8)
_STATE_BEGUN, _IN_FLIGHT, _QUEUED, _HEAD, _STATE_DONE, _RANK, _DICTIONARY_USED, _CLOSED = range(16, 24)
_ARMED = 32  # 0 or 1

# What a slot's second word says: kind | flags << 8 | op << 16.
COLLECTIVE, MARK = 1, 2
ASYNCHRONOUS = 1  # issued without waiting for it
PAYLOAD = 2  # a mark whose value is the number of a payload

UNKNOWN = -1

_STATE = struct.Struct("@5q")
_STATE_OFFSET = _STATE_BEGUN * 8
_SLOT = struct.Struct("@8q")
# The second word in its parts, which saves arithmetic; in this order on little-endian processors, which all are here.
_PARTS = struct.Struct("@qBBHIqqqqqq")
_WORD = struct.Struct("@q")
_pack_slot, _pack_state, _pack_word = _PARTS.pack_into, _STATE.pack_into, _WORD.pack_into
_ARMED_OFFSET = _ARMED * 8
_MOST_OPS = 0xFFFF
_STATE_TRIES = 100  # a writer may be killed, or the processor taken from it, in the middle


@dataclass(frozen=True, slots=True)
class RingEvent:
    """A collective, or a mark of the trainer. `end_ns` is None while it runs, `start_ns` for a mark of one moment."""

    sequence: int
    kind: int  # COLLECTIVE or MARK
    op: str
    group: int  # 0: none
    n_bytes: int
    start_ns: int
    end_ns: int | None
    value: int  # of p2p the peer's global rank, of `iteration` its number, UNKNOWN where there is none
    flags: int
    payload: bytes | None = None  # of `announce`; None also where it was overwritten before it was read

    @property
    def is_collective(self) -> bool:
        return self.kind == COLLECTIVE

    @property
    def asynchronous(self) -> bool:
        return bool(self.flags & ASYNCHRONOUS)


@dataclass(frozen=True, slots=True)
class RingHeader:
    """Which process writes a ring, as it was at one moment."""

    job: str
    rank: int  # global, UNKNOWN before torch.distributed is initialised
    created_ns: int


def group_id(ranks: Iterable[int], name: str) -> int:
    """The same number in every rank of a group; never 0. Two groups of the same ranks have different names."""
    text = ",".join(map(str, sorted(ranks))) + "|" + name
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1 or 1


def readable(capacity: int) -> int:
    """How many of the newest events a reader can have: of the oldest slots, some may be being overwritten."""
    return capacity - max(1, min(_SPARE_SLOTS, capacity // 8))


class RingWriter:
    """The traced process's side. Raises OSError where the ring cannot be had; afterwards nothing raises.

    All threads of the process may write. After a fork, the child must `abandon` it and make one of its own.
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
        # For what is rare. A handler of a signal may communicate while its thread is in here.
        self._lock = threading.RLock()
        about = job[:200].encode()
        self._file = _allocate(self.path.with_suffix(".tmp"), total)
        try:
            # All pages at once: no collective waits for the first touch of one.
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
        """The number of an operation or a mark, for `begin`."""
        code = self._ops.get(name)
        if code is None:
            with self._lock:
                code = self._ops.setdefault(name, min(len(self._ops) + 1, _MOST_OPS))
                if code == len(self._ops):
                    self._append_entry({"op": code, "name": name})
        return code

    def begin(self, op: int, group: int = 0, n_bytes: int = 0, flags: int = 0, value: int = UNKNOWN) -> int:
        """A collective begins. Returns its sequence, for `end`. Written out, as `end` is: tracing costs this."""
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
        """The collective of that sequence has ended."""
        now_ns = self._clock_ns()
        if self._head - sequence <= self._capacity:
            _pack_word(self._map, _PAGE_BYTES + (sequence & self._mask) * _SLOT_BYTES + _END_AT, now_ns)
        self._in_flight = in_flight = self._in_flight - 1
        self._state = state = self._state + 1
        _pack_state(self._map, _STATE_OFFSET, state, in_flight + 1, self._queued + 1, self._head + 1, state)
        if in_flight == 0 and self._map[_ARMED_OFFSET]:
            self._ring()

    def issue(self, op: int, group: int = 0, n_bytes: int = 0, flags: int = 0, value: int = UNKNOWN) -> int:
        """A collective is given to a device, which begins it later: `started`, then `end` tell when."""
        sequence = self._write(COLLECTIVE, flags, op, group, n_bytes, self._clock_ns(), 0, value)
        self._count(0, 1)
        # From here on it may begin at any moment, and is seen to only later.
        if self._queued == 1 and self._in_flight == 0 and self._words[_ARMED]:
            self._ring()
        return sequence

    def started(self, sequence: int, start_ns: int) -> None:
        """A device began what was issued to it."""
        with self._lock:
            if self._head - sequence <= self._capacity:
                self._words[self._slot_at(sequence) // 8 + 4] = start_ns
        if self._count(1, -1) == 1 and self._words[_ARMED]:
            self._ring()

    def mark(self, name: str) -> int:
        """A mark that lasts until `end_mark`."""
        return self._write(MARK, 0, self.op(name), 0, 0, self._clock_ns(), 0, UNKNOWN)

    def end_mark(self, sequence: int) -> None:
        if self._head - sequence <= self._capacity:
            _pack_word(self._map, self._slot_at(sequence) + _END_AT, self._clock_ns())

    def moment(self, name: str, value: int = UNKNOWN) -> None:
        """A mark of one moment."""
        now_ns = self._clock_ns()
        self._write(MARK, 0, self.op(name), 0, 0, now_ns, now_ns, value)

    def announce(self, name: str, payload: bytes) -> None:
        """A mark that carries at most PAYLOAD_BYTES. Raises ValueError for more."""
        if len(payload) > PAYLOAD_BYTES:
            raise ValueError(f"what is announced: must be at most {PAYLOAD_BYTES} bytes, got {len(payload)}")
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
        self._ring()  # armed or not: it is rare, and what is announced is prepared before the next pause

    def set_rank(self, rank: int) -> None:
        """Where this process stands in torch.distributed."""
        self._words[_RANK] = rank

    def close(self) -> None:
        """The process stops writing in good order. The file stays for its reader, which removes it."""
        with self._lock:
            self._words[_CLOSED] = 1
            self._leave()

    def abandon(self) -> None:
        """Forget the ring without a word in it: what a forked child does with its parent's."""
        self._lock = threading.RLock()  # a thread that is not there after the fork may hold the other
        self._leave()

    def _leave(self) -> None:
        """From now on nobody sees what is written: a collective may end after the recorder."""
        if self._file < 0:
            return
        map_, words = self._map, self._words
        # First the other memory, then this one's end: a thread may be about to write.
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
        """Store the state. Returns how many are in flight."""
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
        if used + len(line) <= DICTIONARY_BYTES:  # else it stays without a name
            at = self._dictionary_at + used
            self._map[at : at + len(line)] = line
            self._words[_DICTIONARY_USED] = used + len(line)

    def _ring(self) -> None:
        # Nobody there, or nobody who empties the socket: whoever wants to know looks into the ring itself.
        with contextlib.suppress(OSError):
            self._socket.sendto(b".", self._doorbell)


class RingReader:
    """The agent's side of one ring. Raises OSError where it is gone and ValueError where it is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            total = os.fstat(self._file).st_size
            if total < _PAGE_BYTES:
                raise ValueError(f"{path}: is no ring: it has {total} bytes")
            self._map = mmap.mmap(self._file, total)
            self._words = memoryview(self._map).cast("q")
            self._capacity = self._words[_CAPACITY]
            self._dictionary_at, self._payloads_at, expected = _layout(self._capacity)
            if (self._words[_MAGIC], self._words[_VERSION], expected) != (MAGIC, VERSION, total):
                raise ValueError(f"{path}: is no ring of version {VERSION}")
        except BaseException:
            os.close(self._file)
            raise
        self._readable = readable(self._capacity)
        self._job = self._map[_JOB_AT : _JOB_AT + self._words[_JOB_BYTES]].decode()
        self._next = 0
        self._known_head = 0
        self._running: set[int] = set()  # given out before they had ended
        self._ops: dict[int, str] = {}
        self._dictionary_read = 0  # bytes of the dictionary that are read

    def header(self) -> RingHeader:
        return RingHeader(self._job, self._words[_RANK], self._words[_CREATED])

    def events(self) -> tuple[list[RingEvent], int]:
        """What happened since the last call, by sequence, and how many events were overwritten before they were read.

        An event that runs is given out when it is first seen and once more when it has ended.
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
        """Something is in flight, or issued to a device."""
        return any(self._state()[:2])

    @property
    def changes(self) -> int:
        """Another number once anything has happened since."""
        return self._words[_STATE_DONE]

    def arm(self, armed: bool) -> None:
        """Whether the process rings the doorbell also when it goes quiet and when it is so no longer."""
        self._words[_ARMED] = int(armed)

    @property
    def alive(self) -> bool:
        """Whether the process that writes still is there and has not stopped recording."""
        if self._words[_CLOSED]:
            return False
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            # A child that forked behind Python's back holds the lock as well: the process itself has the last word.
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
        """In flight, queued, head."""
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
    """The socket at which the armed processes of a directory ring. One per directory: the last that opens has it.
    Raises OSError."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        made = directory / f"{DOORBELL}.{os.getpid()}"
        made.unlink(missing_ok=True)
        self._socket.bind(str(made))
        made.rename(directory / DOORBELL)

    def fileno(self) -> int:
        """To wait for."""
        return self._socket.fileno()

    def rung(self) -> bool:
        """Take one ring; False where there is none. Never waits. The ring in memory may have gone on since."""
        try:
            self._socket.recv(1)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        self._socket.close()


def _layout(capacity: int) -> tuple[int, int, int]:
    """Where the dictionary and the payloads begin, and where the file ends."""
    payloads = _PAGE_BYTES + capacity * _SLOT_BYTES + DICTIONARY_BYTES
    return payloads - DICTIONARY_BYTES, payloads, payloads + PAYLOAD_SLOTS * _PAYLOAD_SLOT_BYTES


def _locked(lock: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    def under_lock(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return call(*args, **kwargs)

    return under_lock


def list_rings(directory: Path = DEFAULT_DIRECTORY) -> list[Path]:
    """The rings of living and dead processes, sorted by name."""
    return sorted(directory.glob(f"*{SUFFIX}"))


def remove_dead(directory: Path = DEFAULT_DIRECTORY, *, older_than_s: float = 0.0) -> list[Path]:
    """Remove what processes have left behind that are gone. Returns what is removed."""
    removed: list[Path] = []
    for path in list_rings(directory):
        with contextlib.suppress(OSError, ValueError):  # another removes it too, or it is none of ours
            if time.time() - path.stat().st_mtime < older_than_s:
                continue
            with RingReader(path) as reader:
                alive = reader.alive
            if not alive:
                path.unlink()
                removed.append(path)
    return removed


def process_start(pid: int) -> int | None:
    """When a process began, in clock ticks after boot; None where there is none, or only its name is left."""
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
    """A file with all its memory, so that no later store kills the process, and locked as long as that lives."""
    opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(opened, 0, n_bytes)
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(opened)
        path.unlink(missing_ok=True)
        raise
    return opened
