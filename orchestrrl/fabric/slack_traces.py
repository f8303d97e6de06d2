"""Recorded collectives told to learners, rank by rank; and when it was quiet on all ranks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrrl.core.errors import ProblemFaults
from orchestrrl.fabric.traces import TracedCollective, TracedIteration, TracedMark, TraceEvent, by_rank, read_trace
from planner.fabric.slack import Signature, SlackLearner
from planner.fabric.slack_summary import SlackSummary, summarize
from planner.fabric.windows import common_quiet, quiet_between


@dataclass(frozen=True, slots=True)
class CommonQuiet:
    """Of the time in which all ranks were being recorded: its windows, ascending by length."""

    ranks: int
    span_s: float
    lengths_s: tuple[float, ...]

    @property
    def share(self) -> float:
        return self.share_covering(0.0)

    def covering(self, need_s: float) -> int:
        return sum(length_s >= need_s for length_s in self.lengths_s)

    def share_covering(self, need_s: float) -> float:
        quiet_s = sum(length_s for length_s in self.lengths_s if length_s >= need_s)
        return quiet_s / self.span_s if self.span_s > 0 else 0.0

    def quantile_s(self, q: float) -> float | None:
        if not self.lengths_s:
            return None
        return self.lengths_s[min(len(self.lengths_s) - 1, int(q * len(self.lengths_s)))]


def read_traces(sources: Iterable[Path]) -> list[TraceEvent]:
    """All files together. Raises ProblemFaults with the faults of all, and where there is no collective in them."""
    events: list[TraceEvent] = []
    faults: list[str] = []
    for source in sources:
        try:
            events += read_trace(source)
        except ProblemFaults as error:
            faults += error.faults
    if not faults and not any(isinstance(event, TracedCollective) for event in events):
        faults.append(f"(traces): must hold at least one collective, got {len(events)} other events")
    if faults:
        raise ProblemFaults(faults)
    return events


def study(events: Iterable[TraceEvent], q: float) -> tuple[list[SlackSummary], CommonQuiet]:
    """What each rank's learner knows in the end, ascending by rank, and the quiet of all."""
    ranks = {rank: each for rank, each in by_rank(events).items() if any(isinstance(e, TracedCollective) for e in each)}
    return [summarize(learned(rank, each), q) for rank, each in ranks.items()], common(list(ranks.values()))


def learned(rank: int, events: Sequence[TraceEvent]) -> SlackLearner:
    """A learner that was told everything, in order of time. At one moment an end goes before a begin."""
    learner = SlackLearner(rank)
    flying: dict[int, int] = {}
    for _, _, index, ends in sorted(_moments(events)):
        event = events[index]
        if isinstance(event, TracedIteration):
            learner.iteration(event.iteration, event.at_s)
        elif isinstance(event, TracedMark):
            learner.mark(event.mark, event.at_s)
        elif ends:
            learner.ended(flying.pop(index), event.end_s)
        else:
            signature = Signature(event.op, event.group, event.bytes)
            flying[index] = learner.started(signature, event.start_s)
    return learner


def _moments(events: Sequence[TraceEvent]) -> Iterable[tuple[float, int, int, bool]]:
    """(when, what goes first then, index of the event, whether it ends there)."""
    for index, event in enumerate(events):
        if isinstance(event, TracedCollective):
            yield event.start_s, 2, index, False
            yield event.end_s, 3 if event.end_s == event.start_s else 0, index, True
        else:
            yield event.at_s, 1, index, False


def common(ranks: Sequence[Sequence[TraceEvent]]) -> CommonQuiet:
    busy = [[(e.start_s, e.end_s) for e in events if isinstance(e, TracedCollective)] for events in ranks]
    quiet = common_quiet([quiet_between(each) for each in busy])
    span_s = min(max(end for _, end in each) for each in busy) - max(min(start for start, _ in each) for each in busy)
    return CommonQuiet(len(ranks), max(0.0, span_s), tuple(sorted(end - start for start, end in quiet)))
