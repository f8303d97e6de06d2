"""Whom operators added, drained and removed at run time. Values only; acting on them is fleet/membership_changes.py."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import PlainSerializer, TypeAdapter

from orchestrrl.core.journal.store import EntryKind, Journal
from orchestrrl.fleet.state import EngineFacts
from planner.model import EngineId

# An agent that was forgotten somewhere may go on to report an engine for long; but names are not kept for ever.
REMOVED_REMEMBERED = 4096

_EngineIds = Annotated[frozenset[EngineId], PlainSerializer(sorted)]  # in the journal in order


@dataclass(frozen=True, slots=True)
class Membership:
    """What operators said of engines, over restarts and reloads. Each transition is a new roster; done twice, it is the
    same one. An engine stands in at most one of `added` and `removed`, and is never removed and draining.
    """

    added: tuple[EngineFacts, ...] = ()  # by id; they stand before the configuration's
    draining: _EngineIds = frozenset()  # nothing new goes there
    leaving: _EngineIds = frozenset()  # of these, whose requests are moved elsewhere
    removed: tuple[EngineId, ...] = ()  # in this order; none of ours until added again, whoever reports them

    def __post_init__(self) -> None:
        added = [facts.id for facts in self.added]
        if added != sorted(set(added)):
            raise ValueError(f"added must be in the order of their ids, each once, got {added}")
        if twice := (set(added) | self.draining) & set(self.removed):
            raise ValueError(f"removed engines must not be added or draining, got {sorted(twice)}")
        if not self.leaving <= self.draining:
            raise ValueError(f"leaving engines must be draining, got {sorted(self.leaving - self.draining)}")

    def with_added(self, facts: EngineFacts) -> "Membership":
        """It is there, and takes requests."""
        others = [other for other in self.added if other.id != facts.id]
        taking = self.with_undrained(facts.id)
        removed = tuple(engine for engine in self.removed if engine != facts.id)
        return replace(taking, added=tuple(sorted([*others, facts], key=lambda one: one.id)), removed=removed)

    def with_readmitted(self, engine: EngineId) -> "Membership":
        """It is there by the configuration's word again."""
        return replace(self, removed=tuple(other for other in self.removed if other != engine))

    def with_drained(self, engine: EngineId, move: bool = False) -> "Membership":
        """It takes nothing new; `move`: what is there goes elsewhere. Draining it again does not call moves back."""
        leaving = self.leaving | {engine} if move else self.leaving
        return replace(self, draining=self.draining | {engine}, leaving=leaving)

    def with_undrained(self, engine: EngineId) -> "Membership":
        return replace(self, draining=self.draining - {engine}, leaving=self.leaving - {engine})

    def with_removed(self, engine: EngineId) -> "Membership":
        others = tuple(other for other in self.removed if other != engine)
        added = tuple(facts for facts in self.added if facts.id != engine)
        removed = (*others, engine)[-REMOVED_REMEMBERED:]
        return replace(self.with_undrained(engine), added=added, removed=removed)

    def body(self) -> dict[str, Any]:
        """For the journal."""
        body: dict[str, Any] = _MEMBERSHIP.dump_python(self, mode="json")
        return body

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> "Membership":
        return _MEMBERSHIP.validate_python(body)


_MEMBERSHIP = TypeAdapter(Membership)


def recovered_roster(journal: Journal) -> Membership:
    """The roster as the daemon before left it."""
    return journal.newest(EntryKind.ENGINES, lambda body: Membership.from_body(body["roster"])) or Membership()
