"""Read traces of collectives from recorder rings or files, write them to files, and analyse them.

A trace file has one JSON object per line, in any order.

    {"rank": 0, "op": "all_reduce", "group": 0, "bytes": 1048576, "start_s": 12.001, "end_s": 12.004, "async": false}
    {"rank": 0, "mark": "backward", "at_s": 12.010}
    {"rank": 0, "iteration": 7, "at_s": 12.100}

`group` is a number that all iterations use for the same process group. Times are seconds on one clock for all ranks.
Recorder rings are opened read-only.
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from orchestrrl.core.documents import NonNegativeInt, require
from orchestrrl.core.errors import Permanent, ProblemFaults, faults_of, shorten
from orchestrrl.integrations.instrument.rings import (
    DEFAULT_DIRECTORY,
    PAYLOAD,
    UNKNOWN,
    RingEvent,
    RingHeader,
    RingReader,
    list_rings,
)
from planner.fabric.slack import Signature, SlackLearner
from planner.fabric.slack_summary import SlackSummary, summarize
from planner.fabric.windows import common_quiet

ITERATION = "iteration"  # the recorder's name for the mark that numbers iterations
NANO = 1e-9
MOST_FAULTS = 50  # reported per file

Time = Annotated[float, AfterValidator(require(lambda _: True, "a finite number"))]


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=True)

    rank: NonNegativeInt


class TracedCollective(_Line):
    op: str = Field(min_length=1)
    group: int
    bytes: NonNegativeInt
    start_s: Time
    end_s: Time
    asynchronous: bool = Field(default=False, alias="async")


class TracedMark(_Line):
    mark: str
    at_s: Time


class TracedIteration(_Line):
    iteration: int
    at_s: Time


TraceEvent = TracedCollective | TracedMark | TracedIteration


def read_trace(source: Path) -> list[TraceEvent]:
    """Return every event of a trace file, in file order. Raises ProblemFaults if the file cannot be read or has invalid
    lines. At most `MOST_FAULTS` faults are listed."""
    try:
        lines = source.read_bytes().splitlines()
    except OSError as error:
        raise ProblemFaults([f"{source}: cannot be read: {error.strerror}"]) from error
    events: list[TraceEvent] = []
    faults: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        event, wrong = _event(line)
        faults += [f"{source}:{number}: {each}" for each in wrong]
        if event is not None:
            events.append(event)
        if len(faults) > MOST_FAULTS:
            faults[MOST_FAULTS:] = [f"{source}: has more faults; only the first are listed, got {len(lines)} lines"]
            break
    if faults:
        raise ProblemFaults(faults)
    return events


def write_trace(events: Iterable[TraceEvent], target: Path) -> None:
    """Write the events to the file `target`, one per line. An existing file is replaced."""
    with target.open("w") as file:
        for event in events:
            file.write(json.dumps(event.model_dump(by_alias=True), allow_nan=False) + "\n")


def by_rank(events: Iterable[TraceEvent]) -> Mapping[int, list[TraceEvent]]:
    """Group events by rank. Ranks are in ascending order, and the order of events within a rank is kept."""
    found: dict[int, list[TraceEvent]] = {}
    for event in events:
        found.setdefault(event.rank, []).append(event)
    return {rank: found[rank] for rank in sorted(found)}


def _event(line: bytes) -> tuple[TraceEvent | None, list[str]]:
    try:
        body: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        text = shorten(line[:80].decode(errors="replace"))
        return None, [f"(line): is not valid JSON: {str(error) or 'nested too deeply'}, got {text}"]
    fields = body if isinstance(body, dict) else {}
    kind = TracedMark if "mark" in fields else TracedIteration if "iteration" in fields else TracedCollective
    try:
        event = kind.model_validate(body)
    except ValidationError as error:
        return None, faults_of(error)
    if isinstance(event, TracedCollective) and event.end_s < event.start_s:
        return None, [f"end_s: must be >= start_s, {event.start_s}, got {event.end_s}"]
    return event, []


@dataclass(frozen=True, slots=True)
class CommonQuiet:
    """The windows in which no rank communicates, within the time span in which all ranks were recorded. `lengths_s`
    contains the lengths of the windows, in ascending order."""

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
    """Return the events of all trace files. Raises ProblemFaults with the faults of all files if a file is invalid.
    Also raises ProblemFaults if the files contain no collective."""
    events: list[TraceEvent] = []
    faults: list[str] = []
    for source in sources:
        try:
            events += read_trace(source)
        except ProblemFaults as error:
            faults += error.faults
    if not faults and not any(isinstance(event, TracedCollective) for event in events):
        faults.append(f"(traces): must have at least one collective, got {len(events)} other events")
    if faults:
        raise ProblemFaults(faults)
    return events


def study(events: Iterable[TraceEvent], q: float) -> tuple[list[SlackSummary], CommonQuiet]:
    """Return the slack summary of each rank that has collectives, in ascending order of ranks, and the quiet windows
    that all of these ranks share. The lower bounds of quiet times in the summaries are computed for the quantile
    `q`."""
    ranks = {rank: each for rank, each in by_rank(events).items() if any(isinstance(e, TracedCollective) for e in each)}
    return [summarize(learned(rank, each), q) for rank, each in ranks.items()], common(list(ranks.values()))


def learned(rank: int, events: Sequence[TraceEvent]) -> SlackLearner:
    """Return a learner that has processed all events of a rank in order of time. At equal times, ends are processed
    before starts."""
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
    """Yield the starts and ends of events as tuples (time, order among equal times, index of the event, True for an
    end)."""
    for index, event in enumerate(events):
        if isinstance(event, TracedCollective):
            yield event.start_s, 2, index, False
            yield event.end_s, 3 if event.end_s == event.start_s else 0, index, True
        else:
            yield event.at_s, 1, index, False


def common(ranks: Sequence[Sequence[TraceEvent]]) -> CommonQuiet:
    busy = [[(e.start_s, e.end_s) for e in events if isinstance(e, TracedCollective)] for events in ranks]
    quiet = common_quiet(busy)
    span_s = min(max(end for _, end in each) for each in busy) - max(min(start for start, _ in each) for each in busy)
    return CommonQuiet(len(ranks), max(0.0, span_s), tuple(sorted(end - start for start, end in quiet)))


@dataclass(frozen=True, slots=True)
class RingTrace:
    """The events read from recorder rings. `events` is sorted by rank and time. `lost` is the number of events that
    were overwritten before they were read. `running` is the number of collectives that have not ended."""

    ranks: tuple[int, ...]
    events: tuple[TraceEvent, ...]
    lost: int
    running: int


def recorded_jobs(rings: Path = DEFAULT_DIRECTORY) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each job that has rings in the folder `rings`, including jobs that have ended."""
    found: dict[str, set[int]] = {}
    for path in list_rings(rings):
        for header, _ in _read(path):
            found.setdefault(header.job, set()).update({header.rank} - {UNKNOWN})
    return {job: tuple(sorted(ranks)) for job, ranks in sorted(found.items())}


def read_rings(rings: Path, job: str) -> RingTrace:
    """Read the events of a job from the rings in the folder `rings`. Times are seconds since the Unix epoch, so traces
    of several hosts are as consistent as the hosts' clocks. If a rank was restarted, only the events of its newest
    process are returned. Raises Permanent if the job has no ring in the folder."""
    ahead_s = time.time() - time.monotonic()
    newest: dict[int, tuple[int, list[RingEvent], int]] = {}
    for path in list_rings(rings):
        for header, reader in _read(path):
            if header.job != job or header.rank == UNKNOWN:
                continue
            if header.rank not in newest or header.created_ns > newest[header.rank][0]:
                newest[header.rank] = header.created_ns, *reader.events()
    if not newest:
        raise Permanent(f"{rings}: has no ring of job {job!r}")
    recorded: list[TraceEvent] = []
    for rank, (_, events, _) in sorted(newest.items()):
        recorded += [each for event in events if (each := _traced_event(rank, event, ahead_s)) is not None]
    return RingTrace(
        tuple(sorted(newest)),
        tuple(recorded),
        sum(lost for _, _, lost in newest.values()),
        sum(event.is_collective and event.end_ns is None for _, events, _ in newest.values() for event in events),
    )


def _read(path: Path) -> Iterator[tuple[RingHeader, RingReader]]:
    try:
        reader = RingReader(path)
    except (OSError, ValueError):  # deleted meanwhile, or not a ring
        return
    with reader:
        yield reader.header(), reader


def _traced_event(rank: int, event: RingEvent, ahead_s: float) -> TraceEvent | None:
    start_s = event.start_ns * NANO + ahead_s
    if event.is_collective:
        if event.end_ns is None:
            return None
        end_s = max(start_s, event.end_ns * NANO + ahead_s)
        call = {"rank": rank, "op": event.op, "group": event.group, "bytes": event.n_bytes, "async": event.asynchronous}
        return TracedCollective.model_validate({**call, "start_s": start_s, "end_s": end_s})
    if event.op == ITERATION:
        return TracedIteration(rank=rank, iteration=event.value, at_s=start_s)
    return None if event.flags & PAYLOAD else TracedMark(rank=rank, mark=event.op, at_s=start_s)
