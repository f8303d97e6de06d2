"""Segments of a shard, byte by byte: each is sent from its holders to its receivers, and adjacent equal ones are
joined."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from planner.model import PeerId
from planner.sync_tree.network import ShardSegment, shard_segments, summed_by
from planner.sync_tree.ranges import ByteRanges, Range

SIZE = 12
ranges = st.lists(st.tuples(st.integers(0, SIZE - 1), st.integers(1, SIZE)), max_size=3).map(
    lambda drawn: tuple((first, min(size, SIZE - first)) for first, size in drawn)
)
peers = st.dictionaries(st.sampled_from([PeerId(name) for name in "abcd"]), ranges, max_size=4)


def covers(found: Sequence[Range], byte: int) -> bool:
    return any(first <= byte < first + size for first, size in found)


@given(peers, peers)
def test_each_byte_goes_from_holders_to_receivers(
    wanted: Mapping[PeerId, Sequence[Range]], there: Mapping[PeerId, Sequence[Range]]
) -> None:
    segments = shard_segments("s", SIZE, wanted, there)
    for byte in range(SIZE):
        receivers = tuple(sorted(peer for peer, lacks in wanted.items() if covers(lacks, byte)))
        holders = tuple(sorted(peer for peer, lacks in there.items() if not covers(lacks, byte)))
        own = [each for each in segments if each.offset <= byte < each.offset + each.bytes]
        assert [(each.receivers, each.holders) for each in own] == ([(receivers, holders)] if receivers else [])
    for sooner, later in pairwise(segments):
        if sooner.offset + sooner.bytes == later.offset:
            assert (sooner.holders, sooner.receivers) != (later.holders, later.receivers)


@given(ranges)
def test_present_bytes_are_those_not_missing(missing: Sequence[Range]) -> None:
    present = ByteRanges(missing).gaps(SIZE)
    assert [covers(present, byte) for byte in range(SIZE)] == [not covers(missing, byte) for byte in range(SIZE)]
    assert list(present) == sorted(present)


def test_least_loaded_holder_computes_checksum() -> None:
    a, b = PeerId("a"), PeerId("b")
    segments = [ShardSegment(name, 0, size, (a, b), ()) for name, size in (("s", 10), ("t", 4), ("u", 4), ("v", 4))]
    assert summed_by([*segments, ShardSegment("lost", 0, 1, (), (a,))]) == {"s": a, "t": b, "u": b, "v": b}
