"""A small world for each kind of operation, so that one test body runs every description of core/operation.py.

A kind of operation takes part with a class that derives from `OperationWorld`, in a file of its own, and a line in the
table `WORLDS` of test_operation_descriptions.py.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Collection, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.errors import Permanent
from orchestrrl.core.journal.kinds import EntryKind, OperationEntries
from orchestrrl.core.journal.store import Journal

MOST_S = 100.0  # of the virtual clock, for one daemon


class KilledJournal(Journal):
    """A journal that kills its daemon after a number of entries on disk, or refuses further entries. `kinds` are the
    entries that count; empty: all. A killed daemon writes nothing more."""

    def __init__(
        self,
        path: Path,
        *,
        killed_after: int | None = None,
        full_after: int | None = None,
        kinds: Collection[EntryKind] = (),
    ) -> None:
        super().__init__(path, 0.0)
        self.written = 0
        self._killed_after, self._full_after, self._kinds = killed_after, full_after, kinds
        self._counts = True
        self.killed = asyncio.Event()

    def append(self, at_s: float, kind: EntryKind, *arguments: Any) -> int:
        if self.killed.is_set():
            raise asyncio.CancelledError
        counts = self._counts and (not self._kinds or kind in self._kinds)
        if counts and self._full_after is not None and self.written >= self._full_after:
            raise Permanent("the disk is full")
        sequence = super().append(at_s, kind, *arguments)
        self.written += counts
        if counts and self.written == self._killed_after:
            self.killed.set()
            raise asyncio.CancelledError
        return sequence

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Do not count entries written inside this block."""
        self._counts = False
        try:
            yield
        finally:
            self._counts = True


async def unless_killed(journal: Journal, work: Coroutine[Any, Any, None]) -> None:
    """Run work of a daemon with several tasks, any of which may write the last entry. If the work is cancelled, the
    daemon is killed as well."""
    assert isinstance(journal, KilledJournal)
    working, killed = asyncio.ensure_future(work), asyncio.ensure_future(journal.killed.wait())
    try:
        await asyncio.wait({working, killed}, return_when=asyncio.FIRST_COMPLETED)
        if journal.killed.is_set():
            raise asyncio.CancelledError
        working.result()
    except asyncio.CancelledError:
        journal.killed.set()
        raise
    finally:
        killed.cancel()
        working.cancel()
        await asyncio.wait({working})
        if not working.cancelled():
            working.exception()


async def until_over(clock: VirtualClock, work: Coroutine[Any, Any, Any], within_s: float = MOST_S) -> bool:
    """Advance time until the work has ended, at most by `within_s`; return whether the daemon was killed."""
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
    """The state that one operation changes: "old", "new" or "between". Faults are set by step, as printed."""

    entries: ClassVar[OperationEntries]
    counted: ClassVar[tuple[EntryKind, ...]] = ()  # entries after which a daemon is killed; empty: all
    written: ClassVar[int]  # entries of a successful operation
    steps: ClassVar[tuple[str, ...]]  # that can fail; the operation completes even if the last one fails
    moments_s: ClassVar[tuple[float, ...]]  # since its start, at which its daemon is killed
    without: ClassVar[Mapping[str, str]] = {}  # tests that do not apply to this kind, with the reason

    def __init__(self) -> None:
        self.clock = VirtualClock(0.0)

    @abstractmethod
    async def start(self, journal: Journal) -> None:
        """Start a daemon with this journal, the first one or the next. Entries that the first one writes to set up the
        old state do not count."""

    @abstractmethod
    async def begin(self, journal: Journal) -> None:
        """Order the operation from the daemon with this journal, and return when it has ended or is left open."""

    @abstractmethod
    async def repeat(self) -> None:
        """Deliver the same order again to the same daemon, which may refuse it."""

    @abstractmethod
    async def begin_late(self, journal: Journal) -> None:
        """Order the operation such that it is delivered after it has expired."""

    @abstractmethod
    async def settle(self) -> None:
        """Make the same daemon resume the operations it left open."""

    @abstractmethod
    async def crash(self) -> None:
        """End the daemon: nothing that it began has an effect any more."""

    @abstractmethod
    async def restart(self, journal: Journal) -> None:
        """Make the next daemon, with this journal, finish the operations that were left open."""

    @abstractmethod
    def state(self) -> str: ...

    @abstractmethod
    def reported(self, result: Mapping[str, Any]) -> str:
        """Return the state of the world by the body of the result's entry."""

    @abstractmethod
    def fail(self, step: str) -> None:
        """Make a step fail once, or every time until `mend`."""

    @abstractmethod
    def lose(self, step: str) -> None:
        """Lose the result of a step: it takes effect, and raises."""

    @abstractmethod
    def fail_to_undo(self) -> None:
        """Make the rollback fail each time, until `mend`."""

    @abstractmethod
    def mend(self) -> None: ...

    def outcome(self, journal: Journal) -> str | None:
        """Return the state of the world by the journal: the old one if nothing was begun, None if the operation is
        open."""
        if journal.open_operations(self.entries):
            return None
        results = journal.tail(1, (self.entries.result,))
        return self.reported(results[0].body) if results else "old"
