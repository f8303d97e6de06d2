"""What a trainer rank has of a version: pieces, each a box of a whole tensor and its values. No torch.

How sharded tensors (DTensor's placements) lie in the whole one, and which of the ranks on one host stages what several
of them have. That is asked of torch.distributed where it runs, once for as long as a rank has the same boxes; every
rank has to take part.
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

SPLIT_BYTES = 1024 * 1024  # smaller pieces are one rank's, whole


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """`values` are the box's: an array or a tensor of its shape, on any device, in any order of memory. Its elements
    are of `meta.dtype`, or will be when they are copied."""

    meta: TensorMeta
    box: Box
    values: Any

    def __post_init__(self) -> None:
        if tuple(self.values.shape) != (shape := shape_of(self.box)):
            raise ValueError(f"{self.meta.name}: {self.box} needs values of {shape}, got {tuple(self.values.shape)}")
        if not self.meta.has(self.box):
            raise ValueError(f"{self.meta.name}: a box must be within {self.meta.shape}, got {self.box}")

    @property
    def bytes(self) -> int:
        return self.meta.bytes_of(self.box)

    @property
    def key(self) -> int:
        """The same in every process, for the same box of the same tensor."""
        words = repr((self.meta.name, self.meta.dtype, self.meta.shape, self.box)).encode()
        return zlib.crc32(words) << 32 | zlib.crc32(words[::-1])

    def part(self, inner: Box) -> "TensorPiece":
        """Of it, what is at `inner`, which counts from the box's corner."""
        box = tuple((first + a, first + b) for (first, _), (a, b) in zip(self.box, inner, strict=True))
        return TensorPiece(self.meta, box, self.values[slices(inner)])


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(last - first for first, last in box)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(first, last) for first, last in box)


@dataclass(frozen=True, slots=True)
class AxisCut:
    """One dimension of a mesh divides an axis: this rank is `number` of `of`. With `strided_by`, the axis is first cut
    into so many, and each of them divided (PyTorch's _StridedShard: TP has divided it already)."""

    axis: int
    of: int
    number: int
    strided_by: int = 1


def divided(shape: Sequence[int], cuts: Sequence[AxisCut]) -> tuple[tuple[Range, ...], ...]:
    """For each axis the ranges of the whole tensor that a rank has, one behind the other in its own; as torch.chunk
    divides, so the last may be shorter, or empty."""
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
    """Of such ranges each box: where it is in the rank's own tensor, and where in the whole one."""
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
    """What this rank stages of its pieces, where others on its host have the same: each an equal share of the rows of a
    large one, and of small ones one rank stages all. `holders` by `TensorPiece.key`, ranks of this host."""
    own: list[TensorPiece] = []
    for piece in pieces:
        ranks = sorted(holders.get(piece.key, (rank,)))
        if rank not in ranks:
            raise ValueError(f"{piece.meta.name}: rank {rank} has it and is not among its holders, got {ranks}")
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
    """In order of names, each once. Raises Permanent where two pieces do not agree on a tensor."""
    found: dict[str, TensorMeta] = {}
    for piece in pieces:
        known = found.setdefault(piece.meta.name, piece.meta)
        if known != piece.meta:
            raise Permanent(
                f"{piece.meta.name} is {known.dtype} {known.shape} and {piece.meta.dtype} {piece.meta.shape} at once;"
                " name each tensor once"
            )
    return tuple(found[name] for name in sorted(found))


def boxes_of(pieces: Sequence[TensorPiece]) -> dict[str, tuple[Box, ...]]:
    """By tensor, in order; neighbours along the first axis are one."""
    found: dict[str, list[Box]] = {}
    for piece in sorted(pieces, key=lambda each: (each.meta.name, each.box[1:], each.box)):
        boxes = found.setdefault(piece.meta.name, [])
        if boxes and piece.box and boxes[-1][1:] == piece.box[1:] and boxes[-1][0][1] == piece.box[0][0]:
            boxes[-1] = ((boxes[-1][0][0], piece.box[0][1]), *piece.box[1:])
        else:
            boxes.append(piece.box)
    return {name: tuple(sorted(boxes)) for name, boxes in found.items()}


# --- what ranks have to know of each other


@dataclass(frozen=True, slots=True)
class HostRanks:
    """`holders`: of what this rank has, by `TensorPiece.key`: which ranks of this host have it, too."""

    run: str
    holders: dict[int, tuple[int, ...]]


class TrainerRanks:
    """The ranks of `group` (None: all of torch.distributed's). `run`: what they call this start of the trainer; without
    it the first of them finds a name, where they can be asked."""

    def __init__(self, rank: int, world: int, peer: str, group: Any = None, run: str = "") -> None:
        self._rank, self._world, self._peer, self._group = rank, world, peer, group
        self._own_run = run or uuid.uuid4().hex
        self._is_named = bool(run)
        self._known: HostRanks | None = None
        self._keys: tuple[int, ...] = ()

    def neighbours(self, pieces: Sequence[TensorPiece]) -> HostRanks:
        """A collective call, unless this is the only rank. Raises Permanent where torch.distributed says otherwise of
        rank and world."""
        distributed = self._distributed()
        if distributed is None:
            # Ranks that nothing joins stage all that they have.
            return HostRanks(self._own_run if self._world == 1 or self._is_named else "", {})
        keys = tuple(sorted(piece.key for piece in pieces))
        if not all(self._gathered(distributed, self._known is not None and keys == self._keys)):
            told = self._gathered(distributed, (self._peer, self._own_run, keys))
            self._known, self._keys = self._read(told, keys), keys
        assert self._known is not None
        return self._known

    def of_the_first(self, ask: Callable[[], int]) -> int:
        """What the first rank is answered, for all: a collective call. Where it raises all do. Ranks that nothing joins
        ask each for itself."""
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
            raise OutcomeUnknown(f"the first rank was not answered: {told[0]}")
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
        """What all ranks say, by rank."""
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
                f"rank and world must be torch.distributed's {rank} of {world}, got {self._rank} of {self._world};"
                " where only some ranks publish, name their group"
            )
        return distributed
