"""Pieces: the boxes of tensors that a trainer rank has, with their values.

This module maps sharded tensors (DTensor placements) to boxes of the whole tensor, and decides which rank of a host
stages a piece that several ranks have. If torch.distributed runs, the ranks exchange the keys of their pieces in a
collective call: once at the first publication, and again whenever the boxes of a rank change. The module does not
import torch.
"""

import itertools
import sys
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrrl.core.errors import OrchestrRLError, OutcomeUnknown, Permanent
from orchestrrl.weights.model import TensorMeta
from planner.sync_tree.layout import Range, between, chunk
from planner.sync_tree.parameters import Box

SPLIT_BYTES = 1024 * 1024  # smaller pieces are not split: one rank stages the whole piece


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A box of a tensor and its values. `meta` describes the whole tensor. `values` is an array or a tensor of the
    box's shape, on any device, with any strides. Its elements have `meta.dtype`, or are converted to that dtype when
    they are copied."""

    meta: TensorMeta
    box: Box
    values: Any

    def __post_init__(self) -> None:
        if tuple(self.values.shape) != (shape := shape_of(self.box)):
            raise ValueError(
                f"{self.meta.name}: the values of box {self.box} must have shape {shape},"
                f" got {tuple(self.values.shape)}"
            )
        if not self.meta.has(self.box):
            raise ValueError(f"{self.meta.name}: the box must be within shape {self.meta.shape}, got {self.box}")

    @property
    def bytes(self) -> int:
        return self.meta.bytes_of(self.box)

    @property
    def key(self) -> int:
        """Return a hash of the tensor and the box that is the same in every process."""
        words = repr((self.meta.name, self.meta.dtype, self.meta.shape, self.box)).encode()
        return zlib.crc32(words) << 32 | zlib.crc32(words[::-1])

    def part(self, inner: Box) -> "TensorPiece":
        """Return the sub-piece at `inner`, whose coordinates are relative to the box."""
        box = tuple((first + a, first + b) for (first, _), (a, b) in zip(self.box, inner, strict=True))
        return TensorPiece(self.meta, box, self.values[slices(inner)])


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(last - first for first, last in box)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(first, last) for first, last in box)


@dataclass(frozen=True, slots=True)
class AxisCut:
    """A division of an axis along one mesh dimension. This rank has part `number`, counted from 0, of `of` parts. If
    `strided_by` is above 1, the axis is first cut into that many ranges, and each range is divided. This is the layout
    of PyTorch's _StridedShard for an axis that TP also divides."""

    axis: int
    of: int
    number: int
    strided_by: int = 1


def divided(shape: Sequence[int], cuts: Sequence[AxisCut]) -> tuple[tuple[Range, ...], ...]:
    """Return for each axis the ranges of the whole tensor that a rank has. The ranges follow each other without gaps in
    the rank's own tensor. Axes are divided as by torch.chunk, so the last part may be shorter or empty."""
    axes: list[tuple[Range, ...]] = [((0, length),) for length in shape]
    for cut in cuts:
        kept: list[Range] = []
        ranges = axes[cut.axis]
        length = sum(last - first for first, last in ranges)
        for stride in range(cut.strided_by):
            first, last = chunk(length, stride, cut.strided_by)
            own = chunk(last - first, cut.number, cut.of)
            kept += between(ranges, first + own[0], first + own[1])
        axes[cut.axis] = tuple(kept)
    return tuple(axes)


def blocks(axes: Sequence[Sequence[Range]]) -> Iterator[tuple[Box, Box]]:
    """Yield a pair of boxes for each combination of one range per axis: the box in the rank's own tensor, and the
    corresponding box in the whole tensor."""
    placed: list[list[tuple[Range, Range]]] = []
    for ranges in axes:
        at, found = 0, []
        for first, last in ranges:
            found.append(((at, at + last - first), (first, last)))
            at += last - first
        placed.append(found)
    for chosen in itertools.product(*placed):
        yield tuple(own for own, _ in chosen), tuple(whole for _, whole in chosen)


def to_stage(pieces: Sequence[TensorPiece], rank: int, holders: Mapping[int, Sequence[int]]) -> list[TensorPiece]:
    """Return the pieces that this rank stages. If several ranks of the host have a piece, each rank stages an equal
    share of its rows. A small piece is staged by only one of them. `holders` has the ranks of this host that have a
    piece, by `TensorPiece.key`."""
    own: list[TensorPiece] = []
    for piece in pieces:
        ranks = sorted(holders.get(piece.key, (rank,)))
        if rank not in ranks:
            raise ValueError(f"{piece.meta.name}: the holders of this piece must include rank {rank}, got {ranks}")
        rows = shape_of(piece.box)[0] if piece.box else 1
        if len(ranks) == 1:
            own.append(piece)
        elif piece.bytes < SPLIT_BYTES or rows < len(ranks):
            if ranks[piece.key % len(ranks)] == rank:
                own.append(piece)
        else:
            number = ranks.index(rank)
            first, last = rows * number // len(ranks), rows * (number + 1) // len(ranks)
            own.append(piece.part(((first, last), *((0, length) for length in shape_of(piece.box)[1:]))))
    return own


def tensors_of(pieces: Sequence[TensorPiece]) -> tuple[TensorMeta, ...]:
    """Return the tensors of these pieces, sorted by name. Raises Permanent if two pieces of one tensor differ in its
    dtype or shape."""
    found: dict[str, TensorMeta] = {}
    for piece in pieces:
        known = found.setdefault(piece.meta.name, piece.meta)
        if known != piece.meta:
            raise Permanent(
                f"tensor {piece.meta.name} must have one dtype and shape, got {known.dtype} {known.shape} and"
                f" {piece.meta.dtype} {piece.meta.shape}"
            )
    return tuple(found[name] for name in sorted(found))


def boxes_of(pieces: Sequence[TensorPiece]) -> dict[str, tuple[Box, ...]]:
    """Return the sorted boxes of these pieces, keyed by tensor name. Adjacent boxes along the first axis are merged."""
    found: dict[str, list[Box]] = {}
    for piece in sorted(pieces, key=lambda each: (each.meta.name, each.box[1:], each.box)):
        boxes = found.setdefault(piece.meta.name, [])
        if boxes and piece.box and boxes[-1][1:] == piece.box[1:] and boxes[-1][0][1] == piece.box[0][0]:
            boxes[-1] = ((boxes[-1][0][0], piece.box[0][1]), *piece.box[1:])
        else:
            boxes.append(piece.box)
    return {name: tuple(sorted(boxes)) for name, boxes in found.items()}


# --- exchange between ranks


@dataclass(frozen=True, slots=True)
class HostRanks:
    """The ranks of this host that publish. `run` is the name of the trainer's run and is the same on all ranks.
    `holders` maps the `TensorPiece.key` of each of this rank's pieces to the ranks of this host that have the piece."""

    run: str
    holders: dict[int, tuple[int, ...]]


class TrainerRanks:
    """The publishing ranks: the ranks of `group` or, if it is None, all ranks of torch.distributed. `run` identifies
    this run of the trainer. If it is empty and torch.distributed is initialised, rank 0 chooses it for all ranks."""

    def __init__(self, rank: int, world: int, peer: str, group: Any = None, run: str = "") -> None:
        self._rank, self._world, self._peer, self._group = rank, world, peer, group
        self._own_run = run or uuid.uuid4().hex
        self._is_named = bool(run)
        self._known: HostRanks | None = None
        self._keys: tuple[int, ...] = ()

    def neighbours(self, pieces: Sequence[TensorPiece]) -> HostRanks:
        """Exchange the keys of pieces with the other ranks; return the ranks of this host that have the same pieces. If
        torch.distributed runs and there are several ranks, this is a collective call. Otherwise, no holders are
        returned. Raises Permanent if the rank or the number of ranks differs from torch.distributed's."""
        distributed = self._distributed()
        if distributed is None:
            # Without torch.distributed, each rank stages all of its pieces.
            return HostRanks(self._own_run if self._world == 1 or self._is_named else "", {})
        keys = tuple(sorted(piece.key for piece in pieces))
        if not all(self._gathered(distributed, self._known is not None and keys == self._keys)):
            told = self._gathered(distributed, (self._peer, self._own_run, keys))
            self._known, self._keys = self._read(told, keys), keys
        assert self._known is not None
        return self._known

    def of_the_first(self, ask: Callable[[], int]) -> int:
        """Call `ask` on rank 0 and return its result on all ranks. This is a collective call, and an error is raised on
        all ranks. Without torch.distributed, each rank calls `ask` itself."""
        distributed = self._distributed()
        if distributed is None:
            return ask()
        answer: int | OrchestrRLError = 0
        if self._rank == 0:
            try:
                answer = ask()
            except OrchestrRLError as error:
                answer = error
        told = self._gathered(distributed, str(answer) if isinstance(answer, OrchestrRLError) else answer)
        if isinstance(answer, OrchestrRLError):
            raise answer
        if isinstance(told[0], str):
            raise OutcomeUnknown(f"the call of rank 0 failed: {told[0]}")
        return int(told[0])

    def _read(self, told: Sequence[tuple[str, str, tuple[int, ...]]], keys: Sequence[int]) -> HostRanks:
        own = set(keys)
        holders: dict[int, list[int]] = {}
        for rank, (peer, _, theirs) in enumerate(told):
            if peer == self._peer:
                for key in own.intersection(theirs):
                    holders.setdefault(key, []).append(rank)
        return HostRanks(told[0][1], {key: tuple(ranks) for key, ranks in holders.items()})

    def _gathered(self, distributed: Any, own: object) -> list[Any]:
        """Gather one object from each rank; return the objects sorted by rank. `own` is the object of this rank."""
        told: list[Any] = [None] * self._world
        distributed.all_gather_object(told, own, group=self._group)
        return told

    def _distributed(self) -> Any:
        distributed: Any = sys.modules.get("torch.distributed")
        if self._world == 1 or distributed is None or not distributed.is_available():
            return None
        if not distributed.is_initialized():
            return None
        rank, world = distributed.get_rank(self._group), distributed.get_world_size(self._group)
        if (rank, world) != (self._rank, self._world):
            raise Permanent(
                f"rank and world must match torch.distributed (rank {rank}, world {world}), got rank {self._rank} and"
                f" world {self._world}; if only some ranks publish, pass their group"
            )
        return distributed
