"""Store KV cache entries in a shared directory. Writes are atomic, reads are fully verified, and old entries are
deleted.

An entry is a directory with one file per rank, `ROOT/orchestrrl-kv/ENTRY/0-of-2.kv`. A file has these parts in order:

    preamble   magic, length of the header in bytes, number of tokens
    header     JSON: weights, identity, ranks, block_tokens, layers, block_bytes, byteorder
    token ids  4 bytes each: the tokens to which the KV belongs
    blocks     layer by layer, block by block, with the same bytes as in the engine's memory
    checksums  CRC-32 of every block, in the same order

This module uses only the standard library and is independent of vLLM; kv_handover.py supplies the bytes.
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

FOLDER = "orchestrrl-kv"  # in the shared directory; nothing outside it is deleted
ENTRY_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~-]{0,127}")
FILE_NAME = re.compile(r"\d+-of-\d+\.(kv|part)")
MAGIC = b"orl-kv1\n"
PREAMBLE = struct.Struct("<8sIQ")
MAX_HEADER_BYTES = 1 << 24
SWEEP_PERIOD_S = 5.0
FULL_SHARE = 0.75  # largest fraction of the space that a sweep leaves in use, as a reserve until the next sweep

logger = logging.getLogger("vllm.orchestrrl.kv_entries")


class UnusableEntry(Exception):
    """Raised, with the reason, if an entry exists but cannot be used. Its tokens must be recomputed."""


@dataclass(frozen=True, slots=True)
class KvBlockLayout:
    """The layout of a block on one rank: the name, dtype, shape, packing and bytes per block of each layer."""

    layers: tuple[str, ...]
    block_bytes: tuple[int, ...]  # one per layer

    def __post_init__(self) -> None:
        if len(self.layers) != len(self.block_bytes):
            raise ValueError(
                f"block_bytes: must have one size per layer ({len(self.layers)}), got {len(self.block_bytes)}"
            )


@dataclass(frozen=True, slots=True)
class KvEntryContents:
    """The description of an entry, equal on every rank. The token ids are in an array, so that they can be stored and
    sent as bytes."""

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
    """The KV entries in directory `shared`, for engines that have `ranks` workers each."""

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
        """Write one rank's file and return its size in bytes. The file gets its final name when it is complete. Raises
        OSError if the file cannot be written.

        `layers` yields for each layer its blocks in order, in pieces of whole blocks. It is not read if there are no
        tokens.
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
        """Return an entry's description, or None if the entry is not yet complete. Raises UnusableEntry if the entry
        can never be used, because it is damaged or does not match this engine, `weights` or `block_tokens`."""
        try:
            names = set(os.listdir(self.root / entry))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise UnusableEntry(str(error)) from error
        others = [name for name in names if name.endswith(".kv") and not name.endswith(f"-of-{self.ranks}.kv")]
        if others:
            raise UnusableEntry(
                f"the KV entry has the file {others[0]}, expected only files named RANK-of-{self.ranks}.kv"
            )
        if not all(self.file(entry, rank).name in names for rank in range(self.ranks)):
            return None
        found = None
        for rank in range(self.ranks):
            with self._opened(entry, rank) as (contents, _, _):
                pass
            if found is not None and contents.identity != found.identity:
                raise UnusableEntry(f"the files of ranks {rank - 1} and {rank} are from different KV entries")
            found = contents
        assert found is not None
        if found.weights != weights:
            raise UnusableEntry(f"the KV entry was computed with weights {found.weights!r}, expected {weights!r}")
        if found.block_tokens != block_tokens:
            raise UnusableEntry(f"the blocks of the KV entry have {found.block_tokens} tokens, expected {block_tokens}")
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
        """Fill `layers`, which have the form described in `write`, with the blocks `wanted` of one rank's file. Return
        the number of bytes read.

        Raises UnusableEntry if the file is missing or damaged, has another identity or layout, lacks a block or fails a
        checksum. Blocks filled before the error are invalid.
        """
        with self._opened(entry, rank) as (contents, saved, file):
            if contents.identity != identity:
                raise UnusableEntry("the KV entry was replaced after its lookup")
            if saved != layout:
                raise UnusableEntry(
                    f"the layout of the KV entry differs from that of this engine: {_difference(saved, layout)}"
                )
            if wanted.stop > contents.blocks:
                raise UnusableEntry(f"the KV entry has {contents.blocks} blocks, but {wanted.stop} were requested")
            return _fill(file, contents.blocks, layout, wanted, layers)

    @contextlib.contextmanager
    def _opened(self, entry: str, rank: int) -> Iterator[tuple[KvEntryContents, KvBlockLayout, io.BufferedReader]]:
        """Open one rank's file, check the file's size against its header, and yield the file positioned at the first
        block. Raises UnusableEntry if the file cannot be read or is damaged."""
        try:
            with self.file(entry, rank).open("rb") as file:
                try:
                    contents, layout = _read_head(file)
                except (ValueError, KeyError, TypeError, ArithmeticError, struct.error) as error:
                    raise UnusableEntry(f"{file.name} is damaged or is not a KV entry: {error}") from error
                yield contents, layout, file
        except OSError as error:
            raise UnusableEntry(str(error)) from error

    def discard(self, entry: str, rank: int | None = None) -> None:
        """Delete one rank's file or, if `rank` is None, the whole entry. The directory is deleted with its last file. A
        repeated call has no effect."""
        directory = self.root / entry
        try:
            names = [self.file(entry, rank).name] if rank is not None else os.listdir(directory)
            for name in names:
                if FILE_NAME.fullmatch(name):
                    (directory / name).unlink(missing_ok=True)
            directory.rmdir()
        except OSError:  # already deleted, or in use by other ranks; a later sweep deletes the rest
            return

    def sweep(self, now_s: float, max_age_s: float, max_bytes: int) -> int:
        """Delete entries older than `max_age_s`, then the oldest entries until at most `max_bytes` remain. Return the
        number of bytes that remain.

        Ages are computed from file system times, so `now_s` must be wall-clock time.
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
    """A thread that deletes entries, so that engine steps do not wait for deletions. It deletes discarded entries at
    once and old entries every few seconds."""

    def __init__(self, store: KvEntryStore, max_age_s: float, max_bytes: int) -> None:
        self._store = store
        self._max_age_s = max_age_s
        self._max_bytes = max_bytes
        self._used_bytes = 0  # bytes at the last sweep plus reservations since
        self._orders: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-housekeeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._orders.put(None)

    def discard(self, entry: str) -> None:
        self._orders.put(entry)

    def reserve(self, size_bytes: int) -> bool:
        """Reserve space for an entry of `size_bytes` bytes. Returns whether there was enough space. The result is
        approximate, because other engines also use the directory."""
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
    """Read and verify the parts of a file before its blocks. Raises ValueError, KeyError, TypeError, ArithmeticError or
    struct.error if these parts are not as `_head` writes them."""
    magic, header_bytes, tokens = PREAMBLE.unpack(file.read(PREAMBLE.size))
    size = os.fstat(file.fileno()).st_size
    if magic != MAGIC or header_bytes > MAX_HEADER_BYTES or 4 * tokens > size:
        raise ValueError(
            f"the preamble must have magic {MAGIC!r} and sizes within the file, got magic {magic!r}, {header_bytes}"
            f" header bytes and {tokens} tokens in a file of {size} bytes"
        )
    header: dict[str, Any] = json.loads(file.read(header_bytes))
    token_ids = array("I")
    token_ids.frombytes(file.read(4 * tokens))
    contents = KvEntryContents(str(header["weights"]), int(header["ranks"]), int(header["block_tokens"]), token_ids)
    layout = KvBlockLayout(tuple(header["layers"]), tuple(header["block_bytes"]))
    if header["byteorder"] != sys.byteorder or contents.identity != header["identity"]:
        raise ValueError(
            f"the header must have byte order {sys.byteorder!r} and identity {contents.identity!r},"
            f" got {header['byteorder']!r} and {header['identity']!r}"
        )
    expected = file.tell() + contents.blocks * (sum(layout.block_bytes) + 4 * len(layout.layers))
    if size != expected:
        raise ValueError(f"the file must have {expected} bytes, got {size}")
    return contents, layout


def _blocks_with_sums(
    out: io.BufferedWriter, blocks: int, layout: KvBlockLayout, layers: Iterable[Iterable[memoryview]]
) -> "array[int]":
    """Write the blocks of all layers to `out` and return their checksums. Raises ValueError if a layer does not have
    `blocks` blocks."""
    sums = array("I")
    for block_bytes, pieces in zip(layout.block_bytes, layers, strict=True):
        before = len(sums)
        for piece in pieces:
            out.write(piece)
            sums.extend(_sums(piece, block_bytes))
        if len(sums) - before != blocks:
            raise ValueError(f"a layer must have {blocks} blocks, got {len(sums) - before}")
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
                raise UnusableEntry(f"{file.name} is truncated: it ends within layer {index}")
            for found in _sums(piece, block_bytes):
                if found != sums[block]:
                    raise UnusableEntry(f"{file.name}: checksum mismatch in block {block % blocks} of layer {index}")
                block += 1
            done += len(piece)
        at += blocks * block_bytes
    return done


def _sums(piece: memoryview, block_bytes: int) -> Iterable[int]:
    return (zlib.crc32(piece[at : at + block_bytes]) for at in range(0, len(piece), block_bytes))


def _difference(saved: KvBlockLayout, here: KvBlockLayout) -> str:
    pairs = zip((*saved.layers, *saved.block_bytes), (*here.layers, *here.block_bytes), strict=False)
    return next((f"saved {one!r}, own {other!r}" for one, other in pairs if one != other), "another number of layers")


def _listed(directory: Path) -> Sequence[str]:
    try:
        return os.listdir(directory)
    except OSError:  # not created yet, or just deleted
        return ()


def _size_and_time(path: Path) -> tuple[int, float]:
    try:
        facts = path.stat()
    except OSError:  # just deleted
        return 0, 0.0
    return facts.st_size, facts.st_mtime
