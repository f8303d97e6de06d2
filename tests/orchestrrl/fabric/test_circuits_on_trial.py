"""Changes on trial, and the owners of circuits that the daemon stores, also across crashes."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from ocs_drivers.errors import CircuitConflict
from ocs_drivers.faults import DeviceFault, DeviceFaultKind
from ocs_drivers.model import ChangeMode, CircuitChange, CrossConnect
from ocs_drivers.virtual import VirtualSwitch
from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.journal.kinds import CIRCUIT_CHANGES
from orchestrrl.core.journal.store import EntryKind, Journal
from orchestrrl.fabric.circuit_change import CircuitOperation, operation_to_json
from orchestrrl.fabric.circuit_executor import VALID_S, CircuitExecutor

OLD = (CrossConnect(1, 17), CrossConnect(2, 18))
NEW = (CrossConnect(1, 18), CrossConnect(2, 17))
THEIRS = CrossConnect(9, 30)


@pytest.fixture
async def clock() -> AsyncIterator[VirtualClock]:
    clock = VirtualClock(1000.0)

    async def run() -> None:
        while True:
            await clock.advance(0.005)

    running = asyncio.create_task(run())
    yield clock
    running.cancel()


@pytest.fixture
def switch(clock: VirtualClock) -> VirtualSwitch:
    return process_of(VirtualSwitch("ocs1", clock=clock), clock)


def process_of(switch: VirtualSwitch, clock: VirtualClock) -> VirtualSwitch:
    """Return a driver of the same device in a restarted process, without the old state."""
    again = VirtualSwitch("ocs1", clock=clock, command_timeout_s=0.2, lock_timeout_s=0.5, link_timeout_s=0.2)
    again.wire._model = again.model = switch.model
    return again


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "journal.sqlite", 1000.0) as journal:
        yield journal


@pytest.fixture
def executor(switch: VirtualSwitch, journal: Journal, clock: VirtualClock) -> CircuitExecutor:
    return CircuitExecutor({"ocs1": switch}, journal, clock)


def results(journal: Journal) -> list[tuple[bool, str]]:
    return [(entry.body["done"], entry.body["detail"]) for entry in journal.tail(100, (EntryKind.CIRCUITS_RESULT,))]


def shown(switch: VirtualSwitch) -> frozenset[CrossConnect]:
    return frozenset(circuit.cross_connect for circuit in switch.model.circuits())


async def on_trial(executor: CircuitExecutor, revert_in_s: float = 10.0) -> None:
    assert (await executor.change("ocs1", CircuitChange(OLD), ChangeMode.SAFE)).done
    outcome = await executor.change("ocs1", CircuitChange(NEW), ChangeMode.UPDATE, revert_in_s=revert_in_s)
    assert outcome.done
    assert "on trial: reverts at 1970-01-01 00:" in outcome.detail
    assert outcome.revert_at_s is not None


async def test_confirmed_change_stays(
    executor: CircuitExecutor, journal: Journal, switch: VirtualSwitch, clock: VirtualClock
) -> None:
    await on_trial(executor)
    assert len(journal.open_operations(CIRCUIT_CHANGES)) == 1
    with pytest.raises(CircuitConflict, match="is on trial until"):
        await executor.change("ocs1", CircuitChange((THEIRS,)), ChangeMode.SAFE)
    assert (await executor.confirm("ocs1")).detail == "confirmed"
    assert results(journal)[-1] == (True, "confirmed")
    await clock.sleep(20.0)
    await executor.settle()
    assert shown(switch) == frozenset(NEW)
    again = await executor.confirm("ocs1")
    assert (again.done, again.detail) == (True, "was confirmed before")


async def test_unconfirmed_change_is_undone_and_journalled(
    executor: CircuitExecutor, journal: Journal, switch: VirtualSwitch, clock: VirtualClock
) -> None:
    await on_trial(executor)
    await clock.sleep(11.0)
    assert shown(switch) == frozenset(OLD)
    with pytest.raises(CircuitConflict, match="reverted"):
        await executor.confirm("ocs1")
    assert [done for done, _ in results(journal)] == [True, False]
    assert "not confirmed in time; rolled back" in results(journal)[-1][1]
    with pytest.raises(CircuitConflict, match="not confirmed in time"):
        await executor.confirm("ocs1")
    assert (await executor.change("ocs1", CircuitChange((THEIRS,)), ChangeMode.SAFE)).done


async def test_failed_revert_is_reported_and_awaited(
    executor: CircuitExecutor,
    journal: Journal,
    switch: VirtualSwitch,
    clock: VirtualClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await on_trial(executor)
    await clock.sleep(9.0)
    await executor.settle()
    assert caplog.messages == []
    switch.model.inject(DeviceFault(DeviceFaultKind.FAIL_PORT, 17))
    await clock.sleep(2.0)
    await executor.settle()
    (logged,) = (record.message for record in caplog.records if record.name == "orchestrrl.fabric.circuit_executor")
    assert logged.startswith("switch ocs1: ")
    assert "PORT 17 FAILED" in logged
    with pytest.raises(CircuitConflict, match="is on trial until"):
        await executor.change("ocs1", CircuitChange((THEIRS,)), ChangeMode.SAFE)
    switch.model.inject(DeviceFault(DeviceFaultKind.MEND_PORT, 17))
    await clock.sleep(10.0)
    await executor.settle()
    assert shown(switch) == frozenset(OLD)
    assert "not confirmed in time; rolled back" in results(journal)[-1][1]


async def test_partial_change_is_completed_on_trial(
    executor: CircuitExecutor, switch: VirtualSwitch, clock: VirtualClock
) -> None:
    switch.model.inject(DeviceFault(DeviceFaultKind.PARTIAL_COMMIT, items=1))
    assert (await executor.change("ocs1", CircuitChange(OLD), ChangeMode.SAFE, revert_in_s=5.0)).done
    await clock.sleep(6.0)
    assert shown(switch) == frozenset()


async def test_failed_change_leaves_no_trial(executor: CircuitExecutor, switch: VirtualSwitch) -> None:
    switch.model.inject(DeviceFault(DeviceFaultKind.STICK_MIRROR, 1))
    outcome = await executor.change("ocs1", CircuitChange(OLD), ChangeMode.SAFE, revert_in_s=5.0)
    assert outcome.rolled_back
    assert (await switch.cross_connects()).unconfirmed is None
    assert (await executor.change("ocs1", CircuitChange(OLD[1:]), ChangeMode.SAFE)).done


@pytest.mark.parametrize("is_same_process", [False, True])
async def test_restarted_daemon_undoes_unconfirmed_change(
    is_same_process: bool, executor: CircuitExecutor, journal: Journal, switch: VirtualSwitch, clock: VirtualClock
) -> None:
    """`is_same_process`: the driver's process survives the daemon's, as with `grpc`."""
    await on_trial(executor, 1000.0)
    driver = switch if is_same_process else process_of(switch, clock)
    restarted = CircuitExecutor({"ocs1": driver}, journal, clock)
    assert restarted.recover() == 1
    await restarted.settle()
    assert shown(switch) == frozenset(OLD)
    assert (await driver.cross_connects()).unconfirmed is None
    assert "was on trial and was not confirmed; rolled back" in results(journal)[-1][1]
    assert (await restarted.change("ocs1", CircuitChange(disconnect=OLD), ChangeMode.SAFE)).done


async def test_daemon_undoes_change_whose_driver_process_died(
    journal: Journal, switch: VirtualSwitch, clock: VirtualClock
) -> None:
    switches = {"ocs1": switch}
    executor = CircuitExecutor(switches, journal, clock)
    await on_trial(executor, 10.0)
    switch._stop_timer()  # no driver process is left to revert it
    switches["ocs1"] = process_of(switch, clock)
    await clock.sleep(11.0)
    await executor.settle()
    assert shown(switch) == frozenset(OLD)
    assert results(journal)[-1][0] is False


async def test_daemon_owns_its_circuits_after_restart_and_no_others(
    executor: CircuitExecutor, journal: Journal, switch: VirtualSwitch, clock: VirtualClock
) -> None:
    switch.model.add([THEIRS, CrossConnect(10, 31)])
    assert (await executor.change("ocs1", CircuitChange(OLD), ChangeMode.SAFE)).done
    assert (await executor.change("ocs1", CircuitChange(disconnect=OLD[1:]), ChangeMode.SAFE)).done
    assert (await executor.take_over("ocs1", [CrossConnect(10, 31)])).foreign == {THEIRS}
    switch.model.add([OLD[1]])  # another controller, now that the port is free
    driver = process_of(switch, clock)
    restarted = CircuitExecutor({"ocs1": driver}, journal, clock)
    restarted.recover()
    with pytest.raises(CircuitConflict, match=r"9:30: is not owned.*take-over ocs1 9:30"):
        await restarted.change("ocs1", CircuitChange(disconnect=(THEIRS,)), ChangeMode.SAFE)
    with pytest.raises(CircuitConflict, match="2:18: is not owned"):
        await restarted.change("ocs1", CircuitChange(NEW), ChangeMode.UPDATE)
    assert (await driver.cross_connects()).foreign == {THEIRS, OLD[1]}
    gone = CircuitChange(disconnect=(OLD[0], CrossConnect(10, 31)))
    assert (await restarted.change("ocs1", gone, ChangeMode.SAFE)).done
    assert shown(switch) == {THEIRS, OLD[1]}


@pytest.mark.parametrize("done", range(5))
async def test_crash_between_intent_and_result_keeps_ownership(
    done: int, executor: CircuitExecutor, journal: Journal, switch: VirtualSwitch, clock: VirtualClock
) -> None:
    assert (await executor.change("ocs1", CircuitChange(OLD), ChangeMode.SAFE)).done
    diff = await switch.plan(CircuitChange(NEW), ChangeMode.UPDATE)
    interrupted = CircuitOperation("circuits-7-1", "ocs1", diff, clock.now_s() + VALID_S)
    journal.append(clock.now_s(), EntryKind.CIRCUITS_INTENT, interrupted.id, operation_to_json(interrupted))
    for step in range(done):
        (switch.model.remove if step < 2 else switch.model.add)([(*OLD, *NEW)[step]])
    driver = process_of(switch, clock)
    restarted = CircuitExecutor({"ocs1": driver}, journal, clock)
    restarted.recover()
    await restarted.settle()
    left = NEW if done else OLD
    assert shown(switch) == frozenset(left)
    assert (await restarted.change("ocs1", CircuitChange(disconnect=left), ChangeMode.SAFE)).done
    again = CircuitExecutor({"ocs1": process_of(switch, clock)}, journal, clock)
    assert again.recover() == 0


async def test_owns_all_switch_has_only_owned_circuits(
    journal: Journal, switch: VirtualSwitch, clock: VirtualClock
) -> None:
    switch.model.add([THEIRS])
    executor = CircuitExecutor({"ocs1": switch}, journal, clock, owns_all={"ocs1"})
    assert (await executor.plan("ocs1", CircuitChange(disconnect=(THEIRS,)), ChangeMode.SAFE)).remove == (THEIRS,)
    assert (await executor.change("ocs1", CircuitChange(OLD), ChangeMode.OVERWRITE)).evicted == (THEIRS,)


async def test_take_over_rejects_missing_circuit(executor: CircuitExecutor, journal: Journal) -> None:
    with pytest.raises(CircuitConflict, match="9:30: is not on the device"):
        await executor.take_over("ocs1", [THEIRS])
    assert journal.latest_by_subject(EntryKind.CIRCUITS_OWNED) == {}


def test_ownership_outlasts_oldest_journal_entries(tmp_path: Path) -> None:
    with Journal(tmp_path / "small.sqlite", 1.0, max_entries=10) as journal:
        for switch in ("ocs1", "ocs2"):
            journal.append(1.0, EntryKind.CIRCUITS_OWNED, switch, {"pairs": ["1:17"], "taken_over": []})
        for _ in range(2500):
            journal.append(2.0, EntryKind.ROUTES, "", {})
        kept = journal.latest_by_subject(EntryKind.CIRCUITS_OWNED)
        assert {switch: entry.body["pairs"] for switch, entry in kept.items()} == {"ocs1": ["1:17"], "ocs2": ["1:17"]}
