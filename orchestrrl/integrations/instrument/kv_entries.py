"""Entries of KV in a shared directory: written whole or not at all, read with every doubt resolved, deleted in time.

An entry is a directory with one file per rank, `ROOT/orchestrrl-kv/ENTRY/0-of-2.kv`. A file holds, one after the other:

    preamble   magic, length of the header in bytes, number of tokens
    header     JSON: weights, identity, ranks, block_tokens, blocks, layout
    token ids  4 bytes each: the tokens whose KV this is
    blocks     layer by layer, block by block, as the bytes lie in the engine's memory
    checksums  CRC-32 of every block, in the same order

Standard library only. Nothing here knows vLLM: kv_handover.py brings the bytes.
"""

import contextlib
import hashlib
import io
import json
import logging
import os
import queue
import re
import struct
import sys
import threading
import time
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = "orchestrrl-kv"  # below the shared directory: only what is in it is ever deleted
ENTRY_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~-]{0,127}")
FILE_NAME = re.compile(r"\d+-of-\d+\.(kv|part)")
MAGIC = b"orl-kv1\n"
PREAMBLE = struct.Struct("<8sIQ")
MAX_HEADER_BYTES = 1 << 24
SWEEP_PERIOD_S = 5.0
FULL_SHARE = 0.75  # what a sweep leaves of the room at most, so that there is some until the next

logger = logging.getLogger("vllm.orchestrrl.kv_entries")


class UnusableEntry(Exception):
    """This entry is there and cannot be used, with the reason. The tokens are to be recomputed."""


@dataclass(frozen=True, slots=True)
class KvBlockLayout:
    """How one rank keeps a block: a layer's name, type, shape and packing, and the bytes of one block of it."""

    layers: tuple[str, ...]
    block_bytes: tuple[int, ...]  # one per layer

    def __post_init__(self) -> None:
        if len(self.layers) != len(self.block_bytes):
            raise ValueError(f"{len(self.layers)} layers, but sizes of {len(self.block_bytes)}")


@dataclass(frozen=True, slots=True)
class KvEntryContents:
    """What an entry is about, the same on every rank. Token ids are packed, so that they travel as bytes."""

    weights: str
    ranks: int
    block_tokens: int
    token_ids: "array[int]" = field(repr=False)

    @property
    def blocks(self) -> int:
        return -(-len(self.token_ids) // self.block_tokens)

    @property
    def identity(self) -> str:
        facts = json.dumps([self.weights, self.ranks, self.block_tokens]).encode()
        return hashlib.sha256(facts + self.token_ids.tobytes()).hexdigest()


def is_entry_id(text: str) -> bool:
    return ENTRY_ID.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class KvEntryStore:
    """The entries of engines with `ranks` workers each, below `shared`."""

    shared: Path
    ranks: int

    @property
    def root(self) -> Path:
        return self.shared / FOLDER

    def file(self, entry: str, rank: int) -> Path:
        return self.root / entry / f"{rank}-of-{self.ranks}.kv"

    def write(
        self,
        entry: str,
        rank: int,
        contents: KvEntryContents,
        layout: KvBlockLayout,
        layers: Iterable[Iterable[memoryview]],
    ) -> int:
        """Write one rank's file; it appears under its name when it is complete. Returns its bytes; raises OSError.

        `layers` yields a layer's blocks in order, in pieces of whole blocks. Without tokens none are taken.
        """
        file = self.file(entry, rank)
        part = file.with_suffix(".part")
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with part.open("wb") as out:
                out.write(_head(contents, layout))
                if contents.blocks:
                    out.write(_blocks_with_sums(out, contents.blocks, layout, layers))
                size = out.tell()
            part.rename(file)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return size

    def lookup(self, entry: str, weights: str, block_tokens: int) -> KvEntryContents | None:
        """The entry, or None when it is not complete yet. Raises Unusable for one that will never do."""
        try:
            names = set(os.listdir(self.root / entry))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise UnusableEntry(str(error)) from error
        others = [name for name in names if name.endswith(".kv") and not name.endswith(f"-of-{self.ranks}.kv")]
        if others:
            raise UnusableEntry(
                f"it was saved by an engine of another number of ranks ({others[0]}, here {self.ranks})"
            )
        if not all(self.file(entry, rank).name in names for rank in range(self.ranks)):
            return None
        found = None
        for rank in range(self.ranks):
            with self._opened(entry, rank) as (contents, _, _):
                pass
            if found is not None and contents.identity != found.identity:
                raise UnusableEntry("its ranks do not belong together")
            found = contents
        assert found is not None
        if found.weights != weights:
            raise UnusableEntry(f"it belongs to weights {found.weights!r}, and {weights!r} is asked for")
        if found.block_tokens != block_tokens:
            raise UnusableEntry(f"its blocks have {found.block_tokens} tokens, here they have {block_tokens}")
        return found

    def read(
        self,
        entry: str,
        rank: int,
        identity: str,
        layout: KvBlockLayout,
        wanted: range,
        layers: Iterable[Iterable[memoryview]],
    ) -> int:
        """Fill `layers` (as in `write`) with the blocks `wanted` of one rank's file. Returns the bytes read.

        Raises Unusable when the file is not there, is torn, belongs to another identity or layout, or fails a checksum;
        what was filled until then is worthless.
        """
        with self._opened(entry, rank) as (contents, saved, file):
            if contents.identity != identity:
                raise UnusableEntry("it was replaced since it was looked up")
            if saved != layout:
                raise UnusableEntry(f"its layout differs: {_difference(saved, layout)}")
            if wanted.stop > contents.blocks:
                raise UnusableEntry(f"it has {contents.blocks} blocks, and {wanted.stop} are asked for")
            return _fill(file, contents.blocks, layout, wanted, layers)

    @contextlib.contextmanager
    def _opened(self, entry: str, rank: int) -> Iterator[tuple[KvEntryContents, KvBlockLayout, io.BufferedReader]]:
        """One rank's file, standing at its first block, its head verified against the file's size."""
        try:
            with self.file(entry, rank).open("rb") as file:
                try:
                    contents, layout = _read_head(file)
                except (ValueError, KeyError, TypeError, ArithmeticError, struct.error) as error:
                    raise UnusableEntry(f"{file.name} is torn or not ours: {error}") from error
                yield contents, layout, file
        except OSError as error:
            raise UnusableEntry(str(error)) from error

    def discard(self, entry: str, rank: int | None = None) -> None:
        """Delete one rank's file, or all of the entry. The directory goes with its last file. Twice is harmless."""
        directory = self.root / entry
        try:
            names = [self.file(entry, rank).name] if rank is not None else os.listdir(directory)
            for name in names:
                if FILE_NAME.fullmatch(name):
                    (directory / name).unlink(missing_ok=True)
            directory.rmdir()
        except OSError:  # it is gone, or other ranks still need it, or a later sweep gets it
            return

    def sweep(self, now_s: float, max_age_s: float, max_bytes: int) -> int:
        """Delete entries older than `max_age_s`, then the oldest until `max_bytes` hold. Returns the bytes left.

        Ages are taken from the file system's times, so `now_s` is a wall clock's.
        """
        entries = []
        for name in _listed(self.root):
            if is_entry_id(name):
                sizes_and_times = [_size_and_time(self.root / name / file) for file in _listed(self.root / name)]
                _, made_s = _size_and_time(self.root / name)
                newest_s = max([made_s, *(time_s for _, time_s in sizes_and_times)])
                entries.append((newest_s, name, sum(size for size, _ in sizes_and_times)))
        left = sum(size for _, _, size in entries)
        for newest_s, name, size in sorted(entries):
            if now_s - newest_s > max_age_s or left > max_bytes:
                self.discard(name)
                left -= size
        return left


class KvEvictor:
    """A thread that deletes: what it is told to at once, what is old every few seconds. No step waits for it."""

    def __init__(self, store: KvEntryStore, max_age_s: float, max_bytes: int) -> None:
        self._store = store
        self._max_age_s = max_age_s
        self._max_bytes = max_bytes
        self._used_bytes = 0  # at the last sweep, and what was promised since
        self._orders: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-housekeeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._orders.put(None)

    def discard(self, entry: str) -> None:
        self._orders.put(entry)

    def reserve(self, size_bytes: int) -> bool:
        """Whether there is room for so much more. About right: other engines use the same directory."""
        if self._used_bytes + size_bytes > self._max_bytes:
            return False
        self._used_bytes += size_bytes
        return True

    def _run(self) -> None:
        swept_s = -SWEEP_PERIOD_S
        while True:
            wait_s = swept_s + SWEEP_PERIOD_S - time.monotonic()
            if wait_s <= 0:
                swept_s = time.monotonic()
                self._used_bytes = self._store.sweep(time.time(), self._max_age_s, int(FULL_SHARE * self._max_bytes))
                continue
            try:
                entry = self._orders.get(timeout=wait_s)
            except queue.Empty:
                continue
            if entry is None:
                return
            self._store.discard(entry)


def _head(contents: KvEntryContents, layout: KvBlockLayout) -> bytes:
    header = {
        "weights": contents.weights,
        "identity": contents.identity,
        "ranks": contents.ranks,
        "block_tokens": contents.block_tokens,
        "layers": layout.layers,
        "block_bytes": layout.block_bytes,
        "byteorder": sys.byteorder,
    }
    text = json.dumps(header).encode()
    return PREAMBLE.pack(MAGIC, len(text), len(contents.token_ids)) + text + contents.token_ids.tobytes()


def _read_head(file: io.BufferedReader) -> tuple[KvEntryContents, KvBlockLayout]:
    """Raises ValueError, KeyError, TypeError, ArithmeticError or struct.error for what `_head` did not write."""
    magic, header_bytes, tokens = PREAMBLE.unpack(file.read(PREAMBLE.size))
    size = os.fstat(file.fileno()).st_size
    if magic != MAGIC or header_bytes > MAX_HEADER_BYTES or 4 * tokens > size:
        raise ValueError("the preamble is wrong")
    header: dict[str, Any] = json.loads(file.read(header_bytes))
    token_ids = array("I")
    token_ids.frombytes(file.read(4 * tokens))
    contents = KvEntryContents(str(header["weights"]), int(header["ranks"]), int(header["block_tokens"]), token_ids)
    layout = KvBlockLayout(tuple(header["layers"]), tuple(header["block_bytes"]))
    if header["byteorder"] != sys.byteorder or contents.identity != header["identity"]:
        raise ValueError("the header and the token ids do not belong together")
    expected = file.tell() + contents.blocks * (sum(layout.block_bytes) + 4 * len(layout.layers))
    if size != expected:
        raise ValueError(f"it should have {expected} bytes and has {size}")
    return contents, layout


def _blocks_with_sums(
    out: io.BufferedWriter, blocks: int, layout: KvBlockLayout, layers: Iterable[Iterable[memoryview]]
) -> "array[int]":
    """Write the blocks and return their checksums."""
    sums = array("I")
    for block_bytes, pieces in zip(layout.block_bytes, layers, strict=True):
        before = len(sums)
        for piece in pieces:
            out.write(piece)
            sums.extend(_sums(piece, block_bytes))
        if len(sums) - before != blocks:
            raise ValueError(f"a layer has {len(sums) - before} blocks, not {blocks}")
    return sums


def _fill(
    file: io.BufferedReader, blocks: int, layout: KvBlockLayout, wanted: range, layers: Iterable[Iterable[memoryview]]
) -> int:
    start = file.tell()
    file.seek(start + blocks * sum(layout.block_bytes))
    sums = array("I")
    sums.frombytes(file.read(4 * blocks * len(layout.layers)))
    at, done = start, 0
    for index, (block_bytes, pieces) in enumerate(zip(layout.block_bytes, layers, strict=True)):
        file.seek(at + wanted.start * block_bytes)
        block = index * blocks + wanted.start
        for piece in pieces:
            if file.readinto(piece) != len(piece):
                raise UnusableEntry(f"{file.name} ended early")
            for found in _sums(piece, block_bytes):
                if found != sums[block]:
                    raise UnusableEntry(f"{file.name} fails the checksum of block {block % blocks} of layer {index}")
                block += 1
            done += len(piece)
        at += blocks * block_bytes
    return done


def _sums(piece: memoryview, block_bytes: int) -> Iterable[int]:
    return (zlib.crc32(piece[at : at + block_bytes]) for at in range(0, len(piece), block_bytes))


def _difference(saved: KvBlockLayout, here: KvBlockLayout) -> str:
    pairs = zip((*saved.layers, *saved.block_bytes), (*here.layers, *here.block_bytes), strict=False)
    return next((f"{one!r} there, {other!r} here" for one, other in pairs if one != other), "another number of layers")


def _listed(directory: Path) -> Sequence[str]:
    try:
        return os.listdir(directory)
    except OSError:  # nobody has made it yet, or it has just gone
        return ()


def _size_and_time(path: Path) -> tuple[int, float]:
    try:
        facts = path.stat()
    except OSError:  # it has just gone
        return 0, 0.0
    return facts.st_size, facts.st_mtime
