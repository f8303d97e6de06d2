"""Run the conformance suite without pytest, on a lab switch and only on the given ports.

Every change is checked before it is sent, so that the run makes and removes only circuits between those ports. The
ports must be free at the start. They are freed after each test and at the end of the run, even after an error or a
cancellation. Circuits that cannot be removed are reported. The number of driver calls and the duration of each test are
limited. Steps that are impossible with a lab switch, such as breaking one of its mirrors, are skipped with the reason.
"""

import asyncio
import inspect
import time
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from unittest import SkipTest

from ocs_drivers import conformance
from ocs_drivers.base import OcsDriver
from ocs_drivers.conformance import DriverConformance
from ocs_drivers.errors import CircuitConflict, DriverPermanent, DriverRetryable, InvalidChange, InvalidOptions
from ocs_drivers.faults import DeviceFaultKind
from ocs_drivers.model import (
    MOST_PORTS,
    ChangeMode,
    CircuitChange,
    CircuitDiff,
    CommitResult,
    CrossConnect,
    CrossConnectReading,
    PortState,
    SwitchCapabilities,
    SwitchEvent,
    SwitchFacts,
    Verification,
)

# The suite uses four circuits that share no port.
FEWEST_PAIRS = 4
# The budget of one test: calls of its driver, and seconds. The longest test moves about thirty circuits one by one;
# robotic patch panels take minutes for each.
MOST_CALLS = 400
TEST_S = 120.0
TEST_CIRCUITS = 30
LONGEST_TEST_S = 1800.0
# Freeing the ports is retried for this long, with growing pauses, if the switch does not answer or does not obey.
RESTORE_S = 30.0
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 8.0
LATE_S = 0.2  # a command with an unknown outcome may take effect this much later, or twice the vendor's stated time


class LabTestState(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class LabTestOutcome:
    """The outcome of one test. `detail` describes the failure or the reason why the test was skipped. It is empty if
    the test passed."""

    name: str
    state: LabTestState
    detail: str
    elapsed_s: float


def parse_ports(text: str) -> tuple[CrossConnect, ...]:
    """Parse a text such as `1-3,7:17-19,23` into pairs of an ingress and an egress port, in the order in which they are
    written. Raises ValueError with the reason if the text is invalid."""
    sides = text.split(":")
    if len(sides) != 2:
        raise ValueError("must be INGRESS:EGRESS, each a list of ports such as 1,2,5-7")
    ingress, egress = (_numbers(side) for side in sides)
    if len(ingress) != len(egress):
        raise ValueError(f"must have the same number of ports on both sides, got {len(ingress)} and {len(egress)}")
    if len(ingress) < FEWEST_PAIRS:
        raise ValueError(f"must have at least {FEWEST_PAIRS} ports on each side, got {len(ingress)}")
    for side in (ingress, egress):
        if twice := sorted({port for port in side if side.count(port) > 1}):
            raise ValueError(f"must name each port once, got {', '.join(map(str, twice))} twice")
    return tuple(CrossConnect(one, other) for one, other in zip(ingress, egress, strict=True))


def _numbers(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError("must be INGRESS:EGRESS, each a list of ports such as 1,2,5-7")
        if len(first) > len(str(MOST_PORTS)) or len(last) > len(str(MOST_PORTS)):
            raise ValueError(f"must name ports <= {MOST_PORTS}")
        found += range(int(first), int(last or first) + 1)
    return found


@dataclass(frozen=True, slots=True)
class Leftover:
    """The differences between the device's state before the run and its present state. `up` lists circuits that still
    use the ports of the run. `gone` lists circuits that have been removed from the device since the start. `why` is the
    reason for the differences, if it is known. `is_read` is False if the switch could not be read."""

    up: tuple[CrossConnect, ...] = ()
    gone: tuple[CrossConnect, ...] = ()  # foreign circuits
    why: str = ""
    is_read: bool = True

    def __bool__(self) -> bool:
        return bool(self.up or self.gone or not self.is_read)

    def __str__(self) -> str:
        parts = []
        if not self.is_read and not self.up:
            parts.append(f"no circuit is known to be left; the switch could not be read: {self.why}")
        if self.up:
            pairs = _listed(self.up)
            parts.append(
                f"{'still up' if self.is_read else 'may still be up, the switch could not be read'}: {pairs}"
                f"{f' ({self.why})' if self.why else ''}; remove them at the switch, or through its "
                f"daemon: orchestrrl ocs take-over SWITCH {pairs}, then orchestrrl ocs disconnect SWITCH {pairs}"
            )
        if self.gone:
            pairs = _listed(self.gone)
            parts.append(
                f"removed since the start, though not by a command of this run: {pairs}; to restore them: "
                f"orchestrrl ocs connect SWITCH {pairs}"
            )
        return "; ".join(parts)


def _listed(pairs: Collection[CrossConnect]) -> str:
    return " ".join(str(pair) for pair in sorted(pairs))


class PortFence:
    """The ports that the run may use, with the circuits that the run may have left on them."""

    def __init__(self, facts: SwitchFacts, pairs: Sequence[CrossConnect]) -> None:
        self._facts = facts
        self._ends = {end for pair in pairs for end in facts.ends(pair)}
        self.calls = 0  # in the present test
        self.may_be_up = set[CrossConnect]()  # circuits that the run may have left
        self.outcome_is_open = False  # of the last command: it was cancelled, or its answer was lost

    def has(self, pair: CrossConnect) -> bool:
        return self._ends.issuperset(self._facts.ends(pair))

    def meets(self, pair: CrossConnect) -> bool:
        return not self._ends.isdisjoint(self._facts.ends(pair))

    def beyond(self, diff: CircuitDiff) -> list[CrossConnect]:
        return [pair for pair in (*diff.remove, *diff.add) if not self.has(pair)]

    def count_call(self) -> None:
        assert self.calls < MOST_CALLS, f"the test exceeded its budget of {MOST_CALLS} driver calls"
        self.calls += 1


class FencedDriver:
    """A driver that wraps another driver, and shows and changes only circuits between the ports of its `PortFence`."""

    def __init__(self, driver: OcsDriver, fence: PortFence) -> None:
        self.device = driver.device
        self._driver = driver
        self._fence = fence

    async def facts(self) -> SwitchFacts:
        return await self._driver.facts()

    async def capabilities(self) -> SwitchCapabilities:
        return await self._driver.capabilities()

    async def ports(self) -> tuple[PortState, ...]:
        self._fence.count_call()
        return await self._driver.ports()

    async def cross_connects(self) -> CrossConnectReading:
        self._fence.count_call()
        return self._within(await self._driver.cross_connects())

    async def plan(self, change: CircuitChange, mode: ChangeMode = ChangeMode.SAFE) -> CircuitDiff:
        self._fence.count_call()
        diff = await self._driver.plan(change, mode)
        if mode is ChangeMode.OVERWRITE and self._fence.beyond(diff):
            raise SkipTest("the driver owns other circuits on the device, which mode overwrite would remove")
        return replace(diff, before=frozenset(filter(self._fence.has, diff.before)))

    async def commit(self, diff: CircuitDiff, expect_revision: int, revert_in_s: float | None = None) -> CommitResult:
        self._check(diff)
        return await self._sending(self._driver.commit(diff, expect_revision, revert_in_s), diff)

    async def confirm(self, revision: int) -> None:
        self._fence.count_call()
        await self._driver.confirm(revision)

    async def take_over(self, pairs: Sequence[CrossConnect]) -> CrossConnectReading:
        assert all(map(self._fence.has, pairs)), (
            f"the suite must only take over circuits on the named ports, got {pairs}"
        )
        return self._within(await self._driver.take_over(pairs))

    async def verify(self, diff: CircuitDiff) -> Verification:
        self._fence.count_call()
        return await self._driver.verify(diff)

    async def rollback(self, diff: CircuitDiff) -> CommitResult:
        self._check(diff)
        return await self._sending(self._driver.rollback(diff), diff)

    async def watch(self) -> AsyncGenerator[SwitchEvent, None]:
        async for event in self._driver.watch():
            if event.cross_connect is None or self._fence.has(event.cross_connect):
                yield event

    async def close(self) -> None:
        await self._driver.close()

    async def _sending(self, work: Awaitable[CommitResult], diff: CircuitDiff) -> CommitResult:
        self._fence.may_be_up.update((*diff.add, *diff.remove))
        was_open, self._fence.outcome_is_open = self._fence.outcome_is_open, True
        try:
            result = await work
        except (DriverPermanent, DriverRetryable):  # nothing was sent
            self._fence.outcome_is_open = was_open
            raise
        self._fence.outcome_is_open = was_open
        return result

    def _within(self, reading: CrossConnectReading) -> CrossConnectReading:
        inside = tuple(each for each in reading.circuits if self._fence.has(each.cross_connect))
        return replace(reading, circuits=inside)

    def _check(self, diff: CircuitDiff) -> None:
        self._fence.count_call()
        beyond = self._fence.beyond(diff)
        assert not beyond, f"the suite must only change circuits on the named ports, got {beyond}; nothing was sent"


class LabConformance(DriverConformance):
    """The conformance suite on one existing device.

    `make` returns a new driver for the device on each call. `pairs` are the cross-connects that the suite may make.
    `cannot` contains further actions that are impossible on this device, in addition to those that are impossible on
    every lab switch, each with the reason.
    """

    def __init__(
        self, make: Callable[[], OcsDriver], pairs: Sequence[CrossConnect], cannot: dict[str, str] | None = None
    ) -> None:
        self._make = make
        self._pairs = tuple(pairs)
        self._fence: PortFence  # set by `prepare`
        self._before: frozenset[CrossConnect] = frozenset()  # of the whole device
        self.leftover = Leftover()  # the differences that the last `restore` could not undo
        self.test_s = LONGEST_TEST_S
        self.cannot = {
            **{kind.value: "faults cannot be injected into a lab switch" for kind in DeviceFaultKind},
            "setters": "a lab switch does not report the commands it received",
            "make_big": "the size of a lab switch is fixed",
            **(cannot or {}),
        }

    async def make_driver(self) -> OcsDriver:
        if self._fence.may_be_up:  # a test may request several devices, each with nothing connected
            left = await self._free()
            assert not left.up, f"the ports could not be freed: {left}"
        return FencedDriver(self._make(), self._fence)

    async def pairs(self, driver: OcsDriver, count: int) -> tuple[CrossConnect, ...]:
        normal = (await driver.facts()).normal
        return tuple(normal(pair) for pair in self._pairs[:count])

    async def make_foreign(self, driver: OcsDriver, pairs: Sequence[CrossConnect]) -> None:
        await driver.close()  # the device may allow only one session; the driver reconnects when needed
        other = FencedDriver(self._make(), self._fence)
        try:
            result = await conformance.carry_out(other, tuple(pairs))
            assert result.done, f"another driver of the same device could not connect: {conformance.undone(result)}"
        finally:
            await other.close()

    async def prepare(self) -> None:
        """Check the ports and record the device's present state. Raises InvalidOptions if a port does not exist on this
        device, and CircuitConflict if a port is in use or failed, or the device has a trial change."""
        driver = self._make()
        try:
            facts, reading = await driver.facts(), await driver.cross_connects()
            self._fence = fence = PortFence(facts, self._pairs)
            busy = [
                f"{each.cross_connect}: uses a named port; disconnect it first"
                for each in reading.circuits
                if fence.meets(each.cross_connect)
            ]
            try:
                await driver.plan(CircuitChange(self._pairs))
            except InvalidChange as error:
                faults = [fault.replace("connect", "ports", 1) for fault in error.faults]
                raise InvalidOptions(faults, device=driver.device) from None
            except CircuitConflict as error:
                busy = busy or error.faults
            if reading.unconfirmed is not None:
                busy.append(f"{reading.unconfirmed}: confirm it first")
            if busy:
                raise CircuitConflict(busy, device=driver.device)
            self._before = reading.cross_connects
            self.test_s = min(LONGEST_TEST_S, TEST_S + TEST_CIRCUITS * facts.reconfiguration_s)
        finally:
            await driver.close()

    def begin(self) -> None:
        """Reset the number of driver calls for the next test."""
        self._fence.calls = 0

    async def restore(self) -> Leftover:
        """Free the ports, and return the remaining differences from the state before the run. Attempts are repeated for
        up to `RESTORE_S` seconds. If the call is cancelled, `leftover` lists the circuits that may still be up."""
        until_s = time.monotonic() + RESTORE_S
        pause_s = FIRST_PAUSE_S
        cancelled = _cancelled()  # for a cancelled run, this is its clean-up
        while True:
            try:
                self.leftover = await asyncio.wait_for(self._free(), self.test_s)
            except asyncio.CancelledError as error:
                if _cancelled() > cancelled:
                    self.leftover = self._unread("cancelled")
                    raise
                self.leftover = self._unread(_failure_text(error))
            except Exception as error:  # noqa: BLE001  # a driver under test may raise any exception
                self.leftover = self._unread(_failure_text(error))
            is_free = self.leftover.is_read and not self.leftover.up
            if is_free or time.monotonic() + pause_s > until_s:
                return self.leftover
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _unread(self, why: str) -> Leftover:
        return Leftover(tuple(sorted(self._fence.may_be_up)), why=why, is_read=False)

    async def _free(self) -> Leftover:
        """Remove the circuits between the ports, and return the remaining differences from the state before the run."""
        driver = self._make()
        try:
            facts, reading = await driver.facts(), await driver.cross_connects()
            if reading.unconfirmed is not None:
                await driver.confirm(reading.revision)
            fence = self._fence
            up = tuple(filter(fence.has, reading.cross_connects))
            self._fence.may_be_up.update(up)
            why = ""
            if up:
                await driver.take_over(up)
                result = await conformance.carry_out(driver, disconnect=up)
                why = conformance.undone(result)
                reading = await driver.cross_connects()
            if self._fence.outcome_is_open:
                await asyncio.sleep(max(LATE_S, 2 * facts.reconfiguration_s))
                reading = await driver.cross_connects()
            left = tuple(sorted(filter(fence.meets, reading.cross_connects)))
            self._fence.may_be_up = set(left)
            self._fence.outcome_is_open &= bool(left)
            return Leftover(left, tuple(sorted(self._before - reading.cross_connects)), why)
        finally:
            await driver.close()


def tests_of(suite: type[DriverConformance]) -> list[str]:
    """Return the names of the suite's tests in the order of their definition."""
    found = {name: member for name, member in inspect.getmembers(suite) if name.startswith("test_")}
    return sorted(found, key=lambda name: inspect.unwrap(found[name]).__code__.co_firstlineno)


async def run_suite(suite: LabConformance, only: Collection[str] = ()) -> AsyncGenerator[LabTestOutcome]:
    """Run the tests, or only the tests named in `only`, and yield their outcomes one by one. If the ports cannot be
    freed after a test, that failure is the last outcome and the run ends early. The ports are freed even after an
    exception or a cancellation. `suite.leftover` contains the remaining differences from the state before the run."""
    if not __debug__:
        raise InvalidOptions(["the conformance suite needs assertions: start Python without -O"])
    cancelled = _cancelled()
    try:
        await suite.prepare()
    except asyncio.CancelledError as error:
        if _cancelled() > cancelled:
            raise
        raise DriverPermanent(_failure_text(error)) from error
    is_restored = True
    try:
        for name in tests_of(type(suite)):
            if only and name not in only:
                continue
            began_s = time.monotonic()
            is_restored = False
            yield LabTestOutcome(name, *await _tried(suite, name), time.monotonic() - began_s)
            left = await suite.restore()
            is_restored = True
            if left.up or not left.is_read:
                yield LabTestOutcome(
                    f"clean up after {name}", LabTestState.FAILED, str(left), time.monotonic() - began_s
                )
                return
    finally:
        if not is_restored:
            await suite.restore()


async def _tried(suite: LabConformance, name: str) -> tuple[LabTestState, str]:
    cancelled = _cancelled()
    try:
        suite.begin()
        async with asyncio.timeout(suite.test_s) as limit:
            await getattr(suite, name)()
    except SkipTest as skip:
        return LabTestState.SKIPPED, str(skip)
    except asyncio.CancelledError as error:
        if _cancelled() > cancelled:
            raise
        return LabTestState.FAILED, _failure_text(error)
    except Exception as error:  # noqa: BLE001  # a driver under test may raise any exception
        if limit.expired():
            return LabTestState.FAILED, f"exceeded its time budget of {suite.test_s:g} s"
        return LabTestState.FAILED, _failure_text(error)
    return LabTestState.PASSED, ""


def _cancelled() -> int:
    """Return the number of cancellation requests for the current task. A CancelledError that does not increase this
    number comes from the driver, for example from a future that the driver cancelled when its session was lost."""
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


def _failure_text(error: BaseException) -> str:
    """Return a text that describes the failure and, if known, quotes the line of the suite where it occurred."""
    frames = traceback.extract_tb(error.__traceback__)
    where = [each for each in frames if each.filename == conformance.__file__ and each.name not in vars(conformance)]
    match error:
        case AssertionError():
            what = str(error)
        case asyncio.CancelledError():
            what = ": ".join(filter(None, ("the driver raised CancelledError", str(error))))
        case _:
            what = f"{type(error).__name__}: {error}"
    line = f"line {where[-1].lineno} of conformance.py: {where[-1].line}" if where else ""
    return "; ".join(filter(None, (what, line)))
