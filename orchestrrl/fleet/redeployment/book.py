"""What is told of redeployments: to who watches one, to who asks for those that were, and in the journal."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

from orchestrrl.core.clock import Clock
from orchestrrl.core.errors import Permanent
from orchestrrl.core.journal.kinds import REDEPLOYMENTS
from orchestrrl.core.journal.store import EntryKind, Journal
from orchestrrl.core.operation import OperationState, StepState
from orchestrrl.core.operation_journal import OperationJournal
from orchestrrl.fleet.redeployment.outcomes import EngineStart
from orchestrrl.fleet.redeployment.records import HISTORY, RecordedFleet, read_history, write_end
from orchestrrl.fleet.redeployment.run import RedeploymentRun
from orchestrrl.fleet.redeployment.steps import RedeploymentId, RedeploymentReport, StepKind
from planner.model import EngineId

STOPS = frozenset({StepKind.STOP, StepKind.RETIRE})


class RedeploymentBook:
    """Every recent redeployment, newest last; those of earlier daemons come from the journal. `current` is the one
    under way, or that was last here."""

    def __init__(self, journal: Journal, clock: Clock, current: Callable[[], RedeploymentReport | None]) -> None:
        self.log = OperationJournal(journal, clock, REDEPLOYMENTS)
        self._journal = journal
        self._clock = clock
        self._current = current
        self._ended = read_history(journal)
        self._watchers: dict[RedeploymentId, set[asyncio.Queue[RedeploymentReport]]] = {}

    @property
    def ids(self) -> tuple[RedeploymentId, ...]:
        return tuple(self._all())

    def report(self, id: str) -> RedeploymentReport:
        """The one of that id; an empty one means the newest. Raises Permanent where there is none."""
        reports = self._all()
        if not id and reports:
            return next(reversed(reports.values()))
        if RedeploymentId(id) in reports:
            return reports[RedeploymentId(id)]
        raise Permanent(
            f"there is no redeployment {id!r} among the {HISTORY} newest" if id else "nothing was redeployed yet"
        )

    def newest(self, limit: int) -> list[RedeploymentReport]:
        """Newest first; 0: all that are remembered."""
        reports = list(reversed(self._all().values()))
        return reports[:limit] if limit else reports

    async def watch(self, id: str) -> AsyncIterator[RedeploymentReport]:
        """The redeployment as it stands, then whenever it changes, until it has ended."""
        report = self.report(id)
        queue: asyncio.Queue[RedeploymentReport] = asyncio.Queue()
        watchers = self._watchers.setdefault(report.id, set())
        watchers.add(queue)
        try:
            yield report
            while report.state is OperationState.RUNNING:
                report = await queue.get()
                while not queue.empty():  # only the newest matters
                    report = queue.get_nowait()
                yield report
        finally:
            watchers.discard(queue)
            if not watchers:
                self._watchers.pop(report.id, None)

    def changed(self, report: RedeploymentReport) -> None:
        for queue in self._watchers.get(report.id, ()):
            queue.put_nowait(report)

    def ended(self, report: RedeploymentReport, fleet: RecordedFleet) -> None:
        """It is remembered, and written down with the fleet that it left. Raises Permanent where it cannot be."""
        self._ended[report.id] = report
        for old in list(self._ended)[:-HISTORY]:
            del self._ended[old]
        write_end(self.log, report, fleet)

    def note_engines(self, run: RedeploymentRun, starts: Mapping[EngineId, EngineStart]) -> None:
        """What became of each engine, with what its start took: later daemons learn by it."""
        gpus = {spec.engine: spec.gpus for spec in run.redeployment.coming}
        for told in run.report().steps:
            engine = told.step.engine
            if engine is None or told.state not in (StepState.DONE, StepState.FAILED):
                continue
            done = told.state is StepState.DONE
            if told.step.kind in STOPS:
                self.note_stopped(engine, done=done, detail=told.detail)
            elif told.step.kind is StepKind.VERIFY or not done:
                body: dict[str, object] = {"done": done, "detail": told.detail}
                if done and (start := starts.get(engine)) is not None:
                    body |= {"configuration": start.configuration, "gpus": list(gpus[engine])}
                    body |= {"elapsed_s": start.elapsed_s, "expected_s": start.expected_s}
                self._journal.append(self._clock.now_s(), EntryKind.ENGINE_STARTED, engine, body)

    def note_stopped(self, engine: EngineId, *, done: bool, detail: str) -> None:
        self._journal.append(self._clock.now_s(), EntryKind.ENGINE_STOPPED, engine, {"done": done, "detail": detail})

    def _all(self) -> dict[RedeploymentId, RedeploymentReport]:
        """Oldest first."""
        reports, current = dict(self._ended), self._current()
        if current is not None:
            reports.pop(current.id, None)
            reports[current.id] = current
        return reports


def starts_of(run: RedeploymentRun, usual: Callable[[RedeploymentRun, EngineId], bool]) -> dict[EngineId, EngineStart]:
    """What engines that started as `usual` took to come up."""
    expected_s = {id: known.switch_s for id, known in run.acts.configurations.items()}
    return {
        spec.engine: EngineStart(spec.configuration, elapsed_s, expected_s.get(spec.configuration, elapsed_s))
        for spec in run.redeployment.coming
        if usual(run, spec.engine) and (elapsed_s := run.elapsed_s(spec.engine)) is not None
    }


def summary_text(report: RedeploymentReport) -> str:
    done = [told for told in report.steps if told.state is StepState.DONE]
    stopped = sum(told.step.kind in (StepKind.STOP, StepKind.SLEEP) for told in done)
    started = sum(told.step.kind is StepKind.VERIFY for told in done)
    moved = report.requests_moved + report.requests_parked
    said = f"{stopped} engines stopped, {started} started, {moved} requests moved"
    if report.state is OperationState.DONE:
        return "; ".join(filter(None, [said, report.detail]))
    return f"{report.state.replace('_', ' ')}: {report.detail} ({said})"
