"""A pause ends with the fleet at rest or with requests going on, wherever it is interrupted, and reports which."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from barrier_harness import Gateway, Harness

from orchestrrl.core.errors import Permanent, Retryable
from orchestrrl.core.journal.kinds import FLEET_PAUSES
from orchestrrl.core.journal.store import EntryKind
from orchestrrl.core.operation_journal import left_open
from orchestrrl.core.operations import CloseBarrier, OpenBarrier, PauseMode
from orchestrrl.fleet.pause_barrier import PauseRequest
from orchestrrl.fleet.reports import BarrierPhase

OWN = (EntryKind.BARRIER, EntryKind.PAUSE_BEGAN, EntryKind.PAUSE_STEP, EntryKind.PAUSE_ENDED)
ENTRIES = 8  # of a pause that goes well: its lease, the intent, two for each of two steps, at rest, the result
AT_REST = 6


class Killed(Exception):
    """The daemon died."""


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[Harness]:
    harness = Harness(tmp_path / "journal.sqlite")
    harness.start()
    yield harness
    assert harness.journal is not None
    harness.journal.close()


def limit(harness: Harness, entries: int, error: type[Exception], *arguments: Any) -> None:
    """Raise the error instead of writing more than so many entries of a pause, and at each one after that."""
    journal, written = harness.journal, 0
    assert journal is not None
    append = journal.append

    def limited(at_s: float, kind: EntryKind, *body: Any, **how: Any) -> int:
        nonlocal written
        if written >= entries and kind in OWN:
            raise error(*arguments)
        written += kind in OWN
        return append(at_s, kind, *body, **how)

    journal.append = limited  # type: ignore[method-assign]


def phases(harness: Harness) -> set[BarrierPhase]:
    return {harness.plane.barrier.state.phase, *(gateway.phase for gateway in harness.gateways.values())}


def agree(harness: Harness, *, at_rest: bool) -> None:
    """The world is in one state, which is the one that was written down."""
    assert phases(harness) == {BarrierPhase.QUIET if at_rest else BarrierPhase.OPEN}
    assert harness.journal is not None
    assert left_open(harness.journal, FLEET_PAUSES, lambda entry: entry.body) == []
    ended = harness.entries(EntryKind.PAUSE_ENDED)
    assert [entry.body["state"] for entry in ended[-1:]] == ["done" if at_rest else "rolled_back"]


@pytest.mark.parametrize("entries", range(1, ENTRIES))
async def test_a_daemon_killed_after_any_entry_leaves_all_at_rest_or_all_going_on(
    harness: Harness, entries: int
) -> None:
    async with harness.running("gw0", "gw1"):
        limit(harness, entries, Killed)
        asked = asyncio.create_task(harness.plane.barrier.pause(PauseRequest(lease_s=120.0)))
        await harness.clock.advance(2.0)
        await harness.restart()
        with suppress(Killed, asyncio.CancelledError):
            await asked
        await harness.clock.advance(10.0)
        if entries == 1:  # not begun, as far as the journal has it
            assert phases(harness) == {BarrierPhase.OPEN}
        else:
            agree(harness, at_rest=entries >= AT_REST)
        await harness.resume() if entries >= AT_REST else None
        await harness.pause()  # it can be closed again at once


@pytest.mark.parametrize("entries", range(1, ENTRIES + 3))
async def test_a_daemon_killed_on_the_way_back_lets_all_go_on(harness: Harness, entries: int) -> None:
    async with harness.running("gw0", "gw1"):
        harness.gateways["gw1"].drains_s = 1000.0
        limit(harness, entries, Killed)
        asked = asyncio.create_task(harness.plane.barrier.pause(PauseRequest(lease_s=120.0, deadline_s=3.0)))
        await harness.clock.advance(12.0)
        await harness.restart()
        with suppress(Killed, Retryable, asyncio.CancelledError):
            await asked
        await harness.clock.advance(10.0)
        assert phases(harness) == {BarrierPhase.OPEN}
        agree(harness, at_rest=False) if entries > 1 else None


@pytest.mark.parametrize("entries", range(1, ENTRIES))
async def test_where_the_journal_is_full_requests_go_on(harness: Harness, entries: int) -> None:
    async with harness.running("gw0", "gw1"):
        limit(harness, entries, Permanent, "the disk is full")
        asked = asyncio.create_task(harness.plane.barrier.pause(PauseRequest(lease_s=20.0)))
        await harness.within(15.0, asked)
        at_rest = asked.exception() is None
        assert at_rest == (entries == ENTRIES - 1), "only the result could not be written down"
        await harness.clock.advance(30.0)
        assert {gateway.phase for gateway in harness.gateways.values()} == {BarrierPhase.OPEN}


async def test_a_result_that_is_lost_is_told_once_the_gateway_attaches_again(harness: Harness) -> None:
    async with harness.running("gw0", "gw1"):
        gateway = harness.gateways["gw1"]
        gateway.broken = True
        asked = asyncio.create_task(harness.plane.barrier.pause(PauseRequest(mode=PauseMode.KEEP, lease_s=60.0)))
        await harness.clock.advance(1.0)
        assert (gateway.phase, asked.done()) == (BarrierPhase.QUIET, False)
        gateway.broken = False
        for order in gateway.of(CloseBarrier):  # the same order again has the same result
            gateway._tasks.append(asyncio.create_task(gateway._carry_out(order)))
        await harness.within(5.0, asked)
        assert (await asked).phase is BarrierPhase.QUIET
        agree(harness, at_rest=True)


async def test_an_order_that_comes_too_late_closes_nothing(harness: Harness) -> None:
    async with harness.running("gw0", "gw1"):
        late = harness.gateways["gw1"]
        late.deaf = True
        asked = asyncio.create_task(harness.plane.barrier.pause(PauseRequest(lease_s=60.0, deadline_s=3.0)))
        await harness.within(30.0, asked)
        with pytest.raises(Retryable, match="not in time; gateway gw1"):
            await asked
        late.deaf = False
        for order in late.of(CloseBarrier):
            late._tasks.append(asyncio.create_task(late._carry_out(order)))
        await harness.clock.advance(5.0)
        agree(harness, at_rest=False)


async def test_a_gateway_that_does_not_open_opens_by_itself(harness: Harness) -> None:
    async with harness.running("gw0", "gw1"):
        stuck: Gateway = harness.gateways["gw0"]
        harness.gateways["gw1"].drains_s = 1000.0
        asked = asyncio.create_task(harness.plane.barrier.pause(PauseRequest(lease_s=30.0, deadline_s=3.0)))
        await harness.clock.advance(1.0)
        stuck.deaf = True  # from now on
        await harness.within(30.0, asked)
        assert isinstance(asked.exception(), Retryable)
        assert stuck.of(OpenBarrier)
        await harness.clock.advance(30.0)
        agree(harness, at_rest=False)
