"""Putting what a trainer rank has into its file of a version's folder, from which the host's peer serves it.

A file is written under another name and renamed when it is whole, so what dies half way is never taken for a part. Room
is taken before anything is copied: a full /dev/shm would otherwise end the process at the first page that is not there.
"""

import math
import mmap
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from orchestrrl.core.errors import Permanent
from orchestrrl.weights.layout import Bytes, FileLayout, lay_out
from orchestrrl.weights.model import DTYPE_BYTES, StagedPart, TensorMeta
from orchestrrl.weights.peer.disk_space import free_bytes, is_full
from orchestrrl.weights.staging_hold import StagingHold
from orchestrrl.weights.trainer.boxes import TensorPiece, boxes_of, shape_of, slices, tensors_of
from planner.sync_tree.parameters import Box


class PieceCopies(Protocol):
    """How values get into the file. `offload_s`: seconds that went into bringing them from a device, so far."""

    offload_s: float

    def copy(self, piece: TensorPiece, into: Bytes) -> None:
        """`into`: the bytes of the piece's whole tensor."""
        ...


class ArrayCopies:
    """Of numpy arrays, with elements as wide as the tensor's: bfloat16 as uint16, say."""

    offload_s = 0.0

    def copy(self, piece: TensorPiece, into: Bytes) -> None:
        plain = np.dtype(f"u{DTYPE_BYTES[piece.meta.dtype]}")
        if piece.values.dtype.itemsize != plain.itemsize:
            raise Permanent(f"{piece.meta.name}: {piece.meta.dtype} cannot be copied from {piece.values.dtype}")
        whole = into.view(plain).reshape(piece.meta.shape)
        whole[slices(piece.box)] = np.ascontiguousarray(piece.values).view(plain).reshape(shape_of(piece.box))


@dataclass(frozen=True, slots=True)
class StagedRank:
    part: StagedPart
    tensors: tuple[TensorMeta, ...]
    bytes: int  # that this rank has put there
    hold: StagingHold  # until the daemon's peer has opened the version: to be let go of then


def version_folder(folder: Path, version: int) -> Path:
    return folder / f"v{version}"


def stage(
    folder: Path, version: int, rank: int, world: int, pieces: Sequence[TensorPiece], copies: PieceCopies
) -> StagedRank:
    """Replaces what this rank has staged of the version before, when all is there. Raises Permanent where there is no
    room, or the folder cannot be written."""
    tensors = tensors_of(pieces)
    part = StagedPart(rank, boxes_of(pieces))
    size = sum(piece.bytes for piece in pieces)
    home = version_folder(folder, version)
    hold: StagingHold | None = None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():  # in /dev/shm anybody may have made it
            raise Permanent(
                f"{folder} is a link or belongs to another user, who could read the weights: name a folder of your own"
                " for the client and its peer"
            )
        hold = StagingHold(home)
        _clear(home, rank, world)
        _check_room(home, size)
        _write(home, part, lay_out(tensors), pieces, copies)
        held, hold = hold, None
        return StagedRank(part, tensors, size, held)
    except OSError as error:
        if is_full(error):
            raise Permanent(_no_room(home, size)) from error
        raise Permanent(f"{home} cannot be written ({error}): name a folder that the trainer and its peer share") from (
            error
        )
    finally:
        if hold is not None:
            hold.let_go()


def _write(
    home: Path, part: StagedPart, layout: FileLayout, pieces: Sequence[TensorPiece], copies: PieceCopies
) -> None:
    unfinished = home / f".{part.file}.{os.getpid()}-{uuid.uuid4().hex[:8]}"
    try:
        with unfinished.open("w+b") as file:
            file.truncate(layout.bytes)
            for first, last in _by_page(_runs(part, layout)):
                os.posix_fallocate(file.fileno(), first, min(last, layout.bytes) - first)
            mapped = np.frombuffer(mmap.mmap(file.fileno(), layout.bytes), dtype=np.uint8)  # closed with its last view
            mapped[: len(layout.header)] = np.frombuffer(layout.header, dtype=np.uint8)
            for piece in pieces:
                at = layout.places[piece.meta.name]
                copies.copy(piece, mapped[at : at + piece.meta.bytes])
        unfinished.rename(home / part.file)
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


def _clear(home: Path, rank: int, world: int) -> None:
    """What trainers that died left: this rank's unfinished files, and parts of ranks that are no more."""
    for left in home.glob(f".part-{rank}.safetensors.*"):
        left.unlink(missing_ok=True)
    for left in home.glob("part-*.safetensors"):
        number = left.name.removeprefix("part-").removesuffix(".safetensors")
        if number.isdecimal() and int(number) >= world:
            left.unlink(missing_ok=True)


def _runs(part: StagedPart, layout: FileLayout) -> Iterator[tuple[int, int]]:
    """Bytes of the file that are written, from and to; what is less than a page apart is one."""
    yield 0, len(layout.header)
    for tensor in layout.tensors:
        for box in part.boxes[tensor.name]:
            yield from _runs_of(box, tensor.shape, DTYPE_BYTES[tensor.dtype], layout.places[tensor.name])


def _runs_of(box: Box, shape: tuple[int, ...], width: int, at: int) -> Iterator[tuple[int, int]]:
    """Of a box of a tensor that begins `at` a byte."""
    inner, size, axis = width, width, len(shape)  # bytes of an element of the axis; of the box's run behind it
    offset = 0
    while axis and (size == inner or inner - size < mmap.PAGESIZE):
        axis -= 1
        first, last = box[axis]
        offset += first * inner
        size += (last - first - 1) * inner
        inner *= shape[axis]
    steps = [width * math.prod(shape[each + 1 :]) for each in range(axis)]
    for corner in np.ndindex(*shape_of(box[:axis])):
        start = at + offset + sum((box[each][0] + corner[each]) * step for each, step in enumerate(steps))
        yield start, start + size


def _by_page(runs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The pages that they touch, joined where they are next to each other."""
    page = mmap.PAGESIZE
    open_run: tuple[int, int] | None = None
    for first, last in sorted(runs):
        first, last = first // page * page, -(-last // page) * page
        if open_run and first <= open_run[1]:
            open_run = open_run[0], max(open_run[1], last)
            continue
        if open_run:
            yield open_run
        open_run = first, last
    if open_run:
        yield open_run


def _check_room(home: Path, size: int) -> None:
    if free_bytes(home) < size:
        raise Permanent(_no_room(home, size))


def _no_room(home: Path, size: int) -> str:
    return (
        f"no room to stage {size / 1e9:.3f} GB in {home}: {free_bytes(home) / 1e9:.3f} GB are free; versions stay until"
        " a newer one is committed, so twice the bytes of one are needed: give the folder more (in containers, the size"
        " of /dev/shm), or name another one for the client and its peer"
    )
