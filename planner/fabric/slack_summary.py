"""Summarize the quiet times that were learned for a rank, as a value that can be sent as JSON and printed. Has no side
effects."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from planner.fabric.sequence import IterationGap
from planner.fabric.slack import Signature, SlackHistogram, SlackLearner
from planner.model import Hold

VANISHED = Signature("?", -1, -1)  # stored under another number since its size was found to vary


@dataclass(frozen=True, slots=True)
class PositionSummary:
    """The quiet time before one collective of an iteration. Times are in seconds. They are None if the rank was never
    quiet before this collective."""

    position: int
    op: str
    group: int
    size: int  # bytes; -1 if they vary
    mark: str  # the trainer's mark before it
    passed: int  # how often the collective began
    samples: int  # remembered quiet times before it
    offset_s: float | None  # median offset of the opening within the iteration
    p5_s: float | None
    p50_s: float | None
    p95_s: float | None
    # lower bound when it opens, at the requested probability; None if there are too few samples
    promised_s: float | None
    risk: float | None

    def covers(self, need_s: float) -> bool:
        return self.promised_s is not None and self.promised_s >= need_s


@dataclass(frozen=True, slots=True)
class SlackSummary:
    """The summary of the quiet times of one or several ranks. For several ranks, the histograms are added up, and
    `positions` are those of the first rank."""

    ranks: tuple[int, ...]
    iterations: int
    relearned: int
    reason: str  # of the last change of the sequence
    why_not: str  # why no bound is given at this position
    q: float
    positions: tuple[PositionSummary, ...]
    histograms: Mapping[str, SlackHistogram]


def summarize(learner: SlackLearner, q: float) -> SlackSummary:
    follower, signatures = learner.follower, learner.signatures
    known, here = follower.sequence, follower.place
    places = () if known is None else zip(known.ids, known.gaps, strict=False)
    return SlackSummary(
        (learner.rank,),
        follower.rounds,
        follower.relearned,
        follower.reason,
        here.detail if isinstance(here, Hold) else "",
        q,
        tuple(
            _position(position, signatures.get(number, VANISHED), gap, q)
            for position, (number, gap) in enumerate(places)
        ),
        {op: histogram.merged(SlackHistogram()) for op, histogram in sorted(learner.histograms.items())},
    )


def merged(summaries: Iterable[SlackSummary]) -> SlackSummary:
    """Merge summaries: list their ranks and add up their histograms. All other values are taken from the first summary.
    Raises ValueError if there are no summaries."""
    rest = list(summaries)
    if not rest:
        raise ValueError("at least one summary is required, got 0")
    first, histograms = rest[0], dict[str, SlackHistogram]()
    for each in rest:
        for op, histogram in each.histograms.items():
            histograms[op] = histograms.get(op, SlackHistogram()).merged(histogram)
    return replace(first, ranks=tuple(rank for each in rest for rank in each.ranks), histograms=histograms)


def _position(position: int, signature: Signature, gap: IterationGap, q: float) -> PositionSummary:
    lengths = gap.lengths_s
    bound = lengths.promised(q, q)
    return PositionSummary(
        position,
        signature.op,
        signature.group,
        signature.size,
        gap.mark,
        gap.passed,
        len(lengths),
        gap.offsets_s.quantile(0.5),
        lengths.quantile(0.05),
        lengths.quantile(0.5),
        lengths.quantile(0.95),
        None if bound is None else bound.value_s,
        None if bound is None else bound.risk,
    )
