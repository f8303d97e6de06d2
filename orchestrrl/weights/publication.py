"""What one trainer rank tells the daemon of a version that it has staged. A value and its JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pydantic import TypeAdapter

from orchestrrl.weights.model import MOST_BYTES, MOST_SECONDS, MOST_VERSION, TensorMeta, Tokens
from planner.model import PeerId
from planner.sync_tree.parameters import Box

MOST_RANKS = 2**20  # of one trainer
NOT_ATTACHED = "peer: is not attached"  # how the daemon's word begins while a rank's peer is away


@dataclass(frozen=True, slots=True)
class Publication:
    """`tensors` are those of which this rank has something, whole; `boxes` what it has of each. Several ranks may have
    the same.

    `install`: "at_once": when all bytes are everywhere the pause barrier is closed for it; "next_pause": the trainer
    goes on, and engines take it when the pause barrier is closed next, or is to be opened again; empty: as is
    configured. `expected`: tokens that the trainer's own model goes on with from `probe`, greedily, where it says so.
    `run`: what all ranks call this time that the version is published. Under another name it is published anew, by a
    trainer that was started again or tries again: these are other bytes, whose parts do not go together with those of
    before. The same under the same name was sent again as its answer was lost. `tensors` is empty where others of the
    rank's host have staged all that it has.
    """

    version: int
    rank: int
    world: int
    peer: PeerId
    tensors: tuple[TensorMeta, ...]
    boxes: Mapping[str, tuple[Box, ...]]
    install: Literal["", "at_once", "next_pause"] = ""
    backend: str = "tree"
    began_s: float = 0.0  # seconds since the Unix epoch
    offload_s: float = 0.0
    gather_s: float = 0.0
    probe: Tokens = ()
    expected: Tokens = ()
    options: Mapping[str, str] = field(default_factory=dict)  # of the backend
    run: str = ""

    def __post_init__(self) -> None:
        faults = []
        if self.version < 0:
            faults.append(f"version: must be >= 0, got {self.version}")
        if self.version > MOST_VERSION:
            faults.append(f"version: must be <= {MOST_VERSION}, got {self.version}")
        if self.world > MOST_RANKS:
            faults.append(f"world: must be <= {MOST_RANKS}, got {self.world}")
        for name in ("began_s", "offload_s", "gather_s"):
            if not 0 <= (value := getattr(self, name)) <= MOST_SECONDS:
                faults.append(f"{name}: must be >= 0 and <= {MOST_SECONDS:.0f}, got {value}")
        if not 0 <= self.rank < self.world:
            faults.append(f"rank: must be >= 0 and below world {self.world}, got {self.rank}")
        if (size := sum(tensor.bytes for tensor in self.tensors)) > MOST_BYTES:
            faults.append(f"tensors: must have at most {MOST_BYTES} bytes together, got {size}")
        known = {tensor.name: tensor for tensor in self.tensors}
        for name, boxes in self.boxes.items():
            for box in boxes:
                if (tensor := known.get(name)) is None:
                    faults.append(f"boxes.{name}: is not one of tensors")
                elif not tensor.has(box):
                    faults.append(f"boxes.{name}: must be within {tensor.shape}, got {box}")
        if faults:
            raise ValueError("; ".join(faults))


PUBLICATION: TypeAdapter[Publication] = TypeAdapter(Publication)
