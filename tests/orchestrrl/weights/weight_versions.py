"""Builders of versions for tests of stores and peers: tensors with contents, shards, and parts of trainer ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import xxhash

from orchestrrl.weights.layout import lay_out
from orchestrrl.weights.model import DTYPE_BYTES, ShardMap, StagedPart, TensorMeta, VersionMap
from planner.sync_tree.parameters import Box
from planner.sync_tree.reshard import ShardSlice

BLOCK = 1024
# Shapes for pieces of several kinds: rows longer and shorter than a block, scalars, and odd sizes.
TENSORS = (
    TensorMeta("embed", "BF16", (64, 48)),
    TensorMeta("layer.bias", "F32", (33,)),
    TensorMeta("layer.weight", "F32", (40, 50)),
    TensorMeta("scale", "F32", ()),
)
# Boxes of tensor parallelism: half of the columns, half of the rows, and whole tensors.
SHARDS: Mapping[str, Sequence[tuple[str, Box]]] = {
    "columns": [("layer.weight", ((0, 40), (0, 20)))],
    "rest": [("layer.weight", ((0, 40), (20, 50))), ("scale", ())],
    "rows": [("embed", ((0, 31), (0, 48))), ("layer.bias", ((0, 33),))],
    "tail": [("embed", ((31, 64), (0, 48)))],
}


class Contents:
    """The contents of a version's tensors, derived from a seed."""

    def __init__(self, seed: int, tensors: Sequence[TensorMeta] = TENSORS) -> None:
        rng = np.random.default_rng(seed)
        self.tensors = tuple(tensors)
        self.values = {
            each.name: rng.integers(0, 256, (*each.shape, DTYPE_BYTES[each.dtype]), dtype=np.uint8)
            for each in self.tensors
        }

    def wire(self, shard: ShardMap) -> bytes:
        return b"".join(
            np.ascontiguousarray(self.values[each.parameter][tuple(slice(*axis) for axis in each.box)]).tobytes()
            for each in shard.slices
        )

    def stage(self, folder: Path, rank: int, boxes: Mapping[str, Sequence[Box]]) -> StagedPart:
        """Stage a part as a trainer's rank does."""
        layout = lay_out([each for each in self.tensors if each.name in boxes])
        image = np.zeros(layout.bytes, dtype=np.uint8)
        image[: len(layout.header)] = np.frombuffer(layout.header, dtype=np.uint8)
        for tensor in layout.tensors:
            view = image[layout.places[tensor.name] :][: tensor.bytes].reshape((*tensor.shape, -1))
            for box in boxes[tensor.name]:
                place = (*(slice(*axis) for axis in box), slice(None))
                view[place] = self.values[tensor.name][place]
        part = StagedPart(rank, {name: tuple(each) for name, each in boxes.items()})
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f".{part.file}.1"
        unfinished.write_bytes(image.tobytes())
        unfinished.rename(folder / part.file)
        return part

    def model_file(self) -> bytes:
        layout = lay_out(self.tensors)
        return layout.header + b"".join(self.values[each.name].tobytes() for each in layout.tensors)

    def map(self, version: int, *, with_sums: bool = True, shards: Sequence[str] = tuple(SHARDS)) -> VersionMap:
        made = [shard_map(name, {each.name: each for each in self.tensors}) for name in shards]
        if with_sums:
            made = [replace(shard, sums=sums_of(self.wire(shard))) for shard in made]
        return VersionMap(version, self.tensors, tuple(made), BLOCK)


def shard_map(name: str, tensors: Mapping[str, TensorMeta]) -> ShardMap:
    slices, at = [], 0
    for tensor, box in SHARDS[name]:
        size = DTYPE_BYTES[tensors[tensor].dtype] * int(np.prod([last - first for first, last in box], dtype=int))
        slices.append(ShardSlice(tensor, box, at, size))
        at += size
    return ShardMap(name, at, tuple(slices))


def sums_of(data: bytes) -> tuple[str, ...]:
    return tuple(xxhash.xxh3_64_hexdigest(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK))


# Two ranks that have halves of everything: rows of the embedding, columns of the matrix.
HALVES: tuple[Mapping[str, Sequence[Box]], ...] = (
    {"embed": [((0, 32), (0, 48))], "layer.weight": [((0, 40), (0, 25))], "scale": [()]},
    {"embed": [((32, 64), (0, 48))], "layer.weight": [((0, 40), (25, 50))], "layer.bias": [((0, 33),)]},
)
