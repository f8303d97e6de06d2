"""Where the bytes of a version lie: the safetensors file of its tensors, and the runs of a shard in such files.

A shard is boxes of tensors one behind the other, row-major. In a file a box is runs at a stride, so what is kept of a
shard is groups of equal rows, and of each row the columns that lie in one piece; a range of bytes is found in them by
bisection. Where several files have parts of a box, a row has a column for each of them. The format is safetensors'
(README of huggingface/safetensors): eight bytes of length, JSON, then the tensors.
"""

import itertools
import json
import math
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from orchestrrl.integrations.instrument.checkpoint_files import read_header
from orchestrrl.weights.model import DTYPE_BYTES, ShardMap, TensorMeta
from planner.sync_tree.parameters import Box

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]

PAGE_BYTES = 4096
MOST_GROUPS = 1 << 22  # of one shard: what is kept of it grows with them


@dataclass(frozen=True, slots=True)
class FileLayout:
    """A safetensors file of whole tensors, in order of names."""

    tensors: tuple[TensorMeta, ...]
    header: bytes
    places: Mapping[str, int]  # byte of the file at which a tensor begins
    bytes: int


def lay_out(tensors: Sequence[TensorMeta]) -> FileLayout:
    """The same for the same tensors, wherever it is asked for. Loaders of Hugging Face's want the format named."""
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
    """Return the layout of a file that another program has written. Raises ValueError where it is no safetensors file,
    or shorter than its header says."""
    try:
        stored = read_header(path)
        tensors = [TensorMeta(each.name, each.dtype, each.shape) for each in stored]
    except ValueError as error:
        raise ValueError(f"{path}: is no safetensors file that can be used here: {error}") from error
    size, places = path.stat().st_size, {each.name: each.begin for each in stored}
    with path.open("rb") as file:
        header = file.read(min(places.values(), default=size))
    return FileLayout(tuple(sorted(tensors, key=lambda each: each.name)), header, places, size)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file, by its place in a list of files, and which boxes of its tensors are there; None: all of them."""

    file: int
    places: Mapping[str, int]
    boxes: Mapping[str, tuple[Box, ...]] | None = None


class ByteRun(NamedTuple):
    """`length` bytes, `times` times: in the file from `start` on, `stride` apart; in what was asked for from `at` on,
    `period` apart."""

    at: int
    file: int
    start: int
    length: int
    times: int
    stride: int
    period: int


class ShardRuns:
    """Where each byte of a shard is. Columns of one kind are arrays; nothing is kept by run."""

    def __init__(self, groups: Sequence["_Group"], size: int) -> None:
        self.bytes = size
        merged = _joined(groups)
        self._at = [group.at for group in merged]
        self._count = np.array([group.rows for group in merged], dtype=np.int64)
        self._period = np.array([group.period for group in merged], dtype=np.int64)
        # [group + 1], the place of its first column in `_columns`
        self._first = np.cumsum([0, *(len(group.columns) for group in merged)], dtype=np.int64)
        columns = [column for group in merged for column in group.columns]
        # [column, (file, within the row, start in the file, length, stride in the file)]
        self._columns = np.array(columns, dtype=np.int64).reshape(-1, 5)

    def single(self, offset: int, size: int) -> tuple[int, int] | None:
        """File and place, where the range lies in one piece."""
        found = None
        for run in self.pieces(offset, size):
            if found is not None or run.times != 1:
                return None
            found = run.file, run.start
        return found

    def pieces(self, offset: int, size: int) -> Iterator[ByteRun]:
        """Of a range of the shard, in no order that matters."""
        end = offset + size
        group = bisect_right(self._at, offset) - 1
        while group < len(self._at) and (at := self._at[group]) < end:
            count, period = int(self._count[group]), int(self._period[group])
            columns = self._columns[self._first[group] : self._first[group + 1]].tolist()
            low, high = max(offset, at) - at, min(end - at, count * period)
            base = at - offset
            (row, within), (last, rest) = divmod(low, period), divmod(high, period)
            if row == last:
                yield from _part_of_row(columns, base, row, period, within, rest)
            else:
                if within:
                    yield from _part_of_row(columns, base, row, period, within, period)
                    row += 1
                if row < last:
                    for file, inside, start, length, stride in columns:
                        place = base + row * period + inside
                        yield ByteRun(place, file, start + row * stride, length, last - row, stride, period)
                if rest:
                    yield from _part_of_row(columns, base, last, period, 0, rest)
            group += 1

    def spans(self, file: int) -> tuple[Ints, Ints]:
        """What a file's pages have to be there for: from and to, gaps of less than a page left in. In no order."""
        group_of = np.repeat(np.arange(len(self._at)), np.diff(self._first))
        chosen = self._columns[:, 0] == file
        start, length, stride = (self._columns[chosen, place] for place in (2, 3, 4))
        count = self._count[group_of[chosen]]
        dense = (count == 1) | (stride - length < PAGE_BYTES)
        starts = [start[dense]]
        ends = [start[dense] + (count[dense] - 1) * stride[dense] + length[dense]]
        sparse = np.stack([start, length, stride, count], axis=1)[~dense]
        for first, size, step, times in sparse.tolist():
            places = first + step * np.arange(times, dtype=np.int64)
            starts.append(places)
            ends.append(places + size)
        return np.concatenate(starts), np.concatenate(ends)


def gather(files: Sequence[Bytes], runs: Iterator[ByteRun], into: Bytes) -> None:
    """Bytes of a range, out of the files."""
    for run in runs:
        source, target = _both_sides(files, run, into)
        target[...] = source


def scatter(files: Sequence[Bytes], runs: Iterator[ByteRun], data: Bytes) -> None:
    """The same the other way round."""
    for run in runs:
        target, source = _both_sides(files, run, data)
        target[...] = source


def _both_sides(files: Sequence[Bytes], run: ByteRun, wire: Bytes) -> tuple[Bytes, Bytes]:
    file = files[run.file]
    if run.times == 1:
        return file[run.start : run.start + run.length], wire[run.at : run.at + run.length]
    shape = run.times, run.length
    return (
        np.ndarray(shape, np.uint8, file, run.start, (run.stride, 1)),
        np.ndarray(shape, np.uint8, wire, run.at, (run.period, 1)),
    )


def locate(shard: ShardMap, tensors: Mapping[str, TensorMeta], sources: Sequence[SourceFile]) -> ShardRuns:
    """Raises ValueError where some of the shard is in none of the sources; the first that has a byte gives it."""
    groups: list[_Group] = []
    for piece in shard.slices:
        tensor = tensors[piece.parameter]
        having = [
            (box, source.file, source.places[tensor.name])
            for source in sources
            if tensor.name in source.places
            for box in (source.boxes.get(tensor.name, ()) if source.boxes is not None else (tensor.whole,))
        ]
        groups += _groups(tensor, piece.box, piece.offset, having)
    return ShardRuns(groups, shard.bytes)


class _Group(NamedTuple):
    at: int  # byte of the shard
    rows: int  # one behind the other
    period: int  # bytes of each
    columns: tuple[tuple[int, int, int, int, int], ...]  # file, within the row, start, length, stride


Having = tuple[Box, int, int]  # a box, the file that it is in, and where its tensor begins there


def _groups(tensor: TensorMeta, box: Box, offset: int, having: Sequence[Having]) -> Iterator[_Group]:
    for each in having:
        if _contains(each[0], box):
            having, cuts = [each], [[*axis] for axis in box]
            break
    else:
        cuts = [
            sorted({first, last, *(at for own, _, _ in having for at in own[axis] if first < at < last)})
            for axis, (first, last) in enumerate(box)
        ]
    shape, cuts, own = _flat(tensor, cuts, [each[0] for each in having])
    files = [(file, base) for _, file, base in having]
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    *outer, rows, columns = cuts
    period = columns[-1] - columns[0]
    at, holders = offset, _holders(columns, [each[-1] for each in own])
    for corner in itertools.product(*(range(cut[0], cut[-1]) for cut in outer)):
        before = sum(place * stride for place, stride in zip(corner, strides, strict=False))
        for row, next_row in itertools.pairwise(rows):
            found = []
            for (column, next_column), numbers in zip(itertools.pairwise(columns), holders, strict=True):
                cell = (*corner, row, column)
                holder = next((number for number in numbers if _has(own[number], cell)), None)
                if holder is None:
                    raise ValueError(f"{tensor.name}: some of {box} is not staged here")
                file, base = files[holder]
                start = base + before + row * strides[-2] + column
                found.append((file, column - columns[0], start, next_column - column, strides[-2]))
            yield _Group(at, next_row - row, period, _together(found))
            at += (next_row - row) * period


def _holders(columns: Sequence[int], own: Sequence[tuple[int, int]]) -> list[list[int]]:
    """For each step from column to column who may have it, in order: of ranks that share a tensor most have none of it.
    Rows that are whole count as columns of one."""
    found: list[list[int]] = [[] for _ in columns[1:]]
    for number, (first, last) in enumerate(own):
        for step in found[bisect_left(columns, first) : bisect_left(columns, last)]:
            step.append(number)
    return found


def _flat(
    tensor: TensorMeta, cuts: list[list[int]], boxes: Sequence[Box]
) -> tuple[list[int], list[list[int]], list[list[tuple[int, int]]]]:
    """Axes that are whole and uncut are one with those before; the last counts bytes, and there are two at least."""
    shape, own = list(tensor.shape) or [1], [list(box) or [(0, 1)] for box in boxes]
    cuts = cuts or [[0, 1]]
    for axis in range(len(shape) - 1, 0, -1):
        if cuts[axis] == [0, length := shape[axis]]:
            shape[axis - 1] *= length
            cuts[axis - 1] = [at * length for at in cuts[axis - 1]]
            for box in own:
                box[axis - 1] = box[axis - 1][0] * length, box[axis - 1][1] * length
                del box[axis]
            del shape[axis], cuts[axis]
    width = DTYPE_BYTES[tensor.dtype]
    shape[-1] *= width
    cuts[-1] = [at * width for at in cuts[-1]]
    for box in own:
        box[-1] = box[-1][0] * width, box[-1][1] * width
    if len(shape) == 1:
        return [1, *shape], [[0, 1], *cuts], [[(0, 1), *box] for box in own]
    return shape, cuts, own


def _together(columns: Sequence[tuple[int, int, int, int, int]]) -> tuple[tuple[int, int, int, int, int], ...]:
    """Neighbours in one file are one."""
    joined: list[tuple[int, int, int, int, int]] = []
    for column in columns:
        if joined and joined[-1][0] == column[0] and joined[-1][2] + joined[-1][3] == column[2]:
            file, within, start, length, stride = joined[-1]
            joined[-1] = file, within, start, length + column[3], stride
        else:
            joined.append(column)
    return tuple(joined)


def _joined(groups: Sequence[_Group]) -> list[_Group]:
    """Groups of one run that are neighbours in the shard and in a file are one: small tensors make no small pieces."""
    joined: list[_Group] = []
    for group in groups:
        before = joined[-1] if joined else None
        if before and before.rows == group.rows == len(before.columns) == len(group.columns) == 1:
            (file, _, start, length, _), (next_file, _, next_start, next_length, _) = (
                before.columns[0],
                group.columns[0],
            )
            if file == next_file and start + length == next_start:
                size = length + next_length
                joined[-1] = _Group(before.at, 1, size, ((file, 0, start, size, size),))
                continue
        joined.append(group)
    return joined


def _part_of_row(
    columns: Sequence[Sequence[int]], base: int, row: int, period: int, first: int, last: int
) -> Iterator[ByteRun]:
    for file, within, start, length, stride in columns:
        low, high = max(first, within), min(last, within + length)
        if low < high:
            yield ByteRun(base + row * period + low, file, start + row * stride + low - within, high - low, 1, 0, 0)


def _contains(outer: Box, inner: Box) -> bool:
    return all(a <= c and d <= b for (a, b), (c, d) in zip(outer, inner, strict=True))


def _has(box: Sequence[tuple[int, int]], cell: Sequence[int]) -> bool:
    return all(first <= at < last for (first, last), at in zip(box, cell, strict=True))


def _most_groups(box: Box, shape: Sequence[int]) -> int:
    """That a box can come to: rows along one axis are a group, those of the axes before it are told one by one."""
    divided = [axis for axis, (first, last) in enumerate(box) if last - first < shape[axis]]
    return math.prod(last - first for first, last in box[: max(0, divided[-1] - 1)]) if divided else 1


def faults_of_shard(shard: ShardMap, tensors: Mapping[str, TensorMeta], block_bytes: int) -> list[str]:
    """What about it makes no sense, whoever has it."""
    faults, at, groups = [], 0, 0
    for number, piece in enumerate(shard.slices):
        path = f"shards.{shard.id}.slices[{number}]"
        tensor = tensors.get(piece.parameter)
        if tensor is None:
            faults.append(f"{path}.parameter: is not one of tensors, got {piece.parameter!r}")
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
        faults.append(f"shards.{shard.id}.bytes: must be what its slices have, {at}, got {shard.bytes}")
    blocks = -(-shard.bytes // block_bytes)
    if shard.sums and len(shard.sums) != blocks:
        faults.append(f"shards.{shard.id}.sums: must be of {blocks} blocks or none, got {len(shard.sums)}")
    return faults
