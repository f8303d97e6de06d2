"""What a rank's learner knows, as a value that can be sent as JSON and printed. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from planner.fabric.sequence import IterationGap
from planner.fabric.slack import Signature, SlackHistogram, SlackLearner
from planner.model import Hold

VANISHED = Signature("?", -1, -1)  # known by another number since its size was found to vary


@dataclass(frozen=True, slots=True)
class PositionSummary:
    """The quiet before one collective of an iteration. Seconds; None: never quiet there."""

    position: int
    op: str
    group: int
    size: int  # bytes; -1: they vary
    mark: str  # of the trainer, before it
    passed: int  # how often the collective began
    samples: int  # how often it was quiet before, as far as it is remembered
    offset_s: float | None  # of the opening in the iteration, median
    p5_s: float | None
    p50_s: float | None
    p95_s: float | None
    promised_s: float | None  # when it opens, but for the probability asked for; None: too few
    risk: float | None

    def covers(self, need_s: float) -> bool:
        return self.promised_s is not None and self.promised_s >= need_s


@dataclass(frozen=True, slots=True)
class SlackSummary:
    """Of one rank, or of several whose histograms were added up (`positions` are then of the first)."""

    ranks: tuple[int, ...]
    iterations: int
    relearned: int
    reason: str  # of the last change of the sequence
    why_not: str  # nothing is promised at this place
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
    """Histograms added up; the rest is the first one's. Raises ValueError without any."""
    rest = list(summaries)
    if not rest:
        raise ValueError("summaries must be >= 1, got 0")
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
