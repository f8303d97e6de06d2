"""Record redeployments in the list of recent redeployments and in the journal, and report them to watchers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from orchestrrl.core.clock import Clock
from orchestrrl.core.errors import Permanent
from orchestrrl.core.journal.kinds import REDEPLOYMENTS
from orchestrrl.core.journal.store import EntryKind, Journal, JournalReader
from orchestrrl.core.operation import OperationState, StepState, check_record
from orchestrrl.core.operation_journal import OpenIntent, OperationJournal, left_open
from orchestrrl.engines.base import AnswerExcerpt
from orchestrrl.fleet.deployers.command_line import EngineSpec
from orchestrrl.fleet.redeployment.steps import Redeployment, RedeploymentId, RedeploymentReport, StepKind
from planner.model import ConfigurationId, EngineId


@dataclass(frozen=True, slots=True)
class EngineStart:
    """The duration of an engine's start, in seconds. `elapsed_s` is the time from when the previous engines on its GPUs
    began to leave until the engine was verified. `expected_s` is the duration that was predicted for an engine of its
    configuration."""

    configuration: ConfigurationId
    elapsed_s: float
    expected_s: float


@dataclass(frozen=True, slots=True)
class RedeploymentOutcome:
    """The result of a redeployment."""

    done: bool
    detail: str
    ended_s: float
    starts: tuple[EngineStart, ...] = ()


REDEPLOYMENT = TypeAdapter(Redeployment)
EXCERPT = TypeAdapter(AnswerExcerpt)
REPORT = TypeAdapter(RedeploymentReport)

HISTORY = 256  # redeployments that are remembered


@dataclass(frozen=True, slots=True)
class RecordedFleet:
    """The serving and sleeping engines at the end of the last redeployment."""

    serving: tuple[EngineSpec, ...]
    asleep: tuple[EngineSpec, ...]


_FLEET = TypeAdapter(RecordedFleet)


def write_end(log: OperationJournal, report: RedeploymentReport, fleet: RecordedFleet) -> None:
    body = {"report": REPORT.dump_python(report, mode="json"), **_FLEET.dump_python(fleet, mode="json")}
    log.end(report.id, body)


def read_fleet(journal: JournalReader) -> RecordedFleet | None:
    """Return the fleet at the end of the last redeployment, or None if no redeployment has ended."""
    latest = journal.latest(EntryKind.REDEPLOYMENT_ENDED)
    return None if latest is None else journal.interpret(latest, _FLEET.validate_python)


def read_open(journal: JournalReader) -> OpenIntent[Redeployment] | None:
    """Return the redeployment that has begun but not ended, or None if the last redeployment has ended. At most one
    redeployment runs at a time."""
    opened = left_open(journal, REDEPLOYMENTS, lambda entry: REDEPLOYMENT.validate_python(entry.body["redeployment"]))
    latest = journal.latest(EntryKind.REDEPLOYMENT_ENDED)
    newest = journal.latest(EntryKind.REDEPLOYMENT_BEGAN)
    if not opened or newest is None or newest.sequence != opened[-1].sequence:
        return None
    left = opened[-1]
    if latest is not None and latest.sequence > left.sequence:
        return None  # it has ended, but the journal write failed
    steps = tuple(step for step in left.steps if journal.interpret(step, _checked_step) is not None)
    return replace(left, steps=steps)


def read_history(journal: JournalReader) -> dict[RedeploymentId, RedeploymentReport]:
    """Return the reports of the recent redeployments by id, oldest first."""
    return {
        RedeploymentId(entry.subject): report
        for entry in journal.tail(HISTORY, (EntryKind.REDEPLOYMENT_ENDED,))
        if (report := journal.interpret(entry, lambda body: REPORT.validate_python(body["report"]))) is not None
    }


def _checked_step(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the body of a step's journal entry. Raises ValueError if a field that a resumed redeployment reads is
    invalid."""
    StepKind(body["kind"]), body["engine"]
    if "reference" in body:
        EXCERPT.validate_python(body["reference"])
    return check_record(body)


STOPS = frozenset({StepKind.STOP, StepKind.RETIRE})


class RedeploymentBook:
    """The recent redeployments, newest last. Redeployments of earlier daemons are read from the journal. `current`
    returns the report of this daemon's running or latest redeployment, or None if this daemon has run none."""

    def __init__(self, journal: Journal, clock: Clock, current: Callable[[], RedeploymentReport | None]) -> None:
        self.log = OperationJournal(journal, clock, REDEPLOYMENTS)
        self._journal = journal
        self._clock = clock
        self._current = current
        self._ended = read_history(journal)
        self._change = asyncio.Event()  # set, then replaced, at each change of the running one

    @property
    def ids(self) -> tuple[RedeploymentId, ...]:
        return tuple(self._all())

    def report(self, id: str = "") -> RedeploymentReport:
        """Return the report of the redeployment with this id. If the id is empty, return the report of the newest
        redeployment. Raises Permanent if no such redeployment is stored."""
        reports = self._all()
        if not id and reports:
            return next(reversed(reports.values()))
        if RedeploymentId(id) in reports:
            return reports[RedeploymentId(id)]
        raise Permanent(f"no redeployment {id!r} among the newest {HISTORY}" if id else "there was no redeployment yet")

    def newest(self, limit: int = 0) -> list[RedeploymentReport]:
        """Return the reports of the `limit` newest redeployments, newest first. A limit of 0 returns all stored
        reports."""
        reports = list(reversed(self._all().values()))
        return reports[:limit] if limit else reports

    async def watch(self, id: str) -> AsyncIterator[RedeploymentReport]:
        """Yield the redeployment's report now and after each change, until the redeployment has ended."""
        change, report = self._change, self.report(id)
        yield report
        while report.state is OperationState.RUNNING:
            await change.wait()
            change, report = self._change, self.report(report.id)
            yield report

    def changed(self) -> None:
        """Wake the watchers, because the report of the running redeployment has changed."""
        self._change.set()
        self._change = asyncio.Event()

    def ended(self, report: RedeploymentReport, fleet: RecordedFleet) -> None:
        """Store an ended redeployment and journal it with the engines that run at its end. Raises Permanent if the
        journal cannot be written."""
        self._ended[report.id] = report
        for old in list(self._ended)[:-HISTORY]:
            del self._ended[old]
        write_end(self.log, report, fleet)

    def note_engines(
        self, redeployment: Redeployment, report: RedeploymentReport, starts: Mapping[EngineId, EngineStart]
    ) -> None:
        """Journal which engines were started or stopped, which of their steps failed, and how long each start took. The
        durations of later starts are predicted from the journalled durations."""
        gpus = {spec.engine: spec.gpus for spec in redeployment.coming}
        for step_report in report.steps:
            engine = step_report.step.engine
            if engine is None or step_report.state not in (StepState.DONE, StepState.FAILED):
                continue
            done = step_report.state is StepState.DONE
            if step_report.step.kind in STOPS:
                self.note_stopped(engine, done=done, detail=step_report.detail)
            elif step_report.step.kind is StepKind.VERIFY or not done:
                body: dict[str, object] = {"done": done, "detail": step_report.detail}
                if done and (start := starts.get(engine)) is not None:
                    body |= {"configuration": start.configuration, "gpus": list(gpus[engine])}
                    body |= {"elapsed_s": start.elapsed_s, "expected_s": start.expected_s}
                self._journal.append(self._clock.now_s(), EntryKind.ENGINE_STARTED, engine, body)

    def note_stopped(self, engine: EngineId, *, done: bool, detail: str) -> None:
        self._journal.append(self._clock.now_s(), EntryKind.ENGINE_STOPPED, engine, {"done": done, "detail": detail})

    def _all(self) -> dict[RedeploymentId, RedeploymentReport]:
        """Return the reports of all stored redeployments by id, oldest first."""
        reports, current = dict(self._ended), self._current()
        if current is not None:
            reports.pop(current.id, None)
            reports[current.id] = current
        return reports


def summary_text(report: RedeploymentReport) -> str:
    done = [step_report for step_report in report.steps if step_report.state is StepState.DONE]
    stopped = sum(step_report.step.kind in (StepKind.STOP, StepKind.SLEEP) for step_report in done)
    started = sum(step_report.step.kind is StepKind.VERIFY for step_report in done)
    moved = report.requests_moved + report.requests_parked
    summary = f"{stopped} engines stopped, {started} started, {moved} requests moved"
    if report.state is OperationState.DONE:
        return "; ".join(filter(None, [summary, report.detail]))
    return f"{report.state.replace('_', ' ')}: {report.detail} ({summary})"
