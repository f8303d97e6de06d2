"""Predict how long the links of one rank stay quiet, as a lower quantile learned from its collectives. Has no side
effects.

This quiet time is the slack of figure 5 and section 5.3 of the paper. Events arrive in order of time, in the clock of
the rank's host. A rank is quiet while it has no collective in flight, synchronous or asynchronous. Quiet times are
stored by the position in the iteration.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from math import floor, log10
from typing import NamedTuple

from planner.fabric.recent import MIN_SAMPLES
from planner.fabric.sequence import UNLEARNT, IterationGap, MarkedIterations, QuietSpan, RepetitionFinder
from planner.model import Hold

MOST_SIZES = 16  # per operation and group: above this, sizes are not distinguished, e.g. for an all-to-all of tokens
CARE = 0.01  # how much one prediction changes the target level
MOST_CARE = 10.0  # the target level is at least the requested one divided by this
LEAST_PACE = 0.1

PER_DECADE = 10
LEAST_S = 1e-6  # shorter quiet times, or starts while others are in flight, are not slack
MOST_BINS = 10 * PER_DECADE  # up to 10,000 s

# Codes of holds, in addition to those of sequence.py.
TRAFFIC = "traffic"
FEW_SAMPLES = "few_samples"
OUTLASTED = "outlasted"


@dataclass(slots=True)
class SlackHistogram:
    """A logarithmic histogram of the quiet time before collectives of one operation. Histograms of several ranks can be
    added.

    The slack of a collective is the time from the end of the previous collective to its start (section 2.2 of the
    paper). `bins[i]` is the number of collectives with a slack from `edge_s(i)` to `edge_s(i + 1)`. `none` is the
    number of collectives without slack.
    """

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
        """Return the `q`-quantile in seconds; None if the histogram is empty. The quantile is interpolated
        logarithmically within a bin and accurate to about a quarter of its value."""
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
    """Return the lower edge of bin `index` in seconds. A fractional index gives a time inside the bin."""
    return float(LEAST_S * 10 ** (index / PER_DECADE))


class Signature(NamedTuple):
    """The identity of a collective across iterations. `size` is in bytes; it is -1 if the size varies."""

    op: str
    group: int
    size: int


@dataclass(frozen=True, slots=True)
class RemainingQuiet:
    """A prediction that a quiet rank stays quiet until `until_s`, except with probability `risk`."""

    position: int  # collectives since the iteration began
    opened_s: float
    until_s: float
    samples: int
    risk: float


class _Request(NamedTuple):
    """A requested prediction: its probability `q`, the predicted end of the quiet time, and the prediction by the
    position alone, before the correction for recent quiet times."""

    q: float
    until_s: float
    place: RemainingQuiet


@dataclass(slots=True)
class SlackLearner:
    """Learns the quiet times of one rank. Its `follower` stores the sequence of collectives of an iteration and tracks
    the position in it."""

    rank: int
    histograms: dict[str, SlackHistogram] = field(default_factory=dict)  # by operation
    follower: MarkedIterations | RepetitionFinder = field(default_factory=RepetitionFinder)
    _numbers: dict[Signature, int] = field(default_factory=dict)
    _fresh: Iterator[int] = field(default_factory=count)
    _sizes: dict[tuple[str, int], int] = field(default_factory=dict)  # number of distinct sizes
    _flying: dict[int, Signature] = field(default_factory=dict)  # by handle
    _handles: int = 0
    _opened_s: float | None = None  # when the rank became quiet; None: it is not quiet, or its state is unknown
    _ended_s: float | None = None  # the latest end
    _opened_at: IterationGap | None = None
    _opened_offset_s: float = 0.0
    _iteration_s: float = 0.0
    _mark: str = ""
    _request: "_Request | None" = None  # the first request in this quiet time
    _pace: float = 1.0  # factor applied to the prediction by position alone
    _levels: dict[float, float] = field(default_factory=dict)  # target levels, by q

    def started(self, signature: Signature, at_s: float) -> int:
        """Record the start of a collective. Returns a handle to pass to `ended`."""
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
        """Record the end of the collective with this handle. Has no effect if the collective is not in flight."""
        if self._flying.pop(handle, None) is None:
            return
        self._ended_s = at_s if self._ended_s is None else max(self._ended_s, at_s)
        if not self._flying:
            self._opened_s = self._ended_s
            self._opened_offset_s = self._ended_s - self._iteration_s
            place = self.follower.place
            self._opened_at = None if isinstance(place, Hold) else place[1]

    def mark(self, name: str, _at_s: float) -> None:
        """Set the trainer's current phase, such as "backward". The phase is stored with the positions that follow."""
        self._mark = name

    def iteration(self, _number: int, at_s: float) -> None:
        """Handle the start of an iteration that the trainer marks."""
        if not isinstance(self.follower, MarkedIterations):
            self.follower = MarkedIterations()
            self._opened_at = None
        self.follower.begin()
        self._iteration_s = at_s

    def lost(self, detail: str) -> None:
        """Handle a loss of events, for which `detail` is the reason. Collectives in flight are forgotten, and the
        position in the iteration becomes unknown."""
        self._flying.clear()
        self._opened_s = self._ended_s = self._opened_at = self._request = None
        self.follower.lose(detail)

    def prepare(self, q: float) -> None:
        """Compute in advance the bound that `remaining` needs at the next quiet time. Call this method while a
        collective is in flight, so that no quiet time is spent on arithmetic."""
        place = self.follower.place
        if not isinstance(place, Hold):
            place[1].lengths_s.lower(self._levels.get(q, q))

    def remaining(self, now_s: float, q: float) -> RemainingQuiet | Hold:
        """Predict the time until which the rank stays quiet, except with probability `q`, given how long it has been
        quiet. Return a Hold if the rank is not quiet or if no prediction is possible."""
        if self._flying:
            first = next(iter(self._flying.values()))
            return Hold(
                TRAFFIC, f"rank {self.rank} has {len(self._flying)} collectives in flight, the oldest is {first.op}"
            )
        if self._opened_s is None:
            return Hold(UNLEARNT, f"rank {self.rank}: no collective seen yet")
        place = self.follower.place
        if isinstance(place, Hold):
            return Hold(place.code, f"rank {self.rank}: {place.detail}")
        position, gap = place
        predicted = self._promise(position, gap, self._opened_s, now_s, q)
        if isinstance(predicted, Hold):
            return predicted
        until_s = predicted.opened_s + self._pace * (predicted.until_s - predicted.opened_s)
        if self._request is None:
            self._request = _Request(q, max(now_s, until_s), predicted)
        if until_s <= now_s:
            return Hold(
                OUTLASTED,
                f"rank {self.rank}, position {position}: recent windows were shorter, so this one may have ended",
            )
        return RemainingQuiet(predicted.position, predicted.opened_s, until_s, predicted.samples, predicted.risk)

    def _grade(self, at_s: float) -> None:
        """Adapt later predictions to the accuracy of the last one. If predictions fail more often than allowed, for
        example while quiet times become shorter, later predictions are more cautious (adaptive conformal inference,
        Gibbs and Candes, 2021). They are never less cautious than requested. If a quiet time was shorter than
        predicted, for example in an iteration with few tokens, the next predictions are shortened in the same
        proportion."""
        if self._request is None:
            return
        request, self._request = self._request, None
        level = self._levels.get(request.q, request.q) + CARE * (request.q - (request.until_s > at_s))
        self._levels[request.q] = min(request.q, max(request.q / MOST_CARE, level))
        opened_s, expected_s = request.place.opened_s, request.place.until_s
        kept = (at_s - opened_s) / (expected_s - opened_s) if expected_s > opened_s else 1.0
        self._pace = min(self._pace, max(LEAST_PACE, kept)) if kept < 1 else (1 + self._pace) / 2

    def _promise(
        self, position: int, gap: IterationGap, opened_s: float, now_s: float, q: float
    ) -> RemainingQuiet | Hold:
        lengths, lasted_s = gap.lengths_s, max(0.0, now_s - opened_s)
        where = f"rank {self.rank}, position {position}"
        if len(lengths) < MIN_SAMPLES:
            return Hold(
                FEW_SAMPLES, f"{where}: at least {MIN_SAMPLES} measured quiet times are required, got {len(lengths)}"
            )
        bound = lengths.promised(q, self._levels.get(q, q), lasted_s)
        if bound is None:
            return Hold(
                OUTLASTED,
                f"{where}: quiet for {lasted_s * 1e3:.1f} ms; too few earlier windows were longer to predict the end",
            )
        return RemainingQuiet(position, opened_s, opened_s + bound.value_s, bound.samples, bound.risk)

    @property
    def signatures(self) -> dict[int, Signature]:
        """The signatures by the numbers that represent them in a sequence. A size of -1 means that the size varies."""
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
