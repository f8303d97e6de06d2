"""The toy world: parts that are old or new, and a selector that sends users to the new ones."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from operation_world import OperationWorld

from orchestrrl.core.errors import Permanent, Retryable
from orchestrrl.core.journal.kinds import REDEPLOYMENTS
from orchestrrl.core.journal.store import Journal
from orchestrrl.core.operation import (
    Description,
    OperationRun,
    OperationState,
    Stage,
    StepEntry,
    StepState,
    check_record,
)
from orchestrrl.core.operation_journal import OperationJournal

PARTS = ("a", "b", "c")
STEP_S = 1.0  # duration of each step
WITHIN_S = 5.0
REPORTED = {OperationState.DONE: "new", OperationState.ROLLED_BACK: "old", OperationState.DEGRADED: "between"}


@dataclass(frozen=True)
class ToyStep:
    number: int
    kind: str  # set, open, tidy
    part: str
    within_s: float = WITHIN_S

    def __str__(self) -> str:
        return f"{self.kind} {self.part}".strip()


class ToyWorld(OperationWorld):
    entries = REDEPLOYMENTS
    written = 12  # the intent, two for each step, the result
    steps = ("set a", "set b", "set c", "open")
    moments_s = (0.5, 1.5, 2.5, 3.5)

    def __init__(self) -> None:
        super().__init__()
        self.parts = dict.fromkeys(PARTS, "old")
        self.is_open = False
        self.fails: dict[str, int] = {}  # how often, before the step has an effect
        self.fails_after: dict[str, int] = {}
        self.hangs: set[str] = set()
        self.unreadable = 0  # observations that fail
        self.dead = False  # its daemon: after its end, nothing that it began takes effect
        self.done: list[str] = []

    async def start(self, journal: Journal) -> None:
        self.log = log_of(self, journal)

    async def begin(self, journal: Journal) -> None:
        self.run = run_of(self, journal)
        await self._to_its_end(self.run.run())

    async def repeat(self) -> None:
        with suppress(Permanent):
            await self.run.carry_out()

    async def begin_late(self, journal: Journal) -> None:
        self.run = run_of(self, journal, self.clock.now_s() - 1.0)
        await self._to_its_end(self.run.run())

    async def settle(self) -> None:
        raise AssertionError("nothing stays open here")

    async def crash(self) -> None:
        self.dead = True
        await self.clock.advance(2 * WITHIN_S)
        self.dead = False

    async def restart(self, journal: Journal) -> None:
        for opened in self.log.left_open(lambda entry: entry.body["parts"]):
            assert opened.intent == list(PARTS)
            assert all(check_record(step.body) for step in opened.steps)
            self.run = run_of(self, journal)
            await self._to_its_end(self.run.resume(opened.steps))

    async def _to_its_end(self, work: Any) -> None:
        await work
        with suppress(Permanent):  # of a full journal
            self.log.end(ToyChange.id, {"state": self.run.state})

    def state(self) -> str:
        values = {*self.parts.values(), "new" if self.is_open else "old"}
        return values.pop() if len(values) == 1 else "between"

    def reported(self, result: Mapping[str, Any]) -> str:
        return REPORTED[OperationState(result["state"])]

    def fail(self, step: str) -> None:
        self.fails[step] = 1

    def lose(self, step: str) -> None:
        self.fails_after[step] = 1

    def fail_to_undo(self) -> None:
        self.fails |= dict.fromkeys(("unset a", "unset b", "unset c"), 99)

    def mend(self) -> None:
        self.fails.clear()

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

    def __init__(self, world: ToyWorld) -> None:
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


def log_of(world: ToyWorld, journal: Journal) -> OperationJournal:
    return OperationJournal(journal, world.clock, REDEPLOYMENTS)


def run_of(world: ToyWorld, journal: Journal, valid_until_s: float | None = None) -> OperationRun[ToyStep]:
    change = ToyChange(world)
    if valid_until_s is not None:
        change.valid_until_s = valid_until_s
    return OperationRun(change, log_of(world, journal), world.clock, lambda: None)
