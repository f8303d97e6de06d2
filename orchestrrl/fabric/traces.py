"""Traces of collectives in a file: one JSON object per line, in any order.

    {"rank": 0, "op": "all_reduce", "group": 0, "bytes": 1048576, "start_s": 12.001, "end_s": 12.004, "async": false}
    {"rank": 0, "mark": "backward", "at_s": 12.010}
    {"rank": 0, "iteration": 7, "at_s": 12.100}

`group` is a number that all iterations use for the same process group. Times are seconds of one clock for all ranks.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from orchestrrl.core.documents import NonNegativeInt, require
from orchestrrl.core.errors import ProblemFaults, faults_of, shorten

MOST_FAULTS = 50  # told of one file

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
    """Every event of a file, as they stand there. Raises ProblemFaults with path and value, `MOST_FAULTS` at most."""
    try:
        lines = source.read_bytes().splitlines()
    except OSError as error:
        raise ProblemFaults([f"{source}: cannot be read: {error.strerror}, got {shorten(str(source))}"]) from error
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
            faults[MOST_FAULTS:] = [f"{source}: has more faults than these, got {len(lines)} lines"]
            break
    if faults:
        raise ProblemFaults(faults)
    return events


def write_trace(events: Iterable[TraceEvent], target: Path) -> None:
    """Whole lines; a trace that is there is replaced."""
    with target.open("w") as file:
        for event in events:
            file.write(json.dumps(event.model_dump(by_alias=True), allow_nan=False) + "\n")


def by_rank(events: Iterable[TraceEvent]) -> Mapping[int, list[TraceEvent]]:
    """Ascending ranks; each rank's events as they came."""
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
