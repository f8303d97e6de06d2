"""Circuits: intent journalled -> committed -> verified -> result journalled; resumable.

A change of circuits is all or nothing as far as the glass allows: what did not take is tried once more, and if it still
does not take, the switch is brought back to what it was. A change whose outcome could not be read stays open, here and
in the journal; before anything else is sent to its switch, and when the daemon has restarted, the switch is read: what
was half done is finished while the order is valid, and undone afterwards; what was never begun stays undone.

A change on trial stays open until it is confirmed. Its driver reverts it in time; one that a restarted daemon finds
unconfirmed is undone. Whose circuits are is in circuit_owners.py.
"""

import asyncio
import itertools
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any

from ocs_drivers.arming import Armed, Arming
from ocs_drivers.base import OcsDriver
from ocs_drivers.diff import compare, remaining
from ocs_drivers.errors import CircuitConflict, DriverError, DriverOutcomeUnknown, DriverPermanent, DriverRetryable
from ocs_drivers.model import (
    ChangeMode,
    CircuitChange,
    CircuitDiff,
    CircuitState,
    CommitResult,
    CrossConnect,
    CrossConnectReading,
    CrossConnectResult,
    SwitchFacts,
    utc,
)
from orchestrrl.core.clock import Clock
from orchestrrl.core.errors import OrchestrRLError, few
from orchestrrl.core.journal.kinds import CIRCUIT_CHANGES
from orchestrrl.core.journal.store import Journal
from orchestrrl.core.operation_journal import OperationJournal
from orchestrrl.fabric.circuit_owners import CircuitOwners

logger = logging.getLogger(__name__)

# How long after it was given an order may still be carried on with.
VALID_S = 60.0
# Pause between attempts to read a switch whose state is unknown.
RETRY_S = 5.0
# What a switch does not show is waited for so many times as long as it takes by its vendor's word.
LATE_TIMES = 2.0


@dataclass(frozen=True, slots=True)
class CircuitOperation:
    """One change on one switch, as it stands in the journal."""

    id: str
    switch: str
    diff: CircuitDiff
    valid_until_s: float
    revert_in_s: float | None = None  # on trial: unless confirmed within so long after it is carried out


@dataclass(frozen=True, slots=True)
class CircuitOutcome:
    """What became of a change. `items` say it port by port, as read back from the switch."""

    operation: str
    switch: str
    done: bool
    detail: str
    items: tuple[CrossConnectResult, ...] = ()
    evicted: tuple[CrossConnect, ...] = ()
    revision: int = 0
    rolled_back: bool = False
    revert_at_s: float | None = None  # on trial until then, by the driver's clock


class CircuitExecutor:
    """Changes circuits on the switches it is given, one change at a time on each."""

    def __init__(
        self, switches: Mapping[str, OcsDriver], journal: Journal, clock: Clock, owns_all: Collection[str] = ()
    ) -> None:
        self.owners = CircuitOwners(switches, journal, clock, owns_all)
        self._switches = switches
        self._log = OperationJournal(journal, clock, CIRCUIT_CHANGES)
        self._clock = clock
        self._turns = {switch: asyncio.Lock() for switch in switches}
        self._count = itertools.count(1)
        self._open: dict[str, CircuitOperation] = {}
        self._undone: dict[str, _Undone] = {}  # open ones that were rolled back, and not read since
        self._prepared: dict[str, CircuitOperation] = {}
        self._not_seen_since_s: dict[str, float] = {}  # of open ones, none of which their switch shows
        self._armed: dict[str, Armed] = {}  # of those prepared, where the driver can
        self.defects = 0  # faults of ours that were met while settling
        self._unwanted: dict[str, CircuitOutcome] = {}  # abandoned, and the journal did not take it
        self._trials: dict[str, _Trial] = {}  # by switch
        self._last_trial: dict[str, CircuitOutcome] = {}  # for who confirms it late, or twice

    @property
    def open(self) -> tuple[CircuitOperation, ...]:
        """Changes whose outcome is not known, oldest first."""
        return tuple(self._open.values())

    async def change(
        self,
        switch: str,
        change: CircuitChange,
        mode: ChangeMode,
        expect_revision: int | None = None,
        revert_in_s: float | None = None,
    ) -> CircuitOutcome:
        """Plan and carry out. Raises DriverError where nothing was done, or, with OutcomeUnknown, where nobody knows.

        With `expect_revision` the switch must be as it was when somebody looked, e.g. at the evictions of a dry run.
        With `revert_in_s` it is undone so long after it was carried out, unless `confirm` keeps it.
        """
        async with self._turns[switch]:
            operation = await self._planned(switch, change, mode, VALID_S, expect_revision, revert_in_s)
            if operation.diff.empty:
                return await self._as_it_is(switch, change)
            self._note(operation)
            return await self._carry_out(operation)

    async def _as_it_is(self, switch: str, change: CircuitChange) -> CircuitOutcome:
        """Of a change that is there without anything being sent. What is listed need not be in place."""
        driver = self._switches[switch]
        facts, reading = await driver.facts(), await driver.cross_connects()
        states = {circuit.cross_connect: circuit.state for circuit in reading.circuits}
        shown = [(pair, states.get(pair)) for pair in map(facts.normal, change.connect)]
        amiss = [f"{pair} is there, and {state}" for pair, state in shown if state not in (None, CircuitState.TUNED)]
        if not amiss:
            return CircuitOutcome("", switch, True, "was so already", revision=reading.revision)
        detail = f"{'; '.join(amiss)}: nothing was sent; disconnect it, then connect it again"
        return CircuitOutcome("", switch, False, detail, revision=reading.revision)

    async def confirm(self, switch: str) -> CircuitOutcome:
        """Keep what is on trial there; harmless where it was kept before. Raises Conflict where nothing is, or it was
        undone; DriverError."""
        async with self._turns[switch]:
            trial = self._trials.get(switch)
            if trial is None:
                last = self._last_trial.get(switch)
                if last is None:
                    raise CircuitConflict(["nothing waits to be confirmed"], device=switch)
                if not last.done:
                    raise CircuitConflict([f"{last.operation} was {last.detail}"], device=switch)
                return replace(last, detail="was confirmed before")
            try:
                await self._switches[switch].confirm(trial.outcome.revision)
            except CircuitConflict:
                if trial.revert_at_s <= self._clock.now_s():
                    with suppress(CircuitConflict):
                        await self._end_trial(switch)
                raise
            return self._close_trial(switch, replace(trial.outcome, detail="confirmed", revert_at_s=None))

    async def take_over(self, switch: str, pairs: Sequence[CrossConnect]) -> CrossConnectReading:
        """From now on these circuits are ours, also after a restart. Raises Conflict where one is not on the switch."""
        async with self._turns[switch]:
            reading = await self._switches[switch].take_over(pairs)
            facts = await self._switches[switch].facts()
            self.owners.ended(switch, (), [facts.normal(pair) for pair in pairs])
            return reading

    async def plan(self, switch: str, change: CircuitChange, mode: ChangeMode) -> CircuitDiff:
        """What a change would do, by all that is known of whose the circuits are. Nothing is sent."""
        await self.owners.before_planning(switch)
        driver = self._switches[switch]
        try:
            return await driver.plan(change, mode)
        except CircuitConflict:  # a device that was restarting may show only now what we made before
            seen = await driver.cross_connects()
            if (await self.owners.claim(switch, seen)).foreign == seen.foreign:
                raise
            return await driver.plan(change, mode)

    async def prepare(self, switch: str, change: CircuitChange, valid_s: float) -> CircuitOperation:
        """Plan and write down a change that is given to `commit`, or to `abandon`, within `valid_s`: what is left to do
        then is to send it. Nothing is evicted for it. Raises DriverError as `change` does."""
        async with self._turns[switch]:
            operation = await self._planned(switch, change, ChangeMode.SAFE, valid_s, None)
            if operation.diff.empty:
                return operation
            armed = await self._arm(operation)
            try:
                self._note(operation)
            except BaseException:
                if armed is not None:
                    armed.disarm()
                raise
            self._prepared[operation.id] = operation
            if armed is not None:
                self._armed[operation.id] = armed
            return operation

    async def commit(self, operation: CircuitOperation, begin_by_s: float = inf) -> CircuitOutcome:
        """Carry out what was prepared, once. Raises as `change` does; Conflict where the switch has changed since, or
        others kept it busy until after `begin_by_s`."""
        if operation.diff.empty:
            return CircuitOutcome("", operation.switch, True, "was so already", revision=operation.diff.revision)
        armed = self._armed.pop(operation.id, None)
        try:
            return await self._begin(operation, begin_by_s, armed)
        finally:
            if armed is not None:
                armed.disarm()

    async def _begin(self, operation: CircuitOperation, begin_by_s: float, armed: Armed | None) -> CircuitOutcome:
        async with self._turns[operation.switch]:
            if self._prepared.pop(operation.id, None) is None:
                raise CircuitConflict([f"{operation.id} was begun or abandoned before"], device=operation.switch)
            if self._clock.now_s() > operation.valid_until_s:
                self._close(_outcome(operation, False, "was not begun, and the order has expired"))
                raise CircuitConflict(["the order has expired: look and ask again"], device=operation.switch)
            if self._of(operation.switch):  # a change whose outcome is not known comes first
                try:
                    await self._settle(operation.switch)
                except DriverError as error:
                    self._close(_outcome(operation, False, f"was not begun, the change before it is open: {error}"))
                    raise
            if self._clock.now_s() > begin_by_s:
                self._close(_outcome(operation, False, "was not begun, others kept the switch busy for too long"))
                raise CircuitConflict(["others kept the switch busy for too long"], device=operation.switch)
            return await self._carry_out(operation, armed, is_timed=True)

    def abandon(self, operation: CircuitOperation, why: str) -> None:
        """What was prepared is not wanted any more; harmless where it was begun, or abandoned before."""
        if self._prepared.pop(operation.id, None) is None:
            return
        if armed := self._armed.pop(operation.id, None):
            armed.disarm()
        self._unwanted[operation.id] = _outcome(operation, False, f"was not begun: {why}")
        try:
            self._forget_unwanted()
        except OrchestrRLError as error:  # tried again; meanwhile it stands in the journal as what is about to be
            logger.error("%s cannot be written off: %s", operation.id, error)

    async def _planned(
        self,
        switch: str,
        change: CircuitChange,
        mode: ChangeMode,
        valid_s: float,
        expect_revision: int | None,
        revert_in_s: float | None = None,
    ) -> CircuitOperation:
        await self._settle(switch)
        if (trial := self._trials.get(switch)) is not None:
            raise CircuitConflict([f"{trial}: confirm it, or wait, before anything else is changed"], device=switch)
        diff = await self.plan(switch, change, mode)
        if expect_revision not in (None, diff.revision):
            raise CircuitConflict(
                [f"switch is at revision {diff.revision}, expected {expect_revision}: look and ask again"],
                device=switch,
            )
        return CircuitOperation(self._next_id(), switch, diff, self._clock.now_s() + valid_s, revert_in_s)

    def _note(self, operation: CircuitOperation) -> None:
        self._log.begin(operation.id, operation_to_json(operation))

    async def _arm(self, operation: CircuitOperation) -> Armed | None:
        """None: nothing is gained by it there."""
        driver = self._switches[operation.switch]
        if not isinstance(driver, Arming):
            return None
        try:
            return await driver.arm(operation.diff, operation.diff.revision)
        except DriverError as error:  # then it is made ready when it is committed
            logger.info("a commit on switch %s cannot be made ready: %s", operation.switch, error)
            return None

    async def _carry_out(
        self, operation: CircuitOperation, armed: Armed | None = None, is_timed: bool = False
    ) -> CircuitOutcome:
        """`is_timed`: it was to begin now or not at all."""
        self._open[operation.id] = operation
        self.owners.begun(operation.switch, operation.diff)
        began_s = self._clock.now_s()
        try:
            if armed is not None:
                result = await armed.begin()
            else:
                result = await self._commit(operation, operation.diff.revision)
        except DriverOutcomeUnknown:
            raise  # stays open
        except DriverError as error:  # nothing was sent
            self._close(_outcome(operation, False, str(error)), gone=operation.diff.add)
            raise
        if is_timed and not result.done and result.revision == operation.diff.revision:
            now = await self._read_after(operation, f"{_why(result)}; not read since")
            if not _is_begun(operation.diff, now.cross_connects):
                detail = f"{_why(result)}; nothing took, {compared_with_before(operation.diff, now)}"
                outcome = replace(_outcome(operation, False, detail, now.revision), items=result.items)
                return self._close(outcome, gone=operation.diff.add)
        return await self._finish(operation, result, began_s)

    def recover(self) -> int:
        """Take up the changes that the journal has no result of; their number. `settle` brings them to an end."""
        for left in self._log.left_open(lambda entry: operation_from_json(entry.subject, entry.body)):
            self._open[left.id] = left.intent
        self.owners.recover((operation.switch, operation.diff) for operation in self.open)
        return len(self._open)

    async def settle(self) -> None:
        """Bring every open change to an end whose switch can be read; the others stay open."""
        self._forget_unwanted()
        switches = {*(change.switch for change in self.open), *self._trials}
        await asyncio.gather(*(self._try_to_settle(switch) for switch in switches))

    async def run(self) -> None:
        """Settle what is open, again and again, until cancelled: a switch may be out of reach for a while."""
        while True:
            try:
                await self.settle()
            except OrchestrRLError as error:  # the journal's: without a record nothing is done
                logger.error("open changes cannot be settled: %s", error)
            except Exception:
                # A fault of ours, or of one driver's, is no reason to stop the daemon: what is open stays open.
                self.defects += 1
                logger.exception("open changes cannot be settled")
            await self._clock.sleep(RETRY_S)

    async def _try_to_settle(self, switch: str) -> None:
        if switch not in self._switches:
            for operation in self._of(switch):
                self._close(_outcome(operation, False, "the switch is no longer configured"))
            return
        async with self._turns[switch]:
            try:
                await self._settle(switch)
            except DriverError as error:
                logger.warning("a change on switch %s stays open: %s", switch, error)
            except OrchestrRLError:
                raise  # the journal's
            except Exception:  # those of other switches are not to wait for it
                self.defects += 1
                logger.exception("a change on switch %s stays open", switch)

    async def _settle(self, switch: str) -> None:
        await self._end_trial(switch)
        for operation in self._of(switch):
            await self._resume(operation)

    async def _resume(self, operation: CircuitOperation) -> CircuitOutcome:
        """End an open change by what its switch shows. Raises DriverError when the switch cannot be read."""
        driver, diff = self._switches[operation.switch], operation.diff
        facts = await driver.facts()
        reading = await self.owners.claim(operation.switch, await driver.cross_connects())
        if not _is_begun(diff, reading.cross_connects) and await self._has_waited(operation, facts):
            reading = await self.owners.claim(operation.switch, await driver.cross_connects())
        if not _is_begun(diff, reading.cross_connects):
            if (undone := self._undone.get(operation.id)) is not None:
                return self._close_undone(operation, undone, reading)
            outcome = _outcome(
                operation, False, f"was not begun; {compared_with_before(diff, reading)}", reading.revision
            )
            return self._close(outcome, gone=diff.add)
        self._undone.pop(operation.id, None)  # it is there again, or not all of it was undone
        if operation.revert_in_s is not None:
            return await self._undo(operation, "was on trial, and nobody confirmed it", ())
        try:
            steps = remaining(facts, diff, reading.cross_connects)
        except CircuitConflict as error:
            return self._close(_outcome(operation, False, f"was half done, then overtaken: {error}", reading.revision))
        if steps.empty and compare(diff, reading).ok:
            return self._close(_outcome(operation, True, "found carried out", reading.revision), gone=diff.remove)
        if self._clock.now_s() > operation.valid_until_s:
            return await self._undo(operation, "was half done, and the order has expired", ())
        began_s = self._clock.now_s()
        return await self._finish(operation, await self._commit(operation, reading.revision), began_s)

    async def _has_waited(self, operation: CircuitOperation, facts: SwitchFacts) -> bool:
        """A device that does not tell tuning from tuned may list only what is in place: what it was told last may come
        yet. Whether that was waited for; raises Retryable where it takes long."""
        if (await self._switches[operation.switch].capabilities()).tuned_state:
            return False
        seen_s = self._not_seen_since_s.setdefault(operation.id, self._clock.now_s())
        left_s = seen_s + LATE_TIMES * facts.reconfiguration_s - self._clock.now_s()
        if left_s > RETRY_S:
            message = f"nothing of {operation.id} is there, and for {left_s:.0f} s some of it may come yet"
            raise DriverRetryable(message, after_s=left_s, device=operation.switch)
        await self._clock.sleep(left_s)
        return left_s > 0

    async def _commit(self, operation: CircuitOperation, revision: int) -> CommitResult:
        driver = self._switches[operation.switch]
        if operation.revert_in_s is None:
            return await driver.commit(operation.diff, revision)
        return await driver.commit(operation.diff, revision, operation.revert_in_s)

    async def _finish(self, operation: CircuitOperation, result: CommitResult, began_s: float) -> CircuitOutcome:
        """Bring a change whose first commit, begun at `began_s`, is over to its end: repeat, verify or undo."""
        if not result.done:
            # Whatever keeps the second attempt from being made, the first has left something to undo.
            with suppress(DriverPermanent, DriverRetryable):
                result = await self._once_more(operation, result, began_s)
        if not result.done:
            return await self._undo(operation, _why(result), result.items)
        dark = await self._verified(operation)
        detail = f"in place, but no light arrives: {_listed(dark)}" if dark else ""
        outcome = _outcome(operation, True, detail, result.revision)
        outcome = replace(outcome, items=result.items, evicted=operation.diff.evicted)
        if result.revert_at_s is not None:
            return self._begin_trial(operation, outcome, result.revert_at_s)
        return self._close(outcome, gone=operation.diff.remove)

    def _begin_trial(self, operation: CircuitOperation, outcome: CircuitOutcome, until_s: float) -> CircuitOutcome:
        """It stays open in the journal: what nobody has confirmed when the daemon restarts is undone."""
        words = f"on trial: reverts at {utc(until_s)} unless confirmed"
        detail = "; ".join(filter(None, (outcome.detail, words)))
        assert operation.revert_in_s is not None
        revert_at_s = self._clock.now_s() + operation.revert_in_s  # by our clock: the driver's process may have another
        self._trials[operation.switch] = _Trial(operation, outcome, revert_at_s)
        self._open.pop(operation.id)
        return replace(outcome, detail=detail, revert_at_s=until_s)

    async def _end_trial(self, switch: str) -> None:
        """Where its time is over: its driver has reverted it, or is at it; one that lost it is told to."""
        trial = self._trials.get(switch)
        if trial is None or self._clock.now_s() < trial.revert_at_s:
            return
        reading = await self.owners.claim(switch, await self._switches[switch].cross_connects())
        if reading.unconfirmed is not None:
            if reading.unconfirmed.failure:
                logger.warning("switch %s: %s", switch, reading.unconfirmed)
            return
        operation = trial.operation
        outcome = await self._undo(operation, "nobody confirmed it in time", ())
        self._close_trial(switch, outcome, is_written=True)

    def _close_trial(self, switch: str, outcome: CircuitOutcome, is_written: bool = False) -> CircuitOutcome:
        trial = self._trials[switch]
        if not is_written:
            self._close(outcome, gone=trial.operation.diff.remove)
        del self._trials[switch]
        self._last_trial[switch] = outcome
        return outcome

    async def _once_more(self, operation: CircuitOperation, first: CommitResult, began_s: float) -> CommitResult:
        """Try what did not take a second time. All times count from the first attempt."""
        later_s = self._clock.now_s() - began_s
        second = await self._commit(operation, first.revision)
        items = tuple(
            before if before.done and after.done else _later(before, after, later_s)
            for before, after in zip(first.items, second.items, strict=True)
        )
        sent = first.commands_sent + second.commands_sent
        return CommitResult(items, second.revision, sent, second.revert_at_s or first.revert_at_s)

    async def _undo(
        self, operation: CircuitOperation, why: str, items: tuple[CrossConnectResult, ...]
    ) -> CircuitOutcome:
        """Bring the switch back to what it was, and say exactly what is where if that fails too."""
        switch = operation.switch
        undone = _Undone(why, items)
        try:
            back = await self._switches[switch].rollback(operation.diff)
        except DriverOutcomeUnknown:  # stays open
            self._undone[operation.id] = undone
            raise
        except DriverPermanent as error:
            outcome = _outcome(operation, False, f"{why}; not rolled back: {error}")
            return self._close(replace(outcome, items=items))
        except DriverRetryable as error:
            raise DriverOutcomeUnknown(f"{why}; not rolled back yet: {error}", device=switch) from error  # stays open
        if not back.done:
            outcome = _outcome(operation, False, f"{why}; not rolled back: {_why(back)}", back.revision)
            return self._close(replace(outcome, items=items))
        self._undone[operation.id] = undone
        now = await self._read_after(operation, f"{why}; rolled back by its driver's word, and not read since")
        return self._close_undone(operation, undone, now)

    def _close_undone(self, operation: CircuitOperation, undone: "_Undone", now: CrossConnectReading) -> CircuitOutcome:
        """End a change that was rolled back, by what its switch shows now."""
        why, items = undone.why, undone.items
        if amiss := _not_undone(operation.diff, now):
            outcome = _outcome(operation, False, f"{why}; rolled back, then shown otherwise: {amiss}", now.revision)
            return self._close(replace(outcome, items=items))
        outcome = _outcome(
            operation, False, f"{why}; rolled back, {compared_with_before(operation.diff, now)}", now.revision
        )
        items = tuple(replace(item, done=False, detail="rolled back" if item.done else item.detail) for item in items)
        return self._close(replace(outcome, items=items, rolled_back=True), gone=operation.diff.add)

    async def _read_after(self, operation: CircuitOperation, text: str) -> CrossConnectReading:
        """Read the switch after a change of it; raises OutcomeUnknown, with `text`, where it cannot be read."""
        try:
            return await self._switches[operation.switch].cross_connects()
        except DriverError as error:
            raise DriverOutcomeUnknown(f"{text}: {error}", device=operation.switch) from error

    async def _verified(self, operation: CircuitOperation) -> tuple[CrossConnect, ...]:
        """The circuits of the change that are in place and dark; raises OutcomeUnknown if the switch disagrees."""
        seen = await self._switches[operation.switch].verify(operation.diff)
        if not seen.ok:
            faulty = _listed((*seen.missing, *seen.lingering, *seen.untuned))
            raise DriverOutcomeUnknown(f"verified as done, then shown otherwise: {faulty}", device=operation.switch)
        return seen.dark

    def _forget_unwanted(self) -> None:
        for id, outcome in list(self._unwanted.items()):
            self._close(outcome)
            del self._unwanted[id]

    def _of(self, switch: str) -> tuple[CircuitOperation, ...]:
        return tuple(operation for operation in self.open if operation.switch == switch)

    def _close(self, outcome: CircuitOutcome, gone: Iterable[CrossConnect] = ()) -> CircuitOutcome:
        """`gone`: what of the change is certainly not up; the rest is ours if it is."""
        if outcome.switch in self._switches:
            self.owners.ended(outcome.switch, gone)
        self._log.end(outcome.operation, outcome_to_json(outcome))
        self._open.pop(outcome.operation, None)
        self._not_seen_since_s.pop(outcome.operation, None)
        self._undone.pop(outcome.operation, None)
        logger.info("circuits %s on %s: done=%s %s", outcome.operation, outcome.switch, outcome.done, outcome.detail)
        return outcome

    def _next_id(self) -> str:
        return f"circuits-{self._log.generation}-{next(self._count)}"


@dataclass(frozen=True, slots=True)
class _Undone:
    """Why a change was rolled back, and what had become of it port by port."""

    why: str
    items: tuple[CrossConnectResult, ...]


@dataclass(frozen=True, slots=True)
class _Trial:
    operation: CircuitOperation
    outcome: CircuitOutcome
    revert_at_s: float

    def __str__(self) -> str:
        return f"{self.operation.id} waits to be confirmed until {utc(self.revert_at_s)}"


def _is_begun(diff: CircuitDiff, present: frozenset[CrossConnect]) -> bool:
    return not present >= frozenset(diff.remove) or bool(present & frozenset(diff.add))


def _not_undone(diff: CircuitDiff, now: CrossConnectReading) -> str:
    """Return how the circuits of a change differ from what they were before it; "" where they do not."""
    state = {circuit.cross_connect: circuit.state for circuit in now.circuits}
    amiss = [f"{pair} is up" for pair in diff.add if pair in state]
    amiss += [f"{pair} is not up" for pair in diff.remove if pair not in state]
    amiss += [
        f"{pair} is {state[pair]}" for pair in diff.remove if state.get(pair, CircuitState.TUNED) != CircuitState.TUNED
    ]
    return few(amiss)


def compared_with_before(diff: CircuitDiff, now: CrossConnectReading) -> str:
    """Return how a switch on which nothing of a change is left compares with what it was before the change."""
    lost, new = sorted(diff.before - now.cross_connects), sorted(now.cross_connects - diff.before)
    if amiss := _not_undone(diff, now):
        return f"its circuits are listed as they were, and {amiss}"
    if not lost and not new:
        return "the switch is as it was"
    others = few([*(f"-{pair}" for pair in lost), *(f"+{pair}" for pair in new)], between=" ")
    return f"its circuits are as they were, and others have changed since: {others}"


def _outcome(operation: CircuitOperation, done: bool, detail: str, revision: int = 0) -> CircuitOutcome:
    return CircuitOutcome(operation.id, operation.switch, done, detail, revision=revision)


def _later(before: CrossConnectResult, after: CrossConnectResult, later_s: float) -> CrossConnectResult:
    """The second attempt's result with its times counted from the first, and the first's where it has none."""
    times = {
        name: getattr(before, name) if (at_s := getattr(after, name)) is None else at_s + later_s
        for name in ("commanded_s", "tuned_s", "link_up_s")
    }
    return replace(after, **times)


def _why(result: CommitResult) -> str:
    """What did not take, with the switch's own words."""
    return "; ".join(
        f"{item.action} {item.cross_connect}: {item.detail or 'did not take'}" for item in result.items if not item.done
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
        "before": [str(pair) for pair in sorted(diff.before)],
        "remove": [str(pair) for pair in diff.remove],
        "add": [str(pair) for pair in diff.add],
        "evicted": [str(pair) for pair in diff.evicted],
    }


def operation_from_json(id: str, body: Mapping[str, Any]) -> CircuitOperation:
    remove, add, evicted = (tuple(map(CrossConnect.parse, body[name])) for name in ("remove", "add", "evicted"))
    before = frozenset(map(CrossConnect.parse, body["before"]))
    diff = CircuitDiff(ChangeMode(body["mode"]), body["revision"], before, remove, add, evicted)
    return CircuitOperation(id, body["switch"], diff, body["valid_until_s"], body.get("revert_in_s"))


def outcome_to_json(outcome: CircuitOutcome) -> dict[str, Any]:
    return {
        "switch": outcome.switch,
        "done": outcome.done,
        "detail": outcome.detail,
        "rolled_back": outcome.rolled_back,
        "revision": outcome.revision,
        "evicted": [str(pair) for pair in outcome.evicted],
        "items": [{**asdict(item), "cross_connect": str(item.cross_connect)} for item in outcome.items],
    }
