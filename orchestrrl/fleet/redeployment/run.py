"""Run a redeployment as an operation: its steps, and how they are undone.

A redeployment ends with the old engines or with the new engines. If undoing fails for some engines, it ends with the
remaining old engines. core/operation.py runs the steps, journals them and resumes them after a restart.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from orchestrrl.core.clock import Clock, within
from orchestrrl.core.errors import OrchestrRLError
from orchestrrl.core.journal.store import JournalEntry
from orchestrrl.core.operation import Description, OperationRun, Stage, StepDirection, StepEntry, StepState, steps_in
from orchestrrl.core.operation_journal import OperationJournal
from orchestrrl.fleet.deployers.base import EngineLife
from orchestrrl.fleet.redeployment import steps
from orchestrrl.fleet.redeployment.actions import REFERENCE_WITHIN_S, RedeployActions
from orchestrrl.fleet.redeployment.book import EXCERPT, REDEPLOYMENT
from orchestrrl.fleet.redeployment.steps import Redeployment, RedeploymentReport, RedeployStep, StepKind
from planner.model import EngineId

logger = logging.getLogger(__name__)

RedeployChain = tuple[RedeployStep, ...]
_TAKES_GPUS = (StepKind.START, StepKind.WAKE)
_FREES_GPUS = (StepKind.STOP, StepKind.SLEEP)


class RedeploymentRun(Description[RedeployStep]):
    """One running redeployment. `changed` is called after each change of its report."""

    def __init__(self, acts: RedeployActions, log: OperationJournal, clock: Clock, changed: Callable[[], None]) -> None:
        self.acts = acts
        self._clock = clock
        self._stages = steps.stages_of(acts.redeployment)
        self._expects = False  # gateways have received which engines are expected
        self._has_written_reference = False
        self._operation = OperationRun(self, log, clock, changed)
        self.call_off = self._operation.call_off

    @property
    def redeployment(self) -> Redeployment:
        return self.acts.redeployment

    @property
    def id(self) -> str:
        return self.redeployment.id

    def __str__(self) -> str:
        return f"redeployment {self.redeployment.id}"

    def report(self) -> RedeploymentReport:
        operation = self._operation
        return RedeploymentReport(
            id=self.redeployment.id,
            plan=self.redeployment.plan,
            reason=self.redeployment.reason,
            created_s=self.redeployment.created_s,
            state=operation.state,
            old=self.redeployment.old,
            new=self.redeployment.new,
            engines=tuple(sorted(self._serving())),
            steps=operation.steps,
            detail=operation.detail,
            ended_s=operation.ended_s,
            requests_moved=len(self.acts.emptying.moved - self.acts.emptying.parked),
            requests_parked=len(self.acts.emptying.parked),
            closed_s=_closed_s(operation.records),
        )

    def elapsed_s(self, engine: EngineId) -> float | None:
        """Return the time, in seconds, from when the previous engines on the engine's GPUs began to leave until the
        engine was verified. Return None if the engine was not verified."""
        gpus = {gpu for spec in self.redeployment.coming if spec.engine == engine for gpu in spec.gpus}
        in_the_way = {spec.engine for spec in self.redeployment.leaving if gpus.intersection(spec.gpus)}
        began_s, verified_s = [], []
        for report in self._operation.steps:
            step, own = report.step, report.step.engine == engine
            if report.direction is not StepDirection.FORWARD or report.began_s is None:
                continue
            if (own and step.kind in _TAKES_GPUS) or (step.engine in in_the_way and step.kind in _FREES_GPUS):
                began_s.append(report.began_s)
            if own and step.kind is StepKind.VERIFY and report.elapsed_s is not None:
                verified_s.append(report.began_s + report.elapsed_s)
        return verified_s[-1] - min(began_s) if verified_s and began_s else None

    async def run(self) -> None:
        """Run the redeployment from start to finish."""
        # Engines on free GPUs are verified before any engine is emptied that could give reference answers.
        early = next(steps_in(self._stages)).kind in _TAKES_GPUS
        limit_s = self.redeployment.limits.check_s if early else REFERENCE_WITHIN_S
        try:
            self.acts.compare_with(await within(self._clock, limit_s, self.acts.reference(patient=early)))
        except OrchestrRLError as error:
            logger.warning("%s: no reference answers: %s", self, error)
        self._has_written_reference = self.redeployment.reference is not None
        await self._operation.run()

    async def resume(self, entries: Sequence[JournalEntry]) -> None:
        """Complete or undo a redeployment that was interrupted by the end of its daemon. `entries` are the journal
        entries of its steps, oldest first."""
        await self._operation.resume(entries)

    # --- called by core/operation.py

    def forward(self) -> tuple[Stage[RedeployStep], ...]:
        return self._stages

    def intent(self) -> Mapping[str, Any]:
        return {"redeployment": REDEPLOYMENT.dump_python(self.redeployment, mode="json")}

    def record(self, step: RedeployStep) -> Mapping[str, Any]:
        body: dict[str, Any] = {"kind": step.kind, "engine": step.engine}
        if self.redeployment.reference is not None and not self._has_written_reference:
            self._has_written_reference = True
            body["reference"] = EXCERPT.dump_python(self.redeployment.reference, mode="json")
        return body

    async def do(self, step: RedeployStep) -> str:
        if not self._expects:
            self._expects = True
            self.acts.expect(spec.engine for spec in self.redeployment.preparing)
        return await self.acts.carry_out(step)

    async def undo(self, step: RedeployStep) -> str:
        return await self.acts.carry_out(step)

    async def observe(self) -> None:
        await self.acts.scan()

    def back(self, records: Sequence[StepEntry]) -> tuple[Stage[RedeployStep], ...]:
        self.acts.going_back = True
        left = _unsettled(records)
        self.acts.loaded = left.loaded
        running, present = self.acts.running, set(self.acts.running)
        old = {spec.engine for spec in self.redeployment.leaving}
        asleep = {engine for engine in present if running[engine].lent}
        asleep |= present & left.dozing & old
        there = present - (left.unready & old)  # another start is harmless and completes theirs
        ended = {engine for engine in present if running[engine].life is EngineLife.ENDED}
        stages = steps.stages_back(self.redeployment, there, asleep, left.scaled, left.stopping | ended)
        brought_up = {step.engine for step in steps_in(stages) if step.kind is StepKind.READY}
        self.acts.expect(engine for engine in brought_up if engine is not None)
        return stages

    def restored(self) -> bool:
        return self._serving() == {spec.engine for spec in self.redeployment.old}

    def resume_from(self, records: Sequence[StepEntry]) -> frozenset[int] | None:
        for record in records:
            if "reference" in record.entry:
                self.acts.compare_with(EXCERPT.validate_python(record.entry["reference"]))
        self._has_written_reference = self.redeployment.reference is not None
        self.acts.loaded = _unsettled(records).loaded
        forward = {step.number: step for step in steps_in(self._stages)}
        done = {
            (forward[record.number].kind, forward[record.number].engine)
            for record in records
            if record.direction is StepDirection.FORWARD and record.state is StepState.DONE and record.number in forward
        }
        alive = {engine for engine, deployed in self.acts.running.items() if deployed.life is EngineLife.ALIVE}
        if not steps.goes_on(self.redeployment, done, alive):
            return None
        stopped = {engine for kind, engine in done if kind in _FREES_GPUS}
        # Steps that set this daemon's own state, and evacuations, which only last until their engine has stopped.
        again: set[tuple[StepKind, EngineId | None]] = {(StepKind.FENCE, None), (StepKind.ADMIT, None)}
        again |= {(StepKind.EVACUATE, spec.engine) for spec in self.redeployment.leaving if spec.engine not in stopped}
        return frozenset(step.number for step in forward.values() if (step.kind, step.engine) in done - again)

    def is_final(self, step: RedeployStep) -> bool:
        return step.kind is StepKind.ADMIT

    def is_optional(self, step: RedeployStep) -> bool:
        """Return whether the redeployment succeeds even if this step fails. Only RETIRE steps are optional, because the
        next redeployment can stop an engine that could not be retired."""
        return step.kind is StepKind.RETIRE

    async def again(self, chain: RedeployChain, failed: RedeployStep) -> RedeployChain:
        """Stop the engine whose start failed at the step `failed`, to free its GPUs. Return the chain of steps for
        another attempt, in which an engine that could not be woken is started instead."""
        if failed.engine is None or failed.kind not in (*_TAKES_GPUS, StepKind.SCALE, *steps.BRING_UP):
            return chain
        try:
            await within(self._clock, self.redeployment.limits.stop_s, self.acts.stop(failed.engine))
        except OrchestrRLError as error:
            logger.error("%s: %s", failed.engine, error)
        if chain[0].kind is StepKind.WAKE:
            start = replace(chain[0], kind=StepKind.START, within_s=self.redeployment.limits.start_s)
            return (start, *chain[1:])
        return chain

    def waits_for(self, step: RedeployStep) -> str:
        return self.acts.waits_for.get(step.engine, "") if step.engine is not None else ""

    def _serving(self) -> set[EngineId]:
        running = self.acts.running.items()
        return {engine for engine, up in running if up.life is EngineLife.ALIVE and not up.lent}


@dataclass(slots=True)
class _Unsettled:
    """The engines that an unfinished redeployment may have left in an intermediate state, according to the journal
    entries of its steps."""

    stopping: set[EngineId] = field(default_factory=set)  # stop begun, and not known to be done
    dozing: set[EngineId] = field(default_factory=set)  # may sleep, even if the deployer did not record it
    unready: set[EngineId] = field(default_factory=set)  # being brought up, and not known to be verified
    loaded: set[EngineId] = field(default_factory=set)  # engines with the current weights
    scaled: set[EngineId] = field(default_factory=set)  # engines whose scaling was begun


# The sets of `_Unsettled` that a step's entry adds its engine to, and those that it removes it from.
_UNSETTLED = {
    (StepKind.START, StepState.RUNNING): (["unready"], ["loaded", "stopping"]),
    (StepKind.WAKE, StepState.RUNNING): (["unready"], ["loaded"]),
    (StepKind.WAKE, StepState.DONE): ([], ["dozing"]),
    (StepKind.LOAD, StepState.DONE): (["loaded"], []),
    (StepKind.VERIFY, StepState.DONE): ([], ["unready"]),
    (StepKind.STOP, StepState.RUNNING): (["stopping"], ["loaded"]),
    (StepKind.STOP, StepState.DONE): ([], ["stopping"]),
    (StepKind.SLEEP, StepState.RUNNING): (["dozing"], ["loaded"]),
    (StepKind.SCALE, StepState.RUNNING): (["scaled"], []),
}


def _unsettled(records: Iterable[StepEntry]) -> _Unsettled:
    left = _Unsettled()
    for record in records:
        added, removed = _UNSETTLED.get((StepKind(record.entry["kind"]), record.state), ([], []))
        for name in added:
            getattr(left, name).add(record.entry["engine"])
        for name in removed:
            getattr(left, name).discard(record.entry["engine"])
    return left


def _closed_s(records: Collection[StepEntry]) -> float | None:
    """Return the time, in seconds, from the start of the fence step until requests went to the new engines. Return None
    if no requests have gone to them yet."""
    fenced_s = [record.entry["began_s"] for record in records if record.entry["kind"] == StepKind.FENCE]
    admitted_s = [
        record.entry["began_s"] + record.entry["elapsed_s"]
        for record in records
        if record.entry["kind"] == StepKind.ADMIT and record.state is StepState.DONE
    ]
    return admitted_s[-1] - fenced_s[0] if fenced_s and admitted_s else None
