"""From the trainer's layout to the engines': the least set of shards, and the order of bytes in each. Pure.

All elements that the same endpoints have, and the same endpoints need, are one shard, whatever parameters they are of.
Senders and receivers read a shard as its slices one behind the other, each a box in row-major order; `Local.places`
says where its parts lie on either side.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.sync_tree.layout import EngineLayout, TrainerLayout
from planner.sync_tree.model import Ints, Shard
from planner.sync_tree.parameters import Box, Parameter

Ends = tuple[int, ...]  # endpoints, in order


@dataclass(frozen=True, slots=True)
class Slice:
    parameter: str
    box: Box  # of the whole tensor
    offset: int  # bytes into the shard
    bytes: int


@dataclass(frozen=True, slots=True)
class Resharded:
    """A shard, and what it is made of. `at_home` are endpoints that need it and have it: nothing is sent to them, but
    it has to be put in its new place there. A shard may be needed only so, and then has no receivers."""

    shard: Shard
    at_home: Ends
    slices: tuple[Slice, ...]


def reshard(
    parameters: Sequence[Parameter], trainer: TrainerLayout, engines: Sequence[EngineLayout]
) -> tuple[Resharded, ...]:
    """Raises ValueError where a layout cannot divide a parameter, or somebody needs what nobody has."""
    parts: dict[tuple[Ends, Ends], list[tuple[Parameter, Box]]] = {}
    known: dict[tuple[object, ...], list[tuple[Ends, Ends, list[Box]]]] = {}
    for parameter in sorted(parameters, key=lambda each: each.name):
        stages = trainer.stages(parameter.where), *(engine.stages(parameter.where) for engine in engines)
        key = parameter.shape, parameter.split, stages
        if key not in known:  # layers are alike
            known[key] = _cells(parameter, trainer, engines)
        for holders, needing, boxes in known[key]:
            parts.setdefault((holders, needing), []).extend((parameter, box) for box in boxes)
    return tuple(
        _resharded(f"shard{number:04}", holders, needing, pieces)
        for number, ((holders, needing), pieces) in enumerate(sorted(parts.items(), key=lambda each: each[0]))
    )


def _resharded(name: str, holders: Ends, needing: Ends, pieces: Iterable[tuple[Parameter, Box]]) -> Resharded:
    slices: list[Slice] = []
    offset = 0
    for parameter, box in pieces:
        elements = int(np.prod([last - first for first, last in box]))
        size = parameter.payload.bytes_of(elements, parameter.dtype_bytes)
        slices.append(Slice(parameter.name, box, offset, size))
        offset += size
    held = set(holders)
    receivers = tuple(end for end in needing if end not in held)
    at_home = tuple(end for end in needing if end in held)
    return Resharded(Shard(name, offset, holders, receivers), at_home, tuple(slices))


def _cells(
    parameter: Parameter, trainer: TrainerLayout, engines: Sequence[EngineLayout]
) -> list[tuple[Ends, Ends, list[Box]]]:
    """What is needed of a parameter, by who has it and who needs it, in as large boxes as can be."""
    having, needing = _boxes(parameter, [trainer]), _boxes(parameter, engines)
    if not needing:
        return []
    cuts = [
        np.unique([each for box in (*having, *needing) for each in box[axis]]) for axis in range(len(parameter.shape))
    ]
    covers = [_covered(box, cuts) for box in (*having, *needing)]
    kinds, kind_of = np.unique(np.stack(covers).reshape(len(covers), -1), axis=1, return_inverse=True)
    grid = kind_of.reshape([len(cut) - 1 for cut in cuts])
    cells: dict[tuple[Ends, Ends], list[list[int]]] = {}
    for kind, column in enumerate(kinds.T):
        holders = _union(ends for ends, has in zip(having.values(), column[: len(having)], strict=True) if has)
        needed = _union(ends for ends, has in zip(needing.values(), column[len(having) :], strict=True) if has)
        cells.setdefault((holders, needed), []).extend(np.argwhere(grid == kind).tolist())
    found = []
    for (holders, needed), places in cells.items():
        boxes = _merged(places, cuts)
        if not holders:
            raise ValueError(f"{parameter.name}: nobody in the trainer has {boxes[0]}")
        found.append((holders, needed, boxes))
    return found


def _boxes(parameter: Parameter, layouts: Iterable[TrainerLayout | EngineLayout]) -> dict[Box, list[int]]:
    """Whose they are."""
    found: dict[Box, list[int]] = {}
    for layout in layouts:
        for rank, end in enumerate(layout.endpoints):
            for local in layout.local(parameter, rank):
                for box in local.boxes:
                    found.setdefault(box, []).append(end)
    return found


def _covered(box: Box, cuts: Sequence[Ints]) -> npt.NDArray[np.bool_]:
    covered = np.zeros([len(cut) - 1 for cut in cuts], dtype=bool)
    places = [slice(*np.searchsorted(cut, each).tolist()) for cut, each in zip(cuts, box, strict=True)]
    covered[tuple(places)] = True
    return covered


def _merged(cells: Sequence[Sequence[int]], cuts: Sequence[Ints]) -> list[Box]:
    """Neighbours are one, along the last axis first: what is contiguous in memory stays so."""
    boxes: list[Box] = [
        tuple((int(cut[at]), int(cut[at + 1])) for cut, at in zip(cuts, cell, strict=True)) for cell in cells
    ]
    for axis in reversed(range(len(cuts))):
        merged: list[Box] = []
        for box in sorted(boxes, key=lambda each: (each[:axis], each[axis + 1 :], each[axis])):
            before = merged[-1] if merged else None
            if before and before[axis][1] == box[axis][0] and _others(before, axis) == _others(box, axis):
                merged[-1] = (*box[:axis], (before[axis][0], box[axis][1]), *box[axis + 1 :])
            else:
                merged.append(box)
        boxes = merged
    return sorted(boxes)


def _others(box: Box, axis: int) -> Box:
    return (*box[:axis], *box[axis + 1 :])


def _union(ends: Iterable[Sequence[int]]) -> Ends:
    return tuple(sorted(set(itertools.chain.from_iterable(ends))))
