"""The state of a wave while it is filled: pieces of shards, their crossings into pods, and the resources used."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.sync_tree.model import BITS, Floats, Ints, SyncProblem


def cut(size: int, parts: int) -> list[tuple[int, int]]:
    """Cut `size` bytes into `parts` parts of about equal size; return the (offset, bytes) of each part."""
    ends = [size * part // parts for part in range(parts + 1)]
    return [(first, last - first) for first, last in itertools.pairwise(ends)]


def cut_to(size: int, most: int) -> list[tuple[int, int]]:
    """Cut `size` bytes into as few parts as possible, of about equal size and at most `most` bytes each; return the
    (offset, bytes) of each part."""
    return cut(size, max(1, -(-size // most)))


def by_pod(problem: SyncProblem, endpoints: Sequence[int]) -> dict[int, Ints]:
    """Return `endpoints` grouped by pod, each group in ascending order."""
    ends = np.array(sorted(endpoints), dtype=np.int64)
    pods = problem.pod[ends]
    return {pod: ends[pods == pod] for pod in np.unique(pods).tolist()}


@dataclass(slots=True)
class ShardPiece:
    shard: int
    offset: int
    bytes: int
    missing: dict[int, Ints]  # [pod] -> the receivers there, which have none of it yet
    groups: dict[int, int]  # [pod] -> the group that misses it, or did
    family: int  # shared by all pieces with the same receivers
    sources: dict[int, Ints]  # [pod] -> endpoints that have it at the start of the wave

    @property
    def gigabits(self) -> float:
        return self.bytes * BITS


@dataclass(slots=True)
class PodCrossing:
    piece: ShardPiece
    src: int
    dst: int
    circuits: int = 1


@dataclass(slots=True)
class WaveDraft:
    """A wave while it is filled: the seconds used on each resource, the remaining circuits, and the pieces and
    crossings added."""

    sent_s: Floats  # [endpoint]
    received_s: Floats  # [endpoint]
    seeded_s: Floats  # [endpoint], pieces that it is the seed of and will send on
    group_sent: Floats  # [group], gigabits that its receivers send: inside the pod, and to others
    tor_out_s: Floats  # [ToR]
    tor_in_s: Floats  # [ToR]
    circuits: Ints  # [pod], remaining
    between: Ints | None  # [pod, pod], remaining; None: any pods can be connected
    relaying: Ints  # [pod], remaining circuits that may be used to leave for other pods
    # [receivers or holders, bytes] -> the count in `changes` it was computed at, and the least busy endpoints
    least: dict[tuple[int, int], tuple[int, Ints]]
    changes: list[int]  # [pod], how often its sending has changed
    floor_s: float = 0.0  # the known lower bound of its duration
    delivered: float = 0.0  # bytes
    crossings: list[PodCrossing] = field(default_factory=list)
    filled: dict[int, list[ShardPiece]] = field(default_factory=dict)  # [pod]
    # Crossings from pods that need nothing: families and pieces share their circuits, and otherwise spread by relays.
    roots: Counter[int] = field(default_factory=Counter)  # [piece]
    family_roots: Counter[int] = field(default_factory=Counter)  # [family]
    # [piece][pod] -> the seed, and the number of pods above it
    seeds: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict)
