"""Circuit changes are done and verified, or undone; they resume by the switch's state from every interrupted point."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ocs_drivers.errors import CircuitConflict, DriverOutcomeUnknown, DriverPermanent, DriverRetryable
from ocs_drivers.faults import DeviceFault, DeviceFaultKind
from ocs_drivers.model import (
    ChangeMode,
    CircuitChange,
    CircuitDiff,
    CircuitState,
    CommitResult,
    CrossConnect,
    CrossConnectReading,
    DeviceCircuit,
    SwitchFacts,
)
from ocs_drivers.virtual import VirtualSwitch
from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.errors import Permanent as OrchestrRLPermanent
from orchestrrl.core.journal.store import EntryKind, Journal
from orchestrrl.fabric.circuit_change import (
    RETRY_S,
    CircuitOperation,
    compared_with_before,
    operation_from_json,
    operation_to_json,
)
from orchestrrl.fabric.circuit_executor import VALID_S, CircuitExecutor

OLD = (CrossConnect(1, 17), CrossConnect(2, 18))
NEW = (CrossConnect(1, 18), CrossConnect(2, 17))
BYSTANDER = CrossConnect(9, 30)


@pytest.fixture
async def clock() -> AsyncIterator[VirtualClock]:
    clock = VirtualClock(1000.0)

    async def run() -> None:
        while True:
            await clock.advance(0.001)

    running = asyncio.create_task(run())
    yield clock
    running.cancel()


@pytest.fixture
def switch(clock: VirtualClock) -> VirtualSwitch:
    return VirtualSwitch("ocs1", clock=clock, command_timeout_s=0.2, lock_timeout_s=0.5, link_timeout_s=0.2)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "journal.sqlite", 1000.0) as journal:
        yield journal


@pytest.fixture
def executor(switch: VirtualSwitch, journal: Journal, clock: VirtualClock) -> CircuitExecutor:
    return CircuitExecutor({"ocs1": switch}, journal, clock)


def written(journal: Journal) -> list[tuple[str, bool | None]]:
    kinds = (EntryKind.CIRCUITS_INTENT, EntryKind.CIRCUITS_RESULT)
    return [(entry.kind, entry.body.get("done")) for entry in journal.tail(100, kinds)]


async def shown(switch: VirtualSwitch) -> frozenset[CrossConnect]:
    return (await switch.cross_connects()).cross_connects


async def connect(executor: CircuitExecutor, *pairs: CrossConnect, mode: ChangeMode = ChangeMode.SAFE) -> None:
    assert (await executor.change("ocs1", CircuitChange(pairs), mode)).done


async def test_change_is_journalled_before_and_after(executor: CircuitExecutor, journal: Journal) -> None:
    outcome = await executor.change("ocs1", CircuitChange(OLD), ChangeMode.SAFE)
    assert outcome.done
    assert written(journal) == [("circuits.intent", None), ("circuits.result", True)]
    intent, result = journal.tail(2, ("circuits.intent", "circuits.result"))
    assert intent.body["add"] == ["1:17", "2:18"]
    assert [item["cross_connect"] for item in result.body["items"]] == ["1:17", "2:18"]
    assert result.subject == intent.subject == outcome.operation == f"circuits-{journal.generation}-1"
    assert executor.open == ()


async def test_unneeded_change_is_not_journalled(executor: CircuitExecutor, journal: Journal) -> None:
    await connect(executor, *OLD)
    outcome = await executor.change("ocs1", CircuitChange(OLD), ChangeMode.SAFE)
    assert outcome.done
    assert outcome.items == ()
    assert len(written(journal)) == 2


async def test_outcome_lists_evictions(executor: CircuitExecutor) -> None:
    await connect(executor, *OLD, BYSTANDER)
    outcome = await executor.change("ocs1", CircuitChange(NEW[:1]), ChangeMode.UPDATE)
    assert outcome.evicted == OLD


async def test_refused_change_leaves_switch_unchanged(
    executor: CircuitExecutor, journal: Journal, switch: VirtualSwitch
) -> None:
    await connect(executor, *OLD)
    with pytest.raises(CircuitConflict, match="1:17"):
        await executor.change("ocs1", CircuitChange(NEW), ChangeMode.SAFE)
    with pytest.raises(CircuitConflict, match="planned for revision 7"):
        await executor.change("ocs1", CircuitChange((BYSTANDER,)), ChangeMode.SAFE, expect_revision=7)
    assert await shown(switch) == frozenset(OLD)
    assert len(written(journal)) == 2


async def test_partial_commit_is_completed(executor: CircuitExecutor, switch: VirtualSwitch) -> None:
    for silent in (False, True):
        switch.model.inject(DeviceFault(DeviceFaultKind.PARTIAL_COMMIT, items=1, silent=silent))
        outcome = await executor.change("ocs1", CircuitChange(OLD), ChangeMode.OVERWRITE)
        assert outcome.done, outcome
        assert await shown(switch) == frozenset(OLD)
        await executor.change("ocs1", CircuitChange(disconnect=OLD), ChangeMode.SAFE)


async def test_failed_change_is_rolled_back_as_a_whole(
    executor: CircuitExecutor, journal: Journal, switch: VirtualSwitch
) -> None:
    await connect(executor, *OLD, BYSTANDER)
    switch.model.inject(DeviceFault(DeviceFaultKind.STICK_MIRROR, 3))
    outcome = await executor.change(
        "ocs1", CircuitChange((CrossConnect(1, 18), CrossConnect(3, 17))), ChangeMode.UPDATE
    )
    assert not outcome.done
    assert outcome.rolled_back
    assert "add 3:17: the device shows it as tuning" in outcome.detail
    assert not any(item.done for item in outcome.items)
    assert await shown(switch) == {*OLD, BYSTANDER}
    assert written(journal)[-1] == ("circuits.result", False)


async def test_change_that_cannot_be_undone_reports_switch_state(journal: Journal, clock: VirtualClock) -> None:
    # Port 17 fails while the commit waits for the stuck mirror of port 2: neither completion nor rollback is possible.
    faults = [{"at_s": 0.0, "kind": "stick_mirror", "port": 2}, {"at_s": 0.5, "kind": "fail_port", "port": 17}]
    switch = VirtualSwitch("ocs1", clock=clock, faults=faults)
    executor = CircuitExecutor({"ocs1": switch}, journal, clock)
    await connect(executor, OLD[0])
    outcome = await executor.change("ocs1", CircuitChange((OLD[1],), (OLD[0],)), ChangeMode.SAFE)
    assert not outcome.done
    assert not outcome.rolled_back
    assert "add 2:18: the device shows it as tuning" in outcome.detail
    assert "not rolled back: add 1:17" in outcome.detail
    assert "PORT 17 FAILED" in outcome.detail
    assert await shown(switch) == frozenset()
    assert executor.open == ()


async def test_change_without_light_is_reported_but_stays_connected(
    executor: CircuitExecutor, switch: VirtualSwitch
) -> None:
    switch.model.inject(DeviceFault(DeviceFaultKind.UNPLUG, 17))
    outcome = await executor.change("ocs1", CircuitChange(OLD), ChangeMode.SAFE)
    assert outcome.done
    assert outcome.detail == "in place, but no light arrives: 1:17"
    assert outcome.items[0].tuned_s is not None
    assert outcome.items[0].link_up_s is None


def operation(diff: CircuitDiff, valid_until_s: float) -> CircuitOperation:
    return CircuitOperation("circuits-7-1", "ocs1", diff, valid_until_s)


@pytest.mark.parametrize("expired", [False, True])
@pytest.mark.parametrize("done", range(5))
async def test_restarted_daemon_ends_change_from_every_point(
    done: int, expired: bool, switch: VirtualSwitch, journal: Journal, clock: VirtualClock
) -> None:
    """The order was journalled, `done` of its four steps were carried out, and then the daemon died."""
    executor = CircuitExecutor({"ocs1": switch}, journal, clock)
    await connect(executor, *OLD, BYSTANDER)
    diff = await switch.plan(CircuitChange(NEW), ChangeMode.UPDATE)
    for step in range(done):
        change = CircuitChange(disconnect=(OLD[step],)) if step < 2 else CircuitChange((NEW[step - 2],))
        part = await switch.plan(change)
        await switch.commit(part, part.revision)
    interrupted = operation(diff, clock.now_s() + (-1.0 if expired else VALID_S))
    journal.append(clock.now_s(), EntryKind.CIRCUITS_INTENT, interrupted.id, operation_to_json(interrupted))

    restarted = CircuitExecutor({"ocs1": switch}, journal, clock)
    assert restarted.recover() == 1
    await restarted.settle()

    is_finished = done == 4 or (done > 0 and not expired)
    assert await shown(switch) == {*(NEW if is_finished else OLD), BYSTANDER}
    assert written(journal)[-1] == ("circuits.result", is_finished)
    assert restarted.open == ()
    before = journal.tail(100)
    again = CircuitExecutor({"ocs1": switch}, journal, clock)
    assert again.recover() == 0
    await again.settle()
    assert journal.tail(100) == before


@pytest.mark.parametrize(("by", "ended"), [("settling", [True]), ("change", [True, True]), ("commit", [True, False])])
async def test_unknown_outcome_stays_open_until_switch_is_read(
    journal: Journal, clock: VirtualClock, by: str, ended: list[bool]
) -> None:
    class Unreadable(VirtualSwitch):
        """Accepts a commit and is unreachable afterwards."""

        reachable = True

        async def cross_connects(self):  # type: ignore[no-untyped-def]
            if not self.reachable:
                raise DriverRetryable("no route to host", device=self.device)
            return await super().cross_connects()

        async def commit(self, diff, expect_revision):  # type: ignore[no-untyped-def]
            result = await super().commit(diff, expect_revision)
            if diff.add != OLD:
                return result
            self.reachable = False
            raise DriverOutcomeUnknown("the connection broke", device=self.device)

    lost = Unreadable("ocs1", clock=clock)
    executor = CircuitExecutor({"ocs1": lost}, journal, clock)
    prepared, later = [await executor.prepare("ocs1", CircuitChange((BYSTANDER,)), 60.0) for _ in range(2)]
    with pytest.raises(DriverOutcomeUnknown):
        await executor.change("ocs1", CircuitChange(OLD), ChangeMode.SAFE)
    assert len(executor.open) == 1
    with pytest.raises(DriverRetryable, match="no route to host"):
        await executor.change("ocs1", CircuitChange((BYSTANDER,)), ChangeMode.SAFE)
    await executor.settle()
    with pytest.raises(DriverRetryable, match="no route to host"):
        await executor.commit(prepared)
    assert len(executor.open) == 1
    (refused,) = journal.tail(100, (EntryKind.CIRCUITS_RESULT,))
    assert (refused.subject, refused.body["done"]) == (prepared.id, False)
    assert refused.body["detail"].startswith("was not begun, the previous change is still open: ocs1: no route to host")
    lost.reachable = True
    if by == "settling":
        await executor.settle()
    elif by == "change":
        assert (await executor.change("ocs1", CircuitChange((BYSTANDER,)), ChangeMode.SAFE)).done
    else:  # the switch has changed since it was prepared
        with pytest.raises(CircuitConflict):
            await executor.commit(later)
    assert executor.open == ()
    assert [entry.body["done"] for entry in journal.tail(100, (EntryKind.CIRCUITS_RESULT,))] == [False, *ended]


async def test_change_with_later_conflict_is_left_alone(
    switch: VirtualSwitch, journal: Journal, clock: VirtualClock
) -> None:
    executor = CircuitExecutor({"ocs1": switch}, journal, clock)
    await connect(executor, *OLD)
    diff = await switch.plan(CircuitChange(NEW), ChangeMode.UPDATE)
    await executor.change("ocs1", CircuitChange(disconnect=OLD), ChangeMode.SAFE)
    await connect(executor, CrossConnect(1, 20))
    interrupted = operation(diff, clock.now_s() + VALID_S)
    journal.append(clock.now_s(), EntryKind.CIRCUITS_INTENT, interrupted.id, operation_to_json(interrupted))
    restarted = CircuitExecutor({"ocs1": switch}, journal, clock)
    restarted.recover()
    await restarted.settle()
    assert await shown(switch) == {CrossConnect(1, 20)}
    (result,) = journal.tail(1)
    assert "conflicted with another change" in result.body["detail"]
    assert not result.body["done"]


async def test_change_on_removed_switch_is_closed_with_reason(journal: Journal, clock: VirtualClock) -> None:
    gone = operation(CircuitDiff(ChangeMode.SAFE, 1, frozenset(), (), OLD), clock.now_s() + VALID_S)
    journal.append(clock.now_s(), EntryKind.CIRCUITS_INTENT, gone.id, operation_to_json(gone))
    executor = CircuitExecutor({}, journal, clock)
    assert executor.recover() == 1
    await executor.settle()
    assert journal.tail(1)[0].body["detail"] == "the switch is no longer configured"


async def test_changes_on_one_switch_are_serialised(executor: CircuitExecutor, switch: VirtualSwitch) -> None:
    pairs = [CrossConnect(port, port + 16) for port in range(1, 9)]
    outcomes = await asyncio.gather(
        *(executor.change("ocs1", CircuitChange((pair,)), ChangeMode.SAFE) for pair in pairs)
    )
    assert all(outcome.done for outcome in outcomes)
    assert await shown(switch) == frozenset(pairs)


def test_operation_round_trips_through_journal() -> None:
    diff = CircuitDiff(ChangeMode.UPDATE, 12345, frozenset({*OLD, BYSTANDER}), OLD, NEW, OLD[:1])
    original = operation(diff, 1060.5)
    assert operation_from_json(original.id, operation_to_json(original)) == original


class ArmingSwitch(VirtualSwitch):
    """Prepares commits in advance, and records its calls with the number of journal entries at the time."""

    noted: list[tuple[str, int]]
    journal: Journal
    refuses = False

    async def arm(self, diff: CircuitDiff, expect_revision: int, revert_in_s: float | None = None) -> "ArmedHere":
        self.note("arm")
        if self.refuses:
            raise DriverRetryable("its process is not there", device=self.device)
        return ArmedHere(self, diff, expect_revision)

    def note(self, what: str) -> None:
        self.noted.append((what, len(written(self.journal))))


class ArmedHere:
    def __init__(self, switch: ArmingSwitch, diff: CircuitDiff, revision: int) -> None:
        self._switch, self._diff, self._revision = switch, diff, revision

    async def begin(self) -> CommitResult:
        self._switch.note("begin")
        return await self._switch.commit(self._diff, self._revision)

    def disarm(self) -> None:
        self._switch.note("disarm")


@pytest.fixture
def arming(journal: Journal, clock: VirtualClock) -> ArmingSwitch:
    switch = ArmingSwitch("ocs1", clock=clock)
    switch.noted, switch.journal = [], journal
    return switch


async def test_prepared_change_is_armed_before_journalling(
    arming: ArmingSwitch, journal: Journal, clock: VirtualClock
) -> None:
    executor = CircuitExecutor({"ocs1": arming}, journal, clock)
    operation = await executor.prepare("ocs1", CircuitChange(OLD), 60.0)
    assert arming.noted == [("arm", 0)]
    assert written(journal) == [("circuits.intent", None)]
    assert (await executor.commit(operation)).done
    assert arming.noted[1:] == [("begin", 1), ("disarm", 2)]
    assert await shown(arming) == frozenset(OLD)
    unwanted = await executor.prepare("ocs1", CircuitChange(disconnect=OLD), 60.0)
    executor.abandon(unwanted, "not wanted")
    executor.abandon(unwanted, "not wanted")
    assert written(journal)[2:] == [("circuits.intent", None), ("circuits.result", False)]
    assert [what for what, _ in arming.noted[3:]] == ["arm", "disarm"]
    with pytest.raises(CircuitConflict, match="already begun or been abandoned"):
        await executor.commit(unwanted)
    assert await shown(arming) == frozenset(OLD)


async def test_change_that_cannot_be_armed_is_committed_anyway(
    arming: ArmingSwitch, journal: Journal, clock: VirtualClock
) -> None:
    executor = CircuitExecutor({"ocs1": arming}, journal, clock)
    arming.refuses = True
    operation = await executor.prepare("ocs1", CircuitChange(OLD), 60.0)
    assert (await executor.commit(operation)).done
    assert [what for what, _ in arming.noted] == ["arm"]


async def test_change_that_cannot_be_journalled_is_disarmed(
    arming: ArmingSwitch, journal: Journal, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = CircuitExecutor({"ocs1": arming}, journal, clock)

    def full(*_: object) -> int:
        raise OrchestrRLPermanent("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(journal, "append", full)
        with pytest.raises(OrchestrRLPermanent):
            await executor.prepare("ocs1", CircuitChange(OLD), 60.0)
    assert [what for what, _ in arming.noted] == ["arm", "disarm"]


async def test_defect_of_one_switch_is_counted_and_others_are_settled(journal: Journal, clock: VirtualClock) -> None:
    class Odd(VirtualSwitch):
        odd = False

        async def facts(self) -> SwitchFacts:
            if self.odd:
                raise KeyError("a fault of ours")
            return await super().facts()

    odd, sound = Odd("a", clock=clock), VirtualSwitch("b", clock=clock)
    before = CircuitExecutor({"a": odd, "b": sound}, journal, clock)
    for switch in "ab":  # journalled before the daemon stopped
        await before.prepare(switch, CircuitChange(OLD), 60.0)
    odd.odd = True
    executor = CircuitExecutor({"a": odd, "b": sound}, journal, clock)
    assert (executor.recover(), executor.defects) == (2, 0)
    running = asyncio.create_task(executor.run())
    await clock.sleep(2 * RETRY_S)
    assert [operation.switch for operation in executor.open] == ["a"]
    assert executor.defects >= 2
    odd.odd = False
    await clock.sleep(2 * RETRY_S)
    assert executor.open == ()
    assert not running.done()
    running.cancel()


async def test_settling_continues_after_full_journal_and_defect(
    executor: CircuitExecutor, journal: Journal, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    unwanted = await executor.prepare("ocs1", CircuitChange(OLD), 60.0)
    error: Exception = OrchestrRLPermanent("database or disk is full")

    def failing(*_: object) -> int:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(journal, "append", failing)
        executor.abandon(unwanted, "not wanted")
        running = asyncio.create_task(executor.run())
        await clock.sleep(RETRY_S * 0.5)
        assert executor.defects == 0
        error = KeyError("a fault of ours")
        await clock.sleep(RETRY_S)
        assert executor.defects == 1
    await clock.sleep(RETRY_S)
    (result,) = journal.tail(100, (EntryKind.CIRCUITS_RESULT,))
    assert (result.body["done"], result.body["detail"]) == (False, "was not begun: not wanted")
    await clock.sleep(RETRY_S)
    assert len(journal.tail(100, (EntryKind.CIRCUITS_RESULT,))) == 1
    assert not running.done()
    running.cancel()


class Credulous(VirtualSwitch):
    """Reports a rollback as done without sending or reading anything."""

    async def rollback(self, diff: CircuitDiff) -> CommitResult:
        return CommitResult((), diff.revision, 0)


class LosesTheLineAfterRollback(VirtualSwitch):
    is_lost = False

    async def rollback(self, diff: CircuitDiff) -> CommitResult:
        result = await super().rollback(diff)
        self.is_lost = True
        return result

    async def cross_connects(self) -> CrossConnectReading:
        if self.is_lost:
            raise DriverRetryable("no route to host", device=self.device)
        return await super().cross_connects()


async def test_rollback_is_read_back_before_success_is_reported(clock: VirtualClock, journal: Journal) -> None:
    switch = Credulous("ocs1", clock=clock, link_timeout_s=0.2)
    executor = CircuitExecutor({"ocs1": switch}, journal, clock)
    switch.model.inject(DeviceFault(DeviceFaultKind.STICK_MIRROR, OLD[0].ingress_port))
    outcome = await executor.change("ocs1", CircuitChange(OLD), ChangeMode.SAFE)
    assert not outcome.done
    assert not outcome.rolled_back
    assert outcome.detail.endswith("rolled back, but the switch still differs: 1:17 is up; 2:18 is up")


async def test_refused_rollback_ends_change_with_reason(
    executor: CircuitExecutor, switch: VirtualSwitch, journal: Journal
) -> None:
    async def refused(diff: CircuitDiff) -> CommitResult:
        raise DriverPermanent("write protected", device="ocs1")

    switch.rollback = refused  # type: ignore[method-assign]
    switch.model.inject(DeviceFault(DeviceFaultKind.STICK_MIRROR, OLD[0].ingress_port))
    outcome = await executor.change("ocs1", CircuitChange(OLD), ChangeMode.SAFE)
    assert (outcome.done, outcome.rolled_back) == (False, False)
    assert outcome.detail.endswith("; not rolled back: ocs1: write protected")
    assert [item.done for item in outcome.items] == [False, True]
    assert written(journal)[-1] == ("circuits.result", False)
    assert executor.open == ()


async def test_rollback_that_cannot_be_read_back_stays_open(clock: VirtualClock, journal: Journal) -> None:
    switch = LosesTheLineAfterRollback("ocs1", clock=clock, link_timeout_s=0.2)
    executor = CircuitExecutor({"ocs1": switch}, journal, clock)
    switch.model.inject(DeviceFault(DeviceFaultKind.STICK_MIRROR, OLD[0].ingress_port))
    with pytest.raises(DriverOutcomeUnknown, match=r"could not be read afterwards.*no route to host"):
        await executor.change("ocs1", CircuitChange(OLD), ChangeMode.SAFE)
    assert len(executor.open) == 1
    switch.is_lost = False
    await executor.settle()
    assert executor.open == ()
    assert_rolled_back(journal)


def assert_rolled_back(journal: Journal) -> None:
    (result,) = journal.tail(100, (EntryKind.CIRCUITS_RESULT,))
    assert result.body["detail"].startswith("add 1:17: the device shows it as tuning")
    assert result.body["detail"].endswith("; rolled back, the switch is as it was")
    assert result.body["rolled_back"]
    assert [item["done"] for item in result.body["items"]] == [False, False]
    assert [item["detail"] for item in result.body["items"]] == ["the device shows it as tuning", "rolled back"]


async def test_rollback_with_outcome_unknown_to_driver_is_journalled_as_rollback(
    switch: VirtualSwitch, executor: CircuitExecutor, journal: Journal
) -> None:
    switch.model.inject(DeviceFault(DeviceFaultKind.STICK_MIRROR, OLD[0].ingress_port))
    rollback = switch.rollback

    async def unread(diff: CircuitDiff) -> CommitResult:
        await rollback(diff)
        raise DriverOutcomeUnknown("cannot read the device after a command was sent to it", device="ocs1")

    switch.rollback = unread  # type: ignore[method-assign]
    with pytest.raises(DriverOutcomeUnknown, match="cannot read the device after"):
        await executor.change("ocs1", CircuitChange(OLD), ChangeMode.SAFE)
    await executor.settle()
    assert executor.open == ()
    assert_rolled_back(journal)


async def test_rolled_back_circuit_that_reappears_is_no_rollback(clock: VirtualClock, journal: Journal) -> None:
    switch = LosesTheLineAfterRollback("ocs1", clock=clock, link_timeout_s=0.2)
    executor = CircuitExecutor({"ocs1": switch}, journal, clock)
    switch.model.inject(DeviceFault(DeviceFaultKind.STICK_MIRROR, OLD[0].ingress_port))
    with pytest.raises(DriverOutcomeUnknown, match="could not be read afterwards"):
        await executor.change("ocs1", CircuitChange(OLD), ChangeMode.SAFE)
    switch.model.inject(DeviceFault(DeviceFaultKind.MEND_PORT, OLD[0].ingress_port))
    switch.model.add(OLD)
    switch.is_lost = False
    await clock.sleep(1.0)
    await executor.settle()
    (result,) = journal.tail(100, (EntryKind.CIRCUITS_RESULT,))
    assert (result.body["done"], result.body["rolled_back"]) == (True, False)


async def test_malformed_answer_does_not_prevent_rollback(switch: VirtualSwitch, executor: CircuitExecutor) -> None:
    switch.model.inject(DeviceFault(DeviceFaultKind.STICK_MIRROR, OLD[0].ingress_port))
    rollback, read = switch.rollback, switch.wire.read_circuits
    defects = iter([KeyError("circuits")] * 2)  # the driver retries once

    async def garbled() -> Sequence[DeviceCircuit]:
        if defect := next(defects, None):
            raise defect
        return await read()

    async def rollback_over_garbled(diff: CircuitDiff) -> CommitResult:
        switch.wire.read_circuits = garbled  # type: ignore[method-assign]
        return await rollback(diff)

    switch.rollback = rollback_over_garbled  # type: ignore[method-assign]
    with pytest.raises(DriverOutcomeUnknown, match="not been rolled back yet"):
        await executor.change("ocs1", CircuitChange(OLD), ChangeMode.SAFE)
    assert len(executor.open) == 1
    switch.model.inject(DeviceFault(DeviceFaultKind.MEND_PORT, OLD[0].ingress_port))
    await executor.settle()
    assert executor.open == ()


async def test_rollback_reports_changes_by_others(executor: CircuitExecutor, switch: VirtualSwitch) -> None:
    await connect(executor, BYSTANDER)
    switch.model.inject(DeviceFault(DeviceFaultKind.STICK_MIRROR, OLD[0].ingress_port))
    rollback = switch.rollback

    async def rollback_among_others(diff: CircuitDiff) -> CommitResult:
        switch.model.remove([BYSTANDER])
        switch.model.add([CrossConnect(8, 29)])
        return await rollback(diff)

    switch.rollback = rollback_among_others  # type: ignore[method-assign]
    outcome = await executor.change("ocs1", CircuitChange(OLD), ChangeMode.SAFE)
    assert outcome.rolled_back
    assert outcome.detail.endswith(
        "rolled back, its circuits are as they were, and others have changed since: -9:30 +8:29"
    )


PAIRS = tuple(CrossConnect(port, port + 16) for port in range(1, 7))
STATES = st.dictionaries(st.sampled_from(PAIRS), st.sampled_from(CircuitState))


@given(frozen=st.frozensets(st.sampled_from(PAIRS)), split=st.integers(0, 3), now=STATES)
def test_switch_is_reported_unchanged_only_if_it_shows_that(
    frozen: frozenset[CrossConnect], split: int, now: dict[CrossConnect, CircuitState]
) -> None:
    remove = tuple(sorted(frozen))[:split]
    add = tuple(pair for pair in PAIRS if pair not in frozen)[:split]
    diff = CircuitDiff(ChangeMode.SAFE, 0, frozen, remove, add)
    expected = compared_with_before(
        diff, CrossConnectReading(tuple(DeviceCircuit(pair, now[pair]) for pair in sorted(now)), 0)
    )
    is_as_before = now.keys() == frozen and all(now[pair] is CircuitState.TUNED for pair in remove)
    assert (expected == "the switch is as it was") is is_as_before
