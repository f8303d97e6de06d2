"""Read, check and checksum the safetensors files of a folder without copying them.

This module is used in engine processes and in OrchestrRL's own processes. It needs only the standard library, and uses
xxhash if installed. The format is described at https://huggingface.co/docs/safetensors. A file contains the length of
the header in 8 bytes, a JSON header, and the data.
"""

import errno
import hashlib
import json
import mmap
import os
import struct
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

try:
    import xxhash
except ImportError:  # an engine's environment may not have it
    xxhash = None  # type: ignore[assignment]

INDEX_FILE = "model.safetensors.index.json"
MODEL_FILE = "model.safetensors"
ITEM_BITS: Mapping[str, int] = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
}  # fmt: skip
MOST_HEADER_BYTES = 100_000_000  # the limit of safetensors
MOST_THREADS = 4
ZEROS = memoryview(bytes(1 << 20))
MOST_NAMED = 5  # differences listed in one message


class BrokenCheckpoint(ValueError):
    """Raised if a folder does not contain a complete checkpoint, or the checkpoint is of another model."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a safetensors file: bytes [begin, end) of `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int


def read_checkpoint(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a folder, sorted by name. Raises BrokenCheckpoint if the folder does not contain a complete
    checkpoint, for example because a file is truncated."""
    found: dict[str, StoredTensor] = {}
    try:
        for file in _files(folder):
            for stored in read_header(file):
                if stored.name in found:
                    raise BrokenCheckpoint(f"{file}: tensor {stored.name} is also in {found[stored.name].file.name}")
                found[stored.name] = stored
    except OSError as error:
        raise BrokenCheckpoint(f"cannot read {folder}: {error}") from error
    if not found:
        raise BrokenCheckpoint(f"{folder} has no tensors")
    return dict(sorted(found.items()))


def shapes_of(tensors: Mapping[str, StoredTensor]) -> dict[str, tuple[int, ...]]:
    return {name: stored.shape for name, stored in tensors.items()}


def check_same_model(given: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raise BrokenCheckpoint unless `given` has exactly the tensors and shapes of the model (`wanted`). An additional
    `lm_head.weight` is allowed, because engines ignore it if the head is tied to the embedding."""
    faults = [f"lacks {name}" for name in wanted if name not in given]
    for name, shape in given.items():
        if name not in wanted:
            if name != "lm_head.weight":
                faults.append(f"has {name}, which the model does not have")
        elif shape != wanted[name]:
            faults.append(f"has {name} with shape {list(shape)}, but the model has {list(wanted[name])}")
    if faults:
        more = f" and {len(faults) - MOST_NAMED} more" if len(faults) > MOST_NAMED else ""
        raise BrokenCheckpoint("; ".join(faults[:MOST_NAMED]) + more)


def mapped(tensors: Mapping[str, StoredTensor]) -> dict[str, memoryview]:
    """Memory-map the files of the tensors, and return each tensor's bytes by name. The bytes are read on access. The
    mapping is copy-on-write and lives as long as its views."""
    maps: dict[Path, memoryview] = {}
    for file in {stored.file: None for stored in tensors.values()}:
        with file.open("rb") as opened:
            maps[file] = memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY))
    return {name: maps[stored.file][stored.begin : stored.end] for name, stored in tensors.items()}


def content_sum(tensors: Mapping[str, StoredTensor], data: Mapping[str, memoryview]) -> str:
    """Return a checksum of the tensors' names, dtypes, shapes and bytes, as `ALGORITHM:HEX`. The checksum does not
    depend on how the tensors are distributed over files. Holes are hashed as zeros and are not read, because reading
    them on a tmpfs would allocate memory, perhaps more than the tmpfs may use."""
    written = {file: written_ranges(file) for file in {stored.file for stored in tensors.values()}}

    def one(name: str) -> str:
        return _digest(data[name], written[tensors[name].file], tensors[name].begin)

    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as threads:
        sums = list(threads.map(one, sorted(tensors)))
    lines = [
        f"{name} {tensors[name].dtype} {list(tensors[name].shape)} {one}\n"
        for name, one in zip(sorted(tensors), sums, strict=True)
    ]
    text = "".join(lines).encode()
    return f"{ALGORITHM}:{_digest(text, [(0, len(text))], 0)}"


def folder_sum(folder: Path) -> str:
    """Return the `content_sum` of a checkpoint's folder. Raises BrokenCheckpoint if the folder does not contain a
    complete checkpoint."""
    tensors = read_checkpoint(folder)
    return content_sum(tensors, mapped(tensors))


ALGORITHM = "blake2b_64" if xxhash is None else "xxh3_64"


def _digest(data: memoryview | bytes, written: Sequence[tuple[int, int]], begin: int) -> str:
    """Return the digest of `data`, which begins at offset `begin` of its file. `written` lists the ranges of the file
    that are not holes. Holes are hashed as zeros."""
    digest: Any = hashlib.blake2b(digest_size=8) if xxhash is None else xxhash.xxh3_64()
    at, end = begin, begin + len(data)
    for first, last in written[max(0, bisect_right(written, (begin,)) - 1) :]:
        if first >= end:
            break
        if at < min(last, end):
            _zeros(digest, first - at)
            at = max(at, first)
            digest.update(data[at - begin : min(last, end) - begin])
            at = min(last, end)
    _zeros(digest, end - at)
    return str(digest.hexdigest())


def _zeros(digest: Any, size: int) -> None:
    for left in range(size, 0, -len(ZEROS)):
        digest.update(ZEROS[:left])


def written_ranges(file: Path) -> list[tuple[int, int]]:
    """Return the (start, end) of each range of the file that is not a hole, sorted by start. If the file system does
    not report holes, the only range is the whole file."""
    found: list[tuple[int, int]] = []
    with file.open("rb") as opened:
        at, size = 0, os.fstat(opened.fileno()).st_size
        while at < size:
            try:
                first = os.lseek(opened.fileno(), at, os.SEEK_DATA)
                at = os.lseek(opened.fileno(), first, os.SEEK_HOLE)
            except OSError as error:
                # ENXIO: no more data. Otherwise the file system does not report holes.
                return found if error.errno == errno.ENXIO else [(0, size)]
            found.append((first, at))
    return found


def _files(folder: Path) -> list[Path]:
    """Return the checkpoint's files. These are the files in the index if there is an index, else model.safetensors if
    that file exists, else all safetensors files. Raises BrokenCheckpoint if the index is invalid."""
    if (folder / INDEX_FILE).is_file():
        try:
            names = set(json.loads((folder / INDEX_FILE).read_text())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BrokenCheckpoint(f"{folder / INDEX_FILE} is not a valid index: {error!r}") from error
        return [folder / str(name) for name in sorted(names)]
    if (folder / MODEL_FILE).is_file():
        return [folder / MODEL_FILE]
    return sorted(folder.glob("*.safetensors"))


def read_header(file: Path) -> list[StoredTensor]:
    """Return the tensors of one file. Raises BrokenCheckpoint if the file is truncated or not a safetensors file, and
    OSError if it cannot be read."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else MOST_HEADER_BYTES + 1
        if length > min(MOST_HEADER_BYTES, size - 8):
            raise BrokenCheckpoint(f"{file} is truncated or is not a safetensors file (it has {size} bytes)")
        text = opened.read(length)
    try:
        header: dict[str, Any] = json.loads(text)
        header.pop("__metadata__", None)
        tensors = [_stored(name, told, file, 8 + length) for name, told in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BrokenCheckpoint(f"cannot parse the header of {file}: {error!r}") from error
    if (end := max((stored.end for stored in tensors), default=0)) > size:
        raise BrokenCheckpoint(f"{file} is truncated: its tensors end at byte {end}, but it has {size} bytes")
    return tensors


def _stored(name: str, told: Mapping[str, Any], file: Path, base: int) -> StoredTensor:
    begin, end = (int(place) for place in told["data_offsets"])
    stored = StoredTensor(name, str(told["dtype"]), tuple(map(int, told["shape"])), file, base + begin, base + end)
    if begin < 0 or (end - begin) * 8 != ITEM_BITS[stored.dtype] * prod(stored.shape):
        raise ValueError(
            f"tensor {name}: bytes {begin} to {end} do not match dtype {stored.dtype} and shape {list(stored.shape)}"
        )
    return stored
