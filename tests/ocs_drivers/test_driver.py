"""SwitchDriver over a wire: the writer's lock, broken sessions, cancelled commits."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from ocs_drivers.conformance import carry_out
from ocs_drivers.driver import DriverTimeouts, SwitchDriver
from ocs_drivers.errors import DriverOutcomeUnknown, DriverPermanent, DriverRetryable
from ocs_drivers.faults import DeviceFault, DeviceFaultKind
from ocs_drivers.model import Action, CircuitChange, CrossConnect, DeviceCircuit
from ocs_drivers.virtual import VirtualSwitch, VirtualSwitchWire
from orchestrrl.core.clock import VirtualClock

ONE, TWO = CrossConnect(1, 17), CrossConnect(2, 18)


@pytest.fixture
async def clock() -> AsyncIterator[VirtualClock]:
    clock = VirtualClock(1000.0)

    async def run() -> None:
        while True:
            await clock.advance(0.001)

    running = asyncio.create_task(run())
    yield clock
    running.cancel()


class RecordingWire(VirtualSwitchWire):
    """Records the calls it receives; can be made unreadable once a setter was sent."""

    def __init__(self, switch: VirtualSwitch, *, bulk: bool = True) -> None:
        super().__init__(switch.model, bulk=bulk)
        self.calls: list[str] = []
        self.goes_silent = False
        self.defects: dict[str, Exception] = {}  # by command; raised once
        self.under_way = 0

    async def open(self) -> None:
        self.calls.append("open")
        self._fail_at("open")
        await super().open()

    async def read_circuits(self) -> Sequence[DeviceCircuit]:
        self.under_way += 1
        assert self.under_way == 1, "two commands share a session"
        try:
            await asyncio.sleep(0)
            if self.goes_silent and "add" in self.calls:
                raise DriverRetryable("no route to host", answer="EHOSTUNREACH")
            self._fail_at("read")
            return await super().read_circuits()
        finally:
            self.under_way -= 1

    async def set(self, action: Action, pairs: Sequence[CrossConnect]) -> None:
        self.calls.append(action)
        self._fail_at(action)
        await super().set(action, pairs)

    def _fail_at(self, command: str) -> None:
        if defect := self.defects.pop(command, None):
            raise defect


@pytest.fixture
def wire(clock: VirtualClock) -> RecordingWire:
    return RecordingWire(VirtualSwitch("ocs1", clock=clock, reconfiguration_s=0.05))


@pytest.fixture
def driver(wire: RecordingWire, clock: VirtualClock) -> SwitchDriver:
    return SwitchDriver("ocs1", wire, clock=clock, limits=DriverTimeouts(command_s=0.5, lock_s=0.5))


async def test_driver_connects_at_first_call(driver: SwitchDriver, wire: RecordingWire) -> None:
    assert wire.calls == []
    await driver.facts()
    await driver.cross_connects()
    assert wire.calls == ["open"]


async def test_session_carries_one_command_at_a_time(driver: SwitchDriver) -> None:
    await asyncio.gather(*(driver.cross_connects() for _ in range(5)), carry_out(driver, (ONE,)))


async def test_second_writer_waits_and_raises_retryable(driver: SwitchDriver, wire: RecordingWire) -> None:
    diff = await driver.plan(CircuitChange((ONE,)))
    wire._model.inject(DeviceFault(DeviceFaultKind.STICK_MIRROR, 1))  # the first commit waits a second for the mirror
    first = asyncio.ensure_future(driver.commit(diff, diff.revision))
    await asyncio.sleep(0)
    with pytest.raises(DriverRetryable, match="another change is under way"):
        await driver.commit(diff, diff.revision)
    assert not (await first).done
    assert (await driver.rollback(diff)).done


async def test_unreadable_device_after_commit_is_outcome_unknown(driver: SwitchDriver, wire: RecordingWire) -> None:
    diff = await driver.plan(CircuitChange((ONE,)))
    wire.goes_silent = True
    with pytest.raises(DriverOutcomeUnknown) as unknown:
        await driver.commit(diff, diff.revision)
    assert (unknown.value.device, unknown.value.answer) == ("ocs1", "EHOSTUNREACH")
    wire.goes_silent = False
    assert (await driver.verify(diff)).missing == ()


@pytest.mark.parametrize("command", ["open", "read"])
async def test_read_is_retried_after_unexpected_answer(command: str, driver: SwitchDriver, wire: RecordingWire) -> None:
    wire.defects = {command: KeyError("circuits")}
    assert (await driver.cross_connects()).circuits == ()
    assert wire.calls == ["open", "open"]  # the session with an interrupted exchange was not reused


async def test_unexpected_answer_to_setter_is_outcome_unknown(driver: SwitchDriver, wire: RecordingWire) -> None:
    diff = await driver.plan(CircuitChange((ONE,)))
    wire.defects = {"add": KeyError("status")}
    wire.goes_silent = True
    with pytest.raises(DriverOutcomeUnknown):
        await driver.commit(diff, diff.revision)


@pytest.mark.parametrize("command", ["read", "add"])
async def test_assertion_error_of_wire_is_not_translated(
    command: str, driver: SwitchDriver, wire: RecordingWire
) -> None:
    wire.defects = {command: AssertionError("two commands share a session")}
    with pytest.raises(AssertionError, match="share a session"):
        await carry_out(driver, (ONE,))


async def test_cancelled_commit_releases_writer_lock(driver: SwitchDriver, wire: RecordingWire) -> None:
    diff = await driver.plan(CircuitChange((ONE,)))
    wire._model.inject(DeviceFault(DeviceFaultKind.SLOW_ANSWER, delay_s=0.4))
    commit = asyncio.ensure_future(driver.commit(diff, diff.revision))
    while "add" not in wire.calls:
        await asyncio.sleep(0)
    commit.cancel()
    with pytest.raises(asyncio.CancelledError):
        await commit
    assert (await carry_out(driver, (ONE, TWO))).done
    assert wire.calls.count("open") == 2  # the session with an interrupted exchange was not reused


async def test_first_refusal_ends_commit_without_bulk(clock: VirtualClock) -> None:
    wire = RecordingWire(VirtualSwitch("ocs1", clock=clock), bulk=False)
    driver = SwitchDriver("ocs1", wire, clock=clock)
    diff = await driver.plan(CircuitChange((ONE, TWO, CrossConnect(3, 19))))
    wire._model.inject(DeviceFault(DeviceFaultKind.FAIL_PORT, 18))
    result = await driver.commit(diff, diff.revision)
    assert [item.done for item in result.items] == [True, False, False]
    assert "PORT 18 FAILED" in result.items[1].detail
    assert result.items[2].detail == "not sent, because an earlier command failed"
    assert result.commands_sent == 2


async def test_wire_refuses_empty_list(clock: VirtualClock, wire: RecordingWire) -> None:
    await wire.open()
    for action in Action:
        with pytest.raises(ValueError, match="must not be empty"):
            await wire.set(action, [])


def test_error_text_has_device_command_and_answer() -> None:
    error = DriverPermanent("refused", device="ocs1", command="connect 1:17", answer="PORT 17 FAILED")
    assert str(error) == "ocs1: refused; command: connect 1:17; device answered: PORT 17 FAILED"


def test_timeouts_are_validated() -> None:
    with pytest.raises(ValueError, match="lock_s must be > 0, got 0"):
        DriverTimeouts(lock_s=0)
