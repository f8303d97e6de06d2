"""What a wave is filled with: pieces of shards, their ways into pods, and what the wave has taken of everything."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.sync_tree.model import BITS, Floats, Ints, SyncProblem


def cut(size: int, parts: int) -> list[tuple[int, int]]:
    """As equal as bytes allow: the offset of each part, and its bytes."""
    ends = [size * part // parts for part in range(parts + 1)]
    return [(first, last - first) for first, last in itertools.pairwise(ends)]


def cut_to(size: int, most: int) -> list[tuple[int, int]]:
    """Into as few equal parts as are each of at most so many bytes."""
    return cut(size, max(1, -(-size // most)))


def by_pod(problem: SyncProblem, endpoints: Sequence[int]) -> dict[int, Ints]:
    """Return the endpoints in order, by their pods."""
    ends = np.array(sorted(endpoints), dtype=np.int64)
    pods = problem.pod[ends]
    return {pod: ends[pods == pod] for pod in np.unique(pods).tolist()}


@dataclass(slots=True)
class ShardPiece:
    shard: int
    offset: int
    bytes: int
    missing: dict[int, Ints]  # [pod] -> the receivers there, which have nothing of it yet
    groups: dict[int, int]  # [pod] -> the group that misses it, or did
    family: int  # of all that go to the same receivers
    sources: dict[int, Ints]  # [pod] -> who has it there at the start of the wave

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
    """A wave in the making: what it takes of everything, in seconds, the circuits that it leaves, and what is in it."""

    sent_s: Floats  # [endpoint]
    received_s: Floats  # [endpoint]
    seeded_s: Floats  # [endpoint], what it is the seed of: it will send that on
    group_sent: Floats  # [group], gigabits that its receivers send: inside the pod, and to others
    tor_out_s: Floats  # [ToR]
    tor_in_s: Floats  # [ToR]
    circuits: Ints  # [pod], left
    between: Ints | None  # [pod, pod], left, where only some lead to each other
    relaying: Ints  # [pod], of these, may leave for other pods
    least: dict[tuple[int, int], tuple[int, Ints]]  # [receivers or holders, bytes], who is least busy; as of changes
    changes: list[int]  # [pod], how often what it sends has changed
    floor_s: float = 0.0  # what it takes as far as is known
    delivered: float = 0.0  # bytes
    crossings: list[PodCrossing] = field(default_factory=list)
    filled: dict[int, list[ShardPiece]] = field(default_factory=dict)  # [pod]
    # Edges from pods that need nothing: their circuits are shared by families and pieces, which else spread by relays.
    roots: Counter[int] = field(default_factory=Counter)  # [piece]
    family_roots: Counter[int] = field(default_factory=Counter)  # [family]
    seeds: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict)  # [piece][pod], and the pods above it
