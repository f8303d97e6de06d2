"""The conformance suite for drivers. To use it, subclass `DriverConformance`, define how to make a driver, and run
pytest (asyncio mode auto):

    class TestMySwitch(DriverConformance):
        async def make_driver(self) -> OcsDriver:
            return MySwitch("lab1", address="192.0.2.7")  # a device with nothing connected

        async def inject(self, driver: OcsDriver, fault: DeviceFault) -> None:
            await my_emulator.inject(fault)

Each test gets its own driver. Declared capabilities are tested. For an undeclared capability, the suite checks that its
fields are None and that its calls raise an error. `cannot` lists the actions that are impossible on the device, such as
breaking a mirror of a lab switch, each with the reason. Tests that need these actions are skipped. A test fails if it
needs a hook that is neither implemented nor in `cannot`. conformance_run.py runs the suite without pytest.
"""

import asyncio
import functools
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from types import MappingProxyType
from typing import TypeVar
from unittest import SkipTest

from ocs_drivers.base import OcsDriver
from ocs_drivers.errors import CircuitConflict, DriverError, DriverPermanent, InvalidChange
from ocs_drivers.faults import DeviceFault, DeviceFaultKind
from ocs_drivers.model import (
    Action,
    ChangeMode,
    CircuitChange,
    CircuitDiff,
    CircuitState,
    CommitResult,
    Connectivity,
    CrossConnect,
    CrossConnectReading,
    EventKind,
    PortStatus,
    SwitchEvent,
)

E = TypeVar("E", bound=DriverError)
Suite = TypeVar("Suite", bound="DriverConformance")

# Durations of trial changes: one outlasts every test, and one ends soon.
LONG_S = 50.0
SHORT_S = 0.05
FIRST_PAUSE_S = 0.005  # between two readings while waiting for a state; increases each time
LONGEST_PAUSE_S = 1.0
PATIENCE_S = 60.0  # after which an expected state is considered missing


async def connected(driver: OcsDriver) -> frozenset[CrossConnect]:
    return (await driver.cross_connects()).cross_connects


async def carry_out(
    driver: OcsDriver,
    connect: tuple[CrossConnect, ...] = (),
    disconnect: tuple[CrossConnect, ...] = (),
    mode: ChangeMode = ChangeMode.SAFE,
) -> CommitResult:
    diff = await driver.plan(CircuitChange(connect, disconnect), mode)
    return await driver.commit(diff, diff.revision)


def undone(result: CommitResult) -> str:
    """Return a text that lists the items that a commit did not carry out, with the device's messages."""
    return "; ".join(
        f"{item.action} {item.cross_connect}: {item.detail or 'not done'}" for item in result.items if not item.done
    )


def all_done(result: CommitResult) -> CommitResult:
    """Return the result unchanged. Raises AssertionError unless every item was carried out."""
    assert result.done, undone(result)[:1000]
    return result


@asynccontextmanager
async def refusal(kind: type[E], *words: str) -> AsyncIterator[list[E]]:
    """Raise AssertionError unless the block raises `kind` with all of `words` in its message. After the block, the
    yielded list contains the error."""
    caught: list[E] = []
    try:
        yield caught
    except kind as error:
        caught.append(error)
    assert caught, f"expected {kind.__name__}, nothing was raised"
    unnamed = [word for word in words if word not in str(caught[0])]
    assert not unnamed, f"{unnamed} not named in: {caught[0]}"


async def until(driver: OcsDriver, is_so: Callable[[CrossConnectReading], bool], what: str) -> CrossConnectReading:
    """Return the first reading for which `is_so` returns True. Raises AssertionError if there is no such reading within
    `PATIENCE_S` seconds. `what` completes the message "the device never ..."."""
    pause_s, left_s = FIRST_PAUSE_S, PATIENCE_S
    while True:
        reading = await driver.cross_connects()
        if is_so(reading):
            return reading
        if left_s <= 0:
            break
        await asyncio.sleep(pause_s)
        left_s -= pause_s
        pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)
    raise AssertionError(f"the device never {what}: {reading}")


async def next_event(events: AsyncGenerator[SwitchEvent, None], kind: EventKind) -> SwitchEvent:
    """Return the next event of this kind. Events of other kinds are skipped. Raises AssertionError if the stream ends
    first."""
    async for event in events:
        if event.kind is kind:
            return event
    raise AssertionError(f"the stream ended without an event of kind {kind}")


def _on_a_device(test: Callable[["DriverConformance", OcsDriver], Awaitable[None]]) -> object:
    """Wrap the test so that it gets a new driver, which is closed afterwards. The wrapper hides the test's driver
    parameter from pytest, which would look for a fixture of that name."""

    @functools.wraps(test)
    async def run(self: "DriverConformance") -> None:
        async with self.device() as driver:
            await test(self, driver)

    vars(run)["__signature__"] = inspect.Signature([inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)])
    return run


def _each_on_a_device(suite: type[Suite]) -> type[Suite]:
    for name, test in inspect.getmembers(suite, inspect.iscoroutinefunction):
        if name.startswith("test_") and "driver" in inspect.signature(test).parameters:
            setattr(suite, name, _on_a_device(test))
    return suite


@_each_on_a_device
class DriverConformance:
    """The conformance suite for drivers. A subclass implements the hooks; see the module's docstring."""

    # reason by key: the hook make_foreign, setters or make_big, or a fault
    cannot: Mapping[str, str] = MappingProxyType({})

    splits_bulk: str = ""  # why a bulk command is split for this device, e.g. because its lines are short

    async def make_driver(self) -> OcsDriver:
        """Return a driver for a device with nothing connected. Must be overridden."""
        raise AssertionError("make_driver must be overridden")

    async def inject(self, driver: OcsDriver, fault: DeviceFault) -> None:
        """Inject the fault into the driver's device. Override this hook, or add the fault to `cannot`."""
        raise AssertionError(f"override inject, or add {fault.kind} to cannot with the reason")

    async def make_foreign(self, driver: OcsDriver, pairs: Sequence[CrossConnect]) -> None:
        """Connect these pairs on the driver's device as another client, e.g. in another session. Override this hook, or
        add it to `cannot`."""
        raise AssertionError("override make_foreign, or add it to cannot with the reason")

    async def setters(self, driver: OcsDriver) -> Sequence[str]:
        """Return all commands that change circuits or ports and have reached the driver's device so far, verbatim.
        Override this hook, or add it to `cannot`."""
        raise AssertionError("override setters, or add it to cannot with the reason")

    async def make_big(self, ports: int) -> OcsDriver:
        """Return a driver for a device with nothing connected. The device has `ports` ports or, if it has two sides,
        `ports` ports on each side. Override this hook, or add it to `cannot`."""
        raise AssertionError("override make_big, or add it to cannot with the reason")

    async def pairs(self, driver: OcsDriver, count: int) -> tuple[CrossConnect, ...]:
        """Return up to `count` cross-connects that the suite may make. No port occurs twice. Override this hook to
        restrict the ports."""
        facts = await driver.facts()
        if facts.connectivity is Connectivity.ANY_TO_ANY:
            ports = list(facts.ingress_ports)
            return tuple(CrossConnect(a, b) for a, b in zip(ports[::2], ports[1::2], strict=False))[:count]
        pairs = zip(facts.ingress_ports, reversed(facts.egress_ports), strict=False)
        return tuple(CrossConnect(a, b) for a, b in pairs)[:count]

    async def crossed(self, driver: OcsDriver) -> tuple[tuple[CrossConnect, CrossConnect], ...]:
        """Return two sets of two cross-connects on the same four ports, so that the second set cannot be connected
        while the first set is connected."""
        one, two = await self.pairs(driver, 2)
        normal = (await driver.facts()).normal
        return (one, two), (
            normal(CrossConnect(one.ingress_port, two.egress_port)),
            normal(CrossConnect(two.ingress_port, one.egress_port)),
        )

    async def crossed_up(self, driver: OcsDriver) -> tuple[tuple[CrossConnect, ...], tuple[CrossConnect, ...]]:
        """Connect the first of the two sets of `crossed`, and return both sets."""
        now, wanted = await self.crossed(driver)
        await carry_out(driver, now)
        return now, wanted

    @asynccontextmanager
    async def device(self, big: int | None = None) -> AsyncIterator[OcsDriver]:
        if big is not None:
            self._need("make_big")
        driver = await (self.make_driver() if big is None else self.make_big(big))
        try:
            yield driver
        finally:
            await driver.close()

    async def foreign(self, driver: OcsDriver, pairs: Sequence[CrossConnect]) -> None:
        """Connect pairs as another client, and wait until the driver reports them."""
        self._need("make_foreign")
        await self.make_foreign(driver, pairs)
        await until(driver, lambda reading: reading.cross_connects.issuperset(pairs), f"shows {pairs}")

    async def received(self, driver: OcsDriver) -> int:
        """Return the number of commands that change circuits or ports and have reached the device."""
        self._need("setters")
        return len(await self.setters(driver))

    def _need(self, ability: str) -> None:
        if ability in self.cannot:
            raise SkipTest(f"{ability}: {self.cannot[ability]}")

    async def break_it(self, driver: OcsDriver, fault: DeviceFault) -> None:
        self._need(fault.kind)
        await self.inject(driver, fault)

    # Facts, ports and events.

    async def test_facts_and_ports_agree(self, driver: OcsDriver) -> None:
        facts, ports = await driver.facts(), await driver.ports()
        assert facts.vendor
        assert facts.model
        numbers = [port.port for port in ports]
        assert numbers == sorted({*facts.ingress_ports, *facts.egress_ports})
        assert len(numbers) == facts.ports

    async def test_capabilities_match_declaration(self, driver: OcsDriver) -> None:
        declared = await driver.capabilities()
        (pair,) = await self.pairs(driver, 1)
        (item,) = (await carry_out(driver, (pair,))).items
        (circuit,) = (await driver.cross_connects()).circuits
        powers = [port.power_dbm for port in await driver.ports() if port.port == pair.ingress_port]
        assert (powers != [None]) is declared.port_power
        assert (circuit.link_up is not None) is declared.link_state
        assert (item.link_up_s is not None) is declared.link_state

    async def test_events_are_reported_if_declared(self, driver: OcsDriver) -> None:
        async with aclosing(driver.watch()) as events:
            assert await self._streams_events(driver, events) is (await driver.capabilities()).events

    async def test_port_failure_is_reported_as_event(self, driver: OcsDriver) -> None:
        async with aclosing(driver.watch()) as events:
            if not await self._streams_events(driver, events):
                return
            (pair,) = (await self.pairs(driver, 21))[-1:]
            await self.break_it(driver, DeviceFault(DeviceFaultKind.FAIL_PORT, pair.ingress_port))
            event = await asyncio.wait_for(next_event(events, EventKind.PORT), PATIENCE_S)
            assert event.port == pair.ingress_port

    async def test_automatic_revert_is_reported_as_alarm(self, driver: OcsDriver) -> None:
        async with aclosing(driver.watch()) as events:
            if not await self._streams_events(driver, events):
                return
            pairs = await self.pairs(driver, 21)
            diff = await driver.plan(CircuitChange(disconnect=tuple(await connected(driver)) or pairs[-1:]))
            await driver.commit(diff, diff.revision, SHORT_S)
            event = await asyncio.wait_for(next_event(events, EventKind.ALARM), PATIENCE_S)
            assert "revert" in event.text

    async def _streams_events(self, driver: OcsDriver, events: AsyncGenerator[SwitchEvent, None]) -> bool:
        """Return True after the first event has arrived. Return False if the driver does not declare events and its
        `watch` raises DriverPermanent, as required."""
        first = asyncio.ensure_future(anext(events))
        try:
            if not (await driver.capabilities()).events:
                async with refusal(DriverPermanent, "events"):
                    await first
                return False
            # Listening begins at an unknown moment: produce events until then.
            pairs = list(await self.pairs(driver, 20))
            while not first.done() and pairs:
                await carry_out(driver, (pairs.pop(),))
            assert (await asyncio.wait_for(first, PATIENCE_S)).kind is EventKind.CIRCUIT
            return True
        finally:  # a stream that is still waiting cannot be closed
            first.cancel()
            await asyncio.wait({first})

    # Planning.

    async def test_plan_sends_nothing(self, driver: OcsDriver) -> None:
        before = await driver.cross_connects()
        diff = await driver.plan(CircuitChange(await self.pairs(driver, 2)))
        assert diff.add == tuple(sorted(await self.pairs(driver, 2)))
        assert diff.remove == ()
        assert diff.revision == before.revision
        assert await driver.cross_connects() == before

    async def test_safe_refuses_ports_in_use_and_names_their_circuits(self, driver: OcsDriver) -> None:
        now, wanted = await self.crossed_up(driver)
        async with refusal(CircuitConflict, str(now[0]), str(now[1]), "connect[0]", "connect[1]"):
            await driver.plan(CircuitChange(wanted))
        assert await connected(driver) == frozenset(now)

    async def test_update_evicts_exactly_the_conflicting_circuits(self, driver: OcsDriver) -> None:
        now, wanted = await self.crossed(driver)
        bystander = (await self.pairs(driver, 3))[2]
        await carry_out(driver, (*now, bystander))
        diff = await driver.plan(CircuitChange(wanted[:1]), ChangeMode.UPDATE)
        assert diff.evicted == tuple(sorted(now))
        assert await connected(driver) == {*now, bystander}
        result = await driver.commit(diff, diff.revision)
        assert result.done
        assert await connected(driver) == {wanted[0], bystander}

    async def test_overwrite_leaves_only_named_circuits(self, driver: OcsDriver) -> None:
        one, two, three = await self.pairs(driver, 3)
        await carry_out(driver, (one, two))
        diff = await driver.plan(CircuitChange((two, three)), ChangeMode.OVERWRITE)
        assert diff.evicted == (one,)
        assert (await driver.commit(diff, diff.revision)).done
        assert await connected(driver) == {two, three}

    async def test_empty_change_removes_no_circuit(self, driver: OcsDriver) -> None:
        pairs = await self.pairs(driver, 2)
        await carry_out(driver, pairs)
        async with refusal(InvalidChange, "connect"):
            await driver.plan(CircuitChange(), ChangeMode.OVERWRITE)
        for mode in (ChangeMode.SAFE, ChangeMode.UPDATE):
            result = await carry_out(driver, mode=mode)
            assert (result.items, result.commands_sent) == ((), 0)
        assert await connected(driver) == frozenset(pairs)

    async def test_empty_diff_sends_no_setter(self, driver: OcsDriver) -> None:
        """Check that an empty list is never sent, because some devices interpret an empty list as all circuits."""
        pairs = await self.pairs(driver, 2)
        await carry_out(driver, pairs)
        before = await self.received(driver)
        now = await driver.cross_connects()
        empty = CircuitDiff(ChangeMode.SAFE, now.revision, now.cross_connects, (), ())
        so_already = CircuitDiff(ChangeMode.SAFE, now.revision, frozenset(), (), tuple(sorted(pairs)))
        for diff in (empty, so_already):
            assert (await driver.commit(diff, now.revision)).done
            assert (await driver.commit(diff, now.revision, LONG_S)).revert_at_s is None
        assert (await driver.rollback(empty)).done
        assert await self.received(driver) == before
        assert await connected(driver) == frozenset(pairs)

    async def test_plan_refuses_ports_out_of_range(self, driver: OcsDriver) -> None:
        facts = await driver.facts()
        (one,) = await self.pairs(driver, 1)
        for wrong in (0, max(facts.ingress_ports[-1], facts.egress_ports[-1]) + 1, 2**40, -1):
            for pair in (CrossConnect(wrong, one.egress_port), CrossConnect(one.ingress_port, wrong)):
                for change in (CircuitChange((pair,)), CircuitChange(disconnect=(pair,))):
                    async with refusal(InvalidChange, f"got {wrong}"):
                        await driver.plan(change)
        assert await connected(driver) == frozenset()

    async def test_plan_refuses_port_named_twice(self, driver: OcsDriver) -> None:
        one, two = await self.pairs(driver, 2)
        for other in (
            one,
            CrossConnect(one.ingress_port, two.egress_port),
            CrossConnect(two.ingress_port, one.egress_port),
        ):
            async with refusal(InvalidChange, "[1].", "already"):
                await driver.plan(CircuitChange((one, other)))
            async with refusal(InvalidChange, "[1].", "already"):
                await driver.plan(CircuitChange(disconnect=(one, other)))
        async with refusal(InvalidChange, str(one)):
            await driver.plan(CircuitChange((one,), (one,)))
        assert await connected(driver) == frozenset()

    async def test_plan_reports_every_fault_at_once(self, driver: OcsDriver) -> None:
        facts = await driver.facts()
        one, two = await self.pairs(driver, 2)
        beyond = max(facts.ingress_ports[-1], facts.egress_ports[-1]) + 1
        wrong = (one, CrossConnect(one.ingress_port, two.egress_port), CrossConnect(0, beyond))
        async with refusal(InvalidChange, "connect[1].", f"got {beyond}", "got 0") as refused:
            await driver.plan(CircuitChange(wrong))
        assert len(refused[0].faults) == 3, refused[0].faults
        assert refused[0].device == driver.device
        assert await connected(driver) == frozenset()

    async def test_disconnect_refuses_wrong_partner_port(self, driver: OcsDriver) -> None:
        now, other = await self.crossed_up(driver)
        async with refusal(CircuitConflict, "disconnect[0]", str(now[0])):
            await driver.plan(CircuitChange(disconnect=other[:1]))
        assert await connected(driver) == frozenset(now)

    # Committing.

    async def test_diff_is_empty_after_commit(self, driver: OcsDriver) -> None:
        change = CircuitChange(await self.pairs(driver, 3))
        diff = await driver.plan(change)
        result = all_done(await driver.commit(diff, diff.revision))
        assert (await driver.plan(change)).empty
        assert (await driver.verify(diff)).ok
        assert result.revision == (await driver.cross_connects()).revision != diff.revision

    async def test_disconnect_and_connect_in_one_change(self, driver: OcsDriver) -> None:
        now, wanted = await self.crossed_up(driver)
        result = await carry_out(driver, wanted, now)
        assert [item.action for item in result.items] == [Action.REMOVE, Action.REMOVE, Action.ADD, Action.ADD]
        all_done(result)
        assert await connected(driver) == frozenset(wanted)

    async def test_repeated_commit_sends_nothing(self, driver: OcsDriver) -> None:
        diff = await driver.plan(CircuitChange(await self.pairs(driver, 2)))
        first = await driver.commit(diff, diff.revision)
        again = await driver.commit(diff, first.revision)
        assert again.done
        assert again.commands_sent == 0
        assert again.revision == first.revision

    async def test_commit_times_are_in_order(self, driver: OcsDriver) -> None:
        declared = await driver.capabilities()
        result = await carry_out(driver, await self.pairs(driver, 2))
        for item in result.items:
            assert item.commanded_s is not None
            assert item.tuned_s is not None
            assert 0 <= item.commanded_s <= item.tuned_s
            if declared.link_state:
                assert item.link_up_s is not None
                assert item.tuned_s <= item.link_up_s

    async def test_commit_refuses_stale_revision(self, driver: OcsDriver) -> None:
        one, two = await self.pairs(driver, 2)
        stale = await driver.plan(CircuitChange((one,)))
        await carry_out(driver, (two,))
        async with refusal(CircuitConflict, "revision"):
            await driver.commit(stale, stale.revision)
        assert await connected(driver) == {two}

    async def test_one_of_two_concurrent_writers_succeeds(self, driver: OcsDriver) -> None:
        one, two = await self.pairs(driver, 2)
        diffs = [await driver.plan(CircuitChange((pair,))) for pair in (one, two)]
        results = await asyncio.gather(*(driver.commit(diff, diff.revision) for diff in diffs), return_exceptions=True)
        winners = [result for result in results if isinstance(result, CommitResult)]
        assert len(winners) == 1
        assert sum(isinstance(result, CircuitConflict) for result in results) == 1
        assert await connected(driver) == {winners[0].items[0].cross_connect}

    async def test_concurrent_writers_all_succeed_with_retries(self, driver: OcsDriver) -> None:
        async def insist(driver: OcsDriver, pair: CrossConnect, writers: int) -> None:
            attempts = 2 * writers  # each conflict is a commit by another writer or another client
            for _ in range(attempts):
                with suppress(CircuitConflict):
                    all_done(await carry_out(driver, (pair,)))
                    return
            raise AssertionError(f"{pair}: {attempts} commits met a conflict, with {writers - 1} other writers")

        pairs = await self.pairs(driver, 8)
        writers = [insist(driver, pair, len(pairs)) for pair in pairs]
        # Wait until every writer has ended before the device is closed, even if one fails.
        for ended in await asyncio.gather(*writers, return_exceptions=True):
            if isinstance(ended, BaseException):
                raise ended
        assert await connected(driver) == frozenset(pairs)

    async def test_whole_device_connects_and_disconnects(self) -> None:
        await self._whole_device()

    async def test_device_with_320_ports_connects_and_disconnects(self) -> None:
        await self._whole_device(320)

    async def test_device_with_1008_ports_connects_and_disconnects(self) -> None:
        await self._whole_device(1008)

    async def _whole_device(self, big: int | None = None) -> None:
        async with self.device(big) as driver:
            ports, can = (await driver.facts()).ports, await driver.capabilities()
            assert ports >= (big or 0)
            pairs = await self.pairs(driver, ports)
            for change in (CircuitChange(pairs), CircuitChange(disconnect=pairs)):
                before = 0 if "setters" in self.cannot else await self.received(driver)
                diff = await driver.plan(change)
                result = all_done(await driver.commit(diff, diff.revision))
                assert len(result.items) == len(pairs)
                is_bulk = can.bulk and not (change.disconnect and can.removes_one_by_one)
                assert result.commands_sent == (1 if is_bulk else len(pairs))
                assert await connected(driver) == frozenset(change.connect)
                if "setters" not in self.cannot:
                    reached = await self.received(driver) - before
                    most = len(pairs) if self.splits_bulk else result.commands_sent
                    assert result.commands_sent <= reached <= most, f"{reached} setters reached the device"

    # Rollback.

    async def test_rollback_restores_from_every_prefix(self) -> None:
        for done in range(5):
            async with self.device() as driver:
                now, wanted = await self.crossed_up(driver)
                diff = await driver.plan(CircuitChange(wanted), ChangeMode.UPDATE)
                for pair in now[:done]:
                    await carry_out(driver, disconnect=(pair,))
                for pair in wanted[: max(0, done - 2)]:
                    await carry_out(driver, (pair,))
                assert (await driver.rollback(diff)).done
                assert await connected(driver) == diff.before
                again = await driver.rollback(diff)
                assert again.done
                assert again.commands_sent == 0

    async def test_rollback_refuses_ports_used_since(self, driver: OcsDriver) -> None:
        now, other = await self.crossed_up(driver)
        diff = await driver.plan(CircuitChange(disconnect=now))
        await driver.commit(diff, diff.revision)
        await carry_out(driver, other[:1])
        async with refusal(CircuitConflict, str(other[0])):
            await driver.rollback(diff)
        assert await connected(driver) == {other[0]}

    async def test_verify_distinguishes_missing_from_lingering(self, driver: OcsDriver) -> None:
        now, wanted = await self.crossed_up(driver)
        diff = await driver.plan(CircuitChange(wanted, now))
        seen = await driver.verify(diff)
        assert not seen.ok
        assert (seen.missing, seen.lingering) == (diff.add, diff.remove)

    # Trial changes.

    async def test_confirmed_trial_stays(self, driver: OcsDriver) -> None:
        one, two = await self.pairs(driver, 2)
        diff = await driver.plan(CircuitChange((one,)))
        result = all_done(await driver.commit(diff, diff.revision, LONG_S))
        assert result.revert_at_s is not None
        shown = await driver.cross_connects()
        for trial in (shown.unconfirmed, (await driver.verify(diff)).unconfirmed):
            assert trial is not None
            assert (trial.added, trial.removed, trial.failure) == ((one,), (), "")
            assert (trial.revision, trial.until_s) == (result.revision, result.revert_at_s)
        await driver.confirm(result.revision)
        await driver.confirm(result.revision)  # harmless
        assert (await driver.cross_connects()).unconfirmed is None
        assert (await carry_out(driver, (two,))).done
        assert await connected(driver) == {one, two}

    async def test_unconfirmed_trial_reverts(self, driver: OcsDriver) -> None:
        now, wanted = await self.crossed_up(driver)
        diff = await driver.plan(CircuitChange(wanted), ChangeMode.UPDATE)
        result = await driver.commit(diff, diff.revision, SHORT_S)
        reading = await until(driver, lambda reading: reading.unconfirmed is None, "reverted")
        assert reading.cross_connects == frozenset(now)
        async with refusal(CircuitConflict, "revert"):
            await driver.confirm(result.revision)
        assert (await carry_out(driver, disconnect=now)).done

    async def test_other_changes_are_refused_during_trial(self, driver: OcsDriver) -> None:
        one, two = await self.pairs(driver, 2)
        other = await driver.plan(CircuitChange((two,)))
        diff = await driver.plan(CircuitChange((one,)))
        result = all_done(await driver.commit(diff, diff.revision, LONG_S))
        async with refusal(CircuitConflict, "confirm"):
            await driver.commit(other, result.revision)
        async with refusal(CircuitConflict, "confirm"):
            await driver.commit(other, result.revision, LONG_S)
        async with refusal(CircuitConflict, "confirm"):
            await driver.commit(diff, result.revision)
        async with refusal(CircuitConflict, "confirm"):
            await driver.rollback(other)
        async with refusal(CircuitConflict, "revision"):
            await driver.confirm(result.revision + 1)
        assert await connected(driver) == {one}
        assert (await driver.rollback(diff)).done
        assert (await driver.cross_connects()).unconfirmed is None
        async with refusal(CircuitConflict, "rolled back"):
            await driver.confirm(result.revision)
        assert (await carry_out(driver, (two,))).done

    async def test_commit_without_changes_starts_no_trial(self, driver: OcsDriver) -> None:
        pairs = await self.pairs(driver, 1)
        async with refusal(CircuitConflict):
            await driver.confirm((await driver.cross_connects()).revision)
        await carry_out(driver, pairs)
        diff = await driver.plan(CircuitChange(pairs))
        assert (await driver.commit(diff, diff.revision, LONG_S)).revert_at_s is None
        assert (await driver.cross_connects()).unconfirmed is None
        for wrong in (0.0, -1.0, float("nan"), float("inf")):
            async with refusal(InvalidChange, "revert_in_s"):
                await driver.commit(diff, diff.revision, wrong)

    async def test_completed_trial_reverts_as_a_whole(self, driver: OcsDriver) -> None:
        diff = await driver.plan(CircuitChange(await self.pairs(driver, 3)))
        await self.break_it(driver, DeviceFault(DeviceFaultKind.PARTIAL_COMMIT, items=1))
        first = await driver.commit(diff, diff.revision, LONG_S)
        assert first.revert_at_s is not None
        all_done(await driver.commit(diff, first.revision, SHORT_S))
        await until(driver, lambda reading: reading.unconfirmed is None, "reverted")
        assert await connected(driver) == frozenset()

    # Ownership of circuits.

    async def test_reading_distinguishes_foreign_circuits(self, driver: OcsDriver) -> None:
        one, two = await self.pairs(driver, 2)
        await self.foreign(driver, (one,))
        await carry_out(driver, (one, two))  # naming a circuit does not change its owner
        reading = await driver.cross_connects()
        assert reading.foreign == {one}
        assert reading.cross_connects == {one, two}

    async def test_foreign_circuits_are_never_removed(self, driver: OcsDriver) -> None:
        theirs, wanted = await self.crossed(driver)
        third, fourth = (await self.pairs(driver, 4))[2:4]
        await self.foreign(driver, theirs)
        await carry_out(driver, (third,))
        for mode in ChangeMode:
            async with refusal(CircuitConflict, str(theirs[0]), str(theirs[1]), "is not owned", "take-over"):
                await driver.plan(CircuitChange(wanted), mode)
        async with refusal(CircuitConflict, str(theirs[0]), "is not owned", "take-over"):
            await driver.plan(CircuitChange(disconnect=theirs[:1]))
        diff = await driver.plan(CircuitChange((fourth,)), ChangeMode.OVERWRITE)
        assert (diff.remove, diff.add) == ((third,), (fourth,))
        assert (await driver.commit(diff, diff.revision)).done
        assert await connected(driver) == {*theirs, fourth}
        forced = CircuitDiff(ChangeMode.UPDATE, 0, frozenset(theirs), tuple(sorted(theirs)), ())
        async with refusal(CircuitConflict, str(theirs[0]), "is not owned"):
            await driver.commit(forced, (await driver.cross_connects()).revision)
        assert await connected(driver) == {*theirs, fourth}

    async def test_take_over_makes_foreign_circuits_owned(self, driver: OcsDriver) -> None:
        theirs, wanted = await self.crossed(driver)
        await self.foreign(driver, theirs)
        async with refusal(CircuitConflict, str(wanted[0])):
            await driver.take_over((theirs[0], wanted[0]))
        assert (await driver.cross_connects()).foreign == frozenset(theirs)
        assert (await driver.take_over(theirs)).foreign == frozenset()
        all_done(await carry_out(driver, wanted, mode=ChangeMode.UPDATE))
        assert await connected(driver) == frozenset(wanted)
        assert (await driver.cross_connects()).foreign == frozenset()

    async def test_rollback_leaves_foreign_circuits(self, driver: OcsDriver) -> None:
        now, other = await self.crossed_up(driver)
        diff = await driver.plan(CircuitChange(disconnect=now))
        assert (await driver.commit(diff, diff.revision)).done
        await self.foreign(driver, other[:1])
        async with refusal(CircuitConflict, str(other[0])):
            await driver.rollback(diff)
        assert await connected(driver) == {other[0]}

    # Faults.

    async def test_plan_refuses_failed_port(self, driver: OcsDriver) -> None:
        one, two = await self.pairs(driver, 2)
        await self.break_it(driver, DeviceFault(DeviceFaultKind.FAIL_PORT, two.egress_port))
        states = {port.port: port.status for port in await driver.ports()}
        assert states[two.egress_port] is PortStatus.FAILED
        async with refusal(CircuitConflict, "connect[1].egress_port", "failed"):
            await driver.plan(CircuitChange((one, two)))
        assert await connected(driver) == frozenset()

    async def test_commit_reports_port_that_failed_after_planning(self, driver: OcsDriver) -> None:
        diff = await driver.plan(CircuitChange(await self.pairs(driver, 3)))
        await self.break_it(driver, DeviceFault(DeviceFaultKind.FAIL_PORT, diff.add[1].ingress_port))
        result = await driver.commit(diff, diff.revision)
        assert not result.items[1].done
        assert result.items[1].detail
        assert not (await driver.verify(diff)).ok
        assert (await driver.rollback(diff)).done
        assert await connected(driver) == frozenset()

    async def test_stuck_mirror_is_never_reported_as_tuned(self, driver: OcsDriver) -> None:
        diff = await driver.plan(CircuitChange(await self.pairs(driver, 2)))
        await self.break_it(driver, DeviceFault(DeviceFaultKind.STICK_MIRROR, diff.add[0].ingress_port))
        result = await driver.commit(diff, diff.revision)
        assert [item.done for item in result.items] == [False, True]
        assert result.items[0].tuned_s is None
        assert result.items[0].detail
        circuits = {circuit.cross_connect: circuit for circuit in (await driver.cross_connects()).circuits}
        if diff.add[0] in circuits:
            assert circuits[diff.add[0]].state is not CircuitState.TUNED

    async def test_disconnect_reports_stuck_mirror(self, driver: OcsDriver) -> None:
        pairs = await self.pairs(driver, 1)
        await carry_out(driver, pairs)
        await self.break_it(driver, DeviceFault(DeviceFaultKind.STICK_MIRROR, pairs[0].ingress_port))
        result = await carry_out(driver, disconnect=pairs)
        assert not result.done
        assert await connected(driver) == frozenset(pairs)

    async def test_partial_commit_is_reported_and_rolled_back(self) -> None:
        for silent in (False, True):
            async with self.device() as driver:
                _, wanted = await self.crossed_up(driver)
                diff = await driver.plan(CircuitChange(wanted), ChangeMode.UPDATE)
                await self.break_it(driver, DeviceFault(DeviceFaultKind.PARTIAL_COMMIT, items=1, silent=silent))
                if not (await driver.capabilities()).bulk:
                    assert (await driver.commit(diff, diff.revision)).done  # a single command cannot be applied in part
                    continue
                result = await driver.commit(diff, diff.revision)
                assert not result.done
                assert all(item.detail for item in result.items if not item.done)
                assert (await driver.rollback(diff)).done
                assert await connected(driver) == diff.before

    async def test_partial_commit_can_be_completed(self, driver: OcsDriver) -> None:
        diff = await driver.plan(CircuitChange(await self.pairs(driver, 3)))
        await self.break_it(driver, DeviceFault(DeviceFaultKind.PARTIAL_COMMIT, items=1))
        first = await driver.commit(diff, diff.revision)
        second = await driver.commit(diff, first.revision)
        assert second.done
        assert await connected(driver) == frozenset(diff.add)

    async def test_connection_lost_after_command_reads_back_as_done(self, driver: OcsDriver) -> None:
        diff = await driver.plan(CircuitChange(await self.pairs(driver, 2)))
        await self.break_it(driver, DeviceFault(DeviceFaultKind.DROP_CONNECTION))
        result = await driver.commit(diff, diff.revision)
        assert result.done or not (await driver.capabilities()).bulk
        assert frozenset(i.cross_connect for i in result.items if i.done) == await connected(driver)

    async def test_connection_lost_before_command_reads_back_as_not_done(self, driver: OcsDriver) -> None:
        diff = await driver.plan(CircuitChange(await self.pairs(driver, 2)))
        await self.break_it(driver, DeviceFault(DeviceFaultKind.DROP_COMMAND))
        result = await driver.commit(diff, diff.revision)
        assert not result.done
        assert result.items[0].detail
        assert await connected(driver) == frozenset()
        assert (await driver.commit(diff, result.revision)).done

    async def test_late_answer_is_read_back(self, driver: OcsDriver) -> None:
        diff = await driver.plan(CircuitChange(await self.pairs(driver, 1)))
        await self.break_it(driver, DeviceFault(DeviceFaultKind.SLOW_ANSWER, delay_s=86400.0))
        result = await driver.commit(diff, diff.revision)
        assert result.done
        assert await connected(driver) == frozenset(diff.add)

    async def test_driver_reconnects_after_device_restart(self, driver: OcsDriver) -> None:
        one, two = await self.pairs(driver, 2)
        await carry_out(driver, (one,))
        await self.break_it(driver, DeviceFault(DeviceFaultKind.RESTART))
        survived = await connected(driver)
        assert survived in (frozenset(), frozenset((one,)))
        assert (await carry_out(driver, (two,))).done
        assert await connected(driver) == {*survived, two}
