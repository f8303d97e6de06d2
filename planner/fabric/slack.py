"""How long it stays quiet on the links of one rank: learned from its collectives, promised as a lower quantile. Pure.

Figure 5 and section 5.3 of the paper. Fed in order of time, in the clock of the rank's host. It is quiet while no
collective is in flight, asynchronous ones included; how long is remembered by the place in the iteration.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from math import floor, log10
from typing import NamedTuple

from planner.fabric.recent import MIN_SAMPLES
from planner.fabric.sequence import UNLEARNT, IterationGap, MarkedIterations, QuietSpan, RepetitionFinder
from planner.model import Hold

MOST_SIZES = 16  # of one operation in one group: beyond, its size says nothing, e.g. of an all-to-all of tokens
CARE = 0.01  # how much one promise changes the level that is aimed at
MOST_CARE = 10.0  # a level is at least this part of what was asked for
LEAST_PACE = 0.1

PER_DECADE = 10
LEAST_S = 1e-6  # whatever is shorter, or begins while others are in flight, is no slack
MOST_BINS = 10 * PER_DECADE  # up to 10,000 s

# Codes of holds, beside those of sequence.py.
TRAFFIC = "traffic"
FEW_SAMPLES = "few_samples"
OUTLASTED = "outlasted"


@dataclass(slots=True)
class SlackHistogram:
    """How long it was quiet before an operation, on a logarithmic scale: counts add up over ranks. The slack of a
    collective is the time from the end of the one before to its own start (section 2.2 of the paper).

    `bins[i]` counts slack from `edge_s(i)` to `edge_s(i + 1)`; `none` what had no slack."""

    bins: dict[int, int] = field(default_factory=dict)
    none: int = 0

    def add(self, slack_s: float) -> None:
        if slack_s < LEAST_S:
            self.none += 1
            return
        index = min(MOST_BINS - 1, floor(log10(slack_s / LEAST_S) * PER_DECADE))
        self.bins[index] = self.bins.get(index, 0) + 1

    @property
    def total(self) -> int:
        return self.none + sum(self.bins.values())

    def merged(self, other: "SlackHistogram") -> "SlackHistogram":
        keys = self.bins.keys() | other.bins.keys()
        return SlackHistogram(
            {key: self.bins.get(key, 0) + other.bins.get(key, 0) for key in sorted(keys)}, self.none + other.none
        )

    def quantile_s(self, q: float) -> float | None:
        """Within a bin by its logarithm: exact to a quarter of itself. None while empty."""
        wanted, passed = q * self.total, float(self.none)
        if not self.total:
            return None
        if wanted <= passed:
            return 0.0
        for index in sorted(self.bins):
            inside = self.bins[index]
            if passed + inside >= wanted:
                return edge_s(index + (wanted - passed) / inside)
            passed += inside
        return edge_s(max(self.bins) + 1)


def edge_s(index: float) -> float:
    """Where a bin begins."""
    return float(LEAST_S * 10 ** (index / PER_DECADE))


class Signature(NamedTuple):
    """What a collective is known by, iteration after iteration. `size`: bytes."""

    op: str
    group: int
    size: int


@dataclass(frozen=True, slots=True)
class RemainingQuiet:
    """It is quiet and stays so until `until_s`, but for a probability of `risk`."""

    position: int  # collectives since the iteration began
    opened_s: float
    until_s: float
    samples: int
    risk: float


class _Asked(NamedTuple):
    """A question, what was promised, and what would have been by the place alone."""

    q: float
    until_s: float
    place: RemainingQuiet


@dataclass(slots=True)
class SlackLearner:
    """One rank. Its `follower` has the sequence of an iteration and the place in it."""

    rank: int
    histograms: dict[str, SlackHistogram] = field(default_factory=dict)  # by operation
    follower: MarkedIterations | RepetitionFinder = field(default_factory=RepetitionFinder)
    _numbers: dict[Signature, int] = field(default_factory=dict)
    _fresh: Iterator[int] = field(default_factory=count)
    _sizes: dict[tuple[str, int], int] = field(default_factory=dict)  # distinct ones
    _flying: dict[int, Signature] = field(default_factory=dict)  # by handle
    _handles: int = 0
    _opened_s: float | None = None  # since when it is quiet; None: nothing was ever in flight, or it is lost
    _ended_s: float | None = None  # the latest end
    _opened_at: IterationGap | None = None
    _opened_offset_s: float = 0.0
    _iteration_s: float = 0.0
    _mark: str = ""
    _asked: "_Asked | None" = None  # first in this quiet
    _pace: float = 1.0  # what is promised is this part of what the place alone would let expect
    _levels: dict[float, float] = field(default_factory=dict)  # what is aimed at, by q

    def started(self, signature: Signature, at_s: float) -> int:
        """A collective begins; the handle is for its end."""
        quiet = None
        if not self._flying and self._opened_s is not None:
            opened_s = self._opened_s
            quiet = QuietSpan(opened_s, opened_s - self._iteration_s, max(0.0, at_s - opened_s))
            self._grade(at_s)
        self._count(signature.op, quiet)
        gap = self.follower.step(self._number(signature), quiet)
        if isinstance(self.follower, RepetitionFinder) and self.follower.depth == 1 % self._length:
            self._iteration_s = at_s
        if gap is not None:
            gap.passed += 1
            gap.mark = self._mark
            if quiet is not None:
                gap.add(quiet.opened_s - self._iteration_s, quiet.length_s)
                if self._opened_at is not None and self._opened_at is not gap:
                    self._opened_at.add(self._opened_offset_s, quiet.length_s)
        self._opened_s = None
        self._handles += 1
        self._flying[self._handles] = signature
        return self._handles

    def ended(self, handle: int, at_s: float) -> None:
        """A collective ends; the end of one that is not in flight, or not any more, counts for nothing."""
        if self._flying.pop(handle, None) is None:
            return
        self._ended_s = at_s if self._ended_s is None else max(self._ended_s, at_s)
        if not self._flying:
            self._opened_s = self._ended_s
            self._opened_offset_s = self._ended_s - self._iteration_s
            place = self.follower.place
            self._opened_at = None if isinstance(place, Hold) else place[1]

    def mark(self, name: str, _at_s: float) -> None:
        """What the trainer does now, e.g. "backward": names the places that follow."""
        self._mark = name

    def iteration(self, _number: int, at_s: float) -> None:
        """The trainer begins an iteration."""
        if not isinstance(self.follower, MarkedIterations):
            self.follower = MarkedIterations()
            self._opened_at = None
        self.follower.begin()
        self._iteration_s = at_s

    def lost(self, detail: str) -> None:
        """Events are missing: nothing is known of what is in flight, nor of the place."""
        self._flying.clear()
        self._opened_s = self._ended_s = self._opened_at = self._asked = None
        self.follower.lose(detail)

    def prepare(self, q: float) -> None:
        """Work out beforehand what `remaining` will be asked for when it becomes quiet: called while there is traffic,
        it takes the arithmetic out of the window."""
        place = self.follower.place
        if not isinstance(place, Hold):
            place[1].lengths_s.lower(self._levels.get(q, q))

    def remaining(self, now_s: float, q: float) -> RemainingQuiet | Hold:
        """Until when it stays quiet, but for a probability of `q`, given that it has lasted until now."""
        if self._flying:
            first = next(iter(self._flying.values()))
            return Hold(TRAFFIC, f"rank {self.rank}: {len(self._flying)} in flight, the oldest {first.op}")
        if self._opened_s is None:
            return Hold(UNLEARNT, f"rank {self.rank}: no collective seen yet")
        place = self.follower.place
        if isinstance(place, Hold):
            return Hold(place.code, f"rank {self.rank}: {place.detail}")
        position, gap = place
        said = self._promise(position, gap, self._opened_s, now_s, q)
        if isinstance(said, Hold):
            return said
        until_s = said.opened_s + self._pace * (said.until_s - said.opened_s)
        if self._asked is None:
            self._asked = _Asked(q, max(now_s, until_s), said)
        if until_s <= now_s:
            return Hold(OUTLASTED, f"rank {self.rank}, position {position}: windows have just become shorter")
        return RemainingQuiet(said.position, said.opened_s, until_s, said.samples, said.risk)

    def _grade(self, at_s: float) -> None:
        """Promises that are broken more often than they may, e.g. while windows shrink, are made more carefully from
        there on (adaptive conformal inference, Gibbs and Candes, 2021), never more boldly than asked for. And what cut
        one window short, e.g. an iteration of few tokens, may cut the next ones: they are expected as much shorter."""
        if self._asked is None:
            return
        asked, self._asked = self._asked, None
        level = self._levels.get(asked.q, asked.q) + CARE * (asked.q - (asked.until_s > at_s))
        self._levels[asked.q] = min(asked.q, max(asked.q / MOST_CARE, level))
        opened_s, expected_s = asked.place.opened_s, asked.place.until_s
        kept = (at_s - opened_s) / (expected_s - opened_s) if expected_s > opened_s else 1.0
        self._pace = min(self._pace, max(LEAST_PACE, kept)) if kept < 1 else (1 + self._pace) / 2

    def _promise(
        self, position: int, gap: IterationGap, opened_s: float, now_s: float, q: float
    ) -> RemainingQuiet | Hold:
        lengths, lasted_s = gap.lengths_s, max(0.0, now_s - opened_s)
        where = f"rank {self.rank}, position {position}"
        if len(lengths) < MIN_SAMPLES:
            return Hold(FEW_SAMPLES, f"{where}: seen {len(lengths)} times, {MIN_SAMPLES} needed")
        bound = lengths.promised(q, self._levels.get(q, q), lasted_s)
        if bound is None:
            return Hold(OUTLASTED, f"{where}: quiet for {lasted_s * 1e3:.1f} ms, too seldom longer to say how long")
        return RemainingQuiet(position, opened_s, opened_s + bound.value_s, bound.samples, bound.risk)

    @property
    def signatures(self) -> dict[int, Signature]:
        """What the numbers of the sequence stand for. Size -1: it varies."""
        return {number: signature for signature, number in self._numbers.items()}

    @property
    def _length(self) -> int:
        known = self.follower.sequence
        return len(known.ids) if known is not None else 1

    def _number(self, signature: Signature) -> int:
        number = self._numbers.get(signature)
        if number is not None:
            return number
        kind = signature.op, signature.group
        sizes = self._sizes.get(kind, 0)
        if sizes < MOST_SIZES:
            self._sizes[kind] = sizes + 1
        else:
            signature = Signature(*kind, -1)
            if signature not in self._numbers:
                for other in [each for each in self._numbers if each[:2] == kind]:
                    del self._numbers[other]
                self._numbers[signature] = next(self._fresh)
            return self._numbers[signature]
        return self._numbers.setdefault(signature, next(self._fresh))

    def _count(self, op: str, quiet: QuietSpan | None) -> None:
        if self._flying or quiet is not None:
            self.histograms.setdefault(op, SlackHistogram()).add(0.0 if quiet is None else quiet.length_s)
