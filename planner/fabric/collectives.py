"""Compute how many bytes each rank sends to each other rank in a collective operation. Has no side effects.

The algorithms are those of NCCL: rings in the order in which a group lists its ranks, and double binary trees.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.fabric.intent import Primitive, Traffic

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# The number of transfers in one batch: an all-to-all among n ranks has n * (n - 1).
TRANSFERS_AT_ONCE = 2_000_000


@dataclass(frozen=True, slots=True)
class RankTransfers:
    """Transfers between ranks: `sent_bytes[i]` go from rank `sources[i]` to rank `destinations[i]`."""

    sources: Ints
    destinations: Ints
    sent_bytes: Floats


def transfers_of(traffic: Traffic) -> Iterator[RankTransfers]:
    """Yield the transfers of any primitive except BROADCAST. Raises ValueError for BROADCAST, whose tree depends on the
    site.

    In a group of n ranks, with `bytes_per_rank` as S, each rank sends the following bytes, `times` times.

    - RING_ALL_REDUCE: 2(n-1)/n * S to the next rank, where S is the rank's buffer.
    - TREE_ALL_REDUCE: half of S up and down each edge of both trees, where S is the rank's buffer.
    - ALL_GATHER: (n-1) * S to the next rank, where S is the rank's shard.
    - REDUCE_SCATTER: (n-1)/n * S to the next rank, where S is the rank's buffer, of which it keeps one n-th.
    - ALL_TO_ALL: S/n to each other rank, where S is the rank's buffer, with one n-th for each rank including itself.
    - PIPELINE: S to the next rank.
    - RING_EXCHANGE: S to the next rank, and S from the last rank to the first.
    - BIPARTITE: S, split evenly over the receivers. If `both_ways` is True, the receivers send as much back.
    """
    if traffic.primitive is Primitive.BROADCAST:
        raise ValueError("traffic must not be a broadcast, whose tree depends on the site; use broadcasts_of")
    message_bytes = traffic.bytes_per_rank * traffic.times
    if traffic.primitive is Primitive.BIPARTITE:
        yield from _bipartite(traffic, message_bytes)
        return
    for groups in _by_size(traffic.groups):
        size = groups.shape[1]
        if size < 2:
            continue
        match traffic.primitive:
            case Primitive.RING_ALL_REDUCE:
                yield _to_the_next(groups, 2 * (size - 1) / size * message_bytes)
            case Primitive.ALL_GATHER:
                yield _to_the_next(groups, (size - 1) * message_bytes)
            case Primitive.REDUCE_SCATTER:
                yield _to_the_next(groups, (size - 1) / size * message_bytes)
            case Primitive.RING_EXCHANGE:
                yield _to_the_next(groups, message_bytes)
            case Primitive.PIPELINE:
                yield _sent(groups[:, :-1], groups[:, 1:], message_bytes)
            case Primitive.TREE_ALL_REDUCE:
                children, parents = double_tree(size)
                yield _sent(groups[:, children], groups[:, parents], message_bytes / 2)
                yield _sent(groups[:, parents], groups[:, children], message_bytes / 2)
            case Primitive.ALL_TO_ALL:
                yield from _crosswise(groups, groups, message_bytes / size)


def double_tree(size: int) -> tuple[Ints, Ints]:
    """Return the children and the parents of the edges of a double binary tree, as positions in a group of `size`
    ranks. The first tree is a binary tree in which every second rank is a leaf. The second tree is its mirror image
    (shifted by one if `size` is odd), so that each leaf of one tree is an inner node of the other."""
    ranks = np.arange(1, size, dtype=np.int64)
    lowest_bit = ranks & -ranks
    above = (ranks ^ lowest_bit) | (lowest_bit << 1)
    parents = np.where(above < size, above, ranks ^ lowest_bit)
    both = np.stack([ranks, parents])
    mirrored = (both + 1) % size if size % 2 else size - 1 - both
    children, their_parents = np.concatenate([both, mirrored], axis=1)
    return children, their_parents


def _by_size(groups: Sequence[tuple[int, ...]]) -> Iterator[Ints]:
    """Yield one array for each group size. Its rows are the groups of this size."""
    sizes: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for group in groups:
        sizes[len(group)].append(group)
    for size in sorted(sizes):
        yield np.array(sizes[size], dtype=np.int64).reshape(len(sizes[size]), size)


def _to_the_next(groups: Ints, sent_bytes: float) -> RankTransfers:
    return _sent(groups, np.roll(groups, -1, axis=1), sent_bytes)


def _sent(sources: Ints, destinations: Ints, sent_bytes: float) -> RankTransfers:
    return RankTransfers(sources.ravel(), destinations.ravel(), np.full(sources.size, sent_bytes))


def _crosswise(sources: Ints, destinations: Ints, sent_bytes: float) -> Iterator[RankTransfers]:
    """Yield transfers from each rank in a row of `sources` to each other rank in the same row of `destinations`."""
    rows = max(1, TRANSFERS_AT_ONCE // (sources.shape[1] * destinations.shape[1]))
    for first in range(0, len(sources), rows):
        some, others = sources[first : first + rows], destinations[first : first + rows]
        one = np.repeat(some, others.shape[1], axis=1).ravel()
        other = np.tile(others, (1, some.shape[1])).ravel()
        apart = one != other
        yield _sent(one[apart], other[apart], sent_bytes)


def _bipartite(traffic: Traffic, message_bytes: float) -> Iterator[RankTransfers]:
    shapes: dict[tuple[int, int], list[tuple[tuple[int, ...], tuple[int, ...]]]] = defaultdict(list)
    for group, receivers in zip(traffic.groups, traffic.receivers, strict=True):
        if group and receivers:
            shapes[len(group), len(receivers)].append((group, receivers))
    for (_, count), both in sorted(shapes.items()):
        senders = np.array([group for group, _ in both], dtype=np.int64)
        takers = np.array([receivers for _, receivers in both], dtype=np.int64)
        yield from _crosswise(senders, takers, message_bytes / count)
        if traffic.both_ways:
            yield from _crosswise(takers, senders, message_bytes / count)
