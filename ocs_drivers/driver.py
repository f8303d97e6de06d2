"""The contract of `base.OcsDriver` made of a family's `base.Wire`: one writer, time limits, reading back.

Every commit begins by reading the device and ends by reading it. So an outcome that was unknown, a setter that answers
nothing and a bulk command that took in part are one case: what counts is what the device shows.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from ocs_drivers import diff as diffs
from ocs_drivers.base import Clock, SystemClock, Wire
from ocs_drivers.errors import Conflict, DriverError, Faults, OutcomeUnknown, Permanent, Retryable
from ocs_drivers.model import (
    Action,
    Capabilities,
    Change,
    ChangeMode,
    CommitResult,
    CrossConnect,
    Diff,
    Event,
    Facts,
    PortState,
    Reading,
    Verification,
    fingerprint,
)
from ocs_drivers.progress import Progress

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """How long to wait. `tune_s` None: ten times what the device states for one circuit, at least a second."""

    command_s: float = 5.0
    lock_s: float = 10.0
    tune_s: float | None = None
    link_s: float = 2.0

    def __post_init__(self) -> None:
        for name in ("command_s", "lock_s", "tune_s", "link_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be > 0, got {value}")


async def within(clock: Clock, limit_s: float, work: Awaitable[T]) -> T:
    """The result of `work`, or TimeoutError after `limit_s` by the clock; `work` is then cancelled."""
    task = asyncio.ensure_future(work)
    alarm = asyncio.ensure_future(clock.sleep(limit_s))
    try:
        await asyncio.wait({task, alarm}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise TimeoutError(f"no answer within {limit_s:g} s")
    finally:
        for pending in (task, alarm):
            pending.cancel()
        await asyncio.gather(task, alarm, return_exceptions=True)


class SwitchDriver:
    """An OcsDriver over one wire. See `base.OcsDriver` for what each call promises."""

    def __init__(self, device: str, wire: Wire, *, clock: Clock | None = None, limits: Limits | None = None) -> None:
        self.device = device
        self._wire = wire
        self._clock = clock or SystemClock()
        self._limits = limits or Limits()
        self._writer = asyncio.Lock()  # held through a whole commit
        self._session = asyncio.Lock()  # held through one command: sessions are not shared
        self._is_open = False
        self._facts: Facts | None = None

    async def facts(self) -> Facts:
        if self._facts is None:
            self._facts = await self._read("read facts", self._wire.read_facts)
        return self._facts

    async def capabilities(self) -> Capabilities:
        return self._wire.capabilities

    async def ports(self) -> tuple[PortState, ...]:
        states = await self._read("read ports", self._wire.read_ports)
        return tuple(sorted(states, key=lambda state: state.port))

    async def cross_connects(self) -> Reading:
        facts = await self.facts()
        circuits = await self._read("read cross-connects", self._wire.read_circuits)
        normal = (replace(circuit, cross_connect=facts.normal(circuit.cross_connect)) for circuit in circuits)
        in_order = tuple(sorted(normal, key=lambda circuit: circuit.cross_connect))
        return Reading(in_order, fingerprint(circuit.cross_connect for circuit in in_order))

    async def plan(self, change: Change, mode: ChangeMode = ChangeMode.SAFE) -> Diff:
        facts = await self.facts()
        ports = await self.ports()
        reading = await self.cross_connects()
        try:
            return diffs.plan(facts, ports, reading, change, mode)
        except Faults as error:
            error.device = self.device
            raise

    async def commit(self, diff: Diff, expect_revision: int) -> CommitResult:
        async with self._writing():
            now = await self.cross_connects()
            if now.revision != expect_revision:
                raise Conflict(
                    [f"device is at revision {now.revision}, expected {expect_revision}: look at it and plan again"],
                    device=self.device,
                )
            steps = await self._steps(diffs.remaining, diff, now)
            return await self._carry_out(diffs.Steps(diff.remove, diff.add), steps)

    async def rollback(self, diff: Diff) -> CommitResult:
        async with self._writing():
            steps = await self._steps(diffs.way_back, diff, await self.cross_connects())
            return await self._carry_out(diffs.Steps(diff.add, diff.remove), steps)

    async def verify(self, diff: Diff) -> Verification:
        return diffs.compare(diff, await self.cross_connects())

    async def watch(self) -> AsyncGenerator[Event, None]:
        if not self._wire.capabilities.events:
            raise Permanent("this device reports no events", device=self.device, command="watch")
        await self.facts()  # connects
        async with aclosing(self._wire.events()) as events:
            async for event in events:
                yield event

    async def close(self) -> None:
        async with self._session:
            await self._drop_session()

    async def _steps(
        self, choose: Callable[[Facts, Diff, frozenset[CrossConnect]], diffs.Steps], diff: Diff, now: Reading
    ) -> diffs.Steps:
        try:
            return choose(await self.facts(), diff, now.cross_connects)
        except Conflict as error:
            error.device = self.device
            raise

    async def _carry_out(self, wanted: diffs.Steps, steps: diffs.Steps) -> CommitResult:
        """Send the steps, those of what is wanted that are not yet so; wait for the mirrors and, where the device can
        tell, for the light; report what the device shows of everything wanted."""
        progress = Progress(steps, self._clock.now_s())
        progress.watched.extend(pair for pair in wanted.add if pair not in steps.add)
        is_clear = True
        if steps.remove:
            await self._send(Action.REMOVE, steps.remove, progress)
            # Seen to be gone, not assumed: a port that is still held would be taken from its circuit without a word.
            is_clear = (await self._settle(progress)).cross_connects.isdisjoint(steps.remove)
        if is_clear:
            await self._send(Action.ADD, steps.add, progress)
        reading = await self._settle(progress)
        seen = {circuit.cross_connect: circuit for circuit in reading.circuits}
        results = tuple(
            progress.result(action, pair, seen.get(pair))
            for action, pairs in ((Action.REMOVE, wanted.remove), (Action.ADD, wanted.add))
            for pair in pairs
        )
        return CommitResult(results, reading.revision, progress.commands_sent)

    async def _send(self, action: Action, pairs: Sequence[CrossConnect], progress: Progress) -> None:
        """Command these, in bulk where the device can, up to the first command that goes wrong."""
        setter = self._wire.add if action is Action.ADD else self._wire.remove
        batches = [tuple(pairs)] if self._wire.capabilities.bulk else [(pair,) for pair in pairs]
        for batch in filter(None, batches):
            command = f"{action} {' '.join(str(pair) for pair in batch)}"
            try:
                progress.sent(batch)
                await self._command(command, partial(setter, batch), is_setter=True)
            except DriverError as error:
                progress.went_wrong(batch, str(error))
                if not isinstance(error, OutcomeUnknown) or not await self._took(action, batch):
                    return
            progress.commanded(batch, self._clock.now_s())

    async def _took(self, action: Action, pairs: Sequence[CrossConnect]) -> bool:
        """After an unknown outcome: read the device, over a new session, before anything else is sent."""
        present = (await self._read_after_setting()).cross_connects
        return all((pair in present) is (action is Action.ADD) for pair in pairs)

    async def _settle(self, progress: Progress) -> Reading:
        """Read until every commanded circuit is in place, or its time is up."""
        facts = await self.facts()
        tune_s = self._limits.tune_s or max(1.0, 10 * facts.reconfiguration_s)
        pause_s = min(1.0, max(0.001, facts.reconfiguration_s / 4))
        tuned_by_s = self._clock.now_s() + tune_s
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
            await self._clock.sleep(min(pause_s, deadline_s - now_s))

    async def _read_after_setting(self) -> Reading:
        try:
            return await self.cross_connects()
        except Retryable as error:
            raise OutcomeUnknown(
                "the device could not be read after a command was sent to it",
                device=self.device,
                command=error.command,
                answer=error.answer or error.message,
            ) from error

    @asynccontextmanager
    async def _writing(self) -> AsyncIterator[None]:
        turn = asyncio.ensure_future(self._writer.acquire())
        try:
            await within(self._clock, self._limits.lock_s, turn)
        except TimeoutError:
            raise Retryable(
                f"another change is under way, waited {self._limits.lock_s:g} s", device=self.device
            ) from None
        except asyncio.CancelledError:
            if not turn.cancelled():  # our turn came at the very moment
                self._writer.release()
            raise
        try:
            yield
        finally:
            self._writer.release()

    async def _read(self, command: str, verb: Callable[[], Awaitable[T]]) -> T:
        try:
            return await self._command(command, verb)
        except Retryable:
            # The session may have died since its last use: once more over a new one.
            return await self._command(command, verb)

    async def _command(self, command: str, verb: Callable[[], Awaitable[T]], is_setter: bool = False) -> T:
        is_sent = False
        async with self._session:
            is_sound = False  # whatever else ends a command leaves the session in the middle of something
            try:
                if not self._is_open:
                    await within(self._clock, self._limits.command_s, self._wire.open())
                    self._is_open = True
                is_sent = True
                answer = await within(self._clock, self._limits.command_s, verb())
                is_sound = True
                return answer
            except TimeoutError as error:
                kind = OutcomeUnknown if is_setter and is_sent else Retryable
                raise kind(str(error), device=self.device, command=command) from None
            except DriverError as error:
                is_sound = isinstance(error, Permanent)
                error.device, error.command = error.device or self.device, error.command or command
                raise
            finally:
                if not is_sound:
                    await self._drop_session()

    async def _drop_session(self) -> None:
        self._is_open = False
        await self._wire.close()
