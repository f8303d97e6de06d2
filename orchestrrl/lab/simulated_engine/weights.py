"""The weights of a simulated engine.

A folder holds safetensors files, of which every byte is read, and its tokens then depend on every byte; or a file
`simulated.json` that names a seed, e.g. `{"seed": 7}`.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from orchestrrl.core.errors import Permanent, shorten
from orchestrrl.integrations.instrument.checkpoint_files import (
    BrokenCheckpoint,
    content_sum,
    mapped,
    read_checkpoint,
    shapes_of,
)
from orchestrrl.lab.simulated_engine.options import SimulatedOptions
from orchestrrl.lab.simulated_engine.tokens import TokenModel

WEIGHTS_FILE = "simulated.json"
WRONG = 0xBAD  # to the seed of an engine that answers wrongly


@dataclass(frozen=True, slots=True)
class SimulatedWeights:
    """What a folder holds. Without tensors it has a seed alone."""

    seed: int
    sum: str
    bytes: int
    shapes: dict[str, tuple[int, ...]]


def read_weights(folder: Path) -> SimulatedWeights:
    """Raises Permanent."""
    if (folder / WEIGHTS_FILE).exists() or not any(folder.glob("*.safetensors*")):
        seed = _read_seed(folder / WEIGHTS_FILE)
        return SimulatedWeights(seed, f"seed:{seed}", 0, {})
    try:
        tensors = read_checkpoint(folder)
        content = content_sum(tensors, mapped(tensors))
    except BrokenCheckpoint as fault:
        raise Permanent(str(fault)) from fault
    data_bytes = sum(stored.end - stored.begin for stored in tensors.values())
    return SimulatedWeights(int(content.rpartition(":")[2], 16), content, data_bytes, shapes_of(tensors))


def _read_seed(file: Path) -> int:
    try:
        told = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise Permanent(f"{file}: cannot be read: {error}") from error
    seed = told.get("seed") if isinstance(told, dict) else None
    if not isinstance(seed, int):
        raise Permanent(f'{file}: must be like {{"seed": 7}}, got {shorten(told)}')
    return seed


def first_model(options: SimulatedOptions) -> TokenModel:
    """Of the weights that it begins with. Raises Permanent where they cannot be read."""
    return model_of(options, options.seed if options.weights is None else read_weights(options.weights).seed)


def model_of(options: SimulatedOptions, seed: int) -> TokenModel:
    return TokenModel(options.vocab_size, options.lengths, seed ^ WRONG if options.wrong_answers else seed)
