"""Run a journalled operation to its end: carry out its steps, or roll them back if a step fails.

A description defines the steps and their effects. This module decides the order of execution. Stages run one after
another. The chains of a stage run in parallel, and the steps of a chain run one after another. A journal entry is
written before and after each step, unless the type of operation has no entries for steps. After a failure, and when a
restarted daemon resumes an open operation, this module observes the present state. The description then decides whether
the operation is completed or rolled back, and plans the rollback. Every step must be idempotent.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf
from typing import Any, Generic, Protocol, TypeVar

from orchestrrl.core.clock import Clock, within
from orchestrrl.core.errors import OrchestrRLError, Permanent
from orchestrrl.core.journal.store import JournalEntry
from orchestrrl.core.operation_journal import OperationJournal

logger = logging.getLogger(__name__)

OBSERVE_AGAIN_S = 2.0
BACK_ATTEMPTS = 2  # for a chain of the rollback: a resource that its first attempt needs may be freed late


class StepDirection(StrEnum):
    FORWARD = "forward"
    BACK = "back"


class StepState(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    SKIPPED = "skipped"  # an earlier step failed


class OperationState(StrEnum):
    RUNNING = "running"
    DONE = "done"
    ROLLED_BACK = "rolled_back"  # the state before the operation is restored
    DEGRADED = "degraded"  # a part of the rollback failed


class Step(Protocol):
    """One step of an operation. `number` counts from 1, separately for forward steps and rollback steps."""

    @property
    def number(self) -> int: ...

    @property
    def within_s(self) -> float | None:
        """The step's time limit in seconds, or None if the step's actions have their own time limits."""
        ...


S = TypeVar("S", bound=Step)
Chain = tuple[S, ...]
Stage = tuple[tuple[S, ...], ...]


@dataclass(frozen=True, slots=True)
class StepReport(Generic[S]):
    step: S
    direction: StepDirection
    state: StepState = StepState.PENDING
    detail: str = ""
    began_s: float | None = None
    elapsed_s: float | None = None


@dataclass(frozen=True, slots=True)
class StepEntry:
    """A journal entry about one step."""

    direction: StepDirection
    number: int
    state: StepState
    entry: Mapping[str, Any]
    attempt: int = 1


class Description(Protocol[S]):
    """Defines the steps and decisions of one operation. Subclasses must implement the methods whose body is `...`; the
    other methods have a default."""

    valid_until_s: float = inf  # an operation that would begin later is refused
    errors: tuple[type[Exception], ...] = (OrchestrRLError,)  # errors that the methods raise; any other is a defect
    # The subset that leaves the operation open: `carry_out` and `resume` raise the error, and a later `resume`
    # continues it. If the subset is not empty, defects and failed observations also leave it open; otherwise
    # observations are repeated.
    leaves_open: tuple[type[Exception], ...] = ()

    @property
    def id(self) -> str: ...

    def forward(self) -> Sequence[Stage[S]]: ...

    def intent(self) -> Mapping[str, Any]:
        """Return the body of the journal entry that records the operation's intent."""
        ...

    def record(self, step: S) -> Mapping[str, Any]:
        """Return additional fields for the journal entries of a step. The rollback is planned from these entries."""
        return {}

    async def do(self, step: S) -> str:
        """Carry out a step and return a remark for the report. Raises one of `errors` if the step fails."""
        ...

    async def undo(self, step: S) -> str:
        """Carry out a step of the rollback and return a remark for the report. Raises one of `errors` if the step
        fails."""
        ...

    async def observe(self) -> None:
        """Read the present state of the resources that the operation changes. Raises one of `errors` if the state
        cannot be read yet."""
        ...

    def back(self, records: Sequence[StepEntry]) -> Sequence[Stage[S]]:
        """Return the stages of the rollback, planned from the last observed state and the journal entries of the
        steps."""
        ...

    def restored(self) -> bool:
        """Return whether the last observed state equals the state before the operation."""
        ...

    def resume_from(self, records: Sequence[StepEntry]) -> frozenset[int] | None:
        """Decide how a restarted daemon continues an open operation. Return the numbers of the steps that need not be
        repeated, or None to roll the operation back."""
        return None

    def goes_on_after(self, failure: "OperationFailure[S]") -> frozenset[int] | None:
        """Decide how the operation continues after a failure while the daemon is running. The result has the same
        meaning as that of `resume_from`. The implementation must limit the number of attempts."""
        return None

    def is_final(self, step: S) -> bool:
        """Return whether the operation can no longer be cancelled after this step has begun."""
        return False

    def is_optional(self, step: S) -> bool:
        """Return whether the operation continues if this step fails."""
        return False

    def is_committed(self) -> bool:
        """Return whether the operation can no longer be rolled back. In that case, failures of steps are only reported,
        and the remaining steps are carried out."""
        return False

    def retry(self, failure: "OperationFailure[S]") -> bool:
        """Return whether the operation starts again from the first step after a rollback has restored the previous
        state."""
        return False

    def hold(self, step: S) -> Coroutine[Any, Any, None] | None:
        """Return a coroutine that keeps a resource that the step acquired, for example by renewing a lease. The
        coroutine is cancelled when the forward steps end. Return None if the step acquired no such resource."""
        return None

    async def again(self, chain: Chain[S], failed: S) -> Chain[S]:
        """Clean up after `failed`, a step of the rollback's `chain` that failed. Return the chain to carry out in the
        next attempt."""
        return chain

    def waits_for(self, step: S) -> str:
        """Return what a long step is waiting for, or "" if this is unknown."""
        return ""


class OperationFailure(Exception, Generic[S]):
    """The reason for a rollback. `step` is the failed step, or None if no step failed, for example because the
    operation was cancelled. `error` is the exception that caused the failure, if there was one."""

    def __init__(self, step: S | None, why: str, error: Exception | None = None) -> None:
        super().__init__(why if step is None else f"{step}: {why}")
        self.step = step
        self.why = why
        self.error = error


class OperationRun(Generic[S]):
    """Runs one operation. `changed` is called whenever the operation's report changes."""

    def __init__(
        self, description: Description[S], log: OperationJournal, clock: Clock, changed: Callable[[], None]
    ) -> None:
        self.state = OperationState.RUNNING
        self.detail = ""
        self.failure: OperationFailure[S] | None = None  # why the operation is rolled back or was not begun
        self.ended_s: float | None = None
        self.going_back = False
        self.attempt = 1
        self._description = description
        self._log = log
        self._clock = clock
        self._changed = changed
        self._forward_stages = tuple(description.forward())
        self._reports: dict[tuple[StepDirection, int], StepReport[S]] = {}
        self.records: list[StepEntry] = []  # of its steps, including those written by earlier daemons
        self._going: asyncio.Task[None] | None = None  # the forward steps
        self._holding: list[asyncio.Task[None]] = []
        self._called_off = ""
        self._is_begun = False
        self._is_final = False
        self._list_steps(StepDirection.FORWARD, self._forward_stages)

    @property
    def steps(self) -> tuple[StepReport[S], ...]:
        """The reports of the forward steps, followed by the reports of the rollback's steps, if any."""
        return tuple(self._reports.values())

    def call_off(self, because: str) -> None:
        """Cancel the operation and roll it back. `because` is reported as the reason. Raises Permanent if the operation
        can no longer be cancelled."""
        going = self._going  # None: not yet begun
        over = self.going_back or self.state is not OperationState.RUNNING or (going is not None and going.done())
        if over or self._is_final:
            raise Permanent(f"{self._description} can no longer be cancelled")
        self._called_off = because
        if going is not None:
            going.cancel()

    async def run(self) -> None:
        """Write the intent and run the operation to its end. If the intent cannot be written, the operation ends before
        its first step."""
        try:
            self.begin()
        except OrchestrRLError as error:
            self.detail = f"not begun, because the intent cannot be journalled: {error}"
            self.failure = OperationFailure(None, self.detail, error)
            self._set_end(OperationState.ROLLED_BACK)
        else:
            await self.carry_out()

    def begin(self) -> None:
        """Write the operation's intent to the journal. Raises OrchestrRLError if the journal cannot be written."""
        self._log.begin(self._description.id, self._description.intent())

    async def carry_out(self) -> None:
        """Run the operation, whose intent must have been written. Raises Permanent on a second call."""
        if self._is_begun:
            raise Permanent(f"{self._description} has already begun")
        self._is_begun = True
        is_late = self._clock.now_s() > self._description.valid_until_s
        why_not = self._called_off or ("the order has expired" if is_late else "")
        await self._end(OperationFailure(None, why_not) if why_not else await self._go(frozenset()))

    async def resume(
        self, entries: Sequence[JournalEntry], because: str = "the daemon ended in the middle of it"
    ) -> None:
        """Finish an operation that this daemon or an earlier one left open. `entries` are the journal entries of its
        steps. If the operation is rolled back, `because` is reported as the reason."""
        self._is_begun, self.state, self.going_back = True, OperationState.RUNNING, False
        self._recall(entries)
        await self._observe()
        last = [record for record in self.records if record.attempt == self.attempt]
        went_back = any(record.direction is StepDirection.BACK for record in last)
        done = None if went_back or self._called_off else self._description.resume_from(self.records)
        if done is None:
            return await self._go_back(OperationFailure(None, self._called_off or because))
        logger.warning("%s is resumed and completed", self._description)
        return await self._end(await self._go(done))

    async def _go(self, done: frozenset[int]) -> OperationFailure[S] | None:
        self._going = asyncio.ensure_future(self._run_stages(done))
        try:
            await self._going
        except OperationFailure as failure:
            return failure
        except asyncio.CancelledError:
            if not self._called_off:  # the daemon is stopping: the next one resumes the operation
                self._going.cancel()
                await asyncio.wait({self._going})
                raise
            return OperationFailure(None, self._called_off)
        finally:
            for task in self._holding:
                task.cancel()
            self._holding.clear()
        return None

    async def _end(self, failure: OperationFailure[S] | None) -> None:
        """End the operation after its forward steps have succeeded (`failure` is None) or failed. After a failure, the
        state is observed, and the description decides whether the operation continues or is rolled back. After a
        rollback, the description decides whether the operation starts again."""
        while failure is not None:
            self.failure, self.detail = failure, str(failure)
            self._changed()
            await self._observe()
            done = self._description.goes_on_after(failure)
            if done is None:
                await self._go_back(failure)
                if self.state is not OperationState.ROLLED_BACK or not self._description.retry(failure):
                    return
                self._begin_again()
                done = frozenset()
            failure = await self._go(done)
        self.failure = None
        self._set_end(OperationState.DONE)

    def _begin_again(self) -> None:
        logger.warning("%s starts again", self._description)
        self.state, self.ended_s = OperationState.RUNNING, None
        self.attempt += 1
        self.going_back = self._is_final = False
        self.detail = ""
        self._reports.clear()
        self._list_steps(StepDirection.FORWARD, self._forward_stages)
        self._changed()

    async def _go_back(self, failure: OperationFailure[S]) -> None:
        for key, report in self._reports.items():
            if report.state is StepState.PENDING:
                self._reports[key] = replace(report, state=StepState.SKIPPED)
        self.going_back, self.failure, self.detail = True, failure, str(failure)
        stages = self._description.back(self.records)
        self._list_steps(StepDirection.BACK, stages)
        if stages:
            logger.warning("%s is rolled back: %s", self._description, failure)
        self._changed()
        failed: list[str] = []
        for stage in stages:
            outcomes = await asyncio.gather(*(self._chain_back(chain) for chain in stage))
            failed += [outcome for outcome in outcomes if outcome]
        if stages:  # steps that failed during the rollback may have taken effect
            await self._observe()
        self.detail = "; ".join([str(failure), *dict.fromkeys(failed)])
        self._set_end(OperationState.ROLLED_BACK if self._description.restored() else OperationState.DEGRADED)

    def _set_end(self, state: OperationState) -> None:
        self.state, self.ended_s = state, self._clock.now_s()

    async def _observe(self) -> None:
        """Observe the present state, on which every decision depends. After an error, the observation is repeated. If
        errors leave the operation open (`leaves_open`), the error is raised instead."""
        while True:
            try:
                return await self._description.observe()
            except self._description.errors as error:
                if self._description.leaves_open:
                    raise
                logger.error("%s waits for an observation: %s", self._description, error)
                await self._clock.sleep(OBSERVE_AGAIN_S)

    async def _run_stages(self, done: frozenset[int]) -> None:
        for stage in self._forward_stages:
            chains = [asyncio.ensure_future(self._run_chain(chain, done)) for chain in stage]
            try:
                await asyncio.wait(chains, return_when=asyncio.FIRST_EXCEPTION)
            finally:
                for chain in chains:  # after a failure the other chains are cancelled, because all are rolled back
                    chain.cancel()
                outcomes = await asyncio.gather(*chains, return_exceptions=True)
            errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
            own = [error for error in errors if not isinstance(error, asyncio.CancelledError)]
            if errors:
                raise (own or errors)[0]

    async def _run_chain(self, chain: Chain[S], done: frozenset[int]) -> None:
        for step in chain:
            if step.number in done:
                continue
            try:
                await self._do(StepDirection.FORWARD, step, self._description.do)
            except OperationFailure as failure:
                optional = self._description.is_optional(step) or self._description.is_committed()
                if failure.step is None or not optional:
                    raise
                self.detail = "; ".join(filter(None, [self.detail, str(failure)]))

    async def _chain_back(self, chain: Chain[S]) -> str:
        """Carry out one chain of the rollback, with retries. Return the reason for its failure, or "" on success. A
        failure does not stop the other chains."""
        why = ""
        for _ in range(BACK_ATTEMPTS):
            try:
                for step in chain:
                    await self._do(StepDirection.BACK, step, self._description.undo)
            except OperationFailure as failure:
                logger.error("%s, during rollback: %s", self._description, failure)
                why = str(failure)
                if failure.step is not None:
                    chain = await self._description.again(chain, failure.step)
            else:
                return ""
        return why

    async def _do(self, direction: StepDirection, step: S, act: Callable[[S], Awaitable[str]]) -> None:
        if direction is StepDirection.FORWARD and self._description.is_final(step):
            self._is_final = True
        began_s = self._clock.now_s()
        self._write(StepReport(step, direction, StepState.RUNNING, began_s=began_s))
        failure: OperationFailure[S] | None = None
        try:
            work, limit_s = act(step), step.within_s
            detail = await (work if limit_s is None else within(self._clock, limit_s, work))
        except self._description.errors as error:
            if isinstance(error, self._description.leaves_open):
                raise
            waits = self._description.waits_for(step)
            why = f"{error}: {waits}" if waits and waits not in str(error) else str(error)
            failure = OperationFailure(step, why, error)
        except Exception as error:  # a defect must not leave the operation half done
            if self._description.leaves_open:
                raise
            logger.exception("%s: %s", self._description, step)
            failure = OperationFailure(step, f"unexpected exception: {error!r}")
        except asyncio.CancelledError:  # the present state is observed before the next step
            cut_short = self._over(direction, step, StepState.FAILED, "interrupted", began_s)
            self._reports[direction, step.number] = cut_short
            raise
        if failure is not None:
            self._write(self._over(direction, step, StepState.FAILED, failure.why, began_s))
            raise failure
        self._write(self._over(direction, step, StepState.DONE, detail, began_s))
        holding = self._description.hold(step) if direction is StepDirection.FORWARD else None
        if holding is not None:
            self._holding.append(asyncio.ensure_future(holding))

    def _over(self, direction: StepDirection, step: S, state: StepState, detail: str, began_s: float) -> StepReport[S]:
        return StepReport(step, direction, state, detail, began_s, self._clock.now_s() - began_s)

    def _write(self, report: StepReport[S]) -> None:
        step = report.step
        self._reports[report.direction, step.number] = report
        if not self._log.has_steps:
            return
        entry = {
            "id": f"{self._description.id}/{self.attempt}/{report.direction}/{step.number}",
            "attempt": self.attempt,
            "direction": report.direction,
            "number": step.number,
            **self._description.record(step),
            "state": report.state,
            "detail": report.detail,
            "began_s": report.began_s,
            "elapsed_s": report.elapsed_s,
            "valid_until_s": None if step.within_s is None else (report.began_s or 0.0) + step.within_s,
        }
        self.records.append(StepEntry(report.direction, step.number, report.state, entry, self.attempt))
        try:
            self._log.step(self._description.id, entry)
        except OrchestrRLError as error:
            if report.direction is StepDirection.FORWARD and not self._description.is_committed():
                raise OperationFailure(None, f"the step cannot be journalled: {error}", error) from error
            # A full disk must not prevent the rollback.
            logger.error("%s: %s", self._description, error)
        logger.info("%s: %s %s %s", self._description, step, report.state, report.detail)
        self._changed()

    def _recall(self, entries: Sequence[JournalEntry]) -> None:
        """Restore reports and records from the journal entries of the operation's steps. A step that began but did not
        end is reported as failed, although it may have taken effect."""
        forward = {step.number: step for step in steps_in(self._forward_stages)}
        for entry in entries:
            body = entry.body
            direction, state, attempt = StepDirection(body["direction"]), StepState(body["state"]), body["attempt"]
            record = StepEntry(direction, body["number"], state, body, attempt)
            self.records.append(record)
            if attempt > self.attempt:
                self.attempt = attempt
                self._reports.clear()
                self._list_steps(StepDirection.FORWARD, self._forward_stages)
            if record.direction is StepDirection.FORWARD and record.number in forward:
                self._reports[record.direction, record.number] = StepReport(
                    forward[record.number],
                    record.direction,
                    record.state,
                    body["detail"],
                    body["began_s"],
                    body["elapsed_s"],
                )
        for key, report in self._reports.items():
            if report.state is StepState.RUNNING:
                self._reports[key] = replace(report, state=StepState.FAILED, detail="the daemon stopped")

    def _list_steps(self, direction: StepDirection, stages: Sequence[Stage[S]]) -> None:
        for step in steps_in(stages):
            self._reports[direction, step.number] = StepReport(step, direction)


def check_record(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check the body of a step's journal entry and return it. Raises ValueError if a field that `resume` reads is
    missing or invalid."""
    missing = {"attempt", "number", "direction", "state", "detail", "began_s", "elapsed_s"} - entry.keys()
    if missing:
        raise ValueError(f"the journal entry has no field {min(missing)}")
    StepDirection(entry["direction"]), StepState(entry["state"])
    return entry


def steps_in(stages: Sequence[Stage[S]]) -> Iterator[S]:
    """Return an iterator over the steps of these stages, in order of stages and chains."""
    return (step for stage in stages for chain in stage for step in chain)
