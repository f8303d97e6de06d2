"""Carry one redeployment out, step by step, each written down before and after; where a step fails, go back.

Whatever happens, the run ends with the old engines, the new ones, or, where going back fails for some, with all others.
A run that its daemon did not live to end is taken up by the next one: `resume` decides by what was written down and by
what the deployer has.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestrrl.core.clock import Clock
from orchestrrl.core.errors import OrchestrRLError, Permanent
from orchestrrl.core.journal.store import EntryKind, Journal, JournalEntry
from orchestrrl.fleet.deployers.base import EngineLife
from orchestrrl.fleet.redeployment.actions import REFERENCE_WITHIN_S, RedeployActions, within
from orchestrrl.fleet.redeployment.records import EXCERPT, REDEPLOYMENT
from orchestrrl.fleet.redeployment.steps import (
    BRING_UP,
    Redeployment,
    RedeploymentReport,
    RedeploymentState,
    RedeployStep,
    RedeployStepState,
    Stage,
    StepDirection,
    StepKind,
    StepReport,
    check,
    goes_on,
    stages_back,
    stages_of,
    steps_in,
)
from planner.model import EngineId

logger = logging.getLogger(__name__)

POLL_AGAIN_S = 2.0
BACK_ATTEMPTS = 2  # for an engine of before: memory of what was on its GPUs may be freed late
_TAKES_GPUS = (StepKind.START, StepKind.WAKE)
_FREES_GPUS = (StepKind.STOP, StepKind.SLEEP)


@dataclass(frozen=True, slots=True)
class RedeployFailure:
    """Why it does not go on."""

    step: RedeployStep | None  # None: it was called off
    why: str

    def __str__(self) -> str:
        if self.step is None:
            return self.why
        return f"{self.step.kind}{f' of {self.step.engine}' if self.step.engine else ''}: {self.why}"


class _ChainFailed(Exception):
    def __init__(self, failure: RedeployFailure) -> None:
        super().__init__(str(failure))
        self.failure = failure


class RedeploymentRun:
    """One redeployment under way. `changed` is called with each new state of the report."""

    def __init__(
        self,
        redeployment: Redeployment,
        acts: RedeployActions,
        journal: Journal,
        clock: Clock,
        changed: Callable[[], None],
    ) -> None:
        self.redeployment = redeployment
        self.acts = acts
        self._journal = journal
        self._clock = clock
        self._changed = changed
        self._stages: dict[StepDirection, tuple[Stage, ...]] = {
            StepDirection.FORWARD: stages_of(redeployment),
            StepDirection.BACK: (),
        }
        check(redeployment, self._stages[StepDirection.FORWARD])
        self._steps: dict[tuple[StepDirection, int], StepReport] = {}
        self._list_steps(StepDirection.FORWARD)
        self._state = RedeploymentState.RUNNING
        self._detail = ""
        self._ended_s: float | None = None
        self._fenced_s: float | None = None
        self._closed_s: float | None = None
        self._going: asyncio.Task[None] | None = None  # forward
        self._called_off = ""
        self._point_of_no_return = False
        self._stopping: set[EngineId] = set()  # begun, and not known to have been done
        self._dozing: set[EngineId] = set()  # that may sleep, whatever the deployer knows of it
        self._unready: set[EngineId] = set()  # on their way up, and not known to have been verified

    # --- told

    def report(self) -> RedeploymentReport:
        return RedeploymentReport(
            id=self.redeployment.id,
            plan=self.redeployment.plan,
            reason=self.redeployment.reason,
            created_s=self.redeployment.created_s,
            state=self._state,
            old=self.redeployment.old,
            new=self.redeployment.new,
            engines=tuple(sorted(e for e, d in self.acts.running.items() if d.life is EngineLife.ALIVE and not d.lent)),
            steps=tuple(self._steps.values()),
            detail=self._detail,
            ended_s=self._ended_s,
            requests_moved=len(self.acts.tally.moved - self.acts.tally.parked),
            requests_parked=len(self.acts.tally.parked),
            closed_s=self._closed_s,
        )

    def elapsed_s(self, engine: EngineId) -> float | None:
        """Seconds from when what was in its way began to leave until it was verified; None: it was not."""
        verified_s, began_s = None, []
        gpus = {gpu for spec in self.redeployment.coming if spec.engine == engine for gpu in spec.gpus}
        in_the_way = {spec.engine for spec in self.redeployment.leaving if gpus.intersection(spec.gpus)}
        for (direction, _), told in self._steps.items():
            if direction is not StepDirection.FORWARD or told.began_s is None:
                continue
            step = told.step
            if step.engine in in_the_way and step.kind in _FREES_GPUS:
                began_s.append(told.began_s)
            if step.engine == engine and step.kind in _TAKES_GPUS:
                began_s.append(told.began_s)
            if step.engine == engine and step.kind is StepKind.VERIFY and told.elapsed_s is not None:
                verified_s = told.began_s + told.elapsed_s
        return None if verified_s is None or not began_s else verified_s - min(began_s)

    def call_off(self, because: str) -> None:
        """Go back. Raises Permanent where that is no longer possible."""
        going = self._going  # None: it is yet to begin
        over = (
            self.acts.going_back or self._state is not RedeploymentState.RUNNING or (going is not None and going.done())
        )
        if over or self._point_of_no_return:
            raise Permanent(f"redeployment {self.redeployment.id} can no longer be called off")
        self._called_off = because
        if going is not None:
            going.cancel()

    # --- run

    async def run(self) -> None:
        """From the beginning to the end."""
        # Who comes on free GPUs is verified before any engine is emptied that could be asked then.
        early = next(steps_in(self._stages[StepDirection.FORWARD])).kind in _TAKES_GPUS
        limit_s = self.redeployment.limits.check_s if early else REFERENCE_WITHIN_S
        try:
            reference = await within(self._clock, limit_s, self.acts.reference(patient=early))
        except OrchestrRLError as error:
            logger.warning("redeployment %s: nobody was there to compare answers with: %s", self.redeployment.id, error)
            reference = None
        self.redeployment = self.acts.redeployment = replace(self.redeployment, reference=reference)
        body = {"redeployment": REDEPLOYMENT.dump_python(self.redeployment, mode="json")}
        try:
            self._journal.append(self._clock.now_s(), EntryKind.REDEPLOYMENT_BEGAN, self.redeployment.id, body)
        except OrchestrRLError as error:
            self._state, self._ended_s = RedeploymentState.ROLLED_BACK, self._clock.now_s()
            self._detail = f"nothing was begun, since it cannot be written down: {error}"
            return
        failure = RedeployFailure(None, self._called_off) if self._called_off else await self._forward()
        await self._end(failure)

    async def resume(self, steps: Sequence[JournalEntry]) -> None:
        """Take up what a daemon before left open; `steps` are its entries of this redeployment, in order."""
        done = self._recall(steps)
        alive = {engine for engine, deployed in self.acts.running.items() if deployed.life is EngineLife.ALIVE}
        if not goes_on(self.redeployment, done, alive):
            return await self._end(RedeployFailure(None, "the daemon ended in the middle of it"))
        logger.warning("redeployment %s is finished: all that is new had been verified", self.redeployment.id)
        stopped = {engine for kind, engine in done if kind in _FREES_GPUS}
        # What this daemon has to know of itself, and what is as good as undone until its engine has stopped.
        again: set[tuple[StepKind, EngineId | None]] = {(StepKind.FENCE, None), (StepKind.ADMIT, None)}
        again |= {(StepKind.EVACUATE, spec.engine) for spec in self.redeployment.leaving if spec.engine not in stopped}
        return await self._end(await self._forward(done - again))

    async def _forward(self, done: set[tuple[StepKind, EngineId | None]] | None = None) -> RedeployFailure | None:
        skip = done or set()
        self.acts.expect(spec.engine for spec in self.redeployment.preparing)
        self._going = asyncio.ensure_future(self._run_stages(skip))
        try:
            await self._going
        except _ChainFailed as failed:
            return failed.failure
        except OrchestrRLError as error:
            return RedeployFailure(None, f"it cannot be written down: {error}")
        except asyncio.CancelledError:
            if not self._called_off:  # the daemon ends: the next one takes it up
                self._going.cancel()
                await asyncio.wait({self._going})
                raise
            return RedeployFailure(None, self._called_off)
        return None

    async def _end(self, failure: RedeployFailure | None) -> None:
        amiss: list[str] = []
        if failure is not None:
            logger.warning("redeployment %s goes back: %s", self.redeployment.id, failure)
            self._detail = str(failure)
            self._notify()
            amiss = await self._back()
        state = RedeploymentState.DONE
        if failure is not None:
            # What failed on the way may have come right in the end, e.g. an engine that would not stop and serves on.
            state = RedeploymentState.ROLLED_BACK if await self._as_before() else RedeploymentState.DEGRADED
            self._detail = "; ".join([str(failure), *amiss])
        self._state = state  # in one go: whoever looks sees a redeployment that runs, or how it ended
        self._ended_s = self._clock.now_s()
        # Whose run it is tells of it, once the next one may begin.

    async def _back(self) -> list[str]:
        """What failed on the way."""
        for key, told in list(self._steps.items()):
            if told.state is RedeployStepState.PENDING:
                self._steps[key] = replace(told, state=RedeployStepState.SKIPPED)
        self.acts.going_back = True
        present = await self._scan()
        asleep = {engine for engine in present if self.acts.running[engine].lent}
        old = {spec.engine for spec in self.redeployment.leaving}
        asleep |= present & self._dozing & old
        there = present - (self._unready & old)  # starting one again is harmless, and brings it up
        ended = {engine for engine in present if self.acts.running[engine].life is EngineLife.ENDED}
        scaled = {
            told.step.engine
            for told in self._steps.values()
            if told.step.kind is StepKind.SCALE and told.step.engine is not None and told.began_s is not None
        }
        self._stages[StepDirection.BACK] = stages_back(self.redeployment, there, asleep, scaled, self._stopping | ended)
        self._list_steps(StepDirection.BACK)
        brought_up = {step.engine for step in steps_in(self._stages[StepDirection.BACK]) if step.kind is StepKind.READY}
        self.acts.expect(engine for engine in brought_up if engine is not None)
        self._notify()
        amiss: list[str] = []
        for stage in self._stages[StepDirection.BACK]:
            outcomes = await asyncio.gather(*(self._chain_back(chain) for chain in stage))
            amiss += [outcome for outcome in outcomes if outcome]
        return list(dict.fromkeys(amiss))

    async def _scan(self) -> set[EngineId]:
        """What is there. Without that nothing can be undone, so a deployer that does not answer is asked again."""
        while True:
            try:
                return await self.acts.scan()
            except OrchestrRLError as error:
                logger.error(
                    "redeployment %s cannot go back: the deployer does not say what there is: %s",
                    self.redeployment.id,
                    error,
                )
                await self._clock.sleep(POLL_AGAIN_S)

    async def _as_before(self) -> bool:
        await self._scan()
        serving = {engine for engine, up in self.acts.running.items() if up.life is EngineLife.ALIVE and not up.lent}
        return serving == {spec.engine for spec in self.redeployment.old}

    async def _chain_back(self, chain: Sequence[RedeployStep]) -> str:
        """Nobody else goes without an engine because of this one; why it failed, if it did."""
        failure: RedeployFailure | None = None
        for _ in range(BACK_ATTEMPTS):
            try:
                for step in chain:
                    await self._do(StepDirection.BACK, step, self.acts.back)
            except _ChainFailed as failed:
                failure = failed.failure
                logger.error("redeployment %s, on its way back: %s", self.redeployment.id, failure)
                if failure.step is not None and failure.step.kind in (*_TAKES_GPUS, StepKind.SCALE, *BRING_UP):
                    await self._let_go(failure.step)
                    if chain[0].kind is StepKind.WAKE:  # nobody is there to be woken now
                        start = replace(chain[0], kind=StepKind.START, within_s=self.redeployment.limits.start_s)
                        chain = [start, *chain[1:]]
            else:
                return ""
        return str(failure)

    async def _let_go(self, step: RedeployStep) -> None:
        """What came up by half is not left on its GPUs."""
        assert step.engine is not None
        try:
            await within(self._clock, self.redeployment.limits.stop_s, self.acts.discard(step.engine))
        except OrchestrRLError as error:
            logger.error("%s: %s", step.engine, error)

    async def _run_stages(self, skip: set[tuple[StepKind, EngineId | None]]) -> None:
        for stage in self._stages[StepDirection.FORWARD]:
            chains = [asyncio.ensure_future(self._run_chain(chain, skip)) for chain in stage]
            try:
                await asyncio.wait(chains, return_when=asyncio.FIRST_EXCEPTION)
            finally:
                # Where one fails the others are not waited for: all go back.
                for chain in chains:
                    chain.cancel()
                outcomes = await asyncio.gather(*chains, return_exceptions=True)
            failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
            told = [outcome for outcome in failures if not isinstance(outcome, asyncio.CancelledError)]
            if failures:
                raise (told or failures)[0]

    async def _run_chain(self, chain: Sequence[RedeployStep], skip: set[tuple[StepKind, EngineId | None]]) -> None:
        for step in chain:
            if (step.kind, step.engine) in skip:
                continue
            try:
                await self._do(StepDirection.FORWARD, step, self.acts.forward)
            except _ChainFailed as failed:
                if step.kind is not StepKind.RETIRE:
                    raise
                # The new deployment stands: what could not be stopped is told, and stopped by the next redeployment.
                self._detail = "; ".join(filter(None, [self._detail, str(failed.failure)]))

    async def _do(
        self, direction: StepDirection, step: RedeployStep, act: Callable[[RedeployStep], Awaitable[str]]
    ) -> None:
        if direction is StepDirection.FORWARD and step.kind is StepKind.ADMIT:
            self._point_of_no_return = True
        began_s = self._clock.now_s()
        if step.kind is StepKind.FENCE and self._fenced_s is None:
            self._fenced_s = began_s
        self._write(StepReport(step, direction, RedeployStepState.RUNNING, began_s=began_s))
        if step.engine is not None:
            self.acts.waits_for.pop(step.engine, None)
        try:
            detail = await within(self._clock, step.within_s, act(step))
        except OrchestrRLError as error:
            waits = self.acts.waits_for.get(step.engine, "") if step.engine is not None else ""
            why = f"{error}: {waits}" if waits and waits not in str(error) else str(error)
            self._write(self._ended_step(direction, step, RedeployStepState.FAILED, why, began_s))
            raise _ChainFailed(RedeployFailure(step, why)) from error
        except Exception as error:
            # A defect, ours or a deployer's, must not leave the fleet between the two.
            logger.exception("redeployment %s: %s %s", self.redeployment.id, step.kind, step.engine or "")
            why = f"a defect: {error!r}"
            self._write(self._ended_step(direction, step, RedeployStepState.FAILED, why, began_s))
            raise _ChainFailed(RedeployFailure(step, why)) from error
        except asyncio.CancelledError:
            # What became of it is looked at before anything else is done.
            self._steps[direction, step.number] = self._ended_step(
                direction, step, RedeployStepState.FAILED, "cut short", began_s
            )
            raise
        if step.kind is StepKind.ADMIT and self._fenced_s is not None:
            self._closed_s = self._clock.now_s() - self._fenced_s
        self._write(self._ended_step(direction, step, RedeployStepState.DONE, detail, began_s))

    def _ended_step(
        self, direction: StepDirection, step: RedeployStep, state: RedeployStepState, detail: str, began_s: float
    ) -> StepReport:
        return StepReport(step, direction, state, detail, began_s, self._clock.now_s() - began_s)

    # --- written down

    def _write(self, report: StepReport) -> None:
        step = report.step
        self._steps[report.direction, step.number] = report
        self._note(step.kind, step.engine, report.state)
        body: dict[str, Any] = {
            "id": f"{self.redeployment.id}/{report.direction}/{step.number}",
            "direction": report.direction,
            "number": step.number,
            "kind": step.kind,
            "engine": step.engine,
            "state": report.state,
            "detail": report.detail,
            "began_s": report.began_s,
            "elapsed_s": report.elapsed_s,
            "valid_until_s": (report.began_s or 0.0) + step.within_s,
        }
        if self.redeployment.reference is None and self.acts.redeployment.reference is not None:
            self.redeployment = self.acts.redeployment
            body["reference"] = EXCERPT.dump_python(self.acts.redeployment.reference, mode="json")
        try:
            self._journal.append(self._clock.now_s(), EntryKind.REDEPLOYMENT_STEP, self.redeployment.id, body)
        except OrchestrRLError as error:
            if report.direction is StepDirection.FORWARD:
                raise
            # A full disk must not keep the fleet from being whole again.
            logger.error("redeployment %s: %s", self.redeployment.id, error)
        logger.info(
            "redeployment %s: %s %s %s %s",
            self.redeployment.id,
            step.kind,
            step.engine or "",
            report.state,
            report.detail,
        )
        self._notify()

    def _note(self, kind: StepKind, engine: EngineId | None, state: RedeployStepState) -> None:
        """Whose processes may be there now, and neither serve nor stay."""
        if engine is None:
            return
        if kind in _TAKES_GPUS and state is RedeployStepState.RUNNING:
            self._unready.add(engine)
        if kind in (*_TAKES_GPUS, *_FREES_GPUS) and state is RedeployStepState.RUNNING:
            self.acts.loaded.discard(engine)
        match kind, state:
            case (StepKind.LOAD, RedeployStepState.DONE):
                self.acts.loaded.add(engine)
            case (StepKind.VERIFY, RedeployStepState.DONE):
                self._unready.discard(engine)
            case (StepKind.STOP, RedeployStepState.RUNNING):
                self._stopping.add(engine)
            case (StepKind.STOP, RedeployStepState.DONE) | (StepKind.START, RedeployStepState.RUNNING):
                self._stopping.discard(engine)
            case (StepKind.SLEEP, RedeployStepState.RUNNING):
                self._dozing.add(engine)
            case (StepKind.WAKE, RedeployStepState.DONE):
                self._dozing.discard(engine)

    def _recall(self, entries: Sequence[JournalEntry]) -> set[tuple[StepKind, EngineId | None]]:
        """What was done, forward. A step that had begun may have been done or not."""
        done = set()
        forward = {step.number: step for step in steps_in(self._stages[StepDirection.FORWARD])}
        for entry in entries:
            body = entry.body
            self._note(StepKind(body["kind"]), body["engine"], RedeployStepState(body["state"]))
            if "reference" in body:
                reference = EXCERPT.validate_python(body["reference"])
                self.redeployment = self.acts.redeployment = replace(self.redeployment, reference=reference)
            step = forward.get(body["number"])
            if body["direction"] != StepDirection.FORWARD or step is None:
                continue
            state = RedeployStepState(body["state"])
            self._steps[StepDirection.FORWARD, step.number] = StepReport(
                step, StepDirection.FORWARD, state, body["detail"], body["began_s"], body["elapsed_s"]
            )
            if step.kind is StepKind.FENCE and self._fenced_s is None:
                self._fenced_s = body["began_s"]
            if state is RedeployStepState.DONE:
                done.add((step.kind, step.engine))
        for key, told in list(self._steps.items()):
            if told.state is RedeployStepState.RUNNING:
                self._steps[key] = replace(told, state=RedeployStepState.FAILED, detail="the daemon ended")
        if any(entry.body["direction"] == StepDirection.BACK for entry in entries):
            return set()  # it was on its way back already
        return done

    def _list_steps(self, direction: StepDirection) -> None:
        for step in steps_in(self._stages[direction]):
            self._steps[direction, step.number] = StepReport(step, direction)

    def _notify(self) -> None:
        self._changed()
