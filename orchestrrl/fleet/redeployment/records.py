"""Redeployments and the fleet that they left, in the journal: written and read in one form."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from orchestrrl.core.journal.store import EntryKind, Journal, JournalEntry, JournalReader
from orchestrrl.engines.managed import AnswerExcerpt
from orchestrrl.fleet.deployers.command_line import EngineSpec
from orchestrrl.fleet.redeployment.steps import (
    Redeployment,
    RedeploymentId,
    RedeploymentReport,
    RedeployStepState,
    StepKind,
)

REDEPLOYMENT = TypeAdapter(Redeployment)
EXCERPT = TypeAdapter(AnswerExcerpt)
REPORT = TypeAdapter(RedeploymentReport)
_SPECS = TypeAdapter(tuple[EngineSpec, ...])

HISTORY = 256  # redeployments that are remembered
MOST_STEPS = 100_000  # entries of one redeployment


@dataclass(frozen=True, slots=True)
class RecordedFleet:
    """The engines as the last redeployment left them: those that serve, and those that sleep."""

    serving: tuple[EngineSpec, ...] = ()
    asleep: tuple[EngineSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class OpenRedeployment:
    """One whose daemon did not live to end it, and what it wrote of its steps."""

    redeployment: Redeployment
    steps: tuple[JournalEntry, ...]


def write_end(journal: Journal, at_s: float, report: RedeploymentReport, fleet: RecordedFleet) -> None:
    body = {
        "report": REPORT.dump_python(report, mode="json"),
        "serving": _SPECS.dump_python(fleet.serving, mode="json"),
        "asleep": _SPECS.dump_python(fleet.asleep, mode="json"),
    }
    journal.append(at_s, EntryKind.REDEPLOYMENT_ENDED, report.id, body)


def read_fleet(journal: JournalReader) -> RecordedFleet | None:
    """None: no redeployment has ended here."""
    latest = journal.latest(EntryKind.REDEPLOYMENT_ENDED)
    return None if latest is None else journal.interpret(latest, _fleet_from)


def read_open(journal: JournalReader) -> OpenRedeployment | None:
    """The latest that was not ended: there is one at a time."""
    opened = journal.open_operations(EntryKind.REDEPLOYMENT_BEGAN)
    if not opened:
        return None
    begun, ended = opened[-1], journal.latest(EntryKind.REDEPLOYMENT_ENDED)
    if ended is not None and ended.sequence > begun.sequence:  # it has ended, and that could not be written down
        return None
    redeployment = journal.interpret(begun, lambda body: REDEPLOYMENT.validate_python(body["redeployment"]))
    if redeployment is None:
        return None
    steps = [
        entry
        for entry in journal.since(begun.sequence, (EntryKind.REDEPLOYMENT_STEP,), MOST_STEPS)
        if entry.subject == redeployment.id and journal.interpret(entry, _checked_step) is not None
    ]
    return OpenRedeployment(redeployment, tuple(steps))


def read_history(journal: JournalReader) -> dict[RedeploymentId, RedeploymentReport]:
    """Oldest first."""
    reports = {}
    for entry in journal.tail(HISTORY, (EntryKind.REDEPLOYMENT_ENDED,)):
        report = journal.interpret(entry, lambda body: REPORT.validate_python(body["report"]))
        if report is not None:
            reports[RedeploymentId(entry.subject)] = report
    return reports


def _fleet_from(body: Mapping[str, Any]) -> RecordedFleet:
    return RecordedFleet(_SPECS.validate_python(body["serving"]), _SPECS.validate_python(body["asleep"]))


def _checked_step(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The body of a step, which has what a resumed redeployment reads of it."""
    StepKind(body["kind"]), RedeployStepState(body["state"])
    if "reference" in body:
        EXCERPT.validate_python(body["reference"])
    missing = {"engine", "number", "direction", "detail", "began_s", "elapsed_s"} - body.keys()
    if missing:
        raise ValueError(f"has no {min(missing)}")
    return body
