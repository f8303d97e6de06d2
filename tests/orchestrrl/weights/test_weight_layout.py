"""File layouts checked with the safetensors library, and runs of shards checked with numpy's slicing."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from orchestrrl.weights.layout import (
    ShardRuns,
    SourceFile,
    faults_of_shard,
    gather,
    lay_out,
    locate,
    read_layout,
    scatter,
)
from orchestrrl.weights.model import DTYPE_BYTES, ShardMap, TensorMeta
from planner.sync_tree.parameters import Box
from planner.sync_tree.ranges import ByteRanges
from planner.sync_tree.reshard import ShardSlice

DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "I64": np.int64, "U8": np.uint8, "BOOL": np.bool_}


@st.composite
def tensors(draw: st.DrawFn) -> list[TensorMeta]:
    names = draw(st.lists(st.text('ab.é"\\', min_size=1, max_size=6), min_size=1, max_size=5, unique=True))
    shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)
    return [TensorMeta(name, draw(st.sampled_from(sorted(DTYPES))), draw(shapes)) for name in sorted(names)]


def box_of(draw: st.DrawFn, within: Box) -> Box:
    found = []
    for first, last in within:
        low = draw(st.integers(first, last - 1))
        found.append((low, draw(st.integers(low + 1, last))))
    return tuple(found)


def shard_of(pieces: list[tuple[TensorMeta, Box]]) -> ShardMap:
    slices, at = [], 0
    for tensor, box in pieces:
        size = DTYPE_BYTES[tensor.dtype] * int(np.prod([last - first for first, last in box], dtype=int))
        slices.append(ShardSlice(tensor.name, box, at, size))
        at += size
    return ShardMap("s", at, tuple(slices))


def values(tensors: list[TensorMeta]) -> dict[str, np.ndarray]:
    """Return distinct bytes for each tensor, as [*shape, element width]."""
    rng = np.random.default_rng(7)
    return {each.name: rng.integers(0, 256, (*each.shape, DTYPE_BYTES[each.dtype]), dtype=np.uint8) for each in tensors}


def wire(pieces: list[tuple[TensorMeta, Box]], data: dict[str, np.ndarray]) -> bytes:
    return b"".join(
        np.ascontiguousarray(data[tensor.name][tuple(slice(*axis) for axis in box)]).tobytes() for tensor, box in pieces
    )


@given(tensors())
def test_layout_is_compatible_with_safetensors_in_both_directions(
    tmp_path_factory: pytest.TempPathFactory, metas: list[TensorMeta]
) -> None:
    folder = tmp_path_factory.mktemp("files")
    layout = lay_out(metas)
    data = {
        each.name: np.arange(int(np.prod(each.shape, dtype=int))).reshape(each.shape).astype(DTYPES[each.dtype])
        for each in metas
    }
    image = bytearray(layout.bytes)
    image[: len(layout.header)] = layout.header
    for each in metas:
        image[layout.places[each.name] : layout.places[each.name] + each.bytes] = data[each.name].tobytes()
    (folder / "ours.safetensors").write_bytes(image)
    loaded = load_file(folder / "ours.safetensors")
    assert loaded.keys() == data.keys()
    for name, array in data.items():
        assert loaded[name].dtype == array.dtype
        assert np.array_equal(loaded[name], array)
    assert read_layout(folder / "ours.safetensors") == layout

    save_file(data, folder / "theirs.safetensors")
    theirs = read_layout(folder / "theirs.safetensors")
    raw = (folder / "theirs.safetensors").read_bytes()
    assert list(theirs.tensors) == metas
    for each in metas:
        place = theirs.places[each.name]
        assert raw[place : place + each.bytes] == data[each.name].tobytes()


@given(st.data())
def test_runs_of_every_range_agree_with_numpy(data: st.DataObject) -> None:
    metas = data.draw(tensors())
    boxed = data.draw(st.lists(st.sampled_from(metas), min_size=1, max_size=5))
    pieces = [(tensor, box_of(data.draw, tensor.whole)) for tensor in boxed]
    contents, layout = values(metas), lay_out(metas)
    image = np.zeros(layout.bytes, dtype=np.uint8)
    for each in metas:
        image[layout.places[each.name] : layout.places[each.name] + each.bytes] = contents[each.name].ravel()
    shard, expected = shard_of(pieces), wire(pieces, contents)
    assert faults_of_shard(shard, {each.name: each for each in metas}, 4) == []
    runs = locate(shard, {each.name: each for each in metas}, [SourceFile(0, layout.places)])
    check(data, runs, [image], expected)


@given(st.data())
def test_box_in_several_files_is_assembled(data: st.DataObject) -> None:
    """Each tensor is staged as a grid of boxes, distributed over files with different tensors."""
    metas = data.draw(tensors())
    files = data.draw(st.integers(1, 3))
    boxes: list[dict[str, tuple[Box, ...]]] = [{} for _ in range(files)]
    for tensor in metas:
        cuts = [
            sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=2))}) for length in tensor.shape
        ]
        for cell in itertools.product(*(list(itertools.pairwise(cut)) for cut in cuts)):
            mine = boxes[data.draw(st.integers(0, files - 1))]
            mine[tensor.name] = (*mine.get(tensor.name, ()), cell)
    contents = values(metas)
    sources, images = [], []
    for number, own in enumerate(boxes):
        layout = lay_out([each for each in metas if each.name in own])
        image = np.zeros(layout.bytes, dtype=np.uint8)
        for each in layout.tensors:
            view = image[layout.places[each.name] :][: each.bytes].reshape((*each.shape, -1))
            for box in own[each.name]:
                place = tuple(slice(*axis) for axis in box)
                view[place] = contents[each.name][place]
        sources.append(SourceFile(number, layout.places, own))
        images.append(image)
    tensor = data.draw(st.sampled_from(metas))
    pieces = [(tensor, box_of(data.draw, tensor.whole))]
    runs = locate(shard_of(pieces), {each.name: each for each in metas}, sources)
    check(data, runs, images, wire(pieces, contents))


def expanded_runs(runs: ShardRuns, offset: int, size: int) -> list[tuple[int, int, int]]:
    """Return (file, offset, length) of each row, in the order of the shard's bytes."""
    rows = [
        (run.at + number * run.period, run.file, run.start + number * run.stride, run.length)
        for run in runs.pieces(offset, size)
        for number in range(run.times)
    ]
    return [(file, start, length) for _, file, start, length in sorted(rows)]


def check(data: st.DataObject, runs: ShardRuns, images: list[np.ndarray], expected: bytes) -> None:
    offset = data.draw(st.integers(0, len(expected) - 1))
    size = data.draw(st.integers(1, len(expected) - offset))
    wanted = expected[offset : offset + size]
    found = np.zeros(size, dtype=np.uint8)
    gather(images, runs.pieces(offset, size), found)
    assert found.tobytes() == wanted
    expanded = expanded_runs(runs, offset, size)
    assert b"".join(images[file][start : start + length].tobytes() for file, start, length in expanded) == wanted
    if single := runs.single(offset, size):
        assert images[single[0]][single[1] : single[1] + size].tobytes() == wanted
    empty = [np.zeros_like(image) for image in images]
    scatter(empty, runs.pieces(offset, size), np.frombuffer(wanted, dtype=np.uint8))
    gather(empty, runs.pieces(offset, size), found)
    assert found.tobytes() == wanted
    for file in range(len(images)):
        touched = np.zeros(len(images[file]), dtype=bool)
        for first, last in zip(*runs.spans(file), strict=True):
            touched[first:last] = True
        for at, start, length in expanded:
            assert at != file or touched[start : start + length].all()


def test_unstaged_box_is_reported() -> None:
    tensor = TensorMeta("w", "F32", (4, 4))
    shard = shard_of([(tensor, tensor.whole)])
    half = SourceFile(0, lay_out([tensor]).places, {"w": (((0, 2), (0, 4)),)})
    with pytest.raises(ValueError, match=r"tensor w: a part of box \(\(0, 4\), \(0, 4\)\) is not staged on this host"):
        locate(shard, {"w": tensor}, [half])


def test_runs_are_few_for_large_matrices_and_small_tensors() -> None:
    wide = TensorMeta("wide", "BF16", (100_000, 8192))
    runs = locate(shard_of([(wide, ((0, 100_000), (1024, 2048)))]), {"wide": wide}, [SourceFile(0, {"wide": 8})])
    assert len(list(runs.pieces(0, runs.bytes))) == 1
    assert len(list(runs.pieces(1000, 4 << 20))) == 3
    norms = [TensorMeta(f"norm{number}", "F32", (64,)) for number in range(10)]
    runs = locate(
        shard_of([(norm, norm.whole) for norm in norms]),
        {norm.name: norm for norm in norms},
        [SourceFile(0, lay_out(norms).places)],
    )
    assert runs.single(0, runs.bytes) is not None


def test_faults_of_a_shard_are_reported_together() -> None:
    tensor = TensorMeta("w", "F32", (4,))
    slices = (ShardSlice("x", ((0, 4),), 0, 16), ShardSlice("w", ((0, 5),), 0, 20), ShardSlice("w", ((0, 4),), 8, 16))
    faults = faults_of_shard(ShardMap("s", 16, slices, ("a",)), {"w": tensor}, 4)
    assert [fault.split(":")[0] for fault in faults] == [
        "shards.s.slices[0].parameter",
        "shards.s.slices[1].box",
        "shards.s.slices[2]",
        "shards.s.sums",
    ]


def test_box_with_too_many_row_groups_is_refused() -> None:
    tensor = TensorMeta("w", "U8", (1 << 23, 3, 3, 3))
    shard = shard_of([(tensor, ((0, 1 << 23), (0, 2), (0, 2), (0, 2)))])
    assert faults_of_shard(shard, {"w": tensor}, 4) == [
        f"shards.s.slices: must have at most {1 << 22} groups of rows, got {1 << 24}"
    ]


@pytest.mark.parametrize(
    "text", [b"", b"1234567", b"\xff" * 16, b"\x02" + b"\0" * 7 + b"[]", b"\x0e" + b"\0" * 7 + b'{"a":{"b":1}} ']
)
def test_file_that_is_not_safetensors_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(text)
    with pytest.raises(ValueError, match=r"x\.safetensors is not a usable safetensors file"):
        read_layout(tmp_path / "x.safetensors")


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(0, 12)), max_size=20))
def test_byte_ranges_behave_like_a_set_of_bytes(steps: list[tuple[bool, int, int]]) -> None:
    ranges, there = ByteRanges(), set[int]()
    for is_added, offset, size in steps:
        if is_added:
            ranges.add(offset, size)
            there |= set(range(offset, offset + size))
        else:
            ranges.remove(offset, size)
            there -= set(range(offset, offset + size))
        gaps = ranges.gaps(42)
        assert {at for first, length in gaps for at in range(first, first + length)} == set(range(42)) - there
        assert all(a + b < c for (a, b), (c, _) in itertools.pairwise(gaps))
        assert ranges.covers(offset, size) == (set(range(offset, offset + size)) <= there)


def test_run_before_a_range_is_not_part_of_it() -> None:
    """One of three files has most rows of a column, the others the rest; the range is behind the second one."""
    tensor = TensorMeta("w", "U8", (10, 10))
    boxes = (((0, 10), (0, 4)),), (((0, 2), (4, 10)),), (((2, 10), (4, 10)),)
    sources = [SourceFile(number, {"w": 0}, {"w": own}) for number, own in enumerate(boxes)]
    runs = locate(shard_of([(tensor, tensor.whole)]), {"w": tensor}, sources)
    for offset, end in itertools.combinations(range(101), 2):
        expanded = expanded_runs(runs, offset, end - offset)
        assert [at for _, start, length in expanded for at in range(start, start + length)] == list(range(offset, end))
