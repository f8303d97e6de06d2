"""The operation engine with a toy description: interrupted at any point, it ends in the old or the new state.

The cases for every kind of operation are in test_operation_descriptions.py.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from operation_toy import PARTS, STEP_S, WITHIN_S, ToyStep, ToyWorld, log_of, run_of
from operation_world import KilledJournal

from orchestrrl.core.errors import Permanent, Retryable
from orchestrrl.core.journal.store import Journal
from orchestrrl.core.operation import (
    OBSERVE_AGAIN_S,
    OperationRun,
    OperationState,
    StepDirection,
    StepState,
    check_record,
)


async def until_over(world: ToyWorld, run: OperationRun[ToyStep], work: Any) -> None:
    task = asyncio.ensure_future(work)
    for _ in range(200):
        await world.clock.advance(0.5)
        if task.done():
            return await task
    raise AssertionError(f"it is not over: {run.steps}")


@asynccontextmanager
async def begun(world: ToyWorld, path: Path, **faults: Any) -> AsyncIterator[OperationRun[ToyStep]]:
    journal = KilledJournal(path / "journal.sqlite", **faults)
    run = run_of(world, journal)
    try:
        await until_over(world, run, run.run())
    except asyncio.CancelledError:
        assert journal.killed.is_set()
        await world.crash()
    journal.close()
    yield run


async def resumed(world: ToyWorld, path: Path) -> OperationRun[ToyStep] | None:
    """Return the next daemon's run; None if nothing was left open."""
    journal = Journal(path / "journal.sqlite", 0.0)
    left = log_of(world, journal).left_open(lambda entry: entry.body["parts"])
    if not left:
        journal.close()
        return None
    (opened,) = left
    assert opened.intent == list(PARTS)
    assert all(check_record(step.body) for step in opened.steps)
    run = run_of(world, journal)
    await until_over(world, run, run.resume(opened.steps))
    journal.close()
    return run


def agrees(run: OperationRun[ToyStep], world: ToyWorld) -> None:
    """Return whether the report matches the state of the world."""
    assert world.state() == {OperationState.DONE: "new", OperationState.ROLLED_BACK: "old"}[run.state]
    assert run.ended_s is not None


ENTRIES = 11  # of a successful operation: the intent, and two for each step


@pytest.fixture
def world() -> ToyWorld:
    return ToyWorld()


async def test_operation_without_faults_ends_in_new_state(world: ToyWorld, tmp_path: Path) -> None:
    async with begun(world, tmp_path) as run:
        assert (run.state, run.detail, world.state()) == (OperationState.DONE, "", "new")
        assert {step.state for step in run.steps} == {StepState.DONE}
        assert world.clock.now_s() < 5 * STEP_S, "a and b were set in parallel"


@pytest.mark.parametrize("entries", range(1, ENTRIES + 1))
async def test_daemon_killed_after_any_entry_ends_in_old_or_new_state(
    world: ToyWorld, tmp_path: Path, entries: int
) -> None:
    async with begun(world, tmp_path, killed_after=entries):
        run = await resumed(world, tmp_path)
        assert run is not None
        agrees(run, world)
        assert (run.state is OperationState.DONE) == (entries >= 7), "all parts had been set"


@pytest.mark.parametrize("fails_at", ["set a", "set b", "set c", "open"])
@pytest.mark.parametrize("entries", range(1, 2 * ENTRIES))
async def test_daemons_killed_during_rollback_end_in_old_or_new_state(
    world: ToyWorld, tmp_path: Path, fails_at: str, entries: int
) -> None:
    world.fails_after[fails_at] = 1
    async with begun(world, tmp_path, killed_after=entries) as first:
        if first.ended_s is None:
            second = await resumed(world, tmp_path)
            assert second is not None
            agrees(second, world)
        else:
            agrees(first, world)
            assert first.state is OperationState.ROLLED_BACK


@pytest.mark.parametrize("when", ["fails", "fails_after", "hangs"])
@pytest.mark.parametrize("step", ["set a", "set b", "set c", "open"])
async def test_failed_step_rolls_back(world: ToyWorld, tmp_path: Path, step: str, when: str) -> None:
    faults = getattr(world, when)
    faults.add(step) if when == "hangs" else faults.update({step: 1})
    async with begun(world, tmp_path) as run:
        assert (run.state, world.state()) == (OperationState.ROLLED_BACK, "old")
        why = f"timed out after {WITHIN_S:g} s: a bus" if when == "hangs" else f"{step} failed"
        assert run.detail == f"{step}: {why}"
        forward = [report for report in run.steps if report.direction is StepDirection.FORWARD]
        assert {report.state for report in forward if report.step.kind == "tidy"} == {StepState.SKIPPED}


async def test_failed_optional_step_is_reported_and_operation_completes(world: ToyWorld, tmp_path: Path) -> None:
    world.fails["tidy"] = 1
    async with begun(world, tmp_path) as run:
        assert (run.state, run.detail, world.state()) == (OperationState.DONE, "tidy: tidy failed", "new")


async def test_failed_undo_is_retried(world: ToyWorld, tmp_path: Path) -> None:
    world.fails = {"open": 1, "unset a": 1}
    async with begun(world, tmp_path) as run:
        assert (run.state, world.state()) == (OperationState.ROLLED_BACK, "old")


async def test_repeatedly_failing_undo_is_reported_and_the_rest_undone(world: ToyWorld, tmp_path: Path) -> None:
    world.fails = {"open": 1, "unset a": 9}
    async with begun(world, tmp_path) as run:
        assert run.state is OperationState.DEGRADED
        assert world.parts == {"a": "new", "b": "old", "c": "old"}
        assert run.detail == "open: open failed; set a: unset a failed"


async def test_rollback_waits_for_observation(world: ToyWorld, tmp_path: Path) -> None:
    world.fails, world.unreadable = {"set c": 1}, 3
    async with begun(world, tmp_path) as run:
        assert (run.state, world.state()) == (OperationState.ROLLED_BACK, "old")
        assert world.clock.now_s() > 3 * OBSERVE_AGAIN_S


@pytest.mark.parametrize("entries", range(ENTRIES))
async def test_full_journal_rolls_back_and_does_not_stop_rollback(
    world: ToyWorld, tmp_path: Path, entries: int
) -> None:
    async with begun(world, tmp_path, full_after=entries) as run:
        if entries == 0:
            assert run.detail == "not begun, because the intent cannot be journalled: the disk is full"
            assert run.steps == run.steps[:5]
        agrees(run, world)
        assert run.state is OperationState.ROLLED_BACK


async def test_operation_can_be_cancelled_until_final_step_begins(world: ToyWorld, tmp_path: Path) -> None:
    for at_s in (0.5, 1.5, 2.4, 2.6):
        world = ToyWorld()
        journal = Journal(tmp_path / f"{at_s}.sqlite", 0.0)
        run = run_of(world, journal)
        task = asyncio.ensure_future(run.run())
        await world.clock.advance(at_s)
        if at_s < 2.0:
            run.call_off("an operator said so")
        else:
            with pytest.raises(Permanent, match="can no longer be cancelled"):
                run.call_off("too late")
        await world.clock.advance(20.0)
        await task
        assert world.state() == ("old" if at_s < 2.0 else "new")
        assert run.detail == ("an operator said so" if at_s < 2.0 else "")
        journal.close()


async def test_unexpected_exception_in_step_rolls_back(world: ToyWorld, tmp_path: Path) -> None:
    def broken() -> None:
        raise ZeroDivisionError("of ours")

    journal = Journal(tmp_path / "journal.sqlite", 0.0)
    run = run_of(world, journal)
    change: Any = run._description
    effect = change._effect
    change._effect = lambda step, value: broken() if (str(step), value) == ("set c", "new") else effect(step, value)
    await until_over(world, run, run.run())
    assert (run.state, world.state()) == (OperationState.ROLLED_BACK, "old")
    assert run.detail == "set c: unexpected exception: ZeroDivisionError('of ours')"
    journal.close()


async def test_operation_is_carried_out_once_and_not_after_expiry(world: ToyWorld, tmp_path: Path) -> None:
    async with begun(world, tmp_path) as run:
        with pytest.raises(Permanent, match="has already begun"):
            await run.carry_out()
    journal = Journal(tmp_path / "late.sqlite", 0.0)
    late = run_of(world, journal, world.clock.now_s() - 1.0)
    done = list(world.done)
    await until_over(world, late, late.run())
    assert (late.detail, world.done[: len(done)]) == ("the order has expired", done)
    journal.close()


async def test_description_may_complete_despite_failure(world: ToyWorld, tmp_path: Path) -> None:
    world.fails_after["set c"] = 1
    journal = Journal(tmp_path / "journal.sqlite", 0.0)
    run = run_of(world, journal)
    seen: list[tuple[str, dict[str, str]]] = []

    def goes_on_after(failure: object) -> frozenset[int]:
        change: Any = run._description
        seen.append((str(failure), change.seen))
        return frozenset({1, 2})

    run._description.goes_on_after = goes_on_after  # type: ignore[method-assign]
    await until_over(world, run, run.run())
    assert (run.state, world.state()) == (OperationState.DONE, "new")
    assert seen == [("set c: set c failed", dict.fromkeys(PARTS, "new"))], "it was observed first"
    assert world.done.count("set a") == 1
    assert world.done.count("set c") == 2
    journal.close()


@pytest.mark.parametrize("is_unreadable", [False, True])
async def test_operation_may_stay_open_until_outcome_is_known(
    world: ToyWorld, tmp_path: Path, is_unreadable: bool
) -> None:
    world.fails_after["set c"] = 1
    world.unreadable = int(is_unreadable)
    journal = Journal(tmp_path / "journal.sqlite", 0.0)
    run = run_of(world, journal)
    run._description.leaves_open = (Permanent if is_unreadable else Retryable,)
    with pytest.raises(Retryable, match="no answer" if is_unreadable else "set c failed"):
        await until_over(world, run, run.run())
    assert run.state is OperationState.RUNNING
    await until_over(world, run, run.resume((), "it was left open"))
    assert (run.state, world.state()) == (OperationState.ROLLED_BACK, "old"), "c may not have been set"
    assert run.detail == "it was left open"
    journal.close()
