"""New edges where some broke or a peer died, so that what was to come still comes, once. Pure.

Whoever lacks bytes that no edge brings any more gets them from another peer: one that has them, or one that receives
them by edges that still run, and so cannot be below it. Edges keep waves: none waits for one of a later wave, or peers
that begin waves one after another could wait for each other.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

Range = tuple[int, int]  # bytes into a shard: from, and how many
Missing = Mapping[str, Mapping[str, Sequence[Range]]]  # [peer][shard]
Weight = Callable[[str, str], float | None]


@dataclass(frozen=True, slots=True)
class RepairFeed:
    """Bytes of a shard from one peer to another."""

    id: str
    shard: str
    offset: int
    bytes: int
    src: str
    dst: str
    wave: int = 0

    @property
    def end(self) -> int:
        return self.offset + self.bytes


@dataclass(frozen=True, slots=True)
class RepairedEdges:
    feeds: tuple[RepairFeed, ...]  # beside those that run
    lost: Mapping[str, Mapping[str, tuple[Range, ...]]]  # [peer][shard]: nobody who may send to it has them, or will


def mend(
    feeds: Iterable[RepairFeed],
    broken: Collection[str],
    missing: Missing,
    *,
    name: str,
    weight: Weight = lambda src, dst: 1.0,
    part_bytes: int = 2**28,
) -> RepairedEdges:
    """`feeds`: all that have not brought everything; of these `broken` ones, by id, and any whose ends have died bring
    no more. `missing`: of each living peer and each shard that it has or is to have, what it lacks now. `name`: what
    ids of new ones begin with. `weight`: how long a byte takes from one to another against others; None: there is no
    way. Sources share what there is to send in parts of at most `part_bytes`."""
    feeds = list(feeds)
    runs = [each for each in feeds if each.id not in broken and each.src in missing and each.dst in missing]
    sending: defaultdict[str, float] = defaultdict(float)
    for each in runs:
        sending[each.src] += each.bytes
    living = {each.id for each in runs}
    running, ended = _by_shard(runs), _by_shard(each for each in feeds if each.id not in living)
    found: list[_New] = []
    lost: dict[str, dict[str, list[Range]]] = {}
    for shard in sorted({shard for each in missing.values() for shard in each}):
        lacking = {peer: each[shard] for peer, each in sorted(missing.items()) if shard in each}
        if all(_is_fed(peer, ranges, running[shard]) for peer, ranges in lacking.items()):
            continue
        for first, last in _parts(lacking, [*running[shard], *ended[shard]], part_bytes):
            mending = _Mending(shard, first, last, lacking, running[shard], ended[shard])
            found += mending.new(sending, weight)
            for peer in mending.left():
                lost.setdefault(peer, {}).setdefault(shard, []).append((first, last - first))
    return RepairedEdges(
        tuple(
            RepairFeed(f"{name}{number}", each.shard, each.first, each.last - each.first, each.src, each.dst, each.wave)
            for number, each in enumerate(_joined(found))
        ),
        {peer: {shard: _neighbours(ranges) for shard, ranges in each.items()} for peer, each in lost.items()},
    )


@dataclass(frozen=True, slots=True)
class _New:
    shard: str
    first: int
    last: int
    src: str
    dst: str
    wave: int


class _Mending:
    """Of bytes that are alike: each peer has all of them or none."""

    def __init__(
        self,
        shard: str,
        first: int,
        last: int,
        lacking: Mapping[str, Sequence[Range]],
        running: Sequence[RepairFeed],
        ended: Sequence[RepairFeed],
    ) -> None:
        self._shard, self._first, self._last = shard, first, last
        lack = {peer for peer, ranges in lacking.items() if any(at <= first < at + size for at, size in ranges)}
        self._wave = {peer: -1 for peer in lacking if peer not in lack}  # of who has it, or is going to: since when
        self._below: defaultdict[str, list[RepairFeed]] = defaultdict(list)
        for each in running:
            if each.dst in lack and each.src in lacking and each.offset <= first < each.end:
                self._below[each.src].append(each)
        fed = {each.dst for below in self._below.values() for each in below}
        self._tops = sorted(lack - fed)  # all others come with them
        self._was = {each.dst: each.wave for each in ended if each.offset <= first < each.end}
        self._has = frozenset(self._wave)
        for peer in sorted(self._has):
            self._reach(peer)

    def new(self, sending: defaultdict[str, float], weight: Weight) -> Iterator[_New]:
        """One whom nobody may send to yet waits for the others."""
        waiting = self._tops
        while waiting:
            again = []
            for dst in waiting:
                if (found := self._from(dst, sending, weight)) is None:
                    again.append(dst)
                    continue
                src, wave = found
                sending[src] += self._last - self._first
                self._wave[dst] = wave
                self._reach(dst)
                yield _New(self._shard, self._first, self._last, src, dst, wave)
            if len(again) == len(waiting):
                return
            waiting = again

    def left(self) -> list[str]:
        """Who goes without."""
        found, queue = [], [peer for peer in self._tops if peer not in self._wave]
        while queue:
            peer = queue.pop()
            found.append(peer)
            queue += [each.dst for each in self._below[peer]]
        return sorted(found)

    def _from(self, dst: str, sending: Mapping[str, float], weight: Weight) -> tuple[str, int] | None:
        """Where it would be soonest: who only receives it must do that first."""
        size, was = self._last - self._first, self._was.get(dst, 0)
        best: tuple[tuple[float, bool, str], int] | None = None
        for src, since in self._wave.items():
            each = weight(src, dst)
            if each is None or (since > was and self._below[dst]):  # who is below it would wait for a later wave
                continue
            relays = src not in self._has
            rank = (sending.get(src, 0.0) + size * (1 + relays)) * each, relays, src
            if best is None or rank < best[0]:
                best = rank, max(was, since)
        return None if best is None else (best[0][2], best[1])

    def _reach(self, peer: str) -> None:
        """Who is below it gets what it gets."""
        queue = [peer]
        while queue:
            for each in self._below[queue.pop()]:
                if each.dst not in self._wave:
                    self._wave[each.dst] = each.wave
                    queue.append(each.dst)


def _by_shard(feeds: Iterable[RepairFeed]) -> defaultdict[str, list[RepairFeed]]:
    found: defaultdict[str, list[RepairFeed]] = defaultdict(list)
    for each in feeds:
        found[each.shard].append(each)
    return found


def _is_fed(peer: str, ranges: Sequence[Range], running: Sequence[RepairFeed]) -> bool:
    own = sorted((each.offset, each.end) for each in running if each.dst == peer) if ranges else []
    for first, size in ranges:
        at = first
        for start, end in own:
            if start <= at < end:
                at = end
        if at < first + size:
            return False
    return True


def _parts(lacking: Mapping[str, Sequence[Range]], feeds: Sequence[RepairFeed], most: int) -> Iterator[Range]:
    """From and to: what somebody lacks, cut where anything changes."""
    points = {at for ranges in lacking.values() for first, size in ranges for at in (first, first + size)}
    if not points:
        return
    least, greatest = min(points), max(points)
    points |= {at for each in feeds for at in (each.offset, each.end) if least < at < greatest}
    points |= set(range(least, greatest, most))
    order = sorted(points)
    for first, last in itertools.pairwise(order):
        if any(at <= first < at + size for ranges in lacking.values() for at, size in ranges):
            yield first, last


def _joined(found: Iterable[_New]) -> list[_New]:
    """Neighbours that go the same way are one."""
    joined: list[_New] = []
    for each in sorted(found, key=lambda each: (each.shard, each.dst, each.src, each.wave, each.first)):
        before = joined[-1] if joined else None
        ways = [(one.shard, one.dst, one.src, one.wave) for one in (before, each) if one]
        if before and before.last == each.first and ways[0] == ways[1]:
            joined[-1] = _New(each.shard, before.first, each.last, each.src, each.dst, each.wave)
        else:
            joined.append(each)
    return joined


def _neighbours(ranges: Iterable[Range]) -> tuple[Range, ...]:
    found: list[Range] = []
    for first, size in sorted(ranges):
        if found and sum(found[-1]) == first:
            found[-1] = found[-1][0], found[-1][1] + size
        else:
            found.append((first, size))
    return tuple(found)
