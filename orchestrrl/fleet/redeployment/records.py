"""Redeployments and the fleet that they left, in the journal: written and read in one form."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from orchestrrl.core.journal.kinds import REDEPLOYMENTS
from orchestrrl.core.journal.store import EntryKind, JournalReader
from orchestrrl.core.operation import check_record
from orchestrrl.core.operation_journal import OpenIntent, OperationJournal, left_open
from orchestrrl.engines.managed import AnswerExcerpt
from orchestrrl.fleet.deployers.command_line import EngineSpec
from orchestrrl.fleet.redeployment.steps import Redeployment, RedeploymentId, RedeploymentReport, StepKind

REDEPLOYMENT = TypeAdapter(Redeployment)
EXCERPT = TypeAdapter(AnswerExcerpt)
REPORT = TypeAdapter(RedeploymentReport)
_SPECS = TypeAdapter(tuple[EngineSpec, ...])

HISTORY = 256  # redeployments that are remembered


@dataclass(frozen=True, slots=True)
class RecordedFleet:
    """The engines as the last redeployment left them: those that serve, and those that sleep."""

    serving: tuple[EngineSpec, ...] = ()
    asleep: tuple[EngineSpec, ...] = ()


def write_end(log: OperationJournal, report: RedeploymentReport, fleet: RecordedFleet) -> None:
    body = {
        "report": REPORT.dump_python(report, mode="json"),
        "serving": _SPECS.dump_python(fleet.serving, mode="json"),
        "asleep": _SPECS.dump_python(fleet.asleep, mode="json"),
    }
    log.end(report.id, body)


def read_fleet(journal: JournalReader) -> RecordedFleet | None:
    """None: no redeployment has ended here."""
    latest = journal.latest(EntryKind.REDEPLOYMENT_ENDED)
    return None if latest is None else journal.interpret(latest, _fleet_from)


def read_open(journal: JournalReader) -> OpenIntent[Redeployment] | None:
    """The latest that was not ended: there is one at a time."""
    opened = left_open(journal, REDEPLOYMENTS, lambda entry: REDEPLOYMENT.validate_python(entry.body["redeployment"]))
    latest = journal.latest(EntryKind.REDEPLOYMENT_ENDED)
    newest = journal.latest(EntryKind.REDEPLOYMENT_BEGAN)
    if not opened or newest is None or newest.sequence != opened[-1].sequence:
        return None
    left = opened[-1]
    if latest is not None and latest.sequence > left.sequence:
        return None  # it has ended, and that could not be written down
    steps = tuple(step for step in left.steps if journal.interpret(step, _checked_step) is not None)
    return replace(left, steps=steps)


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
    """Return the body of a step's entry, with what a resumed redeployment reads of it. Raises ValueError."""
    StepKind(body["kind"]), body["engine"]
    if "reference" in body:
        EXCERPT.validate_python(body["reference"])
    return check_record(body)
