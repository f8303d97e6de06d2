"""Boxes of a rank and the division of staging, checked against real slices of tensors."""

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.core.errors import Permanent
from orchestrrl.weights.model import TensorMeta
from orchestrrl.weights.trainer.boxes import (
    SPLIT_BYTES,
    AxisCut,
    TensorPiece,
    blocks,
    boxes_of,
    divided,
    tensors_of,
    to_stage,
)

Array = np.ndarray[Any, Any]


def chunks(array: Array, of: int, axis: int) -> list[Array]:
    """Cut as torch.chunk does, with empty chunks if there are too few rows."""
    each = -(-array.shape[axis] // of)
    cuts = [min(array.shape[axis], each * number) for number in range(1, of)]
    return np.split(array, cuts, axis)


def really_cut(array: Array, cuts: list[AxisCut]) -> Array:
    for cut in cuts:
        strides = [chunks(stride, cut.of, cut.axis) for stride in chunks(array, cut.strided_by, cut.axis)]
        array = np.concatenate([stride[cut.number] for stride in strides], cut.axis)
    return array


@given(st.lists(st.integers(1, 13), min_size=1, max_size=3), st.data())
def test_boxes_of_a_mesh_match_its_ranks_shards(shape: list[int], data: st.DataObject) -> None:
    mesh = data.draw(
        st.lists(
            st.tuples(st.integers(0, len(shape) - 1), st.integers(1, 4), st.sampled_from([1, 1, 2, 3])), max_size=2
        )
    )
    whole = np.arange(math.prod(shape)).reshape(shape)
    seen: Counter[int] = Counter()
    for numbers in itertools.product(*(range(of) for _, of, _ in mesh)):
        cuts = [AxisCut(axis, of, at, strided) for (axis, of, strided), at in zip(mesh, numbers, strict=True)]
        local = really_cut(whole, cuts)
        axes = divided(shape, cuts)
        assert tuple(sum(b - a for a, b in ranges) for ranges in axes) == local.shape
        for own, box in blocks(axes):
            here = local[tuple(slice(*each) for each in own)]
            assert np.array_equal(here, whole[tuple(slice(*each) for each in box)])
            seen.update(here.ravel().tolist())
    assert seen == Counter(range(whole.size))


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=12), st.data())
def test_shared_pieces_are_staged_once_per_host(
    world: int, tensors: list[tuple[int, bool]], data: st.DataObject
) -> None:
    columns = SPLIT_BYTES // 4
    pieces, holders = [], {}
    for number, (rows, is_large) in enumerate(tensors):
        shape = (rows, columns) if is_large else (rows,)
        meta = TensorMeta(f"t{number}", "F32", shape)
        piece = TensorPiece(meta, meta.whole, np.broadcast_to(np.float32(0), shape))
        pieces.append(piece)
        holders[piece.key] = data.draw(st.sets(st.integers(0, world - 1), min_size=1))
    rows_of: Counter[tuple[str, int]] = Counter()
    for rank in range(world):
        own = [piece for piece in pieces if rank in holders[piece.key]]
        for piece in to_stage(own, rank, {key: sorted(ranks) for key, ranks in holders.items()}):
            assert piece.box[1:] == piece.meta.whole[1:]
            rows_of.update((piece.meta.name, row) for row in range(*piece.box[0]))
    assert rows_of == Counter((piece.meta.name, row) for piece in pieces for row in range(piece.meta.shape[0]))


def test_large_piece_is_divided_evenly() -> None:
    meta = TensorMeta("w", "F32", (8, SPLIT_BYTES))
    piece = TensorPiece(meta, meta.whole, np.broadcast_to(np.float32(0), meta.shape))
    shares = [to_stage([piece], rank, {piece.key: (0, 1, 2, 3)}) for rank in range(4)]
    assert [share[0].box[0] for share in shares] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert to_stage([piece], 9, {}) == [piece]  # no other holder is known


def test_neighbouring_boxes_are_merged() -> None:
    meta = TensorMeta("w", "F32", (6, 4))
    boxes = [((4, 6), (0, 4)), ((0, 2), (0, 4)), ((2, 4), (0, 4))]
    pieces = [TensorPiece(meta, box, np.zeros((2, 4), np.float32)) for box in boxes]
    assert boxes_of(pieces) == {"w": (((0, 6), (0, 4)),)}
    assert boxes_of([TensorPiece(meta, ((0, 2), (0, 2)), np.zeros((2, 2))), pieces[2]]) == {
        "w": (((0, 2), (0, 2)), ((2, 4), (0, 4)))
    }


def test_pieces_must_agree_on_a_tensor_and_fill_their_box() -> None:
    one, other = TensorMeta("w", "F32", (2,)), TensorMeta("w", "F32", (3,))
    with pytest.raises(Permanent, match="tensor w must have one dtype and shape, got F32"):
        tensors_of([TensorPiece(one, one.whole, np.zeros(2)), TensorPiece(other, other.whole, np.zeros(3))])
    with pytest.raises(ValueError, match="must have shape"):
        TensorPiece(one, one.whole, np.zeros(3))
    with pytest.raises(ValueError, match="within"):
        TensorPiece(one, ((1, 3),), np.zeros(2))
