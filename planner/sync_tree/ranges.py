"""Byte ranges, and flows of byte ranges between peers."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from planner.model import PeerId

Range = tuple[int, int]  # first byte and number of bytes


@dataclass(frozen=True, slots=True)
class PeerFlow:
    """A range of bytes of a shard that one peer sends to another in one wave."""

    shard: str
    offset: int
    bytes: int
    src: PeerId
    dst: PeerId
    wave: int = 0
    phase: Literal["A", "B"] = "B"  # A: between pods, B: inside one
    rate_gbps: float = 0.0  # limit; 0: none


class ByteRanges:
    """Disjoint byte ranges in ascending order. Adjacent ranges are joined. The class is not thread-safe."""

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._first: list[int] = []
        self._last: list[int] = []  # exclusive end of each
        for offset, size in ranges:
            self.add(offset, size)

    @property
    def is_empty(self) -> bool:
        return not self._first

    @property
    def ranges(self) -> tuple[Range, ...]:
        return tuple((first, last - first) for first, last in zip(self._first, self._last, strict=True))

    def add(self, offset: int, size: int) -> None:
        first, last = offset, offset + size
        if size <= 0:
            return
        low = bisect_left(self._last, first)  # the first range that it touches
        high = bisect_right(self._first, last)
        if low < high:
            first, last = min(first, self._first[low]), max(last, self._last[high - 1])
        self._first[low:high] = [first]
        self._last[low:high] = [last]

    def remove(self, offset: int, size: int) -> None:
        first, last = offset, offset + size
        low = bisect_right(self._last, first)
        high = bisect_left(self._first, last)
        if size <= 0 or low >= high:
            return
        left, right = self._first[low], self._last[high - 1]
        kept = [(left, first)] * (left < first) + [(last, right)] * (last < right)
        self._first[low:high] = [each for each, _ in kept]
        self._last[low:high] = [each for _, each in kept]

    def covers(self, offset: int, size: int) -> bool:
        if size <= 0:
            return True
        at = bisect_right(self._first, offset) - 1
        return at >= 0 and offset + size <= self._last[at]

    def gaps(self, size: int) -> tuple[Range, ...]:
        """Return the ranges of [0, size) that are not included, in ascending order."""
        found, at = [], 0
        for first, last in zip(self._first, self._last, strict=True):
            if at < first:
                found.append((at, first - at))
            at = last
        if at < size:
            found.append((at, size - at))
        return tuple(found)


def is_within(place: int, ranges: Iterable[Range]) -> bool:
    return any(first <= place < first + size for first, size in ranges)
