"""Implement `base.OcsDriver` on top of a `base.SwitchWire`. The implementation serialises writers, limits the duration
of calls, and verifies changes by reading the device.

Every commit begins and ends by reading the device. Its outcome is always the state that the device reports. Unknown
outcomes, setters without an answer and bulk commands that took effect in part are therefore handled alike.

The driver reads circuits that it does not own, but sends no command for them; see ownership.py. A background task of
the driver reverts a trial change that is not confirmed within its time limit.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import TypeVar

from ocs_drivers import diff as diffs
from ocs_drivers.base import DeviceClock, SwitchWire, SystemClock
from ocs_drivers.errors import (
    CircuitConflict,
    DriverError,
    DriverOutcomeUnknown,
    DriverPermanent,
    DriverRetryable,
    InvalidChange,
    naming,
)
from ocs_drivers.model import (
    Action,
    ChangeMode,
    CircuitChange,
    CircuitDiff,
    CommitResult,
    CrossConnect,
    CrossConnectReading,
    EventKind,
    PortState,
    SwitchCapabilities,
    SwitchEvent,
    SwitchFacts,
    Unconfirmed,
    Verification,
    fingerprint,
    utc,
)
from ocs_drivers.ownership import Ownership
from ocs_drivers.progress import CommitProgress

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Pauses between attempts to revert a trial change, doubled after each attempt.
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True, slots=True)
class DriverTimeouts:
    """The time limits, in seconds, of one command (`command_s`) and of the waits for another writer (`lock_s`), for the
    mirrors (`tune_s`) and for light (`link_s`). If `tune_s` is None, the limit is ten times the device's stated time
    for one circuit, but at least 1 s."""

    command_s: float = 5.0
    lock_s: float = 10.0
    tune_s: float | None = None
    link_s: float = 2.0

    def __post_init__(self) -> None:
        for name in ("command_s", "lock_s", "tune_s", "link_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be > 0, got {value}")


async def within(clock: DeviceClock, limit_s: float, work: Awaitable[T]) -> T:
    """Return the result of `work`. If it takes longer than `limit_s` seconds of the clock, cancel it and raise
    TimeoutError."""
    task = asyncio.ensure_future(work)
    alarm = asyncio.ensure_future(clock.sleep(limit_s))
    try:
        await asyncio.wait({task, alarm}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise TimeoutError(f"the device did not respond within {limit_s:g} s")
    finally:
        for pending in (task, alarm):
            pending.cancel()
        await asyncio.gather(task, alarm, return_exceptions=True)


async def take_turn(clock: DeviceClock, lock: asyncio.Lock, limit_s: float) -> None:
    """Acquire the lock. Raises TimeoutError if that takes longer than `limit_s` seconds of the clock."""
    turn = asyncio.ensure_future(lock.acquire())
    try:
        await within(clock, limit_s, turn)
    except asyncio.CancelledError:
        if not turn.cancelled():  # the lock was acquired at this very moment
            lock.release()
        raise


def poll_pause_s(reconfiguration_s: float, waited_s: float) -> float:
    """Return the pause in seconds until the next reading. It is at least a sixteenth of the wait so far, so that a
    circuit that does not come up is not polled hundreds of times."""
    return max(min(1.0, max(0.001, reconfiguration_s / 4)), waited_s / 16)


class SwitchDriver:
    """Implements `base.OcsDriver` on top of one wire. `OcsDriver` documents the methods."""

    def __init__(
        self, device: str, wire: SwitchWire, *, clock: DeviceClock | None = None, limits: DriverTimeouts | None = None
    ) -> None:
        self.device = device
        self._wire = wire
        self._clock = clock or SystemClock()
        self._limits = limits or DriverTimeouts()
        self._writer = asyncio.Lock()  # held through a whole commit
        self._session = asyncio.Lock()  # held through one command: sessions are not shared
        self._is_open = False
        self._facts: SwitchFacts | None = None
        self._ownership = Ownership()
        self._trial: Unconfirmed | None = None  # the pairs that its commits changed; only these are reverted
        self._trial_diff: CircuitDiff | None = None
        self._timer: asyncio.Task[None] | None = None  # reverts the trial change
        self._last_trial = ""  # the last trial's outcome, for a late confirmation
        self._confirmed: int | None = None  # the revision of the last trial, if it was confirmed
        self._listeners: list[asyncio.Queue[SwitchEvent | None]] = []

    async def facts(self) -> SwitchFacts:
        if self._facts is None:
            self._facts = await self._read("read facts", self._wire.read_facts)
        return self._facts

    async def capabilities(self) -> SwitchCapabilities:
        return self._wire.capabilities

    async def ports(self) -> tuple[PortState, ...]:
        states = await self._read("read ports", self._wire.read_ports)
        return tuple(sorted(states, key=lambda state: state.port))

    async def cross_connects(self) -> CrossConnectReading:
        facts = await self.facts()
        circuits = await self._read("read cross-connects", self._wire.read_circuits)
        normal = (replace(circuit, cross_connect=facts.normal(circuit.cross_connect)) for circuit in circuits)
        marked = self._ownership.marked(facts, normal)
        return CrossConnectReading(marked, fingerprint(circuit.cross_connect for circuit in marked), self._trial)

    async def plan(self, change: CircuitChange, mode: ChangeMode = ChangeMode.SAFE) -> CircuitDiff:
        facts = await self.facts()
        ports = await self.ports()
        reading = await self.cross_connects()
        with naming(self.device):
            return diffs.plan(facts, ports, reading, change, mode, self.device)

    async def commit(self, diff: CircuitDiff, expect_revision: int, revert_in_s: float | None = None) -> CommitResult:
        if revert_in_s is not None and not 0 < revert_in_s < inf:
            raise InvalidChange([f"revert_in_s: must be > 0, got {revert_in_s}"], device=self.device)
        async with self._writing():
            if revert_in_s is None or (self._trial and self._trial_diff != diff):
                self._refuse_on_trial()
            now = await self.cross_connects()
            if now.revision != expect_revision:
                raise CircuitConflict(
                    [
                        f"the device is at revision {now.revision}, "
                        f"but the change was planned for revision {expect_revision}: "
                        "read the device and plan the change again"
                    ],
                    device=self.device,
                )
            steps = await self._steps(diff, diff, now)
            if revert_in_s is None or (steps.empty and self._trial is None):
                return await self._carry_out(diff, steps)
            return await self._carry_out_on_trial(diff, steps, revert_in_s)

    async def confirm(self, revision: int) -> None:
        async with self._writing():
            trial = self._trial
            if trial is None:
                if revision == self._confirmed:
                    return
                raise CircuitConflict([self._last_trial or "no change is on trial"], device=self.device)
            if not trial.failure and trial.until_s is not None and self._clock.now_s() >= trial.until_s:
                raise CircuitConflict(
                    [f"the trial time has passed, and the change is being reverted: {trial}"],
                    device=self.device,
                )
            if trial.failure or revision != trial.revision:
                now = await self.cross_connects()
                if revision != now.revision:
                    raise CircuitConflict(
                        [
                            f"the device is at revision {now.revision}, "
                            f"but the confirmation names revision {revision}: read the device and confirm its revision"
                        ],
                        device=self.device,
                    )
            self._end_trial("confirmed")
            self._confirmed = revision

    async def take_over(self, pairs: Sequence[CrossConnect]) -> CrossConnectReading:
        async with self._writing():
            facts, now = await self.facts(), await self.cross_connects()
            wanted = [facts.normal(pair) for pair in pairs]
            if absent := [pair for pair in wanted if pair not in now.cross_connects]:
                faults = [f"{pair}: is not on the device, cannot take it over" for pair in absent]
                raise CircuitConflict(faults, device=self.device)
            self._ownership.take(wanted)
            return replace(now, circuits=self._ownership.marked(facts, now.circuits))

    async def rollback(self, diff: CircuitDiff) -> CommitResult:
        async with self._writing():
            if self._trial and self._trial_diff != diff:
                self._refuse_on_trial()
            steps = await self._steps(diff, diff.way_back, await self.cross_connects())
            result = await self._carry_out(diff.way_back, steps)
            if self._trial and result.done:
                self._end_trial("rolled back")
            return result

    async def verify(self, diff: CircuitDiff) -> Verification:
        return diffs.compare(diff, await self.cross_connects())

    async def watch(self) -> AsyncGenerator[SwitchEvent, None]:
        if not self._wire.capabilities.events:
            raise DriverPermanent("this device does not support events", device=self.device, command="watch")
        await self.facts()  # connects
        queue: asyncio.Queue[SwitchEvent | None] = asyncio.Queue()

        async def forward() -> None:
            try:
                async with aclosing(self._wire.events()) as events:
                    async for event in events:
                        queue.put_nowait(event)
            finally:
                queue.put_nowait(None)

        self._listeners.append(queue)  # alarms of this driver are inserted into the stream
        forwarding = asyncio.create_task(forward())
        try:
            while (event := await queue.get()) is not None:
                yield event
            with naming(self.device):
                await forwarding
        except DriverError as error:
            error.command = error.command or "watch"
            raise
        finally:
            self._listeners.remove(queue)
            forwarding.cancel()
            await asyncio.gather(forwarding, return_exceptions=True)

    async def close(self) -> None:
        try:
            if self._trial is not None:
                await self._revert_now()
        finally:
            async with self._session:
                await self._drop_session()

    async def _steps(self, diff: CircuitDiff, wanted: CircuitDiff, now: CrossConnectReading) -> diffs.CommandSteps:
        """Return the steps of `wanted` that are not yet in effect. `wanted` is the diff or its reverse. Raises
        InvalidChange if the device does not have a port of the diff. Raises CircuitConflict if a step needs an occupied
        port or removes a circuit of another owner."""
        facts = await self.facts()
        if faults := diffs.absent_ports(facts, diff):
            raise InvalidChange(faults, device=self.device)
        with naming(self.device):
            steps = diffs.remaining(facts, wanted, now.cross_connects)
        if faults := diffs.not_ours(now.foreign.intersection(steps.remove), self.device):
            raise CircuitConflict(faults, device=self.device)
        return steps

    async def _carry_out(self, wanted: CircuitDiff | diffs.CommandSteps, steps: diffs.CommandSteps) -> CommitResult:
        """Send the steps. Wait until the mirrors are in place and, if the device detects light, until light arrives.
        Return, for every wanted item, the state that the device then shows, including items that were already in
        effect."""
        progress = CommitProgress(steps, self._clock.now_s())
        progress.also_watch(wanted.add)
        is_clear = True
        if steps.remove:
            await self._send(Action.REMOVE, steps.remove, progress)
            # Read back, not assumed: connecting a port that is still in use would silently break its circuit.
            is_clear = (await self._settle(progress)).cross_connects.isdisjoint(steps.remove)
        if is_clear:
            await self._send(Action.ADD, steps.add, progress)
        reading = await self._settle(progress)
        seen = {circuit.cross_connect: circuit for circuit in reading.circuits}
        self._ownership.release(progress.gone(seen))
        results = tuple(
            progress.result(action, pair, seen.get(pair))
            for action, pairs in ((Action.REMOVE, wanted.remove), (Action.ADD, wanted.add))
            for pair in pairs
        )
        return CommitResult(results, reading.revision, progress.commands_sent)

    async def _send(self, action: Action, pairs: Sequence[CrossConnect], progress: CommitProgress) -> None:
        """Send commands for these pairs, in bulk if the device supports bulk commands. Stop after the first command
        that fails."""
        can = self._wire.capabilities
        is_bulk = can.bulk and not (action is Action.REMOVE and can.removes_one_by_one)
        batches = [tuple(pairs)] if is_bulk else [(pair,) for pair in pairs]
        for batch in filter(None, batches):
            command = f"{action} {' '.join(str(pair) for pair in batch)}"
            try:
                progress.sent(batch)
                if action is Action.ADD:
                    self._ownership.take(batch)
                await self._command(command, partial(self._wire.set, action, batch), is_setter=True)
            except DriverError as error:
                progress.went_wrong(batch, str(error))
                if isinstance(error, DriverRetryable):  # nothing took effect
                    return
                if not await self._took_effect(action, batch) or not isinstance(error, DriverOutcomeUnknown):
                    return
            progress.commanded(batch, self._clock.now_s())

    async def _carry_out_on_trial(
        self, diff: CircuitDiff, steps: diffs.CommandSteps, revert_in_s: float
    ) -> CommitResult:
        """Carry out a trial commit. The trial is recorded before the first command is sent. Its time starts when the
        commit has ended, whether or not the commit succeeded."""
        self._stop_timer()
        before = self._trial or Unconfirmed(None, None)  # the same diff is committed again, to complete it
        removed, added = {*before.removed, *steps.remove}, {*before.added, *steps.add}
        trial = Unconfirmed(None, None, tuple(sorted(removed)), tuple(sorted(added)))
        self._trial, self._trial_diff, self._confirmed = trial, diff, None
        until_s = inf
        try:
            result = await self._carry_out(diff, steps)
            trial = replace(trial, revision=result.revision)
        finally:
            until_s = self._clock.now_s() + revert_in_s
            self._trial = replace(trial, until_s=until_s)
            self._timer = asyncio.create_task(self._revert_when_due(until_s))
        return replace(result, revert_at_s=until_s)

    async def _revert_when_due(self, until_s: float) -> None:
        while (left_s := until_s - self._clock.now_s()) > 0:
            await self._clock.sleep(left_s)
        pause_s = FIRST_PAUSE_S
        while True:
            async with self._writer:
                if self._trial is None or await self._revert(self._trial):
                    return
            await self._clock.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _revert_now(self) -> None:
        """Revert the trial change. Raises DriverRetryable if the revert fails; the change then stays on the device."""
        self._stop_timer()
        async with self._writing():
            if self._trial is not None and not await self._revert(self._trial):
                raise DriverRetryable(str(self._trial), device=self.device, command="revert")

    async def _revert(self, trial: Unconfirmed) -> bool:
        """Revert the trial change and return whether the trial has ended. If the revert fails, return False, and report
        an alarm unless the previous attempt failed for the same reason."""
        try:
            steps, lost = diffs.revert_steps(await self.facts(), trial, await self.cross_connects())
            result = await self._carry_out(steps, steps)
            failure = "; ".join(f"{i.action} {i.cross_connect}: {i.detail}" for i in result.items if not i.done)
        except DriverError as error:
            failure = str(error)
        except Exception as error:  # from the wire: the trial must not be lost with this task
            logger.exception("%s: a change on trial cannot be reverted", self.device)
            failure = f"{type(error).__name__}: {error}"
        if not failure:
            self._end_trial("reverted, it was not confirmed in time")
            self._alarm("; ".join((self._last_trial, *lost)))
            return True
        if failure != trial.failure:
            self._trial = replace(trial, failure=failure)
            self._alarm(str(self._trial))
        return False

    def _refuse_on_trial(self) -> None:
        if self._trial is not None:
            raise CircuitConflict(
                [f"{self._trial}; confirm it or roll it back before any other change"],
                device=self.device,
            )

    def _end_trial(self, how: str) -> None:
        assert self._trial is not None
        self._last_trial = f"the change was {how} at {utc(self._clock.now_s())} ({self._trial.change})"
        self._trial = None
        self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None and self._timer is not asyncio.current_task():
            self._timer.cancel()
        self._timer = None

    def _alarm(self, text: str) -> None:
        logger.warning("%s: %s", self.device, text)
        for queue in self._listeners:
            queue.put_nowait(SwitchEvent(self._clock.now_s(), EventKind.ALARM, text))

    async def _took_effect(self, action: Action, pairs: Sequence[CrossConnect]) -> bool:
        """Read the device, after an unknown outcome or after the device refused a command that it may have applied in
        part. Return whether the whole command took effect. A device that does not distinguish tuning from tuned may
        list an added circuit only when it is in place. On such a device, the circuit is considered absent only if it
        does not appear within ten times the device's stated time, or within `tune_s` if that is shorter."""
        is_late = action is Action.ADD and not self._wire.capabilities.tuned_state
        rest_s = min(self._limits.tune_s or inf, 10 * (await self.facts()).reconfiguration_s)
        began_s = self._clock.now_s()
        until_s = began_s + (rest_s if is_late else 0.0)
        while True:
            present = (await self._read_after_setting()).cross_connects
            took = all((pair in present) is (action is Action.ADD) for pair in pairs)
            now_s = self._clock.now_s()
            if took or now_s >= until_s:
                return took
            pause_s = poll_pause_s((await self.facts()).reconfiguration_s, now_s - began_s)
            await self._clock.sleep(min(pause_s, until_s - now_s))

    async def _settle(self, progress: CommitProgress) -> CrossConnectReading:
        """Read the device until every commanded circuit is in place or the time limit is reached. Return the last
        reading."""
        facts = await self.facts()
        tune_s = self._limits.tune_s or max(1.0, 10 * facts.reconfiguration_s)
        began_s = self._clock.now_s()
        tuned_by_s = began_s + tune_s
        link_by_s = None
        while True:
            reading = await self._read_after_setting()
            now_s = self._clock.now_s()
            waiting, dark = progress.note(reading, now_s)
            if not waiting and link_by_s is None:
                link_by_s = now_s + self._limits.link_s
            deadline_s = tuned_by_s if link_by_s is None else link_by_s
            if (not waiting and not dark) or now_s >= deadline_s:
                return reading
            pause_s = poll_pause_s(facts.reconfiguration_s, now_s - began_s)
            await self._clock.sleep(min(pause_s, deadline_s - now_s))

    async def _read_after_setting(self) -> CrossConnectReading:
        try:
            return await self.cross_connects()
        except (DriverPermanent, DriverRetryable) as error:
            raise DriverOutcomeUnknown(
                "the device could not be read after a command, which may or may not have taken effect",
                device=self.device,
                command=error.command,
                answer=error.answer or error.message,
            ) from error

    @asynccontextmanager
    async def _writing(self) -> AsyncIterator[None]:
        try:
            await take_turn(self._clock, self._writer, self._limits.lock_s)
        except TimeoutError:
            wrong = f"another change is under way, waited {self._limits.lock_s:g} s"
            raise DriverRetryable(wrong, device=self.device) from None
        try:
            yield
        finally:
            self._writer.release()

    async def _read(self, command: str, verb: Callable[[], Awaitable[T]]) -> T:
        try:
            return await self._command(command, verb)
        except DriverRetryable:
            # The session may have died since its last use: retry once over a new one.
            return await self._command(command, verb)

    async def _command(self, command: str, verb: Callable[[], Awaitable[T]], is_setter: bool = False) -> T:
        is_sent = False

        def unclear(otherwise: type[DriverError]) -> type[DriverError]:
            """Return DriverOutcomeUnknown if a setter was sent and may have taken effect, and `otherwise` if not."""
            return DriverOutcomeUnknown if is_setter and is_sent else otherwise

        async with self._session:
            is_sound = False  # on an error, the session may be in the middle of an exchange
            try:
                if not self._is_open:
                    await within(self._clock, self._limits.command_s, self._wire.open())
                    self._is_open = True
                is_sent = True
                answer = await within(self._clock, self._limits.command_s, verb())
                is_sound = True
                return answer
            except TimeoutError as error:
                raise unclear(DriverRetryable)(str(error), device=self.device, command=command) from None
            except DriverError as error:
                is_sound = self._is_open and isinstance(error, DriverPermanent)  # not a refused login
                error.device, error.command = error.device or self.device, error.command or command
                raise
            except AssertionError:
                raise  # raised by a test
            except ValueError as error:
                wrong = f"invalid response: {error}"
                raise unclear(DriverPermanent)(wrong, device=self.device, command=command) from None
            except Exception as error:  # a defect of the wire, mostly in parsing an unexpected answer
                logger.exception("%s: the driver failed at %s", self.device, command)
                wrong = f"the driver failed, possibly because of an invalid response: {type(error).__name__}: {error}"
                # The next answer may be valid.
                raise unclear(DriverRetryable)(wrong, device=self.device, command=command) from error
            finally:
                if not is_sound:
                    await self._drop_session()

    async def _drop_session(self) -> None:
        self._is_open = False
        await self._wire.close()
