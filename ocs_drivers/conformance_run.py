"""The conformance suite without pytest: against a switch in a lab, on ports that its owner names.

Only circuits between those ports are made and taken down: every change is looked at before it is sent. The ports must
be free to begin with, and are free again after each test. What nobody can do with a lab switch, such as breaking one of
its mirrors, is skipped with the reason.
"""

import asyncio
import inspect
import time
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from unittest import SkipTest

from ocs_drivers import conformance
from ocs_drivers.base import OcsDriver
from ocs_drivers.conformance import DriverConformance
from ocs_drivers.errors import Conflict, InvalidOptions
from ocs_drivers.faults import Fault, FaultKind
from ocs_drivers.model import (
    Capabilities,
    Change,
    ChangeMode,
    CommitResult,
    CrossConnect,
    Diff,
    Event,
    Facts,
    PortState,
    PortStatus,
    Reading,
    Verification,
)
from ocs_drivers.virtual import VirtualSwitch

# The suite takes four circuits that share no port.
FEWEST_PAIRS = 4
# A test that takes longer has hung. Robotic patch panels take minutes for a circuit.
TEST_LIMIT_S = 1800.0


class State(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one test. `detail`: what failed, or why it was skipped."""

    name: str
    state: State
    detail: str
    took_s: float


def parse_ports(text: str) -> tuple[CrossConnect, ...]:
    """`1-3,7:17-19,23` as pairs in order; ValueError with what is wrong."""
    sides = text.split(":")
    if len(sides) != 2:
        raise ValueError("must be INGRESS:EGRESS, each a list of ports such as 1,2,5-7")
    ingress, egress = (_numbers(side) for side in sides)
    if len(ingress) != len(egress):
        raise ValueError(f"must have as many ports on either side, not {len(ingress)} and {len(egress)}")
    if len(ingress) < FEWEST_PAIRS:
        raise ValueError(f"must have at least {FEWEST_PAIRS} ports on either side, not {len(ingress)}")
    for side in (ingress, egress):
        if twice := sorted({port for port in side if side.count(port) > 1}):
            raise ValueError(f"names {', '.join(map(str, twice))} twice")
    return tuple(CrossConnect(one, other) for one, other in zip(ingress, egress, strict=True))


def _numbers(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError("must be INGRESS:EGRESS, each a list of ports such as 1,2,5-7")
        found += range(int(first), int(last or first) + 1)
    return found


class Fence:
    """The ports that may be touched."""

    def __init__(self, facts: Facts, pairs: Sequence[CrossConnect]) -> None:
        self._facts = facts
        self._ends = {end for pair in pairs for end in facts.ends(pair)}

    def has(self, pair: CrossConnect) -> bool:
        return self._ends.issuperset(self._facts.ends(pair))

    def meets(self, pair: CrossConnect) -> bool:
        return not self._ends.isdisjoint(self._facts.ends(pair))

    def beyond(self, diff: Diff) -> list[CrossConnect]:
        return [pair for pair in (*diff.remove, *diff.add) if not self.has(pair)]


class FencedDriver:
    """An OcsDriver that sees and changes nothing but circuits between the ports of its fence."""

    def __init__(self, driver: OcsDriver, pairs: Sequence[CrossConnect]) -> None:
        self.device = driver.device
        self._driver = driver
        self._pairs = pairs
        self._fence: Fence | None = None

    async def facts(self) -> Facts:
        return await self._driver.facts()

    async def capabilities(self) -> Capabilities:
        return await self._driver.capabilities()

    async def ports(self) -> tuple[PortState, ...]:
        return await self._driver.ports()

    async def cross_connects(self) -> Reading:
        return await self._within(await self._driver.cross_connects())

    async def plan(self, change: Change, mode: ChangeMode = ChangeMode.SAFE) -> Diff:
        diff = await self._driver.plan(change, mode)
        fence = await self.fence()
        if mode is ChangeMode.OVERWRITE and fence.beyond(diff):
            raise SkipTest("the device has other circuits that its driver owns: mode overwrite would take them down")
        return replace(diff, before=frozenset(filter(fence.has, diff.before)))

    async def commit(self, diff: Diff, expect_revision: int, revert_in_s: float | None = None) -> CommitResult:
        await self._check(diff)
        return await self._driver.commit(diff, expect_revision, revert_in_s)

    async def confirm(self, revision: int) -> None:
        await self._driver.confirm(revision)

    async def take_over(self, pairs: Sequence[CrossConnect]) -> Reading:
        fence = await self.fence()
        assert all(map(fence.has, pairs)), f"the suite wants to take over {pairs}, beyond the ports that were named"
        return await self._within(await self._driver.take_over(pairs))

    async def verify(self, diff: Diff) -> Verification:
        return await self._driver.verify(diff)

    async def rollback(self, diff: Diff) -> CommitResult:
        await self._check(diff)
        return await self._driver.rollback(diff)

    async def watch(self) -> AsyncGenerator[Event, None]:
        async for event in self._driver.watch():
            if event.cross_connect is None or (await self.fence()).has(event.cross_connect):
                yield event

    async def close(self) -> None:
        await self._driver.close()

    async def fence(self) -> Fence:
        if self._fence is None:
            self._fence = Fence(await self._driver.facts(), self._pairs)
        return self._fence

    async def _within(self, reading: Reading) -> Reading:
        fence = await self.fence()
        return replace(reading, circuits=tuple(each for each in reading.circuits if fence.has(each.cross_connect)))

    async def _check(self, diff: Diff) -> None:
        beyond = (await self.fence()).beyond(diff)
        assert not beyond, f"the suite wants to change {beyond}, beyond the ports that were named; nothing was sent"


class LabConformance(DriverConformance):
    """The suite on one device that is there already. `make` gives another driver of it each time; `cannot` says what
    else is not to be had."""

    cannot_inject = MappingProxyType(dict.fromkeys(FaultKind, "nobody breaks a switch in a lab"))

    def __init__(
        self, make: Callable[[], OcsDriver], pairs: Sequence[CrossConnect], cannot: dict[str, str] | None = None
    ) -> None:
        self._make = make
        self._pairs = tuple(pairs)
        self.cannot = {
            "setters": "a switch in a lab does not tell what reached it",
            "make_big": "a switch in a lab has the size that it has",
            **(cannot or {}),
        }

    async def make_driver(self) -> OcsDriver:
        await self.clean()  # a test may ask for a device several times, each time with nothing connected
        return FencedDriver(self._make(), self._pairs)

    async def pairs(self, driver: OcsDriver, count: int) -> tuple[CrossConnect, ...]:
        normal = (await driver.facts()).normal
        return tuple(normal(pair) for pair in self._pairs[:count])

    async def make_foreign(self, driver: OcsDriver, pairs: Sequence[CrossConnect]) -> None:
        await driver.close()  # the device may allow one session; it connects again when it is needed
        async with self._another() as other:
            result = await conformance.carry_out(other, tuple(pairs))
            assert result.done, f"another driver of the same device could not connect {pairs}: {result}"

    async def prepare(self) -> None:
        """Raises InvalidOptions where the ports are not this device's, and Conflict where they are not free."""
        driver = self._make()
        try:
            facts = await driver.facts()
            wrong = [
                f"ports: {name} ports are {valid[0]}..{valid[-1]}, got {port}"
                for pair in self._pairs
                for name, port, valid in (
                    ("ingress", pair.ingress_port, facts.ingress_ports),
                    ("egress", pair.egress_port, facts.egress_ports),
                )
                if port not in valid
            ]
            ends = [end for pair in self._pairs for end in facts.ends(pair)]
            wrong += [
                f"ports: {port} is named twice" for _, port in sorted({end for end in ends if ends.count(end) > 1})
            ]
            if wrong:
                raise InvalidOptions(wrong, device=driver.device)
            fence, reading = Fence(facts, self._pairs), await driver.cross_connects()
            busy = [
                f"{each.cross_connect}: is up on ports that were named; free them first"
                for each in reading.circuits
                if fence.meets(each.cross_connect)
            ]
            named = {port for pair in self._pairs for port in (pair.ingress_port, pair.egress_port)}
            busy += [
                f"port {each.port}: is {each.status}, name another"
                for each in await driver.ports()
                if each.port in named and each.status is not PortStatus.ENABLED
            ]
            if reading.unconfirmed is not None:
                busy.append(f"{reading.unconfirmed}: confirm it first")
            if busy:
                raise Conflict(busy, device=driver.device)
        finally:
            await driver.close()

    async def clean(self) -> None:
        """Take down what a test has left between the ports: they were free before it."""
        async with self._another() as driver:
            reading = await driver.cross_connects()
            if reading.unconfirmed is not None:
                await driver.confirm(reading.revision)
            left = tuple(circuit.cross_connect for circuit in reading.circuits)
            if left:
                await driver.take_over(left)
                result = await conformance.carry_out(driver, disconnect=left)
                assert result.done, f"not free again: {[str(i.cross_connect) for i in result.items if not i.done]}"

    @asynccontextmanager
    async def _another(self) -> AsyncIterator[OcsDriver]:
        driver = FencedDriver(self._make(), self._pairs)
        try:
            yield driver
        finally:
            await driver.close()


class VirtualConformance(LabConformance):
    """A virtual switch lives in its driver, so each driver has one of its own, and it can be broken."""

    cannot_inject = MappingProxyType({})

    def __init__(
        self, make: Callable[[], OcsDriver], pairs: Sequence[CrossConnect], make_big: Callable[[int], OcsDriver]
    ) -> None:
        super().__init__(make, pairs)
        self._make_big = make_big
        self.cannot = {}

    async def make_driver(self) -> OcsDriver:
        return self._make()

    async def make_big(self, ports: int) -> OcsDriver:
        return self._make_big(ports)

    async def pairs(self, driver: OcsDriver, count: int) -> tuple[CrossConnect, ...]:
        if count > len(self._pairs):  # a whole device
            return await DriverConformance.pairs(self, driver, count)
        return await super().pairs(driver, count)

    async def make_foreign(self, driver: OcsDriver, pairs: Sequence[CrossConnect]) -> None:
        assert isinstance(driver, VirtualSwitch)
        driver.glass.add(pairs)

    async def setters(self, driver: OcsDriver) -> Sequence[str]:
        assert isinstance(driver, VirtualSwitch)
        return driver.wire.setters

    async def inject(self, driver: OcsDriver, fault: Fault) -> None:
        assert isinstance(driver, VirtualSwitch)
        driver.glass.inject(fault)

    async def clean(self) -> None:
        pass  # the switch went with its driver


def tests_of(suite: DriverConformance) -> list[str]:
    """In the order in which they are written."""
    found = {name: member for name, member in inspect.getmembers(type(suite)) if name.startswith("test_")}
    return sorted(found, key=lambda name: found[name].__code__.co_firstlineno)


async def run_suite(suite: LabConformance, only: Collection[str] = ()) -> AsyncIterator[Outcome]:
    """One outcome after the other. Ends early, with that as its last outcome, where the ports cannot be freed again."""
    if not __debug__:
        raise InvalidOptions(["this runs on assertions: start Python without -O"])
    await suite.prepare()
    for name in tests_of(suite):
        if only and name not in only:
            continue
        began_s = time.monotonic()
        state, detail = await _tried(suite, name)
        yield Outcome(name, state, detail, time.monotonic() - began_s)
        try:
            await asyncio.wait_for(suite.clean(), TEST_LIMIT_S)
        except Exception as error:  # noqa: BLE001  # whatever it is, nothing more is tried on this switch
            yield Outcome(f"clean up after {name}", State.FAILED, _words(error), time.monotonic() - began_s)
            return


async def _tried(suite: DriverConformance, name: str) -> tuple[State, str]:
    try:
        await asyncio.wait_for(getattr(suite, name)(), TEST_LIMIT_S)
    except SkipTest as skip:
        return State.SKIPPED, str(skip)
    except Exception as error:  # noqa: BLE001  # a driver may raise anything: that is what is tested
        return State.FAILED, _words(error)
    return State.PASSED, ""


def _words(error: BaseException) -> str:
    """What failed, and where in the suite."""
    where = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == conformance.__file__]
    what = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
    line = f"line {where[-1].lineno} of conformance.py: {where[-1].line}" if where else ""
    return "; ".join(filter(None, (what, line)))
