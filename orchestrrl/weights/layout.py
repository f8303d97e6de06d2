"""Compute the byte positions of tensors in a safetensors file, and the byte runs of a shard in such files.

A shard is a sequence of tensor boxes in row-major order. In a file, a box is a set of rows at a fixed stride. If a file
has only a part of a box, the rows of that part are also at a fixed stride in the shard. A shard is described by runs of
equally long rows, not by single rows. The file format is that of safetensors (README of huggingface/safetensors): an
eight-byte length, a JSON header, then the tensors.
"""

import itertools
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from orchestrrl.integrations.instrument.checkpoint_files import read_header
from orchestrrl.weights.model import DTYPE_BYTES, ShardMap, TensorMeta
from planner.sync_tree.parameters import Box, overlap
from planner.sync_tree.reshard import ShardSlice

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]

PAGE_BYTES = 4096
MOST_GROUPS = 1 << 22  # groups of rows in one shard; its description in memory grows with their number


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The layout of a safetensors file of whole tensors, sorted by name. `header` is the start of the file up to the
    first tensor, and `bytes` is the size of the file."""

    tensors: tuple[TensorMeta, ...]
    header: bytes
    places: Mapping[str, int]  # offset in the file at which each tensor begins
    bytes: int


def lay_out(tensors: Sequence[TensorMeta]) -> FileLayout:
    """Return the file layout of these tensors. Equal tensors always give the same layout. The file's metadata names the
    format, because Hugging Face's loaders require it."""
    ordered = tuple(sorted(tensors, key=lambda each: each.name))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at, places = 0, {}
    for tensor in ordered:
        places[tensor.name] = at
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.bytes],
        }
        at += tensor.bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    return FileLayout(ordered, header, {name: len(header) + place for name, place in places.items()}, len(header) + at)


def read_layout(path: Path) -> FileLayout:
    """Read the layout of a file that another program has written. Raises ValueError if it is not a safetensors file or
    is shorter than its header requires."""
    try:
        stored = read_header(path)
        tensors = [TensorMeta(each.name, each.dtype, each.shape) for each in stored]
    except ValueError as error:
        raise ValueError(f"{path} is not a usable safetensors file: {error}") from error
    size, places = path.stat().st_size, {each.name: each.begin for each in stored}
    with path.open("rb") as file:
        header = file.read(min(places.values(), default=size))
    return FileLayout(tuple(sorted(tensors, key=lambda each: each.name)), header, places, size)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file that has bytes of shards. `file` is its index in a list of files. `places` has the offset of each tensor
    in the file. `boxes` has the filled boxes of each tensor; None means that all tensors are complete."""

    file: int
    places: Mapping[str, int]
    boxes: Mapping[str, tuple[Box, ...]] | None = None


class ByteRun(NamedTuple):
    """A run of `times` rows of `length` bytes each. `file` is the index of the file. In the file, the first row begins
    at `start`, and rows are `stride` bytes apart. In the shard, or in the range of the shard that was requested, the
    first row begins at `at`, and rows are `period` bytes apart. Distances are measured between the starts of rows."""

    at: int
    file: int
    start: int
    length: int
    times: int = 1
    stride: int = 0
    period: int = 0

    def clipped(self, offset: int, end: int) -> "Iterator[ByteRun]":
        """Yield the parts of the run within [offset, end), with `at` relative to `offset`. Each row that is cut becomes
        a separate run, and all whole rows together become one run."""
        at, file, start, length, times, stride, period = self
        first, last = max(0, (offset - at) // (period or length)), min(times, -(-(end - at) // (period or length)))
        is_cut = at < offset or at + (times - 1) * period + length > end
        for row in sorted({first, last - 1}) if is_cut else ():
            row_at, row_start = at + row * period, start + row * stride
            low, high = max(row_at, offset), min(row_at + length, end)
            if high - low < length:
                first, last = (first + 1, last) if row == first else (first, last - 1)
                if low < high:
                    yield ByteRun(low - offset, file, row_start + low - row_at, high - low)
        if first < last:
            row_at, row_start = at + first * period, start + first * stride
            yield ByteRun(row_at - offset, file, row_start, length, last - first, stride, period)


class ShardRuns:
    """The position of each byte of a shard in its source files, as an array of runs."""

    def __init__(self, runs: Sequence[ByteRun], size: int) -> None:
        self.bytes = size
        # [run, (at, file, start, length, times, stride, period)], sorted by `at`; `_before` is the running maximum end
        self._runs = np.array(_joined(sorted(runs)), dtype=np.int64).reshape(-1, 7)
        at, _, _, length, times, _, period = self._runs.T
        self._at, self._end = at, at + (times - 1) * period + length
        self._before = np.maximum.accumulate(self._end)

    def single(self, offset: int, size: int) -> tuple[int, int] | None:
        """Return the file index and the offset in that file if the range of the shard is contiguous in one file, else
        None."""
        found = list(itertools.islice(self.pieces(offset, size), 2))
        return (found[0].file, found[0].start) if len(found) == 1 and found[0].times == 1 else None

    def pieces(self, offset: int, size: int) -> Iterator[ByteRun]:
        """Yield the runs of a range of the shard, in unspecified order. `at` of each run is relative to `offset`."""
        low, high = self._before.searchsorted(offset, "right"), self._at.searchsorted(offset + size)
        for run in self._runs[low:high][self._end[low:high] > offset].tolist():
            yield from ByteRun(*run).clipped(offset, offset + size)

    def spans(self, file: int) -> tuple[Ints, Ints]:
        """Return the starts and ends of the byte spans of a file that the shard uses, in unspecified order. Strided
        rows with gaps of less than a page form one span."""
        runs = self._runs[self._runs[:, 1] == file]
        _, _, start, length, times, stride, _ = runs.T
        dense = (times == 1) | (stride - length < PAGE_BYTES)
        starts, ends = [start[dense]], [(start + (times - 1) * stride + length)[dense]]
        for _, _, first, size, count, step, _ in runs[~dense].tolist():
            starts.append(first + step * np.arange(count, dtype=np.int64))
            ends.append(starts[-1] + size)
        return np.concatenate(starts), np.concatenate(ends)


def gather(files: Sequence[Bytes], runs: Iterator[ByteRun], into: Bytes) -> None:
    """Copy the runs of a range from the files into `into`."""
    for source, target in _both_sides(files, runs, into):
        target[...] = source


def scatter(files: Sequence[Bytes], runs: Iterator[ByteRun], data: Bytes) -> None:
    """Copy `data` into the files, to the positions of the runs."""
    for target, source in _both_sides(files, runs, data):
        target[...] = source


def _both_sides(files: Sequence[Bytes], runs: Iterator[ByteRun], wire: Bytes) -> Iterator[tuple[Bytes, Bytes]]:
    for at, number, start, length, times, stride, period in runs:
        file, shape = files[number], (times, length)
        if times == 1:
            yield file[start : start + length], wire[at : at + length]
        else:
            in_file = np.ndarray(shape, np.uint8, file, start, (stride, 1))
            yield in_file, np.ndarray(shape, np.uint8, wire, at, (period, 1))


def locate(shard: ShardMap, tensors: Mapping[str, TensorMeta], sources: Sequence[SourceFile]) -> ShardRuns:
    """Return the runs of a shard in its source files. Each byte is taken from the first source that has it. Raises
    ValueError if a byte is in none of the sources."""
    runs: list[ByteRun] = []
    for piece in shard.slices:
        tensor = tensors[piece.parameter]
        lacking = [piece.box]
        for source in sources:
            if lacking and tensor.name in source.places:
                boxes = (tensor.whole,) if source.boxes is None else source.boxes.get(tensor.name, ())
                for held in boxes:
                    here = [box for box in (overlap(lack, held) for lack in lacking) if box is not None]
                    for box in here:
                        runs += _runs(tensor, piece, box, source)
                        lacking = [rest for lack in lacking for rest in _without(lack, box)]
        if lacking:
            raise ValueError(f"tensor {tensor.name}: a part of box {piece.box} is not staged on this host")
    return ShardRuns(runs, shard.bytes)


def _without(box: Box, hole: Box) -> Iterator[Box]:
    """Yield boxes that cover the part of `box` outside `hole`, split axis by axis. If `box` does not overlap `hole`,
    yield the whole `box`."""
    if overlap(box, hole) is None:
        yield box
        return
    for axis, ((first, last), (low, high)) in enumerate(zip(box, hole, strict=True)):
        for rest in ((first, low), (high, last)):
            if rest[0] < rest[1]:
                yield (*box[:axis], rest, *box[axis + 1 :])
        box = (*box[:axis], (max(first, low), min(last, high)), *box[axis + 1 :])


def _runs(tensor: TensorMeta, piece: ShardSlice, box: Box, source: SourceFile) -> Iterator[ByteRun]:
    """Yield the runs of a box within a slice. Each run has its positions in the shard and in the source file."""
    # For each axis: the start of the box in the slice and in the tensor; the lengths of box, slice and tensor.
    axes = [[0, 0, 1, 1, 1]]
    for (first, last), (low, high), length in zip(box, piece.box, tensor.shape, strict=True):
        if last - first == high - low == length:  # the whole axis: merge it with the axis before
            axes[-1] = [value * length for value in axes[-1]]
        else:
            axes.append([first - low, first, last - first, high - low, length])
    axes[-1] = [value * DTYPE_BYTES[tensor.dtype] for value in axes[-1]]
    *outer, rows, columns = [[0, 0, 1, 1, 1], *axes]
    period, stride = columns[3], columns[4]
    at, start = piece.offset + columns[0], source.places[tensor.name] + columns[1]
    for corner in itertools.product(*(range(axis[2]) for axis in outer)):
        in_slice = in_tensor = 0
        for place, axis in zip((*corner, 0), (*outer, rows), strict=True):
            in_slice, in_tensor = in_slice * axis[3] + axis[0] + place, in_tensor * axis[4] + axis[1] + place
        run = ByteRun(at + in_slice * period, source.file, start + in_tensor * stride, columns[2])
        yield run if rows[2] == 1 else run._replace(times=rows[2], stride=stride, period=period)


def _joined(runs: Sequence[ByteRun]) -> list[ByteRun]:
    """Merge runs that are adjacent both in the shard and in a file, so that small tensors do not lead to small
    pieces."""
    joined: list[ByteRun] = []
    for run in runs:
        before = joined[-1] if joined else None
        if (
            before is not None
            and before.times == run.times == 1
            and (before.file, before.at + before.length, before.start + before.length) == (run.file, run.at, run.start)
        ):
            joined[-1] = before._replace(length=before.length + run.length)
        else:
            joined.append(run)
    return joined


def _most_groups(box: Box, shape: Sequence[int]) -> int:
    """Return an upper bound on the number of row groups of a box. The rows along one axis form a group, and each
    combination of indices of the preceding axes has a separate group."""
    divided = [axis for axis, (first, last) in enumerate(box) if last - first < shape[axis]]
    return math.prod(last - first for first, last in box[: max(0, divided[-1] - 1)]) if divided else 1


def faults_of_shard(shard: ShardMap, tensors: Mapping[str, TensorMeta], block_bytes: int) -> list[str]:
    """Return the faults in the description of a shard that can be found without access to its stored bytes."""
    faults, at, groups = [], 0, 0
    for number, piece in enumerate(shard.slices):
        path = f"shards.{shard.id}.slices[{number}]"
        tensor = tensors.get(piece.parameter)
        if tensor is None:
            faults.append(f"{path}.parameter: must be the name of a tensor in tensors, got {piece.parameter!r}")
            continue
        if not tensor.has(piece.box):
            faults.append(f"{path}.box: must be within {tensor.shape}, got {piece.box}")
            continue
        size = tensor.bytes_of(piece.box)
        if (piece.offset, piece.bytes) != (at, size):
            faults.append(f"{path}: must be {size} bytes at {at}, got {piece.bytes} at {piece.offset}")
        at += size
        groups += _most_groups(piece.box, tensor.shape)
    if groups > MOST_GROUPS:
        faults.append(f"shards.{shard.id}.slices: must have at most {MOST_GROUPS} groups of rows, got {groups}")
    if not faults and (at != shard.bytes or not shard.slices):
        faults.append(f"shards.{shard.id}.bytes: must be the size of its slices, {at}, got {shard.bytes}")
    blocks = -(-shard.bytes // block_bytes)
    if shard.sums and len(shard.sums) != blocks:
        faults.append(f"shards.{shard.id}.sums: must have {blocks} checksums or none, got {len(shard.sums)}")
    return faults
