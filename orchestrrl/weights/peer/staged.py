"""Manage one version on this host: its files, the ranges that have arrived, and their verification by checksums.

A shard is read from the parts that trainers staged on this host if they contain the whole shard. Otherwise it is read
from the received file, from which engines install. A block is hashed when its last byte has arrived, before readers
that wait for it continue. A block with a wrong checksum is marked as missing again. Bytes that an earlier run left in a
file are accepted only if their checksums match.
"""

import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from orchestrrl.core.errors import Permanent, Retryable
from orchestrrl.integrations.instrument.checkpoint_files import BrokenCheckpoint, folder_sum, written_ranges
from orchestrrl.weights.layout import (
    ByteRun,
    Bytes,
    FileLayout,
    Ints,
    ShardRuns,
    SourceFile,
    gather,
    lay_out,
    locate,
    read_layout,
    scatter,
)
from orchestrrl.weights.model import MODEL_FILE, HeldVersion, Range, ShardMap, StagedPart, VersionMap
from orchestrrl.weights.orders import OpenVersion
from orchestrrl.weights.peer import disk_space
from planner.sync_tree.ranges import ByteRanges

_Result = TypeVar("_Result")

logger = logging.getLogger(__name__)

INSTALL_FOLDER = "install"  # contains only the received file, because engines load every file of a folder
MOST_THREADS = 8  # for hashing
_MODEL = 0  # index of the received file among a version's files


@dataclass(slots=True)
class _Shard:
    """The state of one shard. The condition `changed` guards the fields that are declared after it."""

    map: ShardMap
    runs: ShardRuns
    in_parts: bool
    changed: threading.Condition = field(default_factory=threading.Condition)
    present: ByteRanges = field(default_factory=ByteRanges)
    own_sums: tuple[str, ...] = ()  # checksums that this host has computed and reported
    agreed: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=bool))  # [block]


_Block = tuple[_Shard, int]  # shard and block number


class StagedVersion:
    """A `LocalVersion` stored in files. Construction opens the files and verifies the bytes that they already contain.
    It raises Permanent if a part cannot be read, and Retryable or Permanent if there is not enough space. The free
    space is checked before a file is changed."""

    def __init__(self, folder: Path, order: OpenVersion) -> None:
        self.map = map = order.map
        self.folder = folder
        self.parts = tuple(part for part in order.parts if part.boxes)  # a rank may have nothing to stage
        self.disagreed = 0  # blocks that arrived with a wrong checksum
        self.hashed_bytes = 0  # since the version was opened
        self.at_home = tuple(sorted(order.at_home))
        self._tensors = {tensor.name: tensor for tensor in map.tensors}
        self._layout = lay_out(map.tensors)
        self._files: list[Bytes] = [np.zeros(0, dtype=np.uint8)]
        self._identity: dict[str, tuple[int, int]] = {}
        sources = [self._part(number, part) for number, part in enumerate(self.parts, start=1)]
        self._shards = {shard.id: self._located(shard, sources) for shard in map.shards}
        self._own = threading.local()  # a buffer of one block for each hashing thread
        self._model_has: set[str] = set()  # shards for which the received file has pages
        self._content: tuple[tuple[object, ...], str] | None = None  # key of the bytes, and their checksum
        received = [shard for shard in self._shards.values() if not shard.in_parts or shard.map.id in self.at_home]
        self._was_there = bool(received) and self._open_model(received)  # the file is from an earlier run or plan
        self._find(received)

    # LocalVersion, called by edges.

    def view(self, shard: str, offset: int, size: int) -> memoryview | None:
        single = self._within(shard, offset, size).runs.single(offset, size)
        return None if single is None else self._files[single[0]][single[1] : single[1] + size].data

    def read(self, shard: str, offset: int, into: memoryview) -> None:
        runs = self._within(shard, offset, len(into)).runs
        gather(self._files, runs.pieces(offset, len(into)), np.frombuffer(into, dtype=np.uint8))

    def write(self, shard: str, offset: int, data: memoryview) -> None:
        state = self._within(shard, offset, len(data))
        if state.in_parts:
            raise Permanent(f"cannot write shard {shard} of version {self.map.version}: it was staged on this host")
        scatter(self._files, state.runs.pieces(offset, len(data)), np.frombuffer(data, dtype=np.uint8))

    def arrived(self, shard: str, offset: int, size: int) -> None:
        state = self._within(shard, offset, size)
        with state.changed:
            complete = self._completed(state, offset, size) if state.map.sums else []
            if not complete:
                state.present.add(offset, size)
                state.changed.notify_all()
                return
        sums = [self._sum(state, block) for block in complete]
        with state.changed:
            state.present.add(offset, size)
            for block, sum in zip(complete, sums, strict=True):
                self._judge(state, block, sum)

    def wait(self, shard: str, offset: int, size: int, timeout_s: float) -> bool:
        state = self._within(shard, offset, size)
        with state.changed:
            return state.changed.wait_for(lambda: state.present.covers(offset, size), timeout_s)

    def missing(self) -> dict[str, tuple[Range, ...]]:
        found = {}
        for name, state in self._shards.items():
            with state.changed:
                if gaps := state.present.gaps(state.map.bytes):
                    found[name] = gaps
        return found

    # Called by the peer.

    @property
    def held(self) -> HeldVersion:
        ranks = tuple(sorted(part.rank for part in self.parts))
        return HeldVersion(self.map.version, tuple(self._shards), self.missing(), ranks)

    def sums_of(self, shards: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Hash complete shards; return the checksums of their blocks. Raises Permanent if a shard is unknown or
        incomplete."""
        chosen = list(dict.fromkeys(shards))
        if faults := [f"there is no shard {name!r}" for name in chosen if name not in self._shards]:
            raise Permanent(f"version {self.map.version}: {'; '.join(faults)}")
        missing = self.missing()
        if some := [name for name in chosen if name in missing]:
            raise Permanent(f"version {self.map.version} has incomplete shards: {', '.join(some)}")
        states = [self._shards[name] for name in chosen]
        left = iter(self._in_threads(self._sum, [each for state in states for each in _blocks(state)]))
        for state in states:
            state.own_sums = tuple(islice(left, len(state.agreed)))
        return {state.map.id: state.own_sums for state in states}

    def check(self) -> None:
        """Hash arrived blocks that have not been hashed yet. Copy shards that engines need from parts into the received
        file."""
        states = list(self._shards.values())
        self._hash_present([state for state in states if state.map.sums])
        wrong = self.missing()
        to_copy = [state for state in states if state.in_parts and state.map.id in {*self.at_home, *wrong}]
        if to_copy:
            self._copy_out_of_parts(to_copy)

    def update_sums(self, version_map: VersionMap) -> None:
        """Replace the checksums of the version's shards with those in `version_map`, which has the same shards. Stored
        blocks that do not match the new checksums are marked as missing."""
        unknown = []
        for shard in version_map.shards:
            state = self._shards[shard.id]
            with state.changed:
                if shard.sums and shard.sums != state.map.sums:
                    unknown += [] if state.map.sums else [state]
                    state.map = shard
                    state.agreed[:] = shard.sums == state.own_sums
        self.map = replace(version_map, shards=tuple(self._shards[shard.id].map for shard in version_map.shards))
        self._hash_present([state for state in self._shards.values() if state.map.sums and not state.in_parts])
        self._find(unknown)

    def install_folder(self) -> Path:
        """Return a folder that contains the version's received file and no staged parts. Raises Retryable if bytes are
        missing, and Permanent if the version is not for engines of this host."""
        if any(state.in_parts and state.map.id in self.at_home for state in self._shards.values()):
            self.check()
        if missing := self.missing():
            lacking = sum(size for ranges in missing.values() for _, size in ranges)
            raise Retryable(f"version {self.map.version} is incomplete: {lacking} bytes are missing", 1.0)
        if not self._model_has:
            raise Permanent(f"version {self.map.version} is stored only for other peers, not for engines of this host")
        if not any(self.folder.glob("part-*.safetensors")):
            return self.folder
        apart = self.folder / INSTALL_FOLDER
        apart.mkdir(exist_ok=True)
        (apart / MODEL_FILE).unlink(missing_ok=True)
        (apart / MODEL_FILE).hardlink_to(self.folder / MODEL_FILE)
        return apart

    def take_content_sum(self) -> None:
        """Compute the checksum of the install folder before it is needed, because the computation takes a long time.
        The version must be complete and checked. The method does nothing if the version has no block checksums: without
        them, a later change of the bytes would not be noticed, so the checksum could become wrong."""
        if self._model_has and all(state.map.sums for state in self._shards.values()):
            with suppress(Retryable, BrokenCheckpoint):  # the load reports these errors
                self._content = self._bytes, folder_sum(self.install_folder())

    def content_sum(self) -> str:
        """Return the checksum from `take_content_sum` if the bytes have not changed since, else an empty string."""
        return self._content[1] if self._content is not None and self._content[0] == self._bytes else ""

    @property
    def _bytes(self) -> tuple[object, ...]:
        """Return a key that changes whenever the bytes that engines load change. The key includes `disagreed`, the
        number of blocks that arrived with a wrong checksum, because such a block may have overwritten correct bytes."""
        return self.identity, frozenset(self._model_has), self.disagreed

    @property
    def identity(self) -> str:
        """Return the version number and a digest of the version's checksums. The digest is needed because another run
        of a trainer may publish other weights under the same number."""
        shards = [(shard.slices, shard.sums) for shard in self.map.shards]
        return f"{self.map.version}:{xxhash.xxh3_64_hexdigest(repr((self.map.tensors, shards)).encode())}"

    def is_same(self, order: OpenVersion) -> bool:
        """Return whether the order is for the shards and parts that are already open and the parts' files are
        unchanged. Checksums are not compared."""

        def without_sums(map: VersionMap) -> VersionMap:
            return replace(map, shards=tuple(replace(shard, sums=()) for shard in map.shards))

        return (
            without_sums(order.map) == without_sums(self.map)
            and tuple(part for part in order.parts if part.boxes) == self.parts
            and tuple(sorted(order.at_home)) == self.at_home
            and all(_identity(self.folder / part.file) == self._identity[part.file] for part in self.parts)
        )

    # Files.

    def _part(self, number: int, part: StagedPart) -> SourceFile:
        path = self.folder / part.file
        try:
            layout = read_layout(path)
            self._identity[part.file] = _identity(path)
            self._files.append(_mapped(path))
        except (OSError, ValueError) as error:
            raise Permanent(f"cannot read the part of rank {part.rank} from {path}: {error}") from error
        tensors = {tensor.name: tensor for tensor in layout.tensors}
        faults = [
            f"{name} is {tensors.get(name)}, expected {self._tensors.get(name)}"
            for name in part.boxes
            if name not in tensors or tensors[name] != self._tensors.get(name, tensors[name])
        ]
        if faults:
            raise Permanent(f"{path}: {'; '.join(faults)}")
        return SourceFile(number, layout.places, part.boxes)

    def _located(self, shard: ShardMap, sources: Sequence[SourceFile]) -> _Shard:
        """Return the state of a shard, including where its bytes are stored: in the staged parts if they contain the
        whole shard, and otherwise in the received file."""
        try:
            state = _Shard(shard, locate(shard, self._tensors, sources), in_parts=True)
        except ValueError:  # some of it was not staged here: it is received
            state = _Shard(shard, self._in_model(shard), in_parts=False)
        state.agreed = np.zeros(-(-shard.bytes // self.map.block_bytes), dtype=bool)
        if state.in_parts:
            state.present.add(0, shard.bytes)
        return state

    def _in_model(self, shard: ShardMap) -> ShardRuns:
        return locate(shard, self._tensors, [SourceFile(_MODEL, self._layout.places)])

    def _open_model(self, shards: Sequence[_Shard]) -> bool:
        """Open the received file and allocate pages for these shards; return whether a usable file already existed."""
        path = self.folder / MODEL_FILE
        earlier = _is_laid_out(path, self._layout)
        spans = [(np.array([0]), np.array([len(self._layout.header)]))]
        for state in shards:
            self._model_has.add(state.map.id)
            spans.append((self._in_model(state.map) if state.in_parts else state.runs).spans(_MODEL))
        starts, ends = disk_space.pages(*(np.concatenate(column) for column in zip(*spans, strict=True)))
        needed = int((ends - starts).sum()) - (disk_space.allocated_bytes(path) if earlier else 0)
        if needed > disk_space.free_bytes(self.folder):
            raise disk_space.no_room(self.folder, needed, self.map.version)
        if path.exists() and not earlier:
            logger.warning("%s: replaced, because it has other tensors", path)
            path.unlink()
        try:
            with path.open("r+b" if earlier else "x+b") as file:
                os.ftruncate(file.fileno(), self._layout.bytes)
                disk_space.take(file.fileno(), starts, ends, self._layout.bytes)
                os.pwrite(file.fileno(), self._layout.header, 0)
        except OSError as error:
            if not earlier:
                path.unlink(missing_ok=True)
            if not disk_space.is_full(error):
                raise Permanent(f"cannot write {path}: {error}") from error
            raise disk_space.no_room(self.folder, needed, self.map.version) from error
        self._files[_MODEL] = _mapped(path)
        if not earlier:
            disk_space.map_in(self._files[_MODEL], starts, ends)
        return earlier

    def _find(self, shards: Iterable[_Shard]) -> None:
        """Verify the blocks that an earlier run has left in the received file. Holes are skipped, because reading would
        fill them."""
        shards = [state for state in shards if state.map.sums and not state.in_parts]
        if not self._was_there or not shards:
            return
        written = np.array(written_ranges(self.folder / MODEL_FILE), dtype=np.int64).reshape(-1, 2)
        wanted = [
            (state, block)
            for state in shards
            for state, block in _blocks(state)
            if not state.present.covers(*self._range(state, block))
            and all(_is_written(run, written) for run in state.runs.pieces(*self._range(state, block)))
        ]
        self._in_threads(self._verify, wanted)

    def _copy_out_of_parts(self, shards: Sequence[_Shard]) -> None:
        """Copy these shards from parts into the received file, which engines load. Blocks with wrong checksums are not
        copied."""
        if lacking := [state for state in shards if state.map.id not in self._model_has]:
            if len(self._files[_MODEL]):
                lacking += [state for state in self._shards.values() if state.map.id in self._model_has]
            self._open_model(lacking)
        for state in shards:
            target = self._in_model(state.map)
            for _, block in _blocks(state):
                offset, size = self._range(state, block)
                if state.present.covers(offset, size):
                    data = np.frombuffer(self._data(state, offset, size), dtype=np.uint8)
                    scatter(self._files, target.pieces(offset, size), data)
            with state.changed:
                state.runs, state.in_parts = target, False

    # Blocks.

    def _hash_present(self, shards: Iterable[_Shard]) -> None:
        """Hash the complete blocks of these shards that have not been verified."""
        wanted: list[_Block] = []
        for state in shards:
            with state.changed:
                wanted += [
                    (state, block)
                    for _, block in _blocks(state)
                    if not state.agreed[block] and state.present.covers(*self._range(state, block))
                ]
        self._in_threads(self._verify, wanted)

    def _in_threads(self, work: Callable[[_Shard, int], _Result], blocks: Sequence[_Block]) -> list[_Result]:
        """Apply `work` to each block in threads; return the results in the order of `blocks`. Hashing releases the
        GIL."""
        self.hashed_bytes += sum(self._range(*block)[1] for block in blocks)
        with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), "sums") as pool:
            return list(pool.map(lambda block: work(*block), blocks))

    def _sum(self, state: _Shard, block: int) -> str:
        return xxhash.xxh3_64_hexdigest(self._data(state, *self._range(state, block)))

    def _verify(self, state: _Shard, block: int) -> None:
        sum = self._sum(state, block)
        with state.changed:
            self._judge(state, block, sum)

    def _data(self, state: _Shard, offset: int, size: int) -> memoryview:
        """Return the bytes of a range of a shard. The range is at most one block long. Bytes that are not contiguous
        are copied into a buffer that the thread reuses."""
        if (data := self.view(state.map.id, offset, size)) is None:
            if not hasattr(self._own, "memory"):
                self._own.memory = np.empty(self.map.block_bytes, dtype=np.uint8).data
            data = self._own.memory[:size]
            self.read(state.map.id, offset, data)
        return data

    def _judge(self, state: _Shard, block: int, sum: str) -> None:
        """Mark a block as present if `sum` is its expected checksum, and as missing otherwise. The caller holds the
        shard's lock."""
        offset, size = self._range(state, block)
        state.agreed[block] = sum == state.map.sums[block]
        if state.agreed[block]:
            state.present.add(offset, size)
        elif state.present.covers(offset, size):
            self.disagreed += 1
            state.present.remove(offset, size)
            logger.warning(
                "version %d: %d bytes of shard %s at %d have a wrong checksum (xxh3 %s, expected %s): missing again",
                self.map.version, size, state.map.id, offset, sum, state.map.sums[block],
            )  # fmt: skip
        state.changed.notify_all()

    def _completed(self, state: _Shard, offset: int, size: int) -> list[int]:
        """Return the numbers of the blocks that are complete once these bytes have arrived. Some of these bytes may
        have been present earlier. The caller holds the shard's lock."""
        found = []
        for block in range(offset // self.map.block_bytes, -(-(offset + size) // self.map.block_bytes)):
            first, length = self._range(state, block)
            before, behind = max(0, offset - first), max(0, first + length - offset - size)
            if state.present.covers(first, before) and state.present.covers(first + length - behind, behind):
                found.append(block)
        return found

    def _range(self, state: _Shard, block: int) -> Range:
        offset = block * self.map.block_bytes
        return offset, min(self.map.block_bytes, state.map.bytes - offset)

    def _within(self, shard: str, offset: int, size: int) -> _Shard:
        state = self._shards.get(shard)
        if state is None:
            raise Permanent(f"version {self.map.version} has no shard {shard!r} on this peer")
        if offset < 0 or size < 0 or offset + size > state.map.bytes:
            raise Permanent(
                f"the range must be within the {state.map.bytes} bytes of shard {shard}, got {size} bytes at offset"
                f" {offset}"
            )
        return state


def _blocks(state: _Shard) -> Iterator[_Block]:
    return ((state, block) for block in range(len(state.agreed)))


def _identity(path: Path) -> tuple[int, int]:
    """Return the inode and modification time of a file. They identify its content, because a trainer that stages again
    replaces the file by a rename. Return (-1, -1) if the file cannot be read."""
    try:
        status = path.stat()
    except OSError:
        return -1, -1
    return status.st_ino, status.st_mtime_ns


def _mapped(path: Path) -> Bytes:
    """Map a file into writable memory. The mapping lives as long as its views, even if the file is deleted."""
    with path.open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0), dtype=np.uint8)


def _is_laid_out(path: Path, layout: FileLayout) -> bool:
    if not path.is_file() or path.is_symlink() or path.stat().st_size != layout.bytes:
        return False
    with path.open("rb") as file:
        return file.read(len(layout.header)) == layout.header


def _is_written(run: ByteRun, written: Ints) -> bool:
    """Return whether no byte of the run is in a hole of the file. `written` has the (start, end) of each range with
    data, in ascending order."""
    starts = run.start + run.stride * np.arange(run.times, dtype=np.int64)
    places = np.searchsorted(written[:, 0], starts, side="right") - 1
    return bool((places >= 0).all() and (starts + run.length <= written[places, 1]).all())
