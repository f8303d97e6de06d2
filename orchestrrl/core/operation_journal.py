"""Write and read the journal entries of operations: intents, steps and results. No other module writes such entries."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from orchestrrl.core.clock import Clock
from orchestrrl.core.journal.kinds import OperationEntries
from orchestrrl.core.journal.store import Journal, JournalEntry, JournalReader

T = TypeVar("T")
MOST_STEPS = 1_000_000  # maximum number of entries read of one operation


@dataclass(frozen=True, slots=True)
class OpenIntent(Generic[T]):
    """An operation that an earlier daemon began and did not end, with the entries of its steps in the order in which
    they were written."""

    id: str
    sequence: int  # of its intent's entry
    intent: T
    steps: tuple[JournalEntry, ...]


class OperationJournal:
    """Writes the entries of one type of operation. Each method that writes raises Permanent if the journal cannot be
    written."""

    def __init__(self, journal: Journal, clock: Clock, entries: OperationEntries) -> None:
        self._journal = journal
        self._clock = clock
        self._entries = entries

    @property
    def generation(self) -> int:
        return self._journal.generation

    @property
    def has_steps(self) -> bool:
        return self._entries.step is not None

    def begin(self, id: str, body: Mapping[str, Any]) -> None:
        """Write an operation's intent. This method must be called before any step is carried out."""
        self._journal.append(self._clock.now_s(), self._entries.intent, id, body)

    def step(self, id: str, body: Mapping[str, Any]) -> None:
        assert self._entries.step is not None
        self._journal.append(self._clock.now_s(), self._entries.step, id, body)

    def end(self, id: str, body: Mapping[str, Any]) -> None:
        self._journal.append(self._clock.now_s(), self._entries.result, id, body)

    def left_open(self, parse: Callable[[JournalEntry], T]) -> list[OpenIntent[T]]:
        return left_open(self._journal, self._entries, parse)


def left_open(
    journal: JournalReader, entries: OperationEntries, parse: Callable[[JournalEntry], T]
) -> list[OpenIntent[T]]:
    """Return the operations of one type that have no result in the journal, oldest first. Operations whose intent
    `parse` cannot read are skipped."""
    found = []
    for entry in journal.open_operations(entries):
        intent = journal.interpret(entry, lambda _, entry=entry: parse(entry))  # type: ignore[misc]
        if intent is None:
            continue
        steps: tuple[JournalEntry, ...] = ()
        if entries.step is not None:
            written = journal.since(entry.sequence, (entries.step,), MOST_STEPS)
            steps = tuple(step for step in written if step.subject == entry.subject)
        found.append(OpenIntent(entry.subject, entry.sequence, intent, steps))
    return found
