"""Weights of a simulated engine: safetensors files in a folder. The tokens that the engine generates depend on every
byte of these files."""

from dataclasses import dataclass
from pathlib import Path

from orchestrrl.core.errors import Permanent
from orchestrrl.integrations.instrument.checkpoint_files import (
    BrokenCheckpoint,
    content_sum,
    mapped,
    read_checkpoint,
    shapes_of,
)
from orchestrrl.lab.simulated_engine.options import SimulatedOptions
from orchestrrl.lab.simulated_engine.tokens import TokenModel

WRONG = 0xBAD  # XORed to the seed of an engine with the fault `wrong_answers`


@dataclass(frozen=True, slots=True)
class SimulatedWeights:
    """The weights in a folder. `seed` is derived from their bytes, `sum` is their checksum, and `shapes` contains the
    shape of each tensor."""

    seed: int
    sum: str
    shapes: dict[str, tuple[int, ...]]


def read_weights(folder: Path) -> SimulatedWeights:
    """Read the weights in a folder. Raises Permanent if the folder is not a valid checkpoint."""
    if not folder.is_dir():
        raise Permanent(f"{folder}: must be a folder")
    try:
        tensors = read_checkpoint(folder)
        content = content_sum(tensors, mapped(tensors))
    except BrokenCheckpoint as fault:
        raise Permanent(str(fault)) from fault
    return SimulatedWeights(int(content.rpartition(":")[2], 16), content, shapes_of(tensors))


def model_of(options: SimulatedOptions, seed: int) -> TokenModel:
    return TokenModel(options.vocab_size, options.lengths, seed ^ WRONG if options.wrong_answers else seed)
