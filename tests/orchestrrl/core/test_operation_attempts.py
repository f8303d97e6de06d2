"""Repeated attempts, leases that are renewed while later steps run, and steps after the point of no return."""

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.errors import Permanent, Retryable
from orchestrrl.core.journal.kinds import REDEPLOYMENTS
from orchestrrl.core.journal.store import Journal
from orchestrrl.core.operation import (
    Description,
    OperationFailure,
    OperationRun,
    OperationState,
    Stage,
    StepDirection,
    StepEntry,
    StepState,
)
from orchestrrl.core.operation_journal import OperationJournal

RENEW_S = 0.4


@dataclass(frozen=True)
class LeasedStep:
    number: int
    kind: str
    within_s: None = None

    def __str__(self) -> str:
        return self.kind


STAGES = ((tuple(LeasedStep(number, kind) for number, kind in enumerate(("close", "set", "commit", "tidy"), 1)),),)


class LeasedChange(Description[LeasedStep]):
    """Close, set, commit, tidy up. `fails` is the number of failures of each step."""

    id = "leased1"

    def __init__(self, clock: VirtualClock, attempts: int, **fails: int) -> None:
        self.clock = clock
        self.attempts = attempts
        self.fails = Counter(fails)
        self.renewed_s: list[float] = []
        self.did: list[str] = []
        self.value = "old"
        self.committed = False

    def forward(self) -> Sequence[Stage[LeasedStep]]:
        return STAGES

    def intent(self) -> Mapping[str, Any]:
        return {}

    def record(self, step: LeasedStep) -> Mapping[str, Any]:
        return {"kind": step.kind}

    async def do(self, step: LeasedStep) -> str:
        await self.clock.sleep(1.0)
        self.did.append(step.kind)
        if self.fails[step.kind] > 0:
            self.fails[step.kind] -= 1
            raise Retryable(f"{step} failed", 1.0)
        if step.kind == "set":
            self.value = "new"
        self.committed |= step.kind == "commit"
        return ""

    async def undo(self, step: LeasedStep) -> str:
        self.did.append(f"un{step}")
        self.value = "old"
        return ""

    async def observe(self) -> None:
        pass

    def back(self, records: Sequence[StepEntry]) -> Sequence[Stage[LeasedStep]]:
        return (((LeasedStep(1, "set"),),),)

    def restored(self) -> bool:
        return self.value == "old"

    def resume_from(self, records: Sequence[StepEntry]) -> frozenset[int] | None:
        return frozenset({1, 2, 3}) if self.committed else None

    def is_committed(self) -> bool:
        return self.committed

    def retry(self, failure: OperationFailure[LeasedStep]) -> bool:
        self.attempts -= 1
        return self.attempts > 0

    def hold(self, step: LeasedStep) -> Coroutine[Any, Any, None] | None:
        return self._renew() if step.kind == "close" else None

    async def _renew(self) -> None:
        while True:
            await self.clock.sleep(RENEW_S)
            self.renewed_s.append(self.clock.now_s())


class FullJournal(Journal):
    entries_left = 1000

    def append(self, *arguments: Any) -> int:
        if self.entries_left <= 0:
            raise Permanent("the disk is full")
        self.entries_left -= 1
        return super().append(*arguments)


def run_of(change: LeasedChange, journal: Journal) -> OperationRun[LeasedStep]:
    return OperationRun(change, OperationJournal(journal, change.clock, REDEPLOYMENTS), change.clock, lambda: None)


async def ended(run: OperationRun[LeasedStep], change: LeasedChange, work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.ensure_future(work)
    for _ in range(100):
        await change.clock.advance(0.25)
        if task.done():
            return await task
    raise AssertionError(f"it is not over: {run.steps}")


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[FullJournal]:
    with FullJournal(tmp_path / "journal.sqlite", 0.0) as opened:
        yield opened


@pytest.mark.parametrize(("fails", "attempts"), [(0, 1), (1, 2), (2, 3), (2, 2)])
async def test_operation_restarts_after_rollback_that_restored_state(
    journal: FullJournal, fails: int, attempts: int
) -> None:
    change = LeasedChange(VirtualClock(0.0), attempts, set=fails)
    run = run_of(change, journal)
    await ended(run, change, run.run())
    is_done = fails < attempts
    assert (run.state, change.value) == (
        (OperationState.DONE, "new") if is_done else (OperationState.ROLLED_BACK, "old")
    )
    assert run.attempt == min(fails + 1, attempts)
    assert run.detail == ("" if is_done else "set: set failed")
    assert change.did.count("close") == run.attempt
    directions = [step.direction for step in run.steps]
    assert directions.count(StepDirection.BACK) == (0 if is_done else 1), "the steps are those of the last attempt"
    entries = [record.entry for record in run.records]
    assert {entry["attempt"] for entry in entries} == set(range(1, run.attempt + 1))
    assert len({(entry["id"], entry["state"]) for entry in entries}) == len(entries)


async def test_lease_is_renewed_during_later_steps_but_not_rollback(journal: FullJournal) -> None:
    change = LeasedChange(VirtualClock(0.0), 1)
    await ended(run := run_of(change, journal), change, run.run())
    assert change.renewed_s == pytest.approx([1.0 + RENEW_S * number for number in range(1, 8)])
    await change.clock.advance(10.0)
    assert len(change.renewed_s) == 7


@pytest.mark.parametrize("entries_left", [6, 7, 8])
async def test_full_journal_after_point_of_no_return_does_not_roll_back(
    journal: FullJournal, entries_left: int
) -> None:
    """The full journal holds the intent, two entries for each of two steps, and one of the pending commit."""
    change = LeasedChange(VirtualClock(0.0), 1)
    journal.entries_left = entries_left
    await ended(run := run_of(change, journal), change, run.run())
    assert (run.state, change.value, change.did[-1]) == (OperationState.DONE, "new", "tidy")


async def test_failed_step_after_point_of_no_return_is_reported(journal: FullJournal) -> None:
    change = LeasedChange(VirtualClock(0.0), 2, tidy=1)
    await ended(run := run_of(change, journal), change, run.run())
    assert (run.state, change.value, run.detail) == (OperationState.DONE, "new", "tidy: tidy failed")


@pytest.mark.parametrize("at_s", [0.5, 1.5, 2.1, 2.5, 3.5, 4.5, 5.5])
async def test_later_attempt_is_resumed_after_daemon_ends(journal: FullJournal, at_s: float) -> None:
    """The rollback of the first attempt, at 2 s, does not belong to the second attempt."""
    change = LeasedChange(VirtualClock(0.0), 2, set=1)
    task = asyncio.ensure_future(run_of(change, journal).run())
    await change.clock.advance(at_s)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    change.fails.clear()
    (left,) = OperationJournal(journal, change.clock, REDEPLOYMENTS).left_open(lambda entry: entry.subject)
    change.attempts = 1
    await ended(run := run_of(change, journal), change, run.resume(left.steps))
    assert run.attempt == (1 if at_s < 2.0 else 2)
    assert (run.state, change.value) == (
        (OperationState.DONE, "new") if at_s > 5.0 else (OperationState.ROLLED_BACK, "old")
    )
    assert all(step.state is not StepState.RUNNING for step in run.steps)
