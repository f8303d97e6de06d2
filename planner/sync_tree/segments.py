"""Bytes of shards by the peers that have them and the peers that lack them. Pure."""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from planner.model import PeerId
from planner.sync_tree.ranges import Range, is_within


@dataclass(frozen=True, slots=True)
class ShardSegment:
    """Bytes of a shard that the same peers have, and the same lack."""

    shard: str
    offset: int
    bytes: int
    holders: tuple[PeerId, ...]
    receivers: tuple[PeerId, ...]


def shard_segments(
    shard: str, shard_bytes: int, wanted: Mapping[PeerId, Sequence[Range]], there: Mapping[PeerId, Sequence[Range]]
) -> list[ShardSegment]:
    """Return the segments of a shard of `shard_bytes` bytes that peers lack.

    `wanted` has the ranges that receivers lack; `there`, those that holders lack.
    """
    points = {
        at for ranges in (*wanted.values(), *there.values()) for first, size in ranges for at in (first, first + size)
    }
    found: list[ShardSegment] = []
    for first, last in itertools.pairwise(sorted({0, shard_bytes, *points})):
        receivers = tuple(peer for peer, ranges in sorted(wanted.items()) if is_within(first, ranges))
        holders = tuple(peer for peer, ranges in sorted(there.items()) if not is_within(first, ranges))
        before = found[-1] if found else None
        if before and (before.offset + before.bytes, before.holders, before.receivers) == (first, holders, receivers):
            found[-1] = ShardSegment(shard, before.offset, last - before.offset, holders, receivers)
        elif receivers:
            found.append(ShardSegment(shard, first, last - first, holders, receivers))
    return found


def summed_by(segments: Iterable[ShardSegment]) -> dict[str, PeerId]:
    """Return for each shard the holder that has least to sum already."""
    bytes_of: dict[PeerId, int] = defaultdict(int)
    found: dict[str, PeerId] = {}
    for each in segments:
        if each.holders:
            found[each.shard] = min(each.holders, key=lambda peer: (bytes_of[peer], peer))
            bytes_of[found[each.shard]] += each.bytes
    return found
