"""Plan new edges after edges broke or a peer died, so that every missing byte still arrives once. Has no side effects.

If no running edge brings the bytes that a peer lacks, a new edge brings them from another peer. That peer either has
the bytes already or receives them over edges that do not depend on the first peer. A new edge never waits for an edge
of a later wave. Without this rule, peers that begin waves in order could wait for each other.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from planner.model import PeerId
from planner.sync_tree.ranges import ByteRanges, PeerFlow, Range, is_within

Missing = Mapping[PeerId, Mapping[str, Sequence[Range]]]  # [peer][shard]
Weight = Callable[[PeerId, PeerId], float | None]


def mend(
    running: Iterable[PeerFlow],
    ended: Iterable[PeerFlow],
    missing: Missing,
    *,
    weight: Weight = lambda src, dst: 1.0,
    part_bytes: int = 2**28,
) -> tuple[list[PeerFlow], Missing]:
    """Return the new flows, and the bytes that no available peer has or will receive.

    `running` flows bring more bytes unless one of their ends has died; `ended` flows broke before they were complete.
    `missing` has, for each living peer and each shard that the peer holds or needs, the ranges that it lacks now.
    `weight` returns the relative time to send a byte between two peers, or None if they have no connection. Sources
    share the sending in parts of at most `part_bytes`.
    """
    runs: defaultdict[str, list[PeerFlow]] = defaultdict(list)
    over: defaultdict[str, list[PeerFlow]] = defaultdict(list)
    sending: defaultdict[PeerId, float] = defaultdict(float)
    for each in running:
        if each.src in missing and each.dst in missing:
            runs[each.shard].append(each)
            sending[each.src] += each.bytes
        else:
            over[each.shard].append(each)
    for each in ended:
        over[each.shard].append(each)
    found: list[PeerFlow] = []
    lost: defaultdict[PeerId, defaultdict[str, ByteRanges]] = defaultdict(lambda: defaultdict(ByteRanges))
    for shard in sorted({shard for each in missing.values() for shard in each}):
        lacking = {peer: each[shard] for peer, each in sorted(missing.items()) if shard in each}
        if all(_is_fed(peer, ranges, runs[shard]) for peer, ranges in lacking.items()):
            continue
        for first, last in _parts(lacking, [*runs[shard], *over[shard]], part_bytes):
            mending = _Mending(shard, first, last, lacking, runs[shard], over[shard])
            found += mending.new(sending, weight)
            for peer in mending.left():
                lost[peer][shard].add(first, last - first)
    return _joined(found), {peer: {s: ranges.ranges for s, ranges in each.items()} for peer, each in lost.items()}


class _Mending:
    """Plans new flows for one range of bytes, of which each peer has all bytes or none."""

    def __init__(
        self,
        shard: str,
        first: int,
        last: int,
        lacking: Mapping[PeerId, Sequence[Range]],
        running: Sequence[PeerFlow],
        ended: Sequence[PeerFlow],
    ) -> None:
        self._shard, self._first, self._size = shard, first, last - first
        lack = {peer for peer, ranges in lacking.items() if is_within(first, ranges)}
        # since which wave each peer has the bytes, or will have them
        self._wave = {peer: -1 for peer in lacking if peer not in lack}
        self._below: defaultdict[PeerId, list[PeerFlow]] = defaultdict(list)
        for each in running:
            if each.dst in lack and each.src in lacking and each.offset <= first < each.offset + each.bytes:
                self._below[each.src].append(each)
        fed = {each.dst for below in self._below.values() for each in below}
        self._tops = sorted(lack - fed)  # all others receive through these
        self._was = {each.dst: each.wave for each in ended if each.offset <= first < each.offset + each.bytes}
        self._has = frozenset(self._wave)
        for peer in sorted(self._has):
            self._reach(peer)

    def new(self, sending: defaultdict[PeerId, float], weight: Weight) -> Iterator[PeerFlow]:
        """Yield new flows. A peer without a possible sender is served after the peers that may become its sender."""
        waiting = self._tops
        while waiting:
            again = []
            for dst in waiting:
                if (found := self._from(dst, sending, weight)) is None:
                    again.append(dst)
                    continue
                src, wave = found
                sending[src] += self._size
                self._wave[dst] = wave
                self._reach(dst)
                yield PeerFlow(self._shard, self._first, self._size, src, dst, wave)
            if len(again) == len(waiting):
                return
            waiting = again

    def left(self) -> list[PeerId]:
        """Return the peers that cannot receive the range from any peer."""
        found, queue = [], [peer for peer in self._tops if peer not in self._wave]
        while queue:
            peer = queue.pop()
            found.append(peer)
            queue += [each.dst for each in self._below[peer]]
        return sorted(found)

    def _from(self, dst: PeerId, sending: Mapping[PeerId, float], weight: Weight) -> tuple[PeerId, int] | None:
        """Return the source that can finish sending to `dst` first, and the wave of the new flow. Return None if there
        is no source. For a source that is still receiving the bytes, the time to receive them is included."""
        was = self._was.get(dst, 0)
        best: tuple[tuple[float, bool, PeerId], int] | None = None
        for src, since in self._wave.items():
            each = weight(src, dst)
            if each is None or (since > was and self._below[dst]):  # peers below it would wait for a later wave
                continue
            relays = src not in self._has
            rank = (sending.get(src, 0.0) + self._size * (1 + relays)) * each, relays, src
            if best is None or rank < best[0]:
                best = rank, max(was, since)
        return None if best is None else (best[0][2], best[1])

    def _reach(self, peer: PeerId) -> None:
        """Mark all peers below `peer` as served."""
        queue = [peer]
        while queue:
            for each in self._below[queue.pop()]:
                if each.dst not in self._wave:
                    self._wave[each.dst] = each.wave
                    queue.append(each.dst)


def _is_fed(peer: PeerId, ranges: Sequence[Range], running: Sequence[PeerFlow]) -> bool:
    left = ByteRanges(ranges)
    for each in running if ranges else ():
        if each.dst == peer:
            left.remove(each.offset, each.bytes)
    return left.is_empty


def _parts(lacking: Mapping[PeerId, Sequence[Range]], feeds: Sequence[PeerFlow], most: int) -> Iterator[Range]:
    """Yield the ranges that at least one peer lacks, as (first, last) with `last` excluded. All bytes of a range are
    lacked by the same peers and brought by the same flows of `feeds`. No range has more than `most` bytes."""
    points = {at for ranges in lacking.values() for first, size in ranges for at in (first, first + size)}
    least, greatest = min(points), max(points)
    points |= {at for each in feeds for at in (each.offset, each.offset + each.bytes) if least < at < greatest}
    points |= set(range(least, greatest, most))
    for first, last in itertools.pairwise(sorted(points)):
        if any(is_within(first, ranges) for ranges in lacking.values()):
            yield first, last


def _joined(found: Collection[PeerFlow]) -> list[PeerFlow]:
    """Return the flows, with adjacent ranges of the same shard, source, destination and wave joined."""

    def way(each: PeerFlow) -> tuple[str, PeerId, PeerId, int]:
        return each.shard, each.dst, each.src, each.wave

    joined: list[PeerFlow] = []
    for key, own in itertools.groupby(sorted(found, key=lambda each: (way(each), each.offset)), way):
        shard, dst, src, wave = key
        ranges = ByteRanges((each.offset, each.bytes) for each in own).ranges
        joined += [PeerFlow(shard, offset, size, src, dst, wave) for offset, size in ranges]
    return joined
