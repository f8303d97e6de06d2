"""What this host's recorders still remember, as a trace that `orchestrrl fabric slack` reads. Rings are only read."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from orchestrrl.core.errors import Permanent
from orchestrrl.fabric.traces import TracedCollective, TracedIteration, TracedMark, TraceEvent
from orchestrrl.integrations.instrument.rings import (
    DEFAULT_DIRECTORY,
    PAYLOAD,
    UNKNOWN,
    RingEvent,
    RingHeader,
    RingReader,
    list_rings,
)

ITERATION = "iteration"  # the recorder's name for the mark that numbers iterations
NANO = 1e-9


@dataclass(frozen=True, slots=True)
class RingTrace:
    """`events` by rank and time. `lost` are those that a ring has overwritten, `running` collectives without an end."""

    ranks: tuple[int, ...]
    events: tuple[TraceEvent, ...]
    lost: int
    running: int


def recorded_jobs(rings: Path = DEFAULT_DIRECTORY) -> dict[str, tuple[int, ...]]:
    """The ranks of each job that has rings there, ended ones included."""
    found: dict[str, set[int]] = {}
    for path in list_rings(rings):
        for header, _ in _read(path):
            found.setdefault(header.job, set()).update({header.rank} - {UNKNOWN})
    return {job: tuple(sorted(ranks)) for job, ranks in sorted(found.items())}


def read_rings(rings: Path, job: str) -> RingTrace:
    """Times are seconds since the Unix epoch: traces of several hosts agree as far as their clocks do. Of a rank that
    was started again, only the newest process counts. Raises Permanent where the job has no ring there."""
    ahead_s = time.time() - time.monotonic()
    newest: dict[int, tuple[int, list[RingEvent], int]] = {}
    for path in list_rings(rings):
        for header, reader in _read(path):
            if header.job != job or header.rank == UNKNOWN:
                continue
            if header.rank not in newest or header.created_ns > newest[header.rank][0]:
                newest[header.rank] = header.created_ns, *reader.events()
    if not newest:
        raise Permanent(f"{rings}: no ring of job {job!r} is there")
    told: list[TraceEvent] = []
    for rank, (_, events, _) in sorted(newest.items()):
        told += [each for event in events if (each := _traced_event(rank, event, ahead_s)) is not None]
    return RingTrace(
        tuple(sorted(newest)),
        tuple(told),
        sum(lost for _, _, lost in newest.values()),
        sum(event.is_collective and event.end_ns is None for _, events, _ in newest.values() for event in events),
    )


def _read(path: Path) -> Iterator[tuple[RingHeader, RingReader]]:
    try:
        reader = RingReader(path)
    except (OSError, ValueError):  # gone meanwhile, or none of ours
        return
    with reader:
        yield reader.header(), reader


def _traced_event(rank: int, event: RingEvent, ahead_s: float) -> TraceEvent | None:
    start_s = event.start_ns * NANO + ahead_s
    if event.is_collective:
        if event.end_ns is None:
            return None
        end_s = max(start_s, event.end_ns * NANO + ahead_s)
        told = {"rank": rank, "op": event.op, "group": event.group, "bytes": event.n_bytes, "async": event.asynchronous}
        return TracedCollective.model_validate({**told, "start_s": start_s, "end_s": end_s})
    if event.op == ITERATION:
        return TracedIteration(rank=rank, iteration=event.value, at_s=start_s)
    return None if event.flags & PAYLOAD else TracedMark(rank=rank, mark=event.op, at_s=start_s)
