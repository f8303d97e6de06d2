"""Reads the collective boundaries of this host's traced processes, and says when it is quiet and for how long.

Every process's ring (integrations/instrument/rings.py) feeds a learner (planner/fabric/slack.py). Of a job it is quiet
where no rank of it on this host has a collective in flight; it stays so until the first of them is expected to begin
one.
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
MOST_INTENTS = 256  # that are remembered, of all jobs
ITERATION = "iteration"  # the recorder's name for the mark that numbers iterations


@dataclass(eq=False)
class TracedProcess:
    """One process. `header` is as of the last look for new processes."""

    reader: RingReader
    header: RingHeader
    learner: SlackLearner
    handles: dict[int, int] = field(default_factory=dict)  # the learner's, by the ring's sequence
    newest: int = -1  # sequence that was read
    seen: int = -1  # of the ring's changes

    @property
    def rank(self) -> int:
        return self.header.rank

    @property
    def job(self) -> str:
        return self.header.job

    def read(self) -> Iterator[RingEvent]:
        """Feed the learner; marks that announce something are passed on."""
        if self.reader.changes == self.seen:
            return
        self.seen = self.reader.changes  # what happens from here on is read again
        events, lost = self.reader.events()
        if lost:
            self.learner.lost(f"{lost} events were overwritten before they were read")
            self.handles.clear()
        points: list[tuple[int, int, RingEvent]] = []
        for event in events:
            if event.sequence > self.newest:  # one that runs is given out again when it has ended
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
            elif not event.flags & PAYLOAD:  # what is announced is no phase of the iteration
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
        self._by_job: dict[str, list[TracedProcess]] = {}  # by rank; those without one first
        self._unreadable: set[Path] = set()
        self._intents: dict[tuple[str, str], str] = {}  # by job and period, as announced last
        self._armed: Mapping[str, frozenset[float]] = {}

    @property
    def traced(self) -> list[TracedProcess]:
        """Those that have a rank, by job and rank."""
        return [each for _, ranks in sorted(self._by_job.items()) for each in ranks if each.rank != UNKNOWN]

    def jobs(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for each in self.traced:
            found[each.job] = (*found.get(each.job, ()), each.rank)
        return found

    def poll(self) -> bool:
        """Take up processes that have come and let go those that have ended; whether the jobs' ranks changed."""
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
        """The processes of these jobs ring the doorbell, and no others; `assess` will be asked with these quantiles."""
        self._armed = quantiles
        for each in self._traced.values():
            each.reader.arm(each.job in quantiles)

    def prepare(self) -> None:
        """Do beforehand what `assess` would have to do in the windows that come next."""
        for job, quantiles in self._armed.items():
            for each in self._by_job.get(job, ()):
                for q in quantiles:
                    each.learner.prepare(q)

    def read(self, quiet_only: bool = False) -> list[fabric_pb2.Announcement]:
        """Let all learners know what has happened, or those of ranks that are quiet; what was announced meanwhile."""
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
        """Whether some rank of the job has a collective in flight. A look at a few words of memory."""
        return any(each.reader.communicates for each in self._by_job.get(job, ()))

    def assess(self, job: str, q: float) -> fabric_pb2.Quiet | Hold:
        """Of what has been read: how long it stays quiet, but for a probability of `q`, by this host's clock."""
        now_s = self._clock_s()
        first: tuple[RemainingQuiet, int] | None = None
        since_s = risk = 0.0
        ranks = self._by_job.get(job, ())
        for each in ranks:
            if each.reader.communicates:
                return Hold("traffic", f"rank {each.rank} has a collective in flight")
        for each in ranks:
            if each.rank == UNKNOWN:  # not in its job yet: it has communicated with nobody
                continue
            remaining = each.learner.remaining(now_s, q)
            if isinstance(remaining, Hold):
                return remaining
            since_s, risk = max(since_s, remaining.opened_s), risk + remaining.risk
            if first is None or remaining.until_s < first[0].until_s:
                first = remaining, each.rank
        if first is None:
            return Hold("untraced", f"no rank of job {job!r} is traced here")
        soonest, rank = first
        quiet = fabric_pb2.Quiet(job=job, since_s=since_s, until_s=soonest.until_s, risk=min(1.0, risk))
        quiet.rank, quiet.position, quiet.samples = rank, soonest.position, soonest.samples
        return quiet

    def summaries(self, q: float) -> Iterable[dict[str, Any]]:
        """What is known of each rank's iterations: a `SlackSummary` with its job. Much work for long iterations, done
        as it is asked for, rank by rank."""
        for each in self.traced:
            yield {"job": each.job, "summary": asdict(summarize(each.learner, q))}

    def close(self) -> None:
        for each in self._traced.values():
            each.reader.arm(armed=False)
            each.reader.close()
        self._traced.clear()
        self._by_job.clear()

    def _complete(self, announced: fabric_pb2.Announcement) -> None:
        """Add an intent that was announced before: the daemon may not have been there then."""
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
    """`{"period": NAME, "body": INTENT}`, as recorder.announce writes it; an empty body: as announced last."""
    try:
        told = json.loads(event.payload or b"")
        period, intent = told["period"], told["body"]
        if not isinstance(period, str) or not isinstance(intent, dict):
            raise ValueError(f"must be a name and an object, got {period!r} and {intent!r}")
    except (ValueError, KeyError, TypeError) as error:
        logger.warning("rank %d announced what cannot be read: %s", each.rank, error)
        return None
    intent_json = json.dumps(intent) if intent else ""
    return fabric_pb2.Announcement(job=each.job, rank=each.rank, period=period, intent_json=intent_json)
