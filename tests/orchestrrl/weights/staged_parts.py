"""Read the parts that trainer ranks have staged, independently of the code that wrote them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from orchestrrl.weights.model import DTYPE_BYTES
from orchestrrl.weights.publication import Publication

Array = np.ndarray[Any, Any]


def tensors_in(path: Path) -> dict[str, Array]:
    """Return every tensor of a safetensors file as unsigned integers of the element width."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        first, last = (8 + length + at for at in entry["data_offsets"])
        plain = np.frombuffer(content[first:last], dtype=f"u{DTYPE_BYTES[entry['dtype']]}")
        found[name] = plain.reshape(entry["shape"])
    return found


def put_together(folders: Iterable[tuple[Path, Publication]]) -> tuple[dict[str, Array], dict[str, Array]]:
    """Assemble the parts of all ranks; return each whole tensor and how often each element occurs. Fails if overlapping
    parts differ."""
    whole: dict[str, Array] = {}
    times: dict[str, Array] = {}
    for folder, said in folders:
        there = tensors_in(folder / f"v{said.version}" / f"part-{said.rank}.safetensors")
        assert [tensor.name for tensor in said.tensors] == sorted(there) == sorted(said.boxes)
        for name, boxes in said.boxes.items():
            values = there[name]
            total = whole.setdefault(name, np.zeros_like(values))
            count = times.setdefault(name, np.zeros(values.shape, dtype=int))
            for box in boxes:
                at = (*(slice(first, last) for first, last in box), ...)
                assert np.array_equal(np.where(count[at], total[at], values[at]), values[at]), f"{name} {box}"
                total[at] = values[at]
                count[at] += 1
    return whole, times
