"""Words of trainer ranks about a version, until all have said what they have. Pure."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from orchestrrl.weights.backends.base import BACKENDS
from orchestrrl.weights.model import DTYPE_BYTES, TensorMeta
from orchestrrl.weights.publication import PUBLICATION, Publication


@dataclass(slots=True)
class PublicationSet:
    """One version's words so far."""

    version: int
    run: str
    world: int
    by_s: float  # when the last is to have come
    words: dict[int, Publication] = field(default_factory=dict)  # by rank
    tensors: dict[str, tuple[TensorMeta, int]] = field(default_factory=dict)  # and the rank that told it first

    def take(self, word: Publication) -> None:
        """It goes together with the others."""
        self.words[word.rank] = word
        for tensor in word.tensors:
            self.tensors.setdefault(tensor.name, (tensor, word.rank))

    def faults(self, word: Publication) -> list[str]:
        """What is wrong with it, or does not go together with what other ranks have said. These agree among themselves:
        each is not looked at again for each of a thousand."""
        faults = publication_faults(word)
        other = next((each for each in self.words.values() if each.rank != word.rank), None)
        for name in ("world", "install", "backend", "probe", "expected", "options") if other is not None else ():
            one, two = getattr(other, name), getattr(word, name)
            if one != two:
                faults.append(f"{name}: rank {other.rank if other else 0} has said {one!r}, got {two!r}")
        for place, tensor in enumerate(word.tensors):
            before, rank = self.tensors.get(tensor.name, (tensor, word.rank))
            if before != tensor and rank != word.rank:
                faults.append(
                    f"tensors[{place}]: {tensor.name} is {before.dtype} {before.shape} of rank {rank},"
                    f" got {tensor.dtype} {tensor.shape}"
                )
        return faults

    @property
    def complete(self) -> bool:
        return len(self.words) == self.world

    @property
    def publications(self) -> tuple[Publication, ...]:
        return tuple(self.words[rank] for rank in sorted(self.words))


def same_publication(one: Publication, other: Publication) -> bool:
    """Whether they say the same, whenever they were sent."""
    return _timeless(one) == _timeless(other)


def publication_faults(word: Publication) -> list[str]:
    """By itself."""
    faults = []
    if word.backend not in BACKENDS:
        faults.append(f"backend: must be one of {', '.join(BACKENDS.names())}, got {word.backend!r}")
    if not word.tensors:
        faults.append("tensors: must not be empty, got []")
    seen: set[str] = set()
    for place, tensor in enumerate(word.tensors):
        if tensor.name in seen:
            faults.append(f"tensors[{place}].name: is there twice, got {tensor.name!r}")
        seen.add(tensor.name)
        if tensor.dtype not in DTYPE_BYTES:
            faults.append(f"tensors[{place}].dtype: must be one of {', '.join(DTYPE_BYTES)}, got {tensor.dtype!r}")
    if bool(word.expected) and not word.probe:
        faults.append("probe: must be told where expected is, got []")
    return faults


def fingerprint(words: Sequence[Publication]) -> str:
    """Of what was published, and by which start of the trainer: one for each rank."""
    return ",".join(sorted(_of_rank(word) for word in words))


def is_of(word: Publication, fingerprint: str) -> bool:
    """Whether it is one of the words that this was made of."""
    return _of_rank(word) in fingerprint.split(",")


def _of_rank(word: Publication) -> str:
    return f"{word.rank}:{hashlib.sha256(PUBLICATION.dump_json(_timeless(word))).hexdigest()[:32]}"


def _timeless(word: Publication) -> Publication:
    return replace(word, began_s=0.0, offload_s=0.0, gather_s=0.0)
