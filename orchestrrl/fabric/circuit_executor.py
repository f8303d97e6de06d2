"""Run circuit changes one at a time on each switch. A change is journalled before and after it is carried out, so that
a restarted daemon can complete or undo it.

A change whose outcome could not be read stays open, in this module and in the journal. Before the next command to its
switch, and after a restart of the daemon, the switch is read and the change is finished or undone. A trial change stays
open until it is confirmed. If it is not confirmed, the switch's driver reverts it at the end of the trial, or the
daemon undoes it after a restart.

circuit_change.py carries out a single change. circuit_owners.py records which circuits the daemon owns.
"""

import asyncio
import itertools
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf

from ocs_drivers.base import Armed, Arming, OcsDriver
from ocs_drivers.errors import CircuitConflict, DriverError
from ocs_drivers.model import (
    ChangeMode,
    CircuitChange,
    CircuitDiff,
    CircuitState,
    CrossConnect,
    CrossConnectReading,
    utc,
)
from orchestrrl.core.clock import Clock
from orchestrrl.core.errors import OrchestrRLError
from orchestrrl.core.journal.kinds import CIRCUIT_CHANGES
from orchestrrl.core.journal.store import Journal
from orchestrrl.core.operation_journal import OperationJournal
from orchestrrl.fabric.circuit_change import (
    RETRY_S,
    CircuitOperation,
    CircuitOutcome,
    CircuitRun,
    operation_from_json,
    outcome_to_json,
)
from orchestrrl.fabric.circuit_owners import CircuitOwners

logger = logging.getLogger(__name__)

# How long an order may still be carried out after it was given.
VALID_S = 60.0


class CircuitExecutor:
    """Changes circuits on the given switches, one change at a time on each switch."""

    def __init__(
        self, switches: Mapping[str, OcsDriver], journal: Journal, clock: Clock, owns_all: Collection[str] = ()
    ) -> None:
        self.owners = CircuitOwners(switches, journal, clock, owns_all)
        self._switches = switches
        self._log = OperationJournal(journal, clock, CIRCUIT_CHANGES)
        self._clock = clock
        self._turns = {switch: asyncio.Lock() for switch in switches}
        self._count = itertools.count(1)
        self._open: dict[str, CircuitRun] = {}
        self._prepared: dict[str, CircuitRun] = {}
        self.defects = 0  # internal errors caught while settling
        self._unwanted: dict[str, CircuitOutcome] = {}  # abandoned, but not yet recorded in the journal
        self._trials: dict[str, tuple[CircuitRun, CircuitOutcome]] = {}  # by switch, with the outcome so far
        self._last_trial: dict[str, CircuitOutcome] = {}  # for a caller that confirms late, or twice

    @property
    def open(self) -> tuple[CircuitOperation, ...]:
        """The changes whose outcome is unknown, oldest first."""
        return tuple(run.operation for run in self._open.values())

    async def change(
        self,
        switch: str,
        change: CircuitChange,
        mode: ChangeMode,
        expect_revision: int | None = None,
        revert_in_s: float | None = None,
    ) -> CircuitOutcome:
        """Plan a change, carry it out and return its outcome. Raises DriverError if the change failed before any
        command was sent, and OutcomeUnknown if it is unknown whether the change took effect.

        If `expect_revision` is given, the switch must still have that revision, for example the revision that a dry run
        reported. If `revert_in_s` is given, the change is undone that many seconds after it was carried out, unless
        `confirm` is called before then.
        """
        async with self._turns[switch]:
            run = await self._planned(switch, change, mode, VALID_S, expect_revision, revert_in_s)
            if run.operation.diff.empty:
                return await self._as_it_is(switch, change)
            run.begin()
            return await self._carry_out(run)

    async def _as_it_is(self, switch: str, change: CircuitChange) -> CircuitOutcome:
        """Return the outcome of a change that needs no command. The outcome is "done" only if all circuits of the
        change are tuned."""
        driver = self._switches[switch]
        facts, reading = await driver.facts(), await driver.cross_connects()
        states = {circuit.cross_connect: circuit.state for circuit in reading.circuits}
        shown = [(pair, states.get(pair)) for pair in map(facts.normal, change.connect)]
        untuned = [f"{pair} is listed as {state}" for pair, state in shown if state not in (None, CircuitState.TUNED)]
        if not untuned:
            return CircuitOutcome("", switch, done=True, detail="already in effect", revision=reading.revision)
        detail = f"{'; '.join(untuned)}: nothing was sent; disconnect it, then connect it again"
        return CircuitOutcome("", switch, done=False, detail=detail, revision=reading.revision)

    async def confirm(self, switch: str) -> CircuitOutcome:
        """Confirm the trial change of the switch, so that it is kept. A second confirmation has no effect. Raises
        CircuitConflict if the switch has no trial change or the change was undone, and DriverError if the driver cannot
        confirm the change."""
        async with self._turns[switch]:
            if switch not in self._trials:
                last = self._last_trial.get(switch)
                if last is None:
                    raise CircuitConflict(["no change is on trial, so there is nothing to confirm"], device=switch)
                if not last.done:
                    raise CircuitConflict(
                        [f"operation {last.operation} cannot be confirmed: {last.detail}"], device=switch
                    )
                return replace(last, detail="was confirmed before")
            _, outcome = self._trials[switch]
            try:
                await self._switches[switch].confirm(outcome.revision)
            except CircuitConflict:
                with suppress(CircuitConflict):
                    await self._end_trial(switch)
                raise
            return self._close_trial(switch, replace(outcome, detail="confirmed", revert_at_s=None))

    async def take_over(self, switch: str, pairs: Sequence[CrossConnect]) -> CrossConnectReading:
        """Make the daemon the owner of these circuits. The ownership survives a restart. Raises CircuitConflict if one
        of the circuits is not on the switch."""
        async with self._turns[switch]:
            reading = await self._switches[switch].take_over(pairs)
            facts = await self._switches[switch].facts()
            self.owners.ended(switch, (), [facts.normal(pair) for pair in pairs])
            return reading

    async def plan(self, switch: str, change: CircuitChange, mode: ChangeMode) -> CircuitDiff:
        """Return the diff that a change would apply, given the recorded owners of the circuits. Changes nothing on the
        switch. Raises DriverError if the change is not possible."""
        await self.owners.before_planning(switch)
        driver = self._switches[switch]
        try:
            return await driver.plan(change, mode)
        except CircuitConflict:  # a device that was restarting may list only now what the daemon made before
            await self.owners.read(switch)
            return await driver.plan(change, mode)

    async def prepare(self, switch: str, change: CircuitChange, valid_s: float) -> CircuitOperation:
        """Plan and journal a change, so that `commit` only needs to send it. The caller must pass the returned
        operation to `commit` or `abandon` within `valid_s` seconds. The change evicts no circuits. Raises DriverError
        if the change is not possible."""
        async with self._turns[switch]:
            run = await self._planned(switch, change, ChangeMode.SAFE, valid_s, None)
            if run.operation.diff.empty:
                return run.operation
            run.is_timed = True
            run.armed = await self._arm(run.operation)
            try:
                run.begin()
            except BaseException:
                run.disarm()
                raise
            self._prepared[run.id] = run
            return run.operation

    async def commit(self, operation: CircuitOperation, begin_by_s: float = inf) -> CircuitOutcome:
        """Carry out a prepared change, at most once. Raises the same errors as `change`, and CircuitConflict if the
        switch has changed since `prepare` or other changes kept the switch busy until after the time `begin_by_s`."""
        if operation.diff.empty:
            return CircuitOutcome(
                "", operation.switch, done=True, detail="already in effect", revision=operation.diff.revision
            )
        async with self._turns[operation.switch]:
            run = self._prepared.pop(operation.id, None)
            if run is None:
                raise CircuitConflict(
                    [f"operation {operation.id} cannot be committed, because it has already begun or been abandoned"],
                    device=operation.switch,
                )
            try:
                return await self._begin(run, begin_by_s)
            finally:
                run.disarm()

    async def _begin(self, run: CircuitRun, begin_by_s: float) -> CircuitOutcome:
        operation = run.operation
        if self._of(operation.switch):  # a change whose outcome is unknown comes first
            try:
                await self._settle(operation.switch)
            except DriverError as error:
                self._close(_not_begun(operation, f"was not begun, the previous change is still open: {error}"))
                raise
        if self._clock.now_s() > begin_by_s:
            self._close(_not_begun(operation, "was not begun, other changes kept the switch busy for too long"))
            raise CircuitConflict(
                [f"operation {operation.id} did not begin by {utc(begin_by_s)}, because the switch was busy"],
                device=operation.switch,
            )
        return await self._carry_out(run)

    def abandon(self, operation: CircuitOperation, why: str) -> None:
        """Discard a prepared change. Has no effect if it was begun or abandoned before."""
        run = self._prepared.pop(operation.id, None)
        if run is None:
            return
        run.disarm()
        self._unwanted[operation.id] = _not_begun(operation, f"was not begun: {why}")
        try:
            self._forget_unwanted()
        except OrchestrRLError as error:  # tried again later; until then the journal lists the change as about to begin
            logger.error("change %s was abandoned, but cannot be closed in the journal: %s", operation.id, error)

    async def _planned(
        self,
        switch: str,
        change: CircuitChange,
        mode: ChangeMode,
        valid_s: float,
        expect_revision: int | None,
        revert_in_s: float | None = None,
    ) -> CircuitRun:
        await self._settle(switch)
        if switch in self._trials:
            run, _ = self._trials[switch]
            raise CircuitConflict(
                [
                    f"no other change can begin while operation {run.id} is on trial until {utc(run.revert_at_s)};"
                    " confirm the operation, or wait until then"
                ],
                device=switch,
            )
        diff = await self.plan(switch, change, mode)
        if expect_revision not in (None, diff.revision):
            raise CircuitConflict(
                [
                    f"the switch is at revision {diff.revision}, but the change was planned for revision"
                    f" {expect_revision}; read the switch and try again"
                ],
                device=switch,
            )
        id = f"circuits-{self._log.generation}-{next(self._count)}"
        return self._run_of(CircuitOperation(id, switch, diff, self._clock.now_s() + valid_s, revert_in_s))

    def _run_of(self, operation: CircuitOperation) -> CircuitRun:
        return CircuitRun(operation, self._switches, self.owners, self._log, self._clock)

    async def _arm(self, operation: CircuitOperation) -> Armed | None:
        """Prepare the commit in the driver. Return None if the driver does not support preparation or the preparation
        fails."""
        driver = self._switches[operation.switch]
        if not isinstance(driver, Arming):
            return None
        try:
            return await driver.arm(operation.diff, operation.diff.revision)
        except DriverError as error:  # then it is prepared when it is committed
            logger.info("a commit on switch %s cannot be prepared: %s", operation.switch, error)
            return None

    async def _carry_out(self, run: CircuitRun) -> CircuitOutcome:
        self._open[run.id] = run
        self.owners.begun(run.operation.switch, run.operation.diff)
        await run.carry_out()
        return self._ended(run)

    def _ended(self, run: CircuitRun) -> CircuitOutcome:
        outcome, revert_in_s = run.outcome(), run.operation.revert_in_s
        if outcome.revert_at_s is not None and revert_in_s is not None:
            # It stays open in the journal. The daemon's clock counts: the driver's process may have another.
            run.revert_at_s = self._clock.now_s() + revert_in_s
            self._trials[outcome.switch] = run, outcome
            self._open.pop(run.id)
            return outcome
        self._close(outcome, run.gone())
        if run.refusal is not None:
            raise run.refusal
        return outcome

    def recover(self) -> int:
        """Load the changes that have no result in the journal and return their number. `settle` completes or undoes
        them."""
        for left in self._log.left_open(lambda entry: operation_from_json(entry.subject, entry.body)):
            self._open[left.id] = self._run_of(left.intent)
            self.owners.begun(left.intent.switch, left.intent.diff)
        return len(self._open)

    async def settle(self) -> None:
        """Complete or undo every open change whose switch can be read. Changes on unreadable switches stay open."""
        self._forget_unwanted()
        switches = {*(operation.switch for operation in self.open), *self._trials}
        await asyncio.gather(*(self._try_to_settle(switch) for switch in switches))

    async def run(self) -> None:
        """Call `settle` periodically until cancelled, because a switch may be unreachable for some time."""
        while True:
            try:
                await self.settle()
            except OrchestrRLError as error:  # from the journal: nothing is done without a record
                logger.error("open changes cannot be settled: %s", error)
            except Exception:
                # An internal error, or one driver's, must not stop the daemon: open changes stay open.
                self.defects += 1
                logger.exception("open changes cannot be settled")
            await self._clock.sleep(RETRY_S)

    async def _try_to_settle(self, switch: str) -> None:
        if switch not in self._switches:
            for run in self._of(switch):
                self._close(_not_begun(run.operation, "the switch is no longer configured"))
            return
        async with self._turns[switch]:
            try:
                await self._settle(switch)
            except DriverError as error:
                logger.warning("a change on switch %s stays open: %s", switch, error)
            except OrchestrRLError:
                raise  # from the journal
            except Exception:  # changes of other switches must not wait for it
                self.defects += 1
                logger.exception("a change on switch %s stays open", switch)

    async def _settle(self, switch: str) -> None:
        await self._end_trial(switch)
        for run in self._of(switch):
            await run.resume()
            self._ended(run)

    async def _end_trial(self, switch: str) -> None:
        """Close the trial on this switch if its time is over. If the driver is still reverting the change, the trial
        stays open. If the change is still in effect but the driver no longer has a trial, the change is undone."""
        if switch not in self._trials:
            return
        run, _ = self._trials[switch]
        if self._clock.now_s() < run.revert_at_s:
            return
        reading = await self.owners.read(switch)
        if reading.unconfirmed is not None:
            if reading.unconfirmed.failure:
                logger.warning("switch %s: %s", switch, reading.unconfirmed)
            return
        await run.resume()
        self._close_trial(switch, run.outcome())

    def _close_trial(self, switch: str, outcome: CircuitOutcome) -> CircuitOutcome:
        run, _ = self._trials[switch]
        self._close(outcome, run.gone())
        del self._trials[switch]
        self._last_trial[switch] = outcome
        return outcome

    def _forget_unwanted(self) -> None:
        for id, outcome in list(self._unwanted.items()):
            self._close(outcome)
            del self._unwanted[id]

    def _of(self, switch: str) -> tuple[CircuitRun, ...]:
        return tuple(run for run in self._open.values() if run.operation.switch == switch)

    def _close(self, outcome: CircuitOutcome, gone: Iterable[CrossConnect] = ()) -> CircuitOutcome:
        """Record the end of a change. `gone` lists the change's cross-connects that are certainly down. The daemon owns
        the other cross-connects of the change if they are up."""
        if outcome.switch in self._switches:
            self.owners.ended(outcome.switch, gone)
        self._log.end(outcome.operation, outcome_to_json(outcome))
        self._open.pop(outcome.operation, None)
        logger.info("circuits %s on %s: done=%s %s", outcome.operation, outcome.switch, outcome.done, outcome.detail)
        return outcome


def _not_begun(operation: CircuitOperation, detail: str) -> CircuitOutcome:
    return CircuitOutcome(operation.id, operation.switch, done=False, detail=detail)
