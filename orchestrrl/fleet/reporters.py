"""Decide which sender's reports are used if several senders report the same subject, for example if two agents report
one engine. This module performs no I/O.

One sender at a time is the leader, and only the leader's reports are used. The leader is replaced when its stream ends,
when it has sent nothing for TAKEOVER_S, or when it could not read its subject for TAKEOVER_S and another sender can
read it. The reports that are used therefore arrive within seconds of each other, even if senders start or stop.

A sender is one process, identified by its incarnation, and its reports are ordered by (stream, sequence). Two senders
without an incarnation cannot be distinguished from one sender that has attached again. Each stream is then treated as a
separate sender, and the newest stream becomes the leader at once. A few late reports of an older stream do not make
that stream the leader again.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

TAKEOVER_S = 3.0
LATE_MOST = 4  # reports of an older stream that may still arrive, those of one burst counted once
BURST_S = 0.1
# Two senders that overlap for this long are two; with a shorter overlap, one replaced the other.
OVERLAP_S = 1.0
REPORTING_S = 5.0
FORGET_S = 60.0


@dataclass(slots=True)
class _Sender:
    name: str
    named: bool  # whether it has an incarnation
    first_s: float
    order: tuple[int, int] = (-1, -1)  # (stream, sequence)
    last_report_s: float = 0.0
    read_s: float = 0.0  # when it could last read its subject
    unheeded: int = 0  # reports since the leader's last one
    ended: bool = False


@dataclass(slots=True)
class Reporters:
    """The senders that report on one subject, and the current leader among them."""

    _senders: dict[Hashable, _Sender] = field(default_factory=dict)
    _lead: _Sender | None = None

    def admit(
        self, name: str, incarnation: str, stream: int, sequence: int, now_s: float, readable: bool = True
    ) -> bool:
        """Return whether a report is used. A report is used if it is newer than its sender's previous reports, and if
        the sender is the leader or becomes the leader now. `readable` is whether the sender could read its subject."""
        key = (name, incarnation or stream)
        sender = self._senders.get(key)
        if sender is None:
            sender = self._senders[key] = _Sender(name, bool(incarnation), now_s, last_report_s=now_s, read_s=now_s)
            self._forget(now_s)
        if (stream, sequence) <= sender.order:
            return False
        if sender.ended:  # the sender has attached again
            sender.ended, sender.first_s = False, now_s
        is_burst = sender.unheeded > 0 and now_s - sender.last_report_s < BURST_S
        sender.order, sender.last_report_s = (stream, sequence), now_s
        sender.read_s = now_s if readable else sender.read_s
        if not self._leads(sender, now_s, readable):
            sender.unheeded += not is_burst
            return False
        self._lead = sender
        if len(self._senders) > 1:
            for other in self._senders.values():
                other.unheeded = 0
        return True

    def stand_in(self) -> None:
        """Clear the leader, because another source reports the subject until a sender reports again."""
        self._lead = None

    def stream_ended(self, stream: int) -> None:
        for sender in self._senders.values():
            if sender.order[0] == stream:
                sender.ended = True

    def side_by_side(self, now_s: float) -> tuple[str, ...]:
        """Return the names of the senders that report the subject at the same time, the leader first. Return an empty
        tuple if fewer than two senders report it."""
        if len(self._senders) < 2:
            return ()
        there = [s for s in self._senders.values() if not s.ended and now_s - s.last_report_s <= REPORTING_S]
        there.sort(key=lambda sender: (sender is not self._lead, sender.first_s))
        others = [other for other in there[1:] if _overlap_s(there[0], other) >= OVERLAP_S]
        return (there[0].name, *(other.name for other in others)) if others else ()

    def _leads(self, sender: _Sender, now_s: float, readable: bool) -> bool:
        lead = self._lead
        if lead is None or lead is sender or lead.ended:
            return True
        silent = now_s - lead.last_report_s > TAKEOVER_S
        if sender.name == lead.name and not (sender.named and lead.named):
            return sender.order[0] > lead.order[0] or (silent and sender.unheeded >= LATE_MOST)
        return silent or (readable and now_s - lead.read_s > TAKEOVER_S)

    def _forget(self, now_s: float) -> None:
        self._senders = {
            key: sender
            for key, sender in self._senders.items()
            if sender is self._lead or not (sender.ended or now_s - sender.last_report_s > FORGET_S)
        }


def _overlap_s(one: _Sender, other: _Sender) -> float:
    return min(one.last_report_s, other.last_report_s) - max(one.first_s, other.first_s)
