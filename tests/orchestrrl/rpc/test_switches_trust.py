"""The guarantees of drivers and daemon for a network engineer: odd devices, faults of drivers."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ocs_drivers.driver import DriverTimeouts, SwitchDriver
from ocs_drivers.errors import DriverRetryable
from ocs_drivers.faults import DeviceFault, DeviceFaultKind
from ocs_drivers.model import (
    ChangeMode,
    CircuitChange,
    CircuitDiff,
    CircuitState,
    CrossConnect,
    DeviceCircuit,
    SwitchCapabilities,
)
from ocs_drivers.virtual import VirtualSwitch, VirtualSwitchWire
from orchestrrl.core.clock import VirtualClock, WallClock
from orchestrrl.core.journal.store import EntryKind, Journal
from orchestrrl.fabric.circuit_change import LATE_TIMES, RETRY_S, CircuitOperation, operation_to_json
from orchestrrl.fabric.circuit_executor import CircuitExecutor
from orchestrrl.rpc.ocs_client import GrpcSwitch
from orchestrrl.rpc.ocs_server import serve_driver
from orchestrrl.rpc.pb import control_pb2
from orchestrrl.rpc.switches_service import SwitchesService

ONE, TWO = CrossConnect(1, 17), CrossConnect(2, 18)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "journal.sqlite", 1000.0) as journal:
        yield journal


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(1000.0)


async def running(clock: VirtualClock, work: Any, step_s: float = 0.005) -> Any:
    """Return the result of the work while time advances."""

    task = asyncio.ensure_future(work)
    while not task.done():
        await clock.advance(step_s)
    return task.result()


class LateWire(VirtualSwitchWire):
    """A device that lists a circuit once it is in place, and has no other state."""

    def __init__(self, switch: VirtualSwitch, *, bulk: bool = True) -> None:
        super().__init__(switch.model, bulk=bulk)
        self.capabilities = SwitchCapabilities(bulk=bulk)

    async def read_circuits(self) -> Sequence[DeviceCircuit]:
        shown = await super().read_circuits()
        return [DeviceCircuit(each.cross_connect) for each in shown if each.state is CircuitState.TUNED]


def late(clock: VirtualClock, *, bulk: bool = True, reconfiguration_s: float = 0.2) -> tuple[SwitchDriver, LateWire]:
    device = VirtualSwitch("late", clock=clock, reconfiguration_s=reconfiguration_s)
    wire = LateWire(device, bulk=bulk)
    return SwitchDriver("late", wire, clock=clock, limits=DriverTimeouts(command_s=1.0, link_s=0.1)), wire


@pytest.mark.parametrize("bulk", [True, False])
async def test_late_listing_after_lost_connection_counts(journal: Journal, clock: VirtualClock, bulk: bool) -> None:
    """The connection breaks after the command was accepted, while the mirrors are moving."""
    driver, wire = late(clock, bulk=bulk)
    wire._model.inject(DeviceFault(DeviceFaultKind.DROP_CONNECTION))
    executor = CircuitExecutor({"late": driver}, journal, clock)
    outcome = await running(clock, executor.change("late", CircuitChange((ONE, TWO)), ChangeMode.SAFE))
    assert outcome.done, outcome
    assert sum("connect 1:17" in setter for setter in wire._model.setters) == 1, wire._model.setters


async def test_last_command_of_earlier_daemon_may_take_effect(journal: Journal, clock: VirtualClock) -> None:
    """The earlier daemon dies with the command; the device shows no effect before the mirrors are in place."""
    driver, wire = late(clock, reconfiguration_s=120.0)
    diff = await running(clock, driver.plan(CircuitChange((ONE,))))
    operation = CircuitOperation("circuits-0-1", "late", diff, clock.now_s() + 60.0)
    journal.append(clock.now_s(), EntryKind.CIRCUITS_INTENT, operation.id, operation_to_json(operation))
    wire._model.add([ONE])
    executor = CircuitExecutor({"late": driver}, journal, clock)
    executor.recover()
    await running(clock, executor.settle(), 1.0)
    for _ in range(300):
        await clock.advance(1.0)
    await running(clock, executor.settle(), 1.0)
    reading = await running(clock, driver.cross_connects())
    results = [(entry.body["done"], entry.body["detail"]) for entry in journal.tail(9, (EntryKind.CIRCUITS_RESULT,))]
    # The change is done or undone, but never reported as not begun and then in effect.
    assert (reading.cross_connects == {ONE}) is results[-1][0], results


def interrupted(driver: SwitchDriver, journal: Journal, clock: VirtualClock) -> CircuitExecutor:
    """Return a daemon started after one that died during a change of its switch."""
    diff = CircuitDiff(ChangeMode.SAFE, 0, frozenset(), (), (ONE,))
    operation = CircuitOperation("circuits-0-1", driver.device, diff, clock.now_s() + 600.0)
    journal.append(clock.now_s(), EntryKind.CIRCUITS_INTENT, operation.id, operation_to_json(operation))
    executor = CircuitExecutor({driver.device: driver}, journal, clock)
    executor.recover()
    return executor


@pytest.mark.parametrize("commanded", [True, False])
@pytest.mark.parametrize("reconfiguration_s", [0.4, 2.0])
async def test_pending_effect_is_awaited_and_read_again(
    journal: Journal, clock: VirtualClock, reconfiguration_s: float, commanded: bool
) -> None:
    driver, wire = late(clock, reconfiguration_s=reconfiguration_s)
    executor = interrupted(driver, journal, clock)
    wire._model.add([ONE] if commanded else [])
    await running(clock, executor.settle())
    assert clock.now_s() - 1000.0 == pytest.approx(LATE_TIMES * reconfiguration_s, abs=0.05)
    (result,) = journal.tail(9, (EntryKind.CIRCUITS_RESULT,))
    assert result.body["done"] is commanded
    assert result.body["detail"].startswith("was found carried out" if commanded else "was not begun")


async def test_change_stays_open_while_effect_may_be_late(journal: Journal, clock: VirtualClock) -> None:
    driver, _ = late(clock, reconfiguration_s=120.0)
    executor = interrupted(driver, journal, clock)
    for left_s in (240.0, 140.0, 40.0):
        words = f"no circuit of circuits-0-1 is listed yet; one may still appear within {left_s:.0f} s"
        with pytest.raises(DriverRetryable, match=words) as caught:
            await executor.change("late", CircuitChange((TWO,)), ChangeMode.SAFE)
        assert caught.value.after_s == left_s
        await clock.advance(100.0 if left_s > 40.0 else left_s - RETRY_S)
    settling = asyncio.ensure_future(executor.settle())
    await clock.advance(RETRY_S - 0.1)
    assert executor.open
    await clock.advance(0.1)
    await settling
    assert executor.open == ()


async def test_device_with_tuned_state_needs_no_wait(journal: Journal, clock: VirtualClock) -> None:
    switch = VirtualSwitch("s", clock=clock, reconfiguration_s=2.0)
    executor = interrupted(switch, journal, clock)
    reads, read = [], switch.wire.read_circuits

    async def counted() -> Sequence[DeviceCircuit]:
        reads.append(clock.now_s())
        return await read()

    switch.wire.read_circuits = counted  # type: ignore[method-assign]
    await running(clock, executor.settle())
    assert executor.open == ()
    assert len(reads) == 1
    assert clock.now_s() < 1000.1


async def test_failed_circuit_is_not_in_effect(journal: Journal, clock: VirtualClock) -> None:
    switch = VirtualSwitch("s", clock=clock, link_timeout_s=0.1)
    executor = CircuitExecutor({"s": switch}, journal, clock)
    assert (await running(clock, executor.change("s", CircuitChange((ONE,)), ChangeMode.SAFE))).done
    switch.model.inject(DeviceFault(DeviceFaultKind.FAIL_PORT, 17))
    outcome = await running(clock, executor.change("s", CircuitChange((ONE,)), ChangeMode.SAFE))
    assert not outcome.done
    assert "1:17" in outcome.detail
    assert "failed" in outcome.detail


class Broken(VirtualSwitch):
    """A driver with a defect."""

    async def facts(self) -> NoReturn:
        raise KeyError("serial-no")

    async def close(self) -> None:
        raise RuntimeError("loop is closed")


async def test_exception_of_one_driver_is_shown_with_its_switch(journal: Journal, clock: VirtualClock) -> None:
    closed = []

    class Sound(VirtualSwitch):
        async def close(self) -> None:
            closed.append(self.device)

    switches = {"broken": Broken("broken", clock=clock), "sound": Sound("sound", clock=clock)}
    service = SwitchesService(switches, CircuitExecutor(switches, journal, clock))
    answer = await running(clock, service.ListSwitches(control_pb2.ListSwitchesRequest(), _context()))
    assert [(each.switch_id, each.reachable) for each in answer.switches] == [("broken", False), ("sound", True)]
    assert "KeyError" in answer.switches[0].detail
    await running(clock, service.close())
    assert closed == ["sound"]


def _context() -> Any:
    return None


class FailsAfterwards(VirtualSwitch):
    """A driver that sends the command and then raises."""

    async def commit(self, diff: CircuitDiff, expect_revision: int, revert_in_s: float | None = None) -> NoReturn:
        await super().commit(diff, expect_revision, revert_in_s)
        raise ValueError("invalid literal for int() with base 10: ''")


async def test_exception_after_sending_is_not_a_refusal() -> None:
    """Check over gRPC that the device is read after an error in the driver process."""
    device = FailsAfterwards("s", reconfiguration_s=0.001, link_timeout_s=0.1)
    server, port = await serve_driver(device, "127.0.0.1:0")
    driver = GrpcSwitch("s", target=f"127.0.0.1:{port}", clock=WallClock())
    try:
        diff = await driver.plan(CircuitChange((ONE,)))
        result = await driver.commit(diff, diff.revision)
        assert result.done, result
        assert (await driver.cross_connects()).foreign == frozenset()
    finally:
        await driver.close()
        await server.stop(None)
