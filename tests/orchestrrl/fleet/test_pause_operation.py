"""Tests of interrupted pauses, except the cases that core/test_operation_descriptions.py has for all operations."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from barrier_harness import Harness

from orchestrrl.core.errors import Permanent
from orchestrrl.core.journal.kinds import FLEET_PAUSES
from orchestrrl.core.journal.store import EntryKind
from orchestrrl.core.operation_journal import left_open
from orchestrrl.core.operations import CloseBarrier, PauseMode
from orchestrrl.fleet.pause_barrier import PauseRequest
from orchestrrl.fleet.reports import BarrierPhase

OWN = (EntryKind.BARRIER, EntryKind.PAUSE_BEGAN, EntryKind.PAUSE_STEP, EntryKind.PAUSE_ENDED)
ENTRIES = 8  # of a successful pause: its lease, the intent, two for each of two steps, at rest, the result
AT_REST = 6


class Killed(Exception):
    """The daemon is killed."""


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[Harness]:
    harness = Harness(tmp_path / "journal.sqlite")
    harness.start()
    yield harness
    assert harness.journal is not None
    harness.journal.close()


def limit(harness: Harness, entries: int, error: type[Exception], *arguments: Any) -> None:
    """Raise the error instead of writing more than this many entries of a pause, at each further one."""
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
    return {harness.plane.fleet.barrier.state.phase, *(gateway.phase for gateway in harness.gateways.values())}


def agree(harness: Harness, *, at_rest: bool) -> None:
    """Check that all barriers are in one state, which is the journalled one."""
    assert phases(harness) == {BarrierPhase.QUIET if at_rest else BarrierPhase.OPEN}
    assert harness.journal is not None
    assert left_open(harness.journal, FLEET_PAUSES, lambda entry: entry.body) == []
    ended = harness.entries(EntryKind.PAUSE_ENDED)
    assert [entry.body["state"] for entry in ended[-1:]] == ["done" if at_rest else "rolled_back"]


@pytest.mark.parametrize("entries", range(1, ENTRIES))
async def test_fleet_can_be_paused_again_after_the_daemon_was_killed(harness: Harness, entries: int) -> None:
    async with harness.running("gw0", "gw1"):
        limit(harness, entries, Killed)
        asked = asyncio.create_task(harness.plane.fleet.barrier.pause(PauseRequest(lease_s=120.0)))
        await harness.clock.advance(2.0)
        await harness.restart()
        with suppress(Killed, asyncio.CancelledError):
            await asked
        await harness.clock.advance(10.0)
        if entries >= AT_REST:
            await harness.resume()
        await harness.pause()
        agree(harness, at_rest=True)


@pytest.mark.parametrize("entries", range(1, ENTRIES))
async def test_full_journal_lets_requests_continue(harness: Harness, entries: int) -> None:
    async with harness.running("gw0", "gw1"):
        limit(harness, entries, Permanent, "the disk is full")
        asked = asyncio.create_task(harness.plane.fleet.barrier.pause(PauseRequest(lease_s=20.0)))
        await harness.within(15.0, asked)
        at_rest = asked.exception() is None
        assert at_rest == (entries == ENTRIES - 1), "only the result could not be journalled"
        await harness.clock.advance(30.0)
        assert {gateway.phase for gateway in harness.gateways.values()} == {BarrierPhase.OPEN}


async def test_lost_result_is_sent_again_when_the_gateway_reattaches(harness: Harness) -> None:
    async with harness.running("gw0", "gw1"):
        gateway = harness.gateways["gw1"]
        gateway.broken = True
        asked = asyncio.create_task(harness.plane.fleet.barrier.pause(PauseRequest(mode=PauseMode.KEEP, lease_s=60.0)))
        await harness.clock.advance(1.0)
        assert (gateway.phase, asked.done()) == (BarrierPhase.QUIET, False)
        gateway.broken = False
        for order in gateway.of(CloseBarrier):  # the same order again has the same result
            gateway._tasks.append(asyncio.create_task(gateway._carry_out(order)))
        await harness.within(5.0, asked)
        assert (await asked).phase is BarrierPhase.QUIET
        agree(harness, at_rest=True)
