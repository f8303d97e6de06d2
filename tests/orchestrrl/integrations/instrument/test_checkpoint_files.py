"""Reading safetensors files: files of the safetensors library are read exactly, and incomplete files are refused."""

import json
import os
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from orchestrrl.integrations.instrument.checkpoint_files import (
    INDEX_FILE,
    MODEL_FILE,
    BrokenCheckpoint,
    check_same_model,
    content_sum,
    folder_sum,
    mapped,
    read_checkpoint,
    shapes_of,
)

TENSORS = {
    "b.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "a.weight": np.arange(6, dtype=np.int16).reshape(2, 3),
    "c.scale": np.array(2.5, dtype=np.float64),
}


def split(folder: Path, tensors: dict[str, np.ndarray], places: list[int]) -> Path:
    """Write a checkpoint divided into files, with an index like Hugging Face's."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        place: {name: t for (name, t), p in zip(tensors.items(), places, strict=True) if p == place} for place in places
    }
    for place, some in files.items():
        save_file(some, folder / f"model-{place}.safetensors")
    weight_map = {name: f"model-{place}.safetensors" for name, place in zip(tensors, places, strict=True)}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_files_of_safetensors_are_read_without_a_copy(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / MODEL_FILE)
    found = read_checkpoint(tmp_path)
    assert list(found) == sorted(TENSORS)
    data = mapped(found)
    for name, tensor in TENSORS.items():
        assert found[name].shape == tensor.shape
        assert bytes(data[name]) == tensor.tobytes()


@given(places=st.lists(st.integers(0, 2), min_size=3, max_size=3))
def test_content_sum_is_independent_of_files(places: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("split")
    save_file(TENSORS, folder / MODEL_FILE)
    assert folder_sum(split(folder / "split", TENSORS, places)) == folder_sum(folder)


@given(name=st.sampled_from(sorted(TENSORS)), place=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_content_sum_depends_on_every_bit(
    name: str, place: int, bit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("bit")
    save_file(TENSORS, folder / MODEL_FILE)
    found = read_checkpoint(folder)
    data = mapped(found)
    before = content_sum(found, data)
    data[name][place % len(data[name])] ^= 1 << bit  # only in memory
    assert content_sum(found, data) != before
    assert folder_sum(folder) == before


@given(kept=st.floats(0, 1, exclude_max=True))
def test_truncated_file_is_refused(kept: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("cut")
    save_file(TENSORS, folder / MODEL_FILE)
    raw = (folder / MODEL_FILE).read_bytes()
    (folder / MODEL_FILE).write_bytes(raw[: int(len(raw) * kept)])
    with pytest.raises(BrokenCheckpoint):
        read_checkpoint(folder)


def headed(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    "content",
    [
        headed(b"{"),
        headed([]),
        headed({"a": 5}),
        headed({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}, bytes(8)),
        headed({"a": {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]}}, bytes(8)),
        headed({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, bytes(8)),
        headed({}),
        struct.pack("<Q", 1 << 60) + bytes(100),
    ],
)
def test_file_that_is_not_safetensors_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / MODEL_FILE).write_bytes(content)
    with pytest.raises(BrokenCheckpoint):
        read_checkpoint(tmp_path)


def test_duplicate_names_and_broken_indexes_are_refused(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "one.safetensors")
    save_file(TENSORS, tmp_path / "two.safetensors")
    with pytest.raises(BrokenCheckpoint, match="is also in one"):
        read_checkpoint(tmp_path)
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a.weight": "three.safetensors"}}))
    with pytest.raises(BrokenCheckpoint, match="cannot read "):
        read_checkpoint(tmp_path)
    (tmp_path / INDEX_FILE).write_text("[]")
    with pytest.raises(BrokenCheckpoint, match="not a valid index"):
        read_checkpoint(tmp_path)


def test_checkpoint_must_match_the_model_except_for_a_tied_head(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / MODEL_FILE)
    wanted = shapes_of(read_checkpoint(tmp_path))
    check_same_model(wanted, wanted)
    check_same_model({**wanted, "lm_head.weight": (3, 4)}, wanted)
    with pytest.raises(BrokenCheckpoint, match=r"lacks c\.scale; has b\.weight with shape \[4, 3\].*; has d, which"):
        check_same_model({"a.weight": (2, 3), "b.weight": (4, 3), "d": (1,)}, wanted)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a folder in memory")
def test_content_sum_counts_holes_as_zeros_without_filling_them() -> None:
    """A host with a part of the weights may not have space for the rest."""
    rows, columns, page = 600, 64, 4096
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        save_file({"a": np.zeros((rows, columns, 64), np.uint8), "b": np.zeros(7, np.uint8)}, folder / MODEL_FILE)
        content = bytearray((folder / MODEL_FILE).read_bytes())
        (folder / "whole").mkdir()
        with (folder / MODEL_FILE).open("wb") as file:
            file.truncate(len(content))
            for first in (0, 40 * page + 17, 41 * page + 5, 300 * page):
                content[first + 5000 : first + 5010] = b"0123456789"
                os.pwrite(file.fileno(), content[first : first + 6000], first)
        (folder / "whole" / MODEL_FILE).write_bytes(content)
        before = (folder / MODEL_FILE).stat().st_blocks * 512
        assert before < len(content) / 10
        assert folder_sum(folder) == folder_sum(folder / "whole")
        assert (folder / MODEL_FILE).stat().st_blocks * 512 == before
