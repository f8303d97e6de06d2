"""Carry out one change of circuits on one switch as an operation: send its commands, read the switch and determine the
outcome.

A change is atomic as far as the device allows. Cross-connects that did not take effect are retried once. If they fail
again, the change is rolled back. A change whose outcome could not be read stays open until its switch can be read. A
change that was partly applied is then completed, or undone if it is no longer valid (`valid_until_s`). A change that
had no effect is not started again. A trial change that was not confirmed is undone.

core/operation.py runs the steps. circuit_executor.py orders the changes of one switch.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any

from ocs_drivers.base import Armed, OcsDriver
from ocs_drivers.diff import compare, remaining
from ocs_drivers.errors import CircuitConflict, DriverError, DriverOutcomeUnknown, DriverPermanent, DriverRetryable
from ocs_drivers.model import (
    ChangeMode,
    CircuitDiff,
    CommitResult,
    CrossConnect,
    CrossConnectReading,
    CrossConnectResult,
    DeviceCircuit,
    SwitchFacts,
    utc,
)
from orchestrrl.core.clock import Clock
from orchestrrl.core.errors import OrchestrRLError, Retryable, few
from orchestrrl.core.operation import Description, OperationFailure, OperationRun, OperationState, Stage, StepEntry
from orchestrrl.core.operation_journal import OperationJournal
from orchestrrl.fabric.circuit_owners import CircuitOwners

# Pause between attempts to read a switch whose state is unknown.
RETRY_S = 5.0
# A cross-connect that is not listed may still appear within this multiple of the vendor's reconfiguration time.
LATE_TIMES = 2.0
COMMIT_ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class CircuitOperation:
    """One change on one switch, as stored in the journal."""

    id: str
    switch: str
    diff: CircuitDiff
    valid_until_s: float
    revert_in_s: float | None = None  # for a trial: undone this long after it is carried out, unless confirmed


@dataclass(frozen=True, slots=True)
class CircuitOutcome:
    """The result of a change. `items` has one result per cross-connect, as read from the switch afterwards."""

    operation: str
    switch: str
    done: bool
    detail: str
    items: tuple[CrossConnectResult, ...] = ()
    evicted: tuple[CrossConnect, ...] = ()
    revision: int = 0
    rolled_back: bool = False
    revert_at_s: float | None = None  # when the trial ends, by the driver's clock


@dataclass(frozen=True, slots=True)
class CircuitStep:
    number: int
    name: str
    within_s: float = inf  # the driver bounds the time of every command and wait

    def __str__(self) -> str:
        return self.name


COMMIT, VERIFY = CircuitStep(1, "commit"), CircuitStep(2, "verify")
ROLL_BACK = CircuitStep(1, "roll back")
NOT_CONFIRMED = "not confirmed in time"


@dataclass(eq=False)
class CircuitRun(Description[CircuitStep]):
    """One change that is being carried out. The switch's driver is looked up for each use, because it may have been
    replaced."""

    operation: CircuitOperation
    switches: Mapping[str, OcsDriver]
    owners: CircuitOwners
    log: OperationJournal
    clock: Clock
    armed: Armed | None = None
    is_timed: bool = False  # its commit is not repeated if no cross-connect took effect
    refusal: DriverError | None = None  # the error to raise, since nothing was sent
    revert_at_s: float = inf  # by the daemon's clock; finite during a trial

    errors = (DriverError, OrchestrRLError)
    leaves_open = (DriverOutcomeUnknown,)

    def __post_init__(self) -> None:
        diff = self.operation.diff
        self.valid_until_s = self.operation.valid_until_s
        # the last reading
        self._now = CrossConnectReading(tuple(map(DeviceCircuit, sorted(diff.before))), diff.revision)
        self._facts: SwitchFacts | None = None
        self._may_be_begun = False
        self._attempts = 0  # commit attempts since the change began or was resumed
        self._first_s = 0.0  # when the first attempt began
        self._result: CommitResult | None = None  # combined over all attempts
        self._sent = ""  # a summary of what was sent, for the error raised if the switch cannot be read
        self._not_seen_since_s: float | None = None
        self._why = ""  # why it was not carried out
        self._undoes = False
        # None: no rollback was sent; otherwise the driver's reason for its failure, or empty
        self._undone: str | None = None
        self._dark: tuple[CrossConnect, ...] = ()
        self._run = OperationRun(self, self.log, self.clock, lambda: None)
        self.begin = self._run.begin
        self.carry_out = self._run.carry_out

    async def resume(self) -> None:
        """Complete or undo a change that is open or was not confirmed. Raises DriverError if the switch cannot be read
        or changed. The change then stays open."""
        self._may_be_begun, self._attempts, self._sent, self.refusal = True, 0, "", None
        if self._undone is None:
            self._result = None
        await self._run.resume((), NOT_CONFIRMED if self._is_on_trial else "its outcome was not known")

    def disarm(self) -> None:
        """Release the prepared commit. Has no effect if the commit has begun."""
        if self.armed is not None:
            self.armed.disarm()
            self.armed = None

    def outcome(self) -> CircuitOutcome:
        """Return the result of the finished change."""
        operation, result = self.operation, self._result
        is_done, items = self._run.state is OperationState.DONE, result.items if result is not None else ()
        outcome = CircuitOutcome(operation.id, operation.switch, is_done, self._why, items, revision=self._now.revision)
        if is_done:
            if result is None:
                return replace(outcome, detail="was found carried out")
            until_s = result.revert_at_s
            dark = f"in place, but no light arrives: {_listed(self._dark)}" if self._dark else ""
            trial = f"on trial: reverts at {utc(until_s)} unless confirmed" if until_s is not None else ""
            detail, evicted = "; ".join(filter(None, (dark, trial))), operation.diff.evicted
            return replace(outcome, detail=detail, evicted=evicted, revision=result.revision, revert_at_s=until_s)
        if self._undone is None:
            return outcome
        if differences := _not_undone(operation.diff, self._now):
            how = (
                f"not rolled back: {self._undone}"
                if self._undone
                else f"rolled back, but the switch still differs: {differences}"
            )
            return replace(outcome, detail=f"{self._why}; {how}")
        items = tuple(replace(item, done=False, detail="rolled back" if item.done else item.detail) for item in items)
        return replace(outcome, detail=f"{self._why}; rolled back, {self._compared}", items=items, rolled_back=True)

    def gone(self) -> tuple[CrossConnect, ...]:
        """Return the cross-connects of the change that are certainly down after it has ended. The daemon owns the other
        cross-connects of the change if they are up."""
        diff = self.operation.diff
        return {OperationState.DONE: diff.remove, OperationState.ROLLED_BACK: diff.add}.get(self._run.state, ())

    # --- called by core/operation.py

    @property
    def id(self) -> str:
        return self.operation.id

    def __str__(self) -> str:
        return f"{self.operation.id} on {self.operation.switch}"

    def forward(self) -> Sequence[Stage[CircuitStep]]:
        return (((COMMIT, VERIFY),),)

    def intent(self) -> Mapping[str, Any]:
        return operation_to_json(self.operation)

    async def do(self, step: CircuitStep) -> str:
        await (self._commit() if step is COMMIT else self._verify())
        return ""

    async def undo(self, step: CircuitStep) -> str:
        """Roll the change back. Raises DriverOutcomeUnknown if the rollback must be tried again. Otherwise, the next
        reading of the switch shows whether the rollback succeeded."""
        try:
            self._undone = ""
            self._undone = _why(await self._driver.rollback(self.operation.diff))
        except DriverPermanent as error:
            self._undone = str(error)
        except DriverRetryable as error:
            self._undone = None
            raise self._unknown(f"{self._why}; the change has not been rolled back yet: {error}") from error
        how = f"not rolled back: {self._undone}" if self._undone else "rolled back, as its driver reports"
        self._sent = f"{self._why}; {how}"
        return ""

    async def observe(self) -> None:
        if not self._may_be_begun:
            return
        try:
            await self._read()
            is_missing = not self._is_begun and self._result is None and not self._is_on_trial
            if is_missing and await self._has_waited():
                await self._read()
        except DriverError as error:
            if not self._sent:
                raise
            raise self._unknown(f"{self._sent}; the switch could not be read afterwards: {error}") from error

    def resume_from(self, records: Sequence[StepEntry]) -> frozenset[int] | None:
        if self._is_begun or self._is_on_trial:  # earlier results no longer matter
            self._result = self._undone = None
        return self._go_back(NOT_CONFIRMED) if self._is_on_trial else self._by_reading("")

    def goes_on_after(self, failure: OperationFailure[CircuitStep]) -> frozenset[int] | None:
        result = self._result
        if not self._may_be_begun:
            late = CircuitConflict([f"{failure.why}: read the switch and try again"], device=self.operation.switch)
            self.refusal = failure.error if isinstance(failure.error, DriverError) else late
            self._why = f"was not begun: {self.refusal}"
            return None
        if failure.step is not COMMIT or result is None:
            return self._by_reading(failure.why)
        if self.is_timed and not self._is_begun and result.revision == self.operation.diff.revision:
            self._why = f"{_why(result)}; nothing took effect, {self._compared}"
            return None
        return frozenset() if self._attempts < COMMIT_ATTEMPTS else self._go_back(_why(result))

    def back(self, records: Sequence[StepEntry]) -> Sequence[Stage[CircuitStep]]:
        return (((ROLL_BACK,),),) if self._undoes else ()

    def restored(self) -> bool:
        return not self._is_begun

    # ---

    @property
    def _driver(self) -> OcsDriver:
        return self.switches[self.operation.switch]

    @property
    def _is_begun(self) -> bool:
        """True if the last reading of the switch shows that a part of the change has been applied."""
        diff, present = self.operation.diff, self._now.cross_connects
        return not present >= frozenset(diff.remove) or bool(present & frozenset(diff.add))

    @property
    def _is_on_trial(self) -> bool:
        return self.revert_at_s < inf

    @property
    def _compared(self) -> str:
        return compared_with_before(self.operation.diff, self._now)

    def _unknown(self, message: str) -> DriverOutcomeUnknown:
        return DriverOutcomeUnknown(message, device=self.operation.switch)

    def _go_back(self, why: str) -> frozenset[int] | None:
        """Store the reason for a rollback. Always returns None, which causes the operation to be rolled back."""
        self._why, self._undoes = why, True
        return None

    def _by_reading(self, failure: str) -> frozenset[int] | None:
        """Return the numbers of the steps that the last reading shows as done, or None if the change must not
        continue."""
        diff, now = self.operation.diff, self._now
        assert self._facts is not None
        self._undoes = False
        if not self._is_begun:
            if self._undone is None:  # no rollback was sent either
                self._why = f"was not begun; {self._compared}"
            return None
        if self.operation.revert_in_s is not None:
            return self._go_back("was on trial and was not confirmed")
        try:
            steps = remaining(self._facts, diff, now.cross_connects)
        except CircuitConflict as error:
            self._why = f"was partly applied, then conflicted with another change: {error}"
            return None
        if steps.empty and compare(diff, now).ok:
            return frozenset({COMMIT.number, VERIFY.number})
        if self.clock.now_s() > self.valid_until_s:
            return self._go_back("was partly applied when its order expired")
        if self._attempts >= COMMIT_ATTEMPTS:
            return self._go_back(f"was partly applied and cannot be finished: {failure}")
        return frozenset()

    async def _commit(self) -> None:
        began_s, may_be_begun = self.clock.now_s(), self._may_be_begun
        self._attempts, self._may_be_begun = self._attempts + 1, True
        if self._attempts == 1:
            self._first_s = began_s
        try:
            result = await self._send(self.armed if self._attempts == 1 else None)
        except (DriverPermanent, DriverRetryable):  # nothing was sent
            self._may_be_begun = may_be_begun
            raise
        self._result = result if self._result is None else _both(self._result, result, began_s - self._first_s)
        if not self._result.done:
            self._sent = _why(self._result)
            raise Retryable(_why(self._result), after_s=0.0)

    async def _send(self, armed: Armed | None) -> CommitResult:
        if armed is not None:
            return await armed.begin()
        diff, revert_in_s = self.operation.diff, self.operation.revert_in_s
        if revert_in_s is None:
            return await self._driver.commit(diff, self._now.revision)
        return await self._driver.commit(diff, self._now.revision, revert_in_s)

    async def _verify(self) -> None:
        seen = await self._driver.verify(self.operation.diff)
        if not seen.ok:
            faulty = _listed((*seen.missing, *seen.lingering, *seen.untuned))
            raise self._unknown(f"the change was committed, but these circuits differ when read back: {faulty}")
        self._dark = seen.dark

    async def _read(self) -> None:
        self._facts = await self._driver.facts()
        self._now = await self.owners.read(self.operation.switch)

    async def _has_waited(self) -> bool:
        """Wait until no more cross-connects of the change can appear, and return whether a wait was necessary. A wait
        may be necessary because a device that does not report tuning may list a cross-connect only when it is in place.
        Raises DriverRetryable if the wait would exceed `RETRY_S`."""
        assert self._facts is not None
        if (await self._driver.capabilities()).tuned_state:
            return False
        if self._not_seen_since_s is None:
            self._not_seen_since_s = self.clock.now_s()
        left_s = self._not_seen_since_s + LATE_TIMES * self._facts.reconfiguration_s - self.clock.now_s()
        if left_s > RETRY_S:
            message = f"no circuit of {self.operation.id} is listed yet; one may still appear within {left_s:.0f} s"
            raise DriverRetryable(message, after_s=left_s, device=self.operation.switch)
        await self.clock.sleep(left_s)
        return left_s > 0


def _both(first: CommitResult, second: CommitResult, later_s: float) -> CommitResult:
    """Return the combined result of two attempts to commit. The second attempt began `later_s` seconds after the
    first."""
    items = tuple(
        before if before.done and after.done else _later(before, after, later_s)
        for before, after in zip(first.items, second.items, strict=True)
    )
    sent = first.commands_sent + second.commands_sent
    return CommitResult(items, second.revision, sent, second.revert_at_s or first.revert_at_s)


def _not_undone(diff: CircuitDiff, now: CrossConnectReading) -> str:
    """Return a text that describes how the circuits of a change differ from their state before the change, or "" if
    they do not differ."""
    seen = compare(replace(diff, remove=diff.add, add=diff.remove), now)
    differences = [f"{pair} is up" for pair in seen.lingering] + [f"{pair} is not up" for pair in seen.missing]
    states = {circuit.cross_connect: circuit.state for circuit in now.circuits}
    return few([*differences, *(f"{pair} is {states[pair]}" for pair in seen.untuned)])


def compared_with_before(diff: CircuitDiff, now: CrossConnectReading) -> str:
    """Return a text that compares the present state of a switch with its state before a change. The change must have
    had no effect or must have been undone."""
    lost, new = sorted(diff.before - now.cross_connects), sorted(now.cross_connects - diff.before)
    if differences := _not_undone(diff, now):
        return f"its circuits are listed as they were, but {differences}"
    if not lost and not new:
        return "the switch is as it was"
    others = few([*(f"-{pair}" for pair in lost), *(f"+{pair}" for pair in new)], between=" ")
    return f"its circuits are as they were, and others have changed since: {others}"


def _later(before: CrossConnectResult, after: CrossConnectResult, later_s: float) -> CrossConnectResult:
    """Return the second attempt's result, with times in seconds since the start of the first attempt. A time that is
    missing in the second attempt's result is taken from the first attempt's result."""
    times = {
        name: getattr(before, name) if (at_s := getattr(after, name)) is None else at_s + later_s
        for name in ("commanded_s", "tuned_s", "link_up_s")
    }
    return replace(after, **times)


def _why(result: CommitResult) -> str:
    """Return a text that lists the cross-connects that did not take effect, with the switch's reasons."""
    return "; ".join(
        f"{item.action} {item.cross_connect}: {item.detail or 'did not take effect'}"
        for item in result.items
        if not item.done
    )


def _listed(pairs: Iterable[CrossConnect]) -> str:
    return " ".join(str(pair) for pair in pairs)


def operation_to_json(operation: CircuitOperation) -> dict[str, Any]:
    diff = operation.diff
    return {
        "switch": operation.switch,
        "valid_until_s": operation.valid_until_s,
        "revert_in_s": operation.revert_in_s,
        "mode": diff.mode,
        "revision": diff.revision,
        **{
            name: [str(pair) for pair in sorted(getattr(diff, name))] for name in ("before", "remove", "add", "evicted")
        },
    }


def operation_from_json(id: str, body: Mapping[str, Any]) -> CircuitOperation:
    remove, add, evicted = (tuple(map(CrossConnect.parse, body[name])) for name in ("remove", "add", "evicted"))
    before = frozenset(map(CrossConnect.parse, body["before"]))
    diff = CircuitDiff(ChangeMode(body["mode"]), body["revision"], before, remove, add, evicted)
    return CircuitOperation(id, body["switch"], diff, body["valid_until_s"], body.get("revert_in_s"))


def outcome_to_json(outcome: CircuitOutcome) -> dict[str, Any]:
    names = ("switch", "done", "detail", "rolled_back", "revision")
    return {name: getattr(outcome, name) for name in names} | {
        "evicted": [str(pair) for pair in outcome.evicted],
        "items": [{**asdict(item), "cross_connect": str(item.cross_connect)} for item in outcome.items],
    }
