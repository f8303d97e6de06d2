"""Publications of trainer ranks: the data type, its JSON form, and the check that a version's publications agree."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from pydantic import TypeAdapter

from orchestrrl.weights.model import MOST_BYTES, MOST_SECONDS, MOST_VERSION, TensorMeta, Tokens
from planner.model import PeerId
from planner.sync_tree.parameters import Box

MOST_RANKS = 2**20  # of one trainer
NOT_ATTACHED = "peer: is not attached"  # prefix of the daemon's error while the peer of a rank is not attached


@dataclass(frozen=True, slots=True)
class Publication:
    """The part of a version that one trainer rank has staged and publishes.

    `world` is the number of publishing ranks. `tensors` has the whole shape of every tensor of which the rank staged a
    part, and must not be empty. `boxes` has the staged parts. Several ranks may stage the same box.

    `install` is "at_once" (the daemon closes the pause barrier as soon as all bytes have arrived), "next_pause" (the
    trainer continues, and engines install when the barrier is next closed or about to open), or empty (the configured
    value). `expected` are the tokens that the trainer's model generates greedily from `probe`, if the trainer sends
    them. `run` is common to all ranks of one attempt to publish. A restarted or retrying trainer uses another `run`,
    because its parts do not match earlier ones. A publication that arrives again with the same `run` is a resend.
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
            faults.append(f"rank: must be >= 0 and less than the world size ({self.world}), got {self.rank}")
        if (size := sum(tensor.bytes for tensor in self.tensors)) > MOST_BYTES:
            faults.append(f"tensors: must have at most {MOST_BYTES} bytes together, got {size}")
        known = {tensor.name: tensor for tensor in self.tensors}
        for name, boxes in self.boxes.items():
            for box in boxes:
                if (tensor := known.get(name)) is None:
                    faults.append(f"boxes.{name}: must be the name of a tensor in tensors")
                elif not tensor.has(box):
                    faults.append(f"boxes.{name}: must be within {tensor.shape}, got {box}")
        if faults:
            raise ValueError("; ".join(faults))


PUBLICATION: TypeAdapter[Publication] = TypeAdapter(Publication)


@dataclass(slots=True)
class PublicationSet:
    """The publications received so far from the ranks of one trainer. All are of one version and one attempt to publish
    it."""

    by_rank: dict[int, Publication] = field(default_factory=dict)
    tensors: dict[str, tuple[TensorMeta, int]] = field(default_factory=dict)  # and the first rank to publish it

    def takes(self, publication: Publication) -> bool:
        """Return whether a publication has the same version and the same `run` as the publications in the set. An empty
        set takes every publication."""
        other = next(iter(self.by_rank.values()), publication)
        return (other.version, other.run) == (publication.version, publication.run)

    def add(self, publication: Publication) -> None:
        """Add a publication for which `faults` returns an empty list."""
        self.by_rank[publication.rank] = publication
        for tensor in publication.tensors:
            self.tensors.setdefault(tensor.name, (tensor, publication.rank))

    def faults(self, publication: Publication) -> list[str]:
        """Return the faults of a publication, including contradictions to the other ranks' publications. Options are
        compared with those of one other rank only, because the options of all ranks in the set are equal."""
        faults = [] if publication.tensors else ["tensors: must not be empty, got []"]
        names: set[str] = set()
        for place, tensor in enumerate(publication.tensors):
            if tensor.name in names:
                faults.append(f"tensors[{place}].name: must be unique, got {tensor.name!r} twice")
            names.add(tensor.name)
        if publication.expected and not publication.probe:
            faults.append("probe: must not be empty if expected is set, got []")
        other = next((each for each in self.by_rank.values() if each.rank != publication.rank), None)
        for name in ("world", "install", "backend", "probe", "expected", "options") if other is not None else ():
            one, two = getattr(other, name), getattr(publication, name)
            if one != two:
                faults.append(f"{name}: must be {one!r} as for rank {other.rank if other else 0}, got {two!r}")
        for place, tensor in enumerate(publication.tensors):
            before, rank = self.tensors.get(tensor.name, (tensor, publication.rank))
            if before != tensor and rank != publication.rank:
                faults.append(
                    f"tensors[{place}]: {tensor.name} must be {before.dtype} {before.shape} as for rank {rank},"
                    f" got {tensor.dtype} {tensor.shape}"
                )
        return faults


def fingerprint(publication: Publication) -> str:
    """Return the rank and a digest of the publication, including `run`. Staging times do not affect the digest."""
    timeless = replace(publication, began_s=0.0, offload_s=0.0, gather_s=0.0)
    return f"{publication.rank}:{hashlib.sha256(PUBLICATION.dump_json(timeless)).hexdigest()[:32]}"
