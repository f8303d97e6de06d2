"""What trainer ranks publish of a version that they have staged: a value and its JSON, and what goes together. Pure."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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


@dataclass(slots=True)
class PublicationSet:
    """What ranks of one start of a trainer have published of one version so far."""

    by_rank: dict[int, Publication] = field(default_factory=dict)
    tensors: dict[str, tuple[TensorMeta, int]] = field(default_factory=dict)  # and the rank that published it first

    def takes(self, publication: Publication) -> bool:
        """Return whether a publication is of the same version and start of the trainer as those that are here."""
        other = next(iter(self.by_rank.values()), publication)
        return (other.version, other.run) == (publication.version, publication.run)

    def add(self, publication: Publication) -> None:
        """Add a publication without faults."""
        self.by_rank[publication.rank] = publication
        for tensor in publication.tensors:
            self.tensors.setdefault(tensor.name, (tensor, publication.rank))

    def faults(self, publication: Publication) -> list[str]:
        """Return what is wrong with a publication by itself, and beside those of other ranks. These agree among
        themselves, so it is compared with one of them: there may be thousands."""
        faults = [] if publication.tensors else ["tensors: must not be empty, got []"]
        names: set[str] = set()
        for place, tensor in enumerate(publication.tensors):
            if tensor.name in names:
                faults.append(f"tensors[{place}].name: is there twice, got {tensor.name!r}")
            names.add(tensor.name)
        if publication.expected and not publication.probe:
            faults.append("probe: must be told where expected is, got []")
        other = next((each for each in self.by_rank.values() if each.rank != publication.rank), None)
        for name in ("world", "install", "backend", "probe", "expected", "options") if other is not None else ():
            one, two = getattr(other, name), getattr(publication, name)
            if one != two:
                faults.append(f"{name}: rank {other.rank if other else 0} has said {one!r}, got {two!r}")
        for place, tensor in enumerate(publication.tensors):
            before, rank = self.tensors.get(tensor.name, (tensor, publication.rank))
            if before != tensor and rank != publication.rank:
                faults.append(
                    f"tensors[{place}]: {tensor.name} is {before.dtype} {before.shape} of rank {rank},"
                    f" got {tensor.dtype} {tensor.shape}"
                )
        return faults


def fingerprint(publication: Publication) -> str:
    """Return the rank and a digest of what it published and by which start of the trainer, which do not depend on when
    it was staged."""
    timeless = replace(publication, began_s=0.0, offload_s=0.0, gather_s=0.0)
    return f"{publication.rank}:{hashlib.sha256(PUBLICATION.dump_json(timeless)).hexdigest()[:32]}"
