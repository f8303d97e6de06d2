"""Derive the minimal set of shards that brings the weights from the trainer's layout to those of the engines, and the
order of bytes in each shard. Has no side effects.

All elements with the same holders and the same receivers form one shard, across parameters. The bytes of a shard are
its slices in sequence. Each slice is a box in row-major order, and `LocalShard` describes its place in memory on either
side.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.sync_tree.layout import EngineLayout, TrainerLayout
from planner.sync_tree.model import Ints, Shard
from planner.sync_tree.parameters import Box, Parameter

Ends = tuple[int, ...]  # endpoints, in order


@dataclass(frozen=True, slots=True)
class ShardSlice:
    parameter: str
    box: Box  # of the whole tensor
    offset: int  # bytes into the shard
    bytes: int


@dataclass(frozen=True, slots=True)
class ReshardedVersion:
    """A shard and its slices. `at_home` lists the endpoints that need the shard and already have it. The shard is not
    sent to them, but they must copy it to its new place in memory. A shard that only such endpoints need has no
    receivers."""

    shard: Shard
    at_home: Ends
    slices: tuple[ShardSlice, ...]


def reshard(
    parameters: Sequence[Parameter], trainer: TrainerLayout, engines: Sequence[EngineLayout]
) -> tuple[ReshardedVersion, ...]:
    """Return the shards that bring the parameters from a trainer to its engines. Raises ValueError if a layout cannot
    divide a parameter, or if an endpoint needs elements that no trainer rank has."""
    parts: _Parts = {}
    known: dict[tuple[object, ...], list[_Cell]] = {}
    for parameter in sorted(parameters, key=lambda each: each.name):
        stages = trainer.stages(parameter.where), *(engine.stages(parameter.where) for engine in engines)
        key = parameter.shape, parameter.split, stages
        if key not in known:  # layers repeat
            known[key] = _cells(parameter.name, _boxes(parameter, [trainer]), _boxes(parameter, engines))
        _add(parts, known[key], (parameter.name, parameter.dtype_bytes))
    return _numbered(parts)


def reshard_boxes(
    tensors: Mapping[str, tuple[tuple[int, ...], int]],
    having: Mapping[int, Mapping[str, Sequence[Box]]],
    needing: Mapping[int, Mapping[str, Sequence[Box]]],
) -> tuple[ReshardedVersion, ...]:
    """Return the shards that bring to each endpoint the boxes that it needs. `tensors` maps the name of each tensor to
    its shape and its number of bytes per element. `having` and `needing` map each endpoint to the boxes of each tensor
    that it holds or needs, respectively. The function is faster if endpoints with equal boxes share one mapping object.
    Raises ValueError if an endpoint needs elements that no endpoint has."""
    groups = _alike(having), _alike(needing)
    parts: _Parts = {}
    known: dict[tuple[object, ...], list[_Cell]] = {}
    for name in sorted(tensors):
        has, needs = (_owned(name, each) for each in groups)
        shape, dtype_bytes = tensors[name]
        key = shape, tuple(has.items()), tuple(needs.items())
        if key not in known:
            known[key] = _cells(name, has, needs)
        _add(parts, known[key], (name, dtype_bytes))
    return _numbered(parts)


_Of = tuple[str, int]  # a parameter's name, and the bytes of an element
_Cell = tuple[Ends, Ends, list[Box]]  # holders, receivers and boxes
_Parts = dict[tuple[Ends, Ends], list[tuple[_Of, Box]]]


def _add(parts: _Parts, cells: Iterable[_Cell], of: _Of) -> None:
    for holders, needing, boxes in cells:
        parts.setdefault((holders, needing), []).extend((of, box) for box in boxes)


def _numbered(parts: _Parts) -> tuple[ReshardedVersion, ...]:
    return tuple(
        _resharded(f"shard{number:04}", holders, needing, pieces)
        for number, ((holders, needing), pieces) in enumerate(sorted(parts.items(), key=lambda each: each[0]))
    )


def _resharded(name: str, holders: Ends, needing: Ends, pieces: Iterable[tuple[_Of, Box]]) -> ReshardedVersion:
    slices: list[ShardSlice] = []
    offset = 0
    for (parameter, dtype_bytes), box in pieces:
        size = dtype_bytes * math.prod(last - first for first, last in box)
        slices.append(ShardSlice(parameter, box, offset, size))
        offset += size
    held = set(holders)
    receivers = tuple(end for end in needing if end not in held)
    at_home = tuple(end for end in needing if end in held)
    return ReshardedVersion(Shard(name, offset, holders, receivers), at_home, tuple(slices))


def _alike(ends: Mapping[int, Mapping[str, Sequence[Box]]]) -> list[tuple[list[int], Mapping[str, Sequence[Box]]]]:
    """Group the endpoints that share one mapping object; return each group with its mapping."""
    found: dict[int, tuple[list[int], Mapping[str, Sequence[Box]]]] = {}
    for end, boxes in sorted(ends.items()):
        found.setdefault(id(boxes), ([], boxes))[0].append(end)
    return list(found.values())


def _owned(name: str, groups: Iterable[tuple[list[int], Mapping[str, Sequence[Box]]]]) -> dict[Box, Ends]:
    """Return the endpoints that own each box of a tensor."""
    found: dict[Box, Ends] = {}
    for ends, boxes in groups:
        for box in boxes.get(name, ()):
            found[box] = (*found.get(box, ()), *ends)
    return found


def _cells(name: str, having: Mapping[Box, Sequence[int]], needing: Mapping[Box, Sequence[int]]) -> list[_Cell]:
    """Return the needed elements of a tensor by holders and receivers, in boxes as large as possible. Raises ValueError
    if no endpoint holds an element that is needed."""
    if not needing:
        return []
    everyone = (*having, *needing)
    axes = len(everyone[0])  # none for a scalar
    cuts = [np.unique([each for box in everyone for each in box[axis]]) for axis in range(axes)]
    covers = [_covered(box, cuts) for box in everyone]
    kinds, kind_of = np.unique(np.stack(covers).reshape(len(covers), -1), axis=1, return_inverse=True)
    grid = kind_of.reshape([len(cut) - 1 for cut in cuts])
    cells: dict[tuple[Ends, Ends], list[list[int]]] = {}
    for kind, column in enumerate(kinds.T):
        holders = _union(ends for ends, has in zip(having.values(), column[: len(having)], strict=True) if has)
        needed = _union(ends for ends, has in zip(needing.values(), column[len(having) :], strict=True) if has)
        cells.setdefault((holders, needed), []).extend(np.argwhere(grid == kind).tolist())
    found = []
    for (holders, needed), places in cells.items():
        if not needed:
            continue
        boxes = _merged(places, cuts)
        if not holders:
            raise ValueError(f"{name}: no endpoint holds box {boxes[0]}, which a receiver needs")
        found.append((holders, needed, boxes))
    return found


def _boxes(parameter: Parameter, layouts: Iterable[TrainerLayout | EngineLayout]) -> dict[Box, list[int]]:
    """Return the endpoints of `layouts` that own each box of a parameter."""
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
    """Merge adjacent cells into boxes, along the last axis first, so that contiguous memory stays contiguous."""
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
