"""The staged file of a rank: written atomically, with holes for other ranks' bytes, and within the free space."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from orchestrrl.core.errors import Permanent
from orchestrrl.weights.layout import Bytes
from orchestrrl.weights.model import ShardMap, TensorMeta, VersionMap
from orchestrrl.weights.orders import OpenVersion
from orchestrrl.weights.peer.store import VersionStore
from orchestrrl.weights.staging_hold import nobody_stages
from orchestrrl.weights.trainer.boxes import TensorPiece
from orchestrrl.weights.trainer.staging import ArrayCopies, stage
from planner.sync_tree.parameters import Box
from planner.sync_tree.reshard import ShardSlice
from tests.orchestrrl.weights.staged_parts import tensors_in


def piece(name: str, whole: np.ndarray[Any, Any], *box: tuple[int, int], dtype: str = "") -> TensorPiece:
    meta = TensorMeta(name, dtype or f"F{whole.dtype.itemsize * 8}", tuple(whole.shape))
    chosen: Box = box or meta.whole
    return TensorPiece(meta, chosen, whole[tuple(slice(*each) for each in chosen)])


def test_staged_whole_tensors_form_a_safetensors_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    tensors = {
        "b.weight": rng.normal(size=(5, 7)).astype(np.float32),
        "a.weight": rng.normal(size=(3,)).astype(np.float16),
        "scalar": np.array(2.5, np.float64),
        "transposed": rng.normal(size=(4, 6)).astype(np.float32).T,
    }
    staged = stage(tmp_path, 3, 0, 1, [piece(name, values) for name, values in tensors.items()], ArrayCopies())
    read = safetensors.numpy.load_file(tmp_path / "v3" / staged.part.file)
    assert sorted(read) == sorted(tensors)
    assert all(np.array_equal(read[name], values) for name, values in tensors.items())
    assert os.listdir(tmp_path / "v3") == ["part-0.safetensors"]


def test_dtype_without_numpy_equivalent_is_staged(tmp_path: Path) -> None:
    halves, eighths = np.arange(6, dtype=np.uint16), np.arange(5, dtype=np.uint8)
    stage(tmp_path, 1, 0, 1, [piece("b", halves, dtype="BF16"), piece("f", eighths, dtype="F8_E4M3")], ArrayCopies())
    read = tensors_in(tmp_path / "v1" / "part-0.safetensors")
    assert np.array_equal(read["b"], halves)
    assert np.array_equal(read["f"], eighths)
    with pytest.raises(Permanent, match="values of dtype float32 cannot be copied as BF16"):
        stage(tmp_path, 1, 0, 1, [piece("b", np.zeros(2, np.float32), dtype="BF16")], ArrayCopies())


@pytest.mark.parametrize("box", [((0, 16), (0, 65536)), ((120, 128), (0, 65536)), ((0, 128), (65000, 65300))], ids=repr)
def test_missing_boxes_are_holes(box: Box, tmp_path: Path) -> None:
    whole = np.random.default_rng(2).normal(size=(128, 65536)).astype(np.float32)
    staged = stage(tmp_path, 1, 0, 2, [piece("w", whole, *box)], ArrayCopies())
    file = tmp_path / "v1" / staged.part.file
    assert file.stat().st_size > whole.nbytes
    assert file.stat().st_blocks * 512 <= whole.nbytes // 4  # file systems differ in their block size
    read = tensors_in(file)["w"]
    there = tuple(slice(*each) for each in box)
    assert np.array_equal(read[there], whole[there].view(np.uint32))
    read = read.copy()
    read[there] = 0
    assert not read.any()


class Dies(ArrayCopies):
    def copy(self, piece: TensorPiece, into: Bytes) -> None:
        super().copy(piece, into)
        raise KeyboardInterrupt


def test_folder_is_held_until_release_and_not_after_a_failure(tmp_path: Path) -> None:
    class Fails(ArrayCopies):
        def copy(self, piece: TensorPiece, into: Bytes) -> None:
            raise Permanent("no")

    with pytest.raises(Permanent, match="no") as failed:
        stage(tmp_path, 1, 0, 1, [piece("w", np.zeros(3))], Fails())
    with nobody_stages(tmp_path / "v1") as is_left:
        assert is_left, failed
    staged = stage(tmp_path, 1, 0, 1, [piece("w", np.zeros(3))], ArrayCopies())
    with nobody_stages(tmp_path / "v1") as is_left:
        assert not is_left
    staged.hold.let_go()
    with nobody_stages(tmp_path / "v1") as is_left:
        assert is_left


def test_interrupted_staging_keeps_the_previous_part(tmp_path: Path) -> None:
    first, second = np.zeros(5, np.float32), np.ones(7, np.float32)
    with pytest.raises(KeyboardInterrupt):
        stage(tmp_path, 1, 0, 1, [piece("w", first)], Dies())
    assert os.listdir(tmp_path / "v1") == []
    stage(tmp_path, 1, 0, 1, [piece("w", first)], ArrayCopies())
    with (tmp_path / "v1" / "part-0.safetensors").open("rb") as peers:
        with pytest.raises(KeyboardInterrupt):
            stage(tmp_path, 1, 0, 1, [piece("w", second)], Dies())
        assert tensors_in(tmp_path / "v1" / "part-0.safetensors")["w"].shape == (5,)
        stage(tmp_path, 1, 0, 1, [piece("w", second)], ArrayCopies())
        assert len(peers.read()) < (tmp_path / "v1" / "part-0.safetensors").stat().st_size  # its own part is untouched
    assert tensors_in(tmp_path / "v1" / "part-0.safetensors")["w"].shape == (7,)


def test_files_of_killed_trainers_are_deleted(tmp_path: Path) -> None:
    home = tmp_path / "v4"
    home.mkdir()
    for name in ("part-0.safetensors.1-2", ".part-0.safetensors.77-abc", ".part-1.safetensors.78-abc"):
        (home / name).write_bytes(b"half")
    for rank in (0, 1, 2, 10):
        (home / f"part-{rank}.safetensors").write_bytes(b"old")
    stage(tmp_path, 4, 0, 2, [piece("w", np.zeros(3))], ArrayCopies())
    # Another rank may be writing its part.
    assert sorted(os.listdir(home)) == [
        ".part-1.safetensors.78-abc",
        "part-0.safetensors",
        "part-0.safetensors.1-2",
        "part-1.safetensors",
    ]


def test_free_space_is_checked_before_writing(tmp_path: Path) -> None:
    huge = np.broadcast_to(np.float32(0), (1 << 20, 1 << 24))  # 70 TB, all elements equal
    with pytest.raises(Permanent, match=r"not enough space to stage 70368\.744 GB .*/dev/shm"):
        stage(tmp_path, 1, 0, 1, [piece("w", huge)], ArrayCopies())
    assert os.listdir(tmp_path / "v1") == []


def test_space_lost_while_staging_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(Permanent, match="not enough space to stage"):
        stage(tmp_path, 1, 0, 1, [piece("w", np.zeros(3))], ArrayCopies())
    assert os.listdir(tmp_path / "v1") == []


def test_unwritable_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Permanent, match="configure a folder that the trainer and its peer share"):
        stage(tmp_path / "file", 1, 0, 1, [piece("w", np.zeros(3))], ArrayCopies())


def test_peer_reads_the_staged_parts(tmp_path: Path) -> None:
    """Two ranks stage rows of one matrix and columns of another; the peer sends and installs whole tensors."""
    rng = np.random.default_rng(3)
    whole = {"rows": rng.normal(size=(9, 5)).astype(np.float32), "columns": rng.normal(size=(4, 6)).astype(np.float32)}
    peer = VersionStore(tmp_path)
    boxes = (((0, 5), (0, 5)), ((0, 4), (0, 2))), (((5, 9), (0, 5)), ((0, 4), (2, 6)))
    parts = [
        stage(
            tmp_path, 6, rank, 2, [piece("rows", whole["rows"], *rows), piece("columns", whole["columns"], *columns)],
            ArrayCopies(),
        ).part
        for rank, (rows, columns) in enumerate(boxes)
    ]  # fmt: skip
    slices, at = [], 0
    for name in sorted(whole):
        box = tuple((0, length) for length in whole[name].shape)
        slices.append(ShardSlice(name, box, at, whole[name].nbytes))
        at += whole[name].nbytes
    tensors = tuple(TensorMeta(name, "F32", whole[name].shape) for name in sorted(whole))
    staged = peer.open(OpenVersion(VersionMap(6, tensors, (ShardMap("all", at, tuple(slices)),), 64), tuple(parts)))
    assert staged.missing() == {}
    wire = bytearray(at)
    staged.read("all", 0, memoryview(wire))
    assert bytes(wire) == whole["columns"].tobytes() + whole["rows"].tobytes()
    peer.close()


def test_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/shm is world-writable, so another user may have created the folder."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(Permanent, match="is a symbolic link or belongs to another user"):
        stage(tmp_path / "link", 1, 0, 1, [piece("w", np.zeros(3))], ArrayCopies())
    monkeypatch.setattr(os, "getuid", lambda: (tmp_path / "mine").stat().st_uid + 1)
    with pytest.raises(Permanent, match="is a symbolic link or belongs to another user"):
        stage(tmp_path / "mine", 1, 0, 1, [piece("w", np.zeros(3))], ArrayCopies())
    assert os.listdir(tmp_path / "mine") == []


def test_tensor_name_must_not_be_the_metadata_key() -> None:
    with pytest.raises(ValueError, match="must not be the metadata key of safetensors"):
        TensorMeta("__metadata__", "F32", (1,))
