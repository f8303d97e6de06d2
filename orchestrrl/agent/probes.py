"""Read the collective boundaries of this host's traced processes, and predict how long their jobs stay quiet.

The ring buffer of each process (integrations/instrument/rings.py) feeds a learner (planner/fabric/slack.py). A job is
quiet while none of its ranks on this host has a collective in flight. The predicted end of a quiet period is the time
at which the first of these ranks starts its next collective.
"""

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from orchestrrl.integrations.instrument.rings import (
    PAYLOAD,
    UNKNOWN,
    RingEvent,
    RingHeader,
    RingReader,
    list_rings,
    remove_dead,
)
from orchestrrl.rpc.pb import fabric_pb2
from planner.fabric.slack import RemainingQuiet, Signature, SlackLearner
from planner.fabric.slack_summary import summarize
from planner.model import Hold

logger = logging.getLogger(__name__)

NANO = 1e-9
MOST_INTENTS = 256  # remembered, over all jobs
ITERATION = "iteration"  # the recorder's mark that numbers iterations


@dataclass(eq=False)
class TracedProcess:
    """One traced process. `header` is the header of its ring buffer at the last scan for new processes."""

    reader: RingReader
    header: RingHeader
    learner: SlackLearner
    handles: dict[int, int] = field(default_factory=dict)  # learner's handles, by the ring's sequence
    newest: int = -1  # latest sequence read
    seen: int = -1  # the ring's change counter at the last read

    @property
    def rank(self) -> int:
        return self.header.rank

    @property
    def job(self) -> str:
        return self.header.job

    def read(self) -> Iterator[RingEvent]:
        """Feed new events to the learner, and yield those that are marks with an announcement."""
        if self.reader.changes == self.seen:
            return
        self.seen = self.reader.changes  # later changes are read next time
        events, lost = self.reader.events()
        if lost:
            self.learner.lost(f"{lost} events were overwritten before they were read")
            self.handles.clear()
        points: list[tuple[int, int, RingEvent]] = []
        for event in events:
            if event.sequence > self.newest:  # a running event is returned again once it has ended
                self.newest = event.sequence
                points.append((event.start_ns, 1, event))
            if event.is_collective and event.end_ns is not None:
                points.append((event.end_ns, 2, event))
        for at_ns, which, event in sorted(points, key=lambda point: point[:2]):
            self._feed(at_ns * NANO, which, event)
            if which == 1 and event.payload is not None:
                yield event

    def _feed(self, at_s: float, which: int, event: RingEvent) -> None:
        if not event.is_collective:
            if event.op == ITERATION:
                self.learner.iteration(event.value, at_s)
            elif not event.flags & PAYLOAD:  # an announcement is not a phase of the iteration
                self.learner.mark(event.op, at_s)
        elif which == 1:
            self.handles[event.sequence] = self.learner.started(Signature(event.op, event.group, event.n_bytes), at_s)
        elif (handle := self.handles.pop(event.sequence, None)) is not None:
            self.learner.ended(handle, at_s)


class HostTraces:
    """All traced processes of this host. `clock_s` is the monotonic clock that their recorders use."""

    def __init__(self, directory: Path, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._clock_s = clock_s
        self._traced: dict[Path, TracedProcess] = {}
        self._by_job: dict[str, list[TracedProcess]] = {}  # sorted by rank; those without a rank first
        self._unreadable: set[Path] = set()
        self._intents: dict[tuple[str, str], str] = {}  # last announced, by job and period
        self._armed: Mapping[str, frozenset[float]] = {}

    @property
    def traced(self) -> list[TracedProcess]:
        """The processes that have a rank, sorted by job and rank."""
        return [each for _, ranks in sorted(self._by_job.items()) for each in ranks if each.rank != UNKNOWN]

    def jobs(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for each in self.traced:
            found[each.job] = (*found.get(each.job, ()), each.rank)
        return found

    def poll(self) -> bool:
        """Add new processes and remove ended processes. Return whether the jobs' ranks changed."""
        before = self.jobs()
        found = list_rings(self._directory)
        for path in found:
            if path not in self._traced and path not in self._unreadable:
                self._accept(path)
        for path, each in list(self._traced.items()):
            if not each.reader.alive:
                each.reader.close()
                del self._traced[path]
                continue
            each.header = each.reader.header()
            each.learner.rank = each.rank
            each.reader.arm(each.job in self._armed)
        self._unreadable &= set(found)
        if len(found) > len(self._traced):
            remove_dead(self._directory, older_than_s=1.0)
        self._by_job = {}
        for each in sorted(self._traced.values(), key=lambda each: each.rank):
            self._by_job.setdefault(each.job, []).append(each)
        return self.jobs() != before

    def arm(self, quantiles: Mapping[str, frozenset[float]]) -> None:
        """Make the processes of these jobs, and of no others, ring the doorbell when they go quiet or communicate
        again. `quantiles` maps each job to the quantiles that later calls of `assess` use."""
        self._armed = quantiles
        for each in self._traced.values():
            each.reader.arm(each.job in quantiles)

    def prepare(self) -> None:
        """Compute in advance what `assess` needs in the next windows of the armed jobs."""
        for job, quantiles in self._armed.items():
            for each in self._by_job.get(job, ()):
                for q in quantiles:
                    each.learner.prepare(q)

    def read(self, quiet_only: bool = False) -> list[fabric_pb2.Announcement]:
        """Feed new events to the learners of all ranks, or only of quiet ranks. Return the announcements among the
        events."""
        announced: list[fabric_pb2.Announcement] = []
        for each in list(self._traced.values()):
            if quiet_only and each.reader.communicates:
                continue
            for event in each.read():
                found = _announced(each, event)
                if found is not None:
                    self._complete(found)
                    announced.append(found)
        return announced

    def busy(self, job: str) -> bool:
        """Return whether any rank of the job has a collective in flight. The call reads only a few words of memory."""
        return any(each.reader.communicates for each in self._by_job.get(job, ()))

    def assess(self, job: str, q: float) -> fabric_pb2.Quiet | Hold:
        """Return the quiet period of a job on this host, with its predicted end. The probability that a given rank
        starts a collective before this end is at most `q`. The prediction is based on this host's clock and the events
        read so far. If the job is not quiet or no prediction is possible, return a Hold with the reason."""
        now_s = self._clock_s()
        first: tuple[RemainingQuiet, int] | None = None
        since_s = risk = 0.0
        ranks = self._by_job.get(job, ())
        for each in ranks:
            if each.reader.communicates:
                return Hold("traffic", f"rank {each.rank} has a collective in flight")
        for each in ranks:
            if each.rank == UNKNOWN:  # not yet in its job, so it has not communicated
                continue
            remaining = each.learner.remaining(now_s, q)
            if isinstance(remaining, Hold):
                return remaining
            since_s, risk = max(since_s, remaining.opened_s), risk + remaining.risk
            if first is None or remaining.until_s < first[0].until_s:
                first = remaining, each.rank
        if first is None:
            return Hold("untraced", f"no rank of job {job!r} is traced on this host")
        soonest, rank = first
        quiet = fabric_pb2.Quiet(job=job, since_s=since_s, until_s=soonest.until_s, risk=min(1.0, risk))
        quiet.rank, quiet.position, quiet.samples = rank, soonest.position, soonest.samples
        return quiet

    def summaries(self, q: float) -> Iterable[dict[str, Any]]:
        """Yield, for each rank, a mapping with its job and its `SlackSummary`. The summaries are computed lazily, rank
        by rank, because they are expensive for long iterations."""
        for each in self.traced:
            yield {"job": each.job, "summary": asdict(summarize(each.learner, q))}

    def close(self) -> None:
        for each in self._traced.values():
            each.reader.arm(armed=False)
            each.reader.close()
        self._traced.clear()
        self._by_job.clear()

    def _complete(self, announced: fabric_pb2.Announcement) -> None:
        """Add the last intent of the same job and period to an announcement without an intent, because the daemon may
        have missed the earlier announcement."""
        key = announced.job, announced.period
        if announced.intent_json:
            self._intents.pop(key, None)
            if len(self._intents) >= MOST_INTENTS:
                del self._intents[next(iter(self._intents))]
            self._intents[key] = announced.intent_json
        else:
            announced.intent_json = self._intents.get(key, "")

    def _accept(self, path: Path) -> None:
        try:
            reader = RingReader(path)
        except (OSError, ValueError) as error:
            self._unreadable.add(path)
            logger.warning("%s cannot be read: %s", path, error)
            return
        if not reader.alive:
            reader.close()
            return
        header = reader.header()
        self._traced[path] = TracedProcess(reader, header, SlackLearner(header.rank))


def _announced(each: TracedProcess, event: RingEvent) -> fabric_pb2.Announcement | None:
    """Return the announcement in a mark. Its payload is `{"period": NAME, "body": INTENT}`, as recorder.announce writes
    it. An empty body repeats the last intent. Return None if the payload is invalid."""
    try:
        parsed = json.loads(event.payload or b"")
        period, intent = parsed["period"], parsed["body"]
        if not isinstance(period, str) or not isinstance(intent, dict):
            raise ValueError(f"period must be a string and body must be an object, got {period!r} and {intent!r}")
    except (ValueError, KeyError, TypeError) as error:
        logger.warning("rank %d sent an invalid announcement: %s", each.rank, error)
        return None
    intent_json = json.dumps(intent) if intent else ""
    return fabric_pb2.Announcement(job=each.job, rank=each.rank, period=period, intent_json=intent_json)
