"""Stage the tensors of a trainer rank, or of a checkpoint, in a file that the host's peer serves.

A file is written under a temporary name and renamed when it is complete, so that an interrupted write is never used.
Space is allocated before bytes are copied. Without this, a full /dev/shm would kill the process when it first writes to
a page without memory. This module does not import torch.
"""

import mmap
import os
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from orchestrrl.core.errors import Permanent
from orchestrrl.integrations.instrument.checkpoint_files import BrokenCheckpoint, mapped, read_checkpoint
from orchestrrl.weights.layout import Bytes, FileLayout, Ints, SourceFile, lay_out, locate
from orchestrrl.weights.model import DTYPE_BYTES, ShardMap, StagedPart, TensorMeta
from orchestrrl.weights.peer.disk_space import free_bytes, is_full, pages, take
from orchestrrl.weights.staging_hold import StagingHold
from orchestrrl.weights.trainer.boxes import TensorPiece, boxes_of, shape_of, slices, tensors_of
from planner.sync_tree.reshard import ShardSlice


class PieceCopies(Protocol):
    """The interface for copying the values of tensor pieces to a staged file. `offload_s` is the total time, in
    seconds, of copies from a device."""

    offload_s: float

    def copy(self, piece: TensorPiece, into: Bytes) -> None:
        """Copy a piece to its place in `into`, which holds the bytes of the whole tensor."""
        ...


class ArrayCopies:
    """`PieceCopies` for numpy arrays whose elements have the width of the tensor's dtype, for example uint16 for
    bfloat16."""

    offload_s = 0.0

    def copy(self, piece: TensorPiece, into: Bytes) -> None:
        plain = np.dtype(f"u{DTYPE_BYTES[piece.meta.dtype]}")
        if piece.values.dtype.itemsize != plain.itemsize:
            raise Permanent(
                f"{piece.meta.name}: values of dtype {piece.values.dtype} cannot be copied as {piece.meta.dtype}"
            )
        whole = into.view(plain).reshape(piece.meta.shape)
        whole[slices(piece.box)] = np.ascontiguousarray(piece.values).view(plain).reshape(shape_of(piece.box))


@dataclass(frozen=True, slots=True)
class StagedRank:
    part: StagedPart
    tensors: tuple[TensorMeta, ...]
    hold: StagingHold  # to be released once the peer has opened the version


def stage(
    folder: Path, version: int, rank: int, world: int, pieces: Sequence[TensorPiece], copies: PieceCopies
) -> StagedRank:
    """Stage a rank's pieces of a version in a file below `folder`. Once complete, the file replaces an earlier file of
    the same rank. Raises Permanent if there is not enough space or the file cannot be written."""
    tensors = tensors_of(pieces)
    part = StagedPart(rank, boxes_of(pieces))
    size = sum(piece.bytes for piece in pieces)
    home = folder / f"v{version}"
    hold: StagingHold | None = None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():  # /dev/shm is world-writable
            raise Permanent(
                f"{folder} is a symbolic link or belongs to another user, who could read the weights; configure a"
                " folder that you own for the client and its peer"
            )
        hold = StagingHold(home)
        _clear(home, rank, world)
        if free_bytes(home) < size:
            raise Permanent(_no_room(home, size))
        _write(home, part, lay_out(tensors), pieces, copies)
        held, hold = hold, None
        return StagedRank(part, tensors, held)
    except OSError as error:
        if is_full(error):
            raise Permanent(_no_room(home, size)) from error
        raise Permanent(f"cannot write {home}: {error}; configure a folder that the trainer and its peer share") from (
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
            starts, ends = _pages(part, layout)
            take(file.fileno(), starts, ends, layout.bytes)
            mapped = np.frombuffer(mmap.mmap(file.fileno(), layout.bytes), dtype=np.uint8)  # unmapped with its last use
            mapped[: len(layout.header)] = np.frombuffer(layout.header, dtype=np.uint8)
            for piece in pieces:
                at = layout.places[piece.meta.name]
                copies.copy(piece, mapped[at : at + piece.meta.bytes])
        unfinished.rename(home / part.file)
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


def _clear(home: Path, rank: int, world: int) -> None:
    """Delete files that an earlier trainer left: unfinished files of this rank, and the files of ranks >= `world`."""
    for left in home.glob(f".part-{rank}.safetensors.*"):
        left.unlink(missing_ok=True)
    for left in home.glob("part-*.safetensors"):
        number = left.name.removeprefix("part-").removesuffix(".safetensors")
        if number.isdecimal() and int(number) >= world:
            left.unlink(missing_ok=True)


def _pages(part: StagedPart, layout: FileLayout) -> tuple[Ints, Ints]:
    """Return the byte offsets at which the pages of the header and of the part's boxes start and end in the file."""
    tensors = {tensor.name: tensor for tensor in layout.tensors}
    written, size = [], 0
    for name, boxes in part.boxes.items():
        for box in boxes:
            written.append(ShardSlice(name, box, size, tensors[name].bytes_of(box)))
            size += written[-1].bytes
    runs = locate(ShardMap(part.file, size, tuple(written)), tensors, [SourceFile(0, layout.places)])
    starts, ends = runs.spans(0)
    return pages(np.append(starts, 0), np.append(ends, len(layout.header)))


def _no_room(home: Path, size: int) -> str:
    return (
        f"not enough space to stage {size / 1e9:.3f} GB in {home}: {free_bytes(home) / 1e9:.3f} GB are free; a version"
        " is kept until a newer one is committed, so space for two is needed: increase it (in containers, the size of"
        " /dev/shm), or configure another folder for the client and its peer"
    )


# --- a checkpoint's folder, whose files are memory-mapped and read as they are copied


def checkpoint_pieces(folder: Path) -> list[TensorPiece]:
    """Return a checkpoint's tensors, sorted by name, for `publish_arrays`. Raises Permanent if the checkpoint cannot be
    read or has unsupported tensors; the message has one line per fault."""
    if not folder.is_dir():
        raise Permanent(f"{folder} is not a directory")
    try:
        stored = read_checkpoint(folder)
    except BrokenCheckpoint as fault:
        raise Permanent(str(fault)) from fault
    faults, metas = [], []
    for each in stored.values():
        try:
            metas.append(TensorMeta(each.name, each.dtype, each.shape))
        except ValueError as fault:
            faults.append(f"{each.file}: {fault}")
    if faults:
        raise Permanent("\n".join(faults))
    data = mapped(stored)
    return [TensorPiece(meta, meta.whole, _checkpoint_values(data[meta.name], meta)) for meta in metas]


def _checkpoint_values(data: memoryview, meta: TensorMeta) -> "np.ndarray[tuple[int, ...], np.dtype[np.generic]]":
    """Return the tensor's bytes as an array of unsigned integers with the width of the dtype. Data that is not aligned
    to this width is copied."""
    width = DTYPE_BYTES[meta.dtype]
    plain = np.frombuffer(data, dtype=np.uint8)
    if plain.ctypes.data % width:
        plain = plain.copy()
    return plain.view(f"u{width}").reshape(meta.shape)
