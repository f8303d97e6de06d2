"""A small world for each kind of operation, so that one test body runs every description of core/operation.py.

A kind of operation takes part with a class that derives from `OperationWorld`, in a file of its own, and a line in the
table `WORLDS` of test_operation_descriptions.py.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, ClassVar

from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.errors import Permanent
from orchestrrl.core.journal.kinds import OperationEntries
from orchestrrl.core.journal.store import Journal

MOST_S = 100.0  # of the virtual clock, for one daemon


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


async def until_over(clock: VirtualClock, work: Coroutine[Any, Any, Any], within_s: float = MOST_S) -> bool:
    """Let time pass until the work is over; return whether it was killed, at the latest after `within_s`."""
    task, step_s = asyncio.ensure_future(work), min(0.5, within_s)
    end_s = clock.now_s() + within_s
    while not task.done() and clock.now_s() < end_s:
        await clock.advance(step_s)
    if not task.done():
        assert within_s < MOST_S, "it is not over"
        task.cancel()
    await asyncio.wait({task})
    if task.cancelled():
        return True
    task.result()
    return False


class OperationWorld(ABC):
    """What one operation changes. Its state is "old", "new" or "between"; faults are by step, as printed."""

    entries: ClassVar[OperationEntries]
    written: ClassVar[int]  # entries of an operation that goes well
    steps: ClassVar[tuple[str, ...]]  # that can fail; the last of them, too, with the operation finished all the same
    moments_s: ClassVar[tuple[float, ...]]  # since it began, at which its daemon is killed

    def __init__(self) -> None:
        self.clock = VirtualClock(0.0)

    @abstractmethod
    async def begin(self, journal: Journal) -> None:
        """Order the operation, as a new daemon with this journal, and return when it is over or left open."""

    @abstractmethod
    async def repeat(self) -> None:
        """Deliver the same order again to the same daemon, which may refuse it."""

    @abstractmethod
    async def begin_late(self, journal: Journal) -> None:
        """Order the operation, so that it is delivered after it has expired."""

    @abstractmethod
    async def settle(self) -> None:
        """Let the same daemon take up what it left open."""

    @abstractmethod
    async def crash(self) -> None:
        """End the daemon: nothing that it began has an effect any more."""

    @abstractmethod
    async def restart(self, journal: Journal) -> None:
        """Let the next daemon, with this journal, bring to an end what was left open."""

    @abstractmethod
    def state(self) -> str: ...

    @abstractmethod
    def reported(self, result: Mapping[str, Any]) -> str:
        """Return the state of the world by the body of the result's entry."""

    @abstractmethod
    def fail(self, step: str) -> None:
        """Let a step fail once, or stick until `mend`."""

    @abstractmethod
    def lose(self, step: str) -> None:
        """Lose the result of a step: it takes effect, and raises."""

    @abstractmethod
    def fail_to_undo(self) -> None:
        """Let what leads back fail each time, until `mend`."""

    @abstractmethod
    def mend(self) -> None: ...

    def outcome(self, journal: Journal) -> str | None:
        """Return the state of the world by the journal, or None where the operation is open or was never begun."""
        if journal.open_operations(self.entries):
            return None
        results = journal.tail(1, (self.entries.result,))
        return self.reported(results[0].body) if results else None
