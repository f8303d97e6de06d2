"""Changes on trial, with a virtual clock: when they revert, what prevents it, and what ends them."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ocs_drivers.base import OcsDriver
from ocs_drivers.conformance import carry_out, connected, next_event, refusal
from ocs_drivers.diff import occupants, revert_steps
from ocs_drivers.errors import CircuitConflict, DriverOutcomeUnknown, DriverRetryable
from ocs_drivers.faults import DeviceFault, DeviceFaultKind
from ocs_drivers.model import (
    ChangeMode,
    CircuitChange,
    CircuitDiff,
    Connectivity,
    CrossConnect,
    CrossConnectReading,
    DeviceCircuit,
    EventKind,
    SwitchFacts,
    Unconfirmed,
    fingerprint,
)
from ocs_drivers.virtual import VirtualSwitch
from orchestrrl.core.clock import VirtualClock

NOW = (CrossConnect(1, 17), CrossConnect(2, 18))
WANTED = (CrossConnect(1, 18), CrossConnect(2, 17))
OTHER = CrossConnect(5, 21)


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
    return VirtualSwitch("ocs1", clock=clock, command_timeout_s=0.5, lock_timeout_s=5.0, link_timeout_s=0.2)


async def on_trial(switch: OcsDriver, revert_in_s: float = 10.0) -> CircuitDiff:
    await carry_out(switch, NOW)
    diff = await switch.plan(CircuitChange(WANTED), ChangeMode.UPDATE)
    assert (await switch.commit(diff, diff.revision, revert_in_s)).done
    return diff


async def trial_of(switch: OcsDriver) -> Unconfirmed | None:
    return (await switch.cross_connects()).unconfirmed


async def test_trial_time_starts_after_commit(switch: VirtualSwitch, clock: VirtualClock) -> None:
    await carry_out(switch, NOW)
    diff = await switch.plan(CircuitChange(WANTED), ChangeMode.UPDATE)
    result = await switch.commit(diff, diff.revision, 10.0)
    assert result.revert_at_s == pytest.approx(clock.now_s() + 10.0, abs=0.02)
    await clock.sleep(9.5)
    assert await connected(switch) == frozenset(WANTED)
    await clock.sleep(1.0)
    assert await connected(switch) == frozenset(NOW)
    assert await trial_of(switch) is None


async def test_late_confirmation_reports_revert(switch: VirtualSwitch, clock: VirtualClock) -> None:
    await on_trial(switch)
    revision = (await switch.cross_connects()).revision
    await clock.sleep(11.0)
    async with refusal(CircuitConflict, "reverted", "1970-01-01 00:16", "-1:17", "+1:18"):
        await switch.confirm(revision)


async def test_trial_is_confirmed_with_present_revision(switch: VirtualSwitch) -> None:
    diff = await on_trial(switch)
    await switch.confirm((await switch.cross_connects()).revision)
    assert await trial_of(switch) is None
    assert (await switch.verify(diff)).unconfirmed is None


async def test_cancelled_commit_is_on_trial(switch: VirtualSwitch, clock: VirtualClock) -> None:
    await carry_out(switch, NOW)
    diff = await switch.plan(CircuitChange(WANTED), ChangeMode.UPDATE)
    switch.model.inject(DeviceFault(DeviceFaultKind.SLOW_ANSWER, delay_s=0.4))
    commit = asyncio.ensure_future(switch.commit(diff, diff.revision, 3.0))
    while await connected(switch) == frozenset(NOW):
        await asyncio.sleep(0)
    commit.cancel()
    with pytest.raises(asyncio.CancelledError):
        await commit
    trial = await trial_of(switch)
    assert trial is not None
    assert trial.revision is None
    await clock.sleep(4.0)
    assert await connected(switch) == frozenset(NOW)


async def test_failed_revert_is_shown_reported_and_retried(switch: VirtualSwitch, clock: VirtualClock) -> None:
    diff = await on_trial(switch)
    events = switch.watch()
    alarm = asyncio.ensure_future(next_event(events, EventKind.ALARM))
    await asyncio.sleep(0)
    for port in (17, 18):
        switch.model.inject(DeviceFault(DeviceFaultKind.DISABLE_PORT, port))  # the evicted circuits cannot be restored
    await clock.sleep(12.0)
    assert "cannot be reverted" in (await alarm).text
    await events.aclose()
    for trial in (await trial_of(switch), (await switch.verify(diff)).unconfirmed):
        assert trial is not None
        assert "PORT 17 DISABLED" in trial.failure
    other = await switch.plan(CircuitChange((OTHER,)))
    async with refusal(CircuitConflict, "cannot be reverted", "PORT 17 DISABLED"):
        await switch.commit(other, other.revision)
    for port in (17, 18):
        switch.model.inject(DeviceFault(DeviceFaultKind.MEND_PORT, port))
    await clock.sleep(40.0)
    assert await trial_of(switch) is None
    assert await connected(switch) == frozenset(NOW)


async def test_failed_revert_ends_on_confirmation_of_present_revision(
    switch: VirtualSwitch, clock: VirtualClock
) -> None:
    await on_trial(switch)
    result_revision = (await switch.cross_connects()).revision
    switch.model.inject(DeviceFault(DeviceFaultKind.DISABLE_PORT, 17))
    await clock.sleep(12.0)
    async with refusal(CircuitConflict, "read the device and confirm its revision"):
        await switch.confirm(result_revision)
    await switch.confirm((await switch.cross_connects()).revision)
    assert await trial_of(switch) is None
    assert await connected(switch) == frozenset()
    assert (await carry_out(switch, NOW[1:])).done


async def test_revert_keeps_and_reports_foreign_circuits(switch: VirtualSwitch, clock: VirtualClock) -> None:
    await on_trial(switch)
    theirs = CrossConnect(1, 30)  # takes port 1 from 1:18
    switch.model.add([theirs])
    events = switch.watch()
    alarm = asyncio.ensure_future(next_event(events, EventKind.ALARM))
    await clock.sleep(12.0)
    assert "1:17 was not restored: its ports carry 1:30" in (await alarm).text
    await events.aclose()
    assert await connected(switch) == {theirs, NOW[1]}
    assert await trial_of(switch) is None


async def test_revert_covers_only_sent_commands(switch: VirtualSwitch, clock: VirtualClock) -> None:
    diff = await switch.plan(CircuitChange((*NOW, OTHER)))
    await carry_out(switch, NOW)
    revision = (await switch.cross_connects()).revision
    await switch.commit(diff, revision, 5.0)
    await clock.sleep(6.0)
    assert await connected(switch) == frozenset(NOW)


async def test_close_reverts_trial(switch: VirtualSwitch) -> None:
    await on_trial(switch)
    await switch.close()
    assert await connected(switch) == frozenset(NOW)


async def test_close_raises_if_revert_fails(switch: VirtualSwitch) -> None:
    await on_trial(switch)
    switch.model.inject(DeviceFault(DeviceFaultKind.DISABLE_PORT, 17))
    with pytest.raises(DriverRetryable, match="cannot be reverted"):
        await switch.close()


async def test_revert_waits_until_device_is_readable(clock: VirtualClock) -> None:
    class Unreadable(VirtualSwitch):
        reachable = True

        async def cross_connects(self) -> CrossConnectReading:
            if not self.reachable:
                raise DriverOutcomeUnknown("no route to host", device=self.device)
            return await super().cross_connects()

    switch = Unreadable("ocs1", clock=clock)
    await on_trial(switch)
    switch.reachable = False
    await clock.sleep(30.0)
    switch.reachable = True
    trial = await trial_of(switch)
    assert trial is not None
    assert "no route to host" in trial.failure
    await clock.sleep(31.0)
    assert await connected(switch) == frozenset(NOW)


FACTS = SwitchFacts("v", "m", "s", "1", Connectivity.INGRESS_EGRESS, range(1, 5), range(5, 9), 0.01)
PAIRS = [CrossConnect(a, b) for a in FACTS.ingress_ports for b in FACTS.egress_ports]


def matching(pairs: Sequence[CrossConnect]) -> frozenset[CrossConnect]:
    """Return the pairs that share no port with an earlier one."""
    chosen: list[CrossConnect] = []
    for pair in pairs:
        if not any(set(FACTS.ends(pair)) & set(FACTS.ends(other)) for other in chosen):
            chosen.append(pair)
    return frozenset(chosen)


@given(
    st.lists(st.sampled_from(PAIRS), max_size=6).map(matching),
    st.lists(st.sampled_from(PAIRS), max_size=6).map(matching),
    st.lists(st.sampled_from(PAIRS), max_size=6).map(matching),
    st.sets(st.sampled_from(PAIRS)),
)
def test_revert_steps_keep_foreign_circuits_and_share_no_port(
    before: frozenset[CrossConnect],
    after: frozenset[CrossConnect],
    shown: frozenset[CrossConnect],
    foreign: set[CrossConnect],
) -> None:
    trial = Unconfirmed(None, None, tuple(sorted(before - after)), tuple(sorted(after - before)))
    reading = CrossConnectReading(
        tuple(DeviceCircuit(pair, ours=pair not in foreign) for pair in sorted(shown)), fingerprint(shown)
    )
    steps, lost = revert_steps(FACTS, trial, reading)
    left = (shown - frozenset(steps.remove)) | frozenset(steps.add)
    assert not foreign & frozenset(steps.remove)
    assert len(occupants(FACTS, left)) == 2 * len(left)
    assert frozenset(trial.added) & left <= foreign
    for pair in trial.removed:
        others = [other for other in left if set(FACTS.ends(pair)) & set(FACTS.ends(other))]
        assert (pair in left) is not any(str(pair) == line.split()[0] for line in lost)
        assert pair in left or others
