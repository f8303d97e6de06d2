"""Putting what a trainer rank, or a checkpoint's folder, has into a file of a version's folder, from which the host's
peer serves it. No torch.

A file is written under another name and renamed when it is whole, so what dies half way is never taken for a part. Room
is taken before anything is copied: a full /dev/shm would otherwise end the process at the first page that is not there.
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
    hold: StagingHold  # until the daemon's peer has opened the version: to be let go of then


def stage(
    folder: Path, version: int, rank: int, world: int, pieces: Sequence[TensorPiece], copies: PieceCopies
) -> StagedRank:
    """Replaces what this rank has staged of the version before, when all is there. Raises Permanent where there is no
    room, or the folder cannot be written."""
    tensors = tensors_of(pieces)
    part = StagedPart(rank, boxes_of(pieces))
    size = sum(piece.bytes for piece in pieces)
    home = folder / f"v{version}"
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
        if free_bytes(home) < size:
            raise Permanent(_no_room(home, size))
        _write(home, part, lay_out(tensors), pieces, copies)
        held, hold = hold, None
        return StagedRank(part, tensors, held)
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
            starts, ends = _pages(part, layout)
            take(file.fileno(), starts, ends, layout.bytes)
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


def _pages(part: StagedPart, layout: FileLayout) -> tuple[Ints, Ints]:
    """Return the pages of the file that are written, from and to: those of the header and of the part's boxes."""
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
        f"no room to stage {size / 1e9:.3f} GB in {home}: {free_bytes(home) / 1e9:.3f} GB are free; versions stay until"
        " a newer one is committed, so twice the bytes of one are needed: give the folder more (in containers, the size"
        " of /dev/shm), or name another one for the client and its peer"
    )


# --- a checkpoint's folder, whose files stay mapped and are read as they are copied


def checkpoint_pieces(folder: Path) -> list[TensorPiece]:
    """Of every tensor, in order of names: for `publish_arrays`. Raises Permanent, with a line for each fault."""
    if not folder.is_dir():
        raise Permanent(f"{folder}: is no folder")
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
    """As wide as the tensor's elements, whatever they mean: bytes are copied. One that does not begin at a multiple of
    its width is copied here."""
    width = DTYPE_BYTES[meta.dtype]
    plain = np.frombuffer(data, dtype=np.uint8)
    if plain.ctypes.data % width:
        plain = plain.copy()
    return plain.view(f"u{width}").reshape(meta.shape)
