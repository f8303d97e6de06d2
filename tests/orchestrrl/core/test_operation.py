"""Operations end in the old or the new state of the world, wherever they are interrupted, and report which."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.errors import Permanent, Retryable
from orchestrrl.core.journal.kinds import REDEPLOYMENTS
from orchestrrl.core.journal.store import Journal
from orchestrrl.core.operation import (
    OBSERVE_AGAIN_S,
    Description,
    OperationRun,
    OperationState,
    Stage,
    StepDirection,
    StepEntry,
    StepState,
    check_record,
)
from orchestrrl.core.operation_journal import OperationJournal

PARTS = ("a", "b", "c")
STEP_S = 1.0  # what each step takes
WITHIN_S = 5.0


@dataclass(frozen=True)
class ToyStep:
    number: int
    kind: str  # set, open, tidy
    part: str
    within_s: float = WITHIN_S

    def __str__(self) -> str:
        return f"{self.kind} {self.part}".strip()


@dataclass
class World:
    """Parts that are old or new, and a switch that sends users to the new ones. Faults are by step, as printed."""

    clock: VirtualClock
    parts: dict[str, str] = field(default_factory=lambda: dict.fromkeys(PARTS, "old"))
    is_open: bool = False
    fails: dict[str, int] = field(default_factory=dict)  # how often, before the step has an effect
    fails_after: dict[str, int] = field(default_factory=dict)
    hangs: set[str] = field(default_factory=set)
    unreadable: int = 0  # observations that fail
    dead: bool = False  # its daemon: nothing that it began has an effect any more
    done: list[str] = field(default_factory=list)

    def state(self) -> str:
        values = {*self.parts.values(), "new" if self.is_open else "old"}
        return values.pop() if len(values) == 1 else "between"

    async def act(self, name: str, effect: Callable[[], None]) -> str:
        if name in self.hangs:
            await asyncio.Event().wait()
        await self.clock.sleep(STEP_S)
        if self.dead:
            await asyncio.Event().wait()
        for faults, first in ((self.fails, True), (self.fails_after, False)):
            if not first:
                effect()
                self.done.append(name)
            if faults.get(name, 0) > 0:
                faults[name] -= 1
                raise Retryable(f"{name} failed", STEP_S)
        return f"{name} done"


class ToyChange(Description[ToyStep]):
    """Set all parts, two of them in parallel, open, tidy up."""

    id = "toy1"

    def __init__(self, world: World) -> None:
        self.world = world
        self.seen: dict[str, str] = {}
        self.seen_open = False

    def forward(self) -> Sequence[Stage[ToyStep]]:
        return (
            ((ToyStep(1, "set", "a"),), (ToyStep(2, "set", "b"),)),
            ((ToyStep(3, "set", "c"),),),
            ((ToyStep(4, "open", ""),),),
            ((ToyStep(5, "tidy", ""),),),
        )

    def intent(self) -> Mapping[str, Any]:
        return {"parts": list(PARTS)}

    def record(self, step: ToyStep) -> Mapping[str, Any]:
        return {"kind": step.kind, "part": step.part}

    async def do(self, step: ToyStep) -> str:
        return await self.world.act(str(step), lambda: self._effect(step, "new"))

    async def undo(self, step: ToyStep) -> str:
        return await self.world.act(f"un{step}", lambda: self._effect(step, "old"))

    def _effect(self, step: ToyStep, value: str) -> None:
        if step.kind == "set":
            self.world.parts[step.part] = value
        if step.kind == "open":
            self.world.is_open = value == "new"

    async def observe(self) -> None:
        await self.world.clock.sleep(0.1)
        if self.world.unreadable:
            self.world.unreadable -= 1
            raise Retryable("no answer", STEP_S)
        self.seen, self.seen_open = dict(self.world.parts), self.world.is_open

    def back(self, records: Sequence[StepEntry]) -> Sequence[Stage[ToyStep]]:
        changed = [part for part in PARTS if self.seen[part] == "new"]
        close = [ToyStep(1, "open", "")] if self.seen_open else []
        stages: list[Stage[ToyStep]] = [(tuple(close),)] if close else []
        stages.append(tuple((ToyStep(2 + place, "set", part),) for place, part in enumerate(changed)))
        return stages

    def restored(self) -> bool:
        return set(self.seen.values()) == {"old"} and not self.seen_open

    def resume_from(self, records: Sequence[StepEntry]) -> frozenset[int] | None:
        done = {record.number for record in records if record.state is StepState.DONE}
        return frozenset(done - {4}) if {1, 2, 3} <= done else None

    def is_final(self, step: ToyStep) -> bool:
        return step.kind == "open"

    def is_optional(self, step: ToyStep) -> bool:
        return step.kind == "tidy"

    def waits_for(self, step: ToyStep) -> str:
        return "a bus" if str(step) in self.world.hangs else ""


class KilledJournal(Journal):
    """Kills its daemon once so many entries are on disk, or takes no more than so many."""

    def __init__(self, path: Path, *, killed_after: int | None = None, full_after: int | None = None) -> None:
        super().__init__(path, 0.0)
        self.written = 0
        self._killed_after, self._full_after = killed_after, full_after
        self.killed = asyncio.Event()

    def append(self, *arguments: Any) -> int:
        if self._full_after is not None and self.written >= self._full_after:
            raise Permanent("the disk is full")
        sequence = super().append(*arguments)
        self.written += 1
        if self.written == self._killed_after:
            self.killed.set()
            raise asyncio.CancelledError
        return sequence


def run_of(world: World, journal: Journal) -> OperationRun[ToyStep]:
    return OperationRun(
        ToyChange(world), OperationJournal(journal, world.clock, REDEPLOYMENTS), world.clock, lambda: None
    )


async def until_over(world: World, run: OperationRun[ToyStep], work: Any) -> None:
    task = asyncio.ensure_future(work)
    for _ in range(200):
        await world.clock.advance(0.5)
        if task.done():
            return await task
    raise AssertionError(f"it is not over: {run.steps}")


@asynccontextmanager
async def begun(world: World, path: Path, **faults: Any) -> AsyncIterator[OperationRun[ToyStep]]:
    journal = KilledJournal(path / "journal.sqlite", **faults)
    run = run_of(world, journal)
    try:
        await until_over(world, run, run.run())
    except asyncio.CancelledError:
        assert journal.killed.is_set()
        world.dead = True
        await world.clock.advance(2 * WITHIN_S)
        world.dead = False
    journal.close()
    yield run


async def resumed(world: World, path: Path) -> OperationRun[ToyStep] | None:
    """The next daemon's run; None where nothing was left open."""
    journal = Journal(path / "journal.sqlite", 0.0)
    left = OperationJournal(journal, world.clock, REDEPLOYMENTS).left_open(lambda entry: entry.body["parts"])
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


def agrees(run: OperationRun[ToyStep], world: World) -> None:
    """What it reports is what the world is."""
    assert world.state() == {OperationState.DONE: "new", OperationState.ROLLED_BACK: "old"}[run.state]
    assert run.ended_s is not None


ENTRIES = 11  # of an operation that goes well: the intent, and two for each step


@pytest.fixture
def world() -> World:
    return World(VirtualClock(0.0))


async def test_without_faults_it_ends_in_the_new_state(world: World, tmp_path: Path) -> None:
    async with begun(world, tmp_path) as run:
        assert (run.state, run.detail, world.state()) == (OperationState.DONE, "", "new")
        assert {step.state for step in run.steps} == {StepState.DONE}
        assert world.clock.now_s() < 5 * STEP_S, "a and b were set in parallel"


@pytest.mark.parametrize("entries", range(1, ENTRIES + 1))
async def test_a_daemon_killed_after_any_entry_leaves_the_old_or_the_new_state(
    world: World, tmp_path: Path, entries: int
) -> None:
    async with begun(world, tmp_path, killed_after=entries):
        run = await resumed(world, tmp_path)
        assert run is not None
        agrees(run, world)
        assert (run.state is OperationState.DONE) == (entries >= 7), "all parts had been set"


@pytest.mark.parametrize("fails_at", ["set a", "set b", "set c", "open"])
@pytest.mark.parametrize("entries", range(1, 2 * ENTRIES))
async def test_daemons_killed_on_the_way_back_too(world: World, tmp_path: Path, fails_at: str, entries: int) -> None:
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
async def test_a_step_that_fails_leads_back(world: World, tmp_path: Path, step: str, when: str) -> None:
    faults = getattr(world, when)
    faults.add(step) if when == "hangs" else faults.update({step: 1})
    async with begun(world, tmp_path) as run:
        assert (run.state, world.state()) == (OperationState.ROLLED_BACK, "old")
        why = f"took longer than {WITHIN_S:g} s: a bus" if when == "hangs" else f"{step} failed"
        assert run.detail == f"{step}: {why}"
        forward = [report for report in run.steps if report.direction is StepDirection.FORWARD]
        assert {report.state for report in forward if report.step.kind == "tidy"} == {StepState.SKIPPED}


async def test_an_optional_step_that_fails_is_reported_and_the_operation_stands(world: World, tmp_path: Path) -> None:
    world.fails["tidy"] = 1
    async with begun(world, tmp_path) as run:
        assert (run.state, run.detail, world.state()) == (OperationState.DONE, "tidy: tidy failed", "new")


async def test_an_undo_that_fails_once_is_tried_again(world: World, tmp_path: Path) -> None:
    world.fails = {"open": 1, "unset a": 1}
    async with begun(world, tmp_path) as run:
        assert (run.state, world.state()) == (OperationState.ROLLED_BACK, "old")


async def test_an_undo_that_keeps_failing_is_named_and_the_rest_is_undone(world: World, tmp_path: Path) -> None:
    world.fails = {"open": 1, "unset a": 9}
    async with begun(world, tmp_path) as run:
        assert run.state is OperationState.DEGRADED
        assert world.parts == {"a": "new", "b": "old", "c": "old"}
        assert run.detail == "open: open failed; set a: unset a failed"


async def test_nothing_is_undone_before_the_world_is_observed(world: World, tmp_path: Path) -> None:
    world.fails, world.unreadable = {"set c": 1}, 3
    async with begun(world, tmp_path) as run:
        assert (run.state, world.state()) == (OperationState.ROLLED_BACK, "old")
        assert world.clock.now_s() > 3 * OBSERVE_AGAIN_S


@pytest.mark.parametrize("entries", range(ENTRIES))
async def test_a_journal_that_is_full_leads_back_and_does_not_stop_the_way_back(
    world: World, tmp_path: Path, entries: int
) -> None:
    async with begun(world, tmp_path, full_after=entries) as run:
        if entries == 0:
            assert run.detail == "nothing was begun, since it cannot be written down: the disk is full"
            assert run.steps == run.steps[:5]
        agrees(run, world)
        assert run.state is OperationState.ROLLED_BACK


async def test_it_can_be_called_off_until_its_final_step_begins(world: World, tmp_path: Path) -> None:
    for at_s in (0.5, 1.5, 2.4, 2.6):
        world = World(VirtualClock(0.0))
        journal = Journal(tmp_path / f"{at_s}.sqlite", 0.0)
        run = run_of(world, journal)
        task = asyncio.ensure_future(run.run())
        await world.clock.advance(at_s)
        if at_s < 2.0:
            run.call_off("an operator said so")
        else:
            with pytest.raises(Permanent, match="can no longer be called off"):
                run.call_off("too late")
        await world.clock.advance(20.0)
        await task
        assert world.state() == ("old" if at_s < 2.0 else "new")
        assert run.detail == ("an operator said so" if at_s < 2.0 else "")
        journal.close()


async def test_a_defect_in_a_step_leads_back_like_a_failure(world: World, tmp_path: Path) -> None:
    def broken() -> None:
        raise ZeroDivisionError("of ours")

    journal = Journal(tmp_path / "journal.sqlite", 0.0)
    run = run_of(world, journal)
    change: Any = run._description
    effect = change._effect
    change._effect = lambda step, value: broken() if (str(step), value) == ("set c", "new") else effect(step, value)
    await until_over(world, run, run.run())
    assert (run.state, world.state()) == (OperationState.ROLLED_BACK, "old")
    assert run.detail == "set c: a defect: ZeroDivisionError('of ours')"
    journal.close()
