"""What a rank's learner knows, as a value that can be sent and printed. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from planner.fabric.sequence import IterationGap
from planner.fabric.slack import Signature, SlackHistogram, SlackLearner

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

    def to_json(self) -> dict[str, Any]:
        body = {each.name: getattr(self, each.name) for each in fields(self)}
        return body | {
            "ranks": list(self.ranks),
            "positions": [asdict(position) for position in self.positions],
            "histograms": {op: histogram.to_json() for op, histogram in sorted(self.histograms.items())},
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> "SlackSummary":
        """Of what `to_json` wrote."""
        return cls(
            **{
                **body,
                "ranks": tuple(body["ranks"]),
                "positions": tuple(PositionSummary(**position) for position in body["positions"]),
                "histograms": {op: SlackHistogram.from_json(each) for op, each in body["histograms"].items()},
            }
        )


def summarize(learner: SlackLearner, q: float) -> SlackSummary:
    known, signatures = learner.known_sequence, learner.signatures
    places = () if known is None else zip(known.ids, known.gaps, strict=False)
    return SlackSummary(
        (learner.rank,),
        learner.iterations,
        learner.relearned,
        learner.reason,
        learner.why_not,
        q,
        tuple(
            _position(position, signatures.get(number, VANISHED), gap, learner, q)
            for position, (number, gap) in enumerate(places)
        ),
        {op: histogram.merged(SlackHistogram()) for op, histogram in learner.histograms.items()},
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
    return SlackSummary(
        tuple(rank for each in rest for rank in each.ranks),
        first.iterations,
        first.relearned,
        first.reason,
        first.why_not,
        first.q,
        first.positions,
        histograms,
    )


def _position(
    position: int, signature: Signature, gap: IterationGap, learner: SlackLearner, q: float
) -> PositionSummary:
    lengths, trust = gap.lengths_s, learner.trust
    promised_s, risk = None, None
    if len(lengths) >= trust.min_samples:
        bound, least = lengths.lower(q), lengths.least()
        if bound is not None:
            promised_s, risk = bound.value_s, bound.risk
        elif least is not None:
            promised_s, risk = trust.shrunk(least.risk, q) * least.value_s, least.risk
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
        promised_s,
        risk,
    )
