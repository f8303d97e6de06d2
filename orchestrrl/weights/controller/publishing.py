"""Words of trainer ranks about a version, until all have said what they have. Pure."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from orchestrrl.weights.backends.base import BACKENDS
from orchestrrl.weights.model import TensorMeta
from orchestrrl.weights.publication import PUBLICATION, Publication


@dataclass(slots=True)
class PublicationSet:
    """One version's words so far."""

    version: int
    run: str
    world: int
    by_s: float  # when the last is to have come
    by_rank: dict[int, Publication] = field(default_factory=dict)  # by rank
    tensors: dict[str, tuple[TensorMeta, int]] = field(default_factory=dict)  # and the rank that told it first

    def take(self, publication: Publication) -> None:
        """It goes together with the others."""
        self.by_rank[publication.rank] = publication
        for tensor in publication.tensors:
            self.tensors.setdefault(tensor.name, (tensor, publication.rank))

    def faults(self, publication: Publication) -> list[str]:
        """What is wrong with it, or does not go together with what other ranks have said. These agree among themselves:
        each is not looked at again for each of a thousand."""
        faults = publication_faults(publication)
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

    @property
    def complete(self) -> bool:
        return len(self.by_rank) == self.world

    @property
    def publications(self) -> tuple[Publication, ...]:
        return tuple(self.by_rank[rank] for rank in sorted(self.by_rank))


def same_publication(one: Publication, other: Publication) -> bool:
    """Whether they say the same, whenever they were sent."""
    return _timeless(one) == _timeless(other)


def publication_faults(publication: Publication) -> list[str]:
    """By itself."""
    faults = []
    if publication.backend not in BACKENDS:
        faults.append(f"backend: must be one of {', '.join(BACKENDS.names())}, got {publication.backend!r}")
    if not publication.tensors:
        faults.append("tensors: must not be empty, got []")
    seen: set[str] = set()
    for place, tensor in enumerate(publication.tensors):
        if tensor.name in seen:
            faults.append(f"tensors[{place}].name: is there twice, got {tensor.name!r}")
        seen.add(tensor.name)
    if bool(publication.expected) and not publication.probe:
        faults.append("probe: must be told where expected is, got []")
    return faults


def fingerprints(publications: Iterable[Publication]) -> tuple[str, ...]:
    """Return one fingerprint for each rank, of what it published and by which start of the trainer, sorted."""
    return tuple(sorted(map(fingerprint, publications)))


def fingerprint(publication: Publication) -> str:
    return f"{publication.rank}:{hashlib.sha256(PUBLICATION.dump_json(_timeless(publication))).hexdigest()[:32]}"


def _timeless(publication: Publication) -> Publication:
    return replace(publication, began_s=0.0, offload_s=0.0, gather_s=0.0)
