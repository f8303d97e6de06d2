"""Groups of requests: several samples of one prompt, of which only some may be needed. Pure.

A trainer that wants k samples may ask for a few more and take those that end first. Once k answers of a group are
complete, the others are redundant. A group is forgotten with its last request in flight: its name may be used again.
"""

from dataclasses import dataclass, field

from orchestrrl.gateway.ledger.ledger import RequestRecord
from planner.model import RequestId

# Answers that are complete; the others were cut short.
COMPLETE = frozenset({"stop", "length"})


@dataclass(slots=True)
class _Group:
    in_flight: list[RequestRecord] = field(default_factory=list)
    complete: set[RequestId] = field(default_factory=set)  # an answer may be given again


class InFlightGroups:
    """Those of the requests in flight."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}

    def enter(self, record: RequestRecord) -> None:
        if record.group:
            self._groups.setdefault(record.group, _Group()).in_flight.append(record)

    def redundant(self, record: RequestRecord) -> bool:
        """Its group has enough complete answers without it."""
        group = self._groups.get(record.group)
        return group is not None and 0 < record.group_enough <= len(group.complete - {record.id})

    def members(self, group: str) -> tuple[RequestRecord, ...]:
        """In flight, in order of arrival."""
        found = self._groups.get(group)
        return () if found is None else tuple(found.in_flight)

    def ended(self, record: RequestRecord) -> tuple[RequestRecord, ...]:
        """The record has its answer, or none. The others that nobody needs any longer."""
        group = self._groups.get(record.group)
        if group is None:
            return ()
        if record.finish_reason in COMPLETE:
            group.complete.add(record.id)
        complete = len(group.complete)
        return tuple(other for other in group.in_flight if not other.done and 0 < other.group_enough <= complete)

    def leave(self, record: RequestRecord) -> None:
        """The record is forgotten."""
        group = self._groups.get(record.group)
        if group is None:
            return
        # By identity: records compare by their tokens.
        group.in_flight = [other for other in group.in_flight if other is not record]
        if not group.in_flight:
            del self._groups[record.group]
