"""Store the pauses of the balancer, the fabric and weight syncs that operators set. Pauses are journalled and survive
restarts.

Plans are controlled separately, in daemon/plan_book.py, because their control has more states than on and off.
"""

import logging
from dataclasses import dataclass
from enum import StrEnum

from pydantic import TypeAdapter

from orchestrrl.core.clock import Clock
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.core.journal.store import EntryKind, Journal
from orchestrrl.core.ttl import expiry_s, lifetime_faults
from planner.model import Hold

logger = logging.getLogger(__name__)


class PauseScope(StrEnum):
    BALANCER = "balancer"  # moves of the fast loop; moves ordered by an operator continue
    FABRIC = "fabric"  # all changes of circuits for periods
    SYNC = "sync"  # weight syncs: none begins, and no circuits are changed for one


@dataclass(frozen=True, slots=True)
class OperatorPause:
    """An operator's pause of one part of the daemon. If `expires_s` is None, the pause lasts until an operator resumes
    the part."""

    since_s: float
    reason: str = ""
    expires_s: float | None = None


_PAUSES = TypeAdapter(dict[PauseScope, OperatorPause])


class PauseRegistry:
    """The pauses that operators have set. The constructor recovers them from the journal."""

    def __init__(self, journal: Journal, clock: Clock) -> None:
        self._journal = journal
        self._clock = clock
        self._pauses = journal.newest(EntryKind.PAUSES, lambda body: _PAUSES.validate_python(body["pauses"])) or {}

    @property
    def pauses(self) -> dict[PauseScope, OperatorPause]:
        """The pauses in force, by part. Expired pauses are omitted."""
        now_s = self._clock.now_s()
        return {
            part: pause
            for part, pause in sorted(self._pauses.items())
            if pause.expires_s is None or pause.expires_s > now_s
        }

    def hold(self, part: PauseScope) -> Hold | None:
        """Return the reason why this part is paused, or None if it is not paused."""
        pause = self.pauses.get(part)
        if pause is None:
            return None
        until = "" if pause.expires_s is None else f", for {pause.expires_s - self._clock.now_s():.0f} s more"
        return Hold("operator_paused", f"an operator paused the {part}{until}: {pause.reason or 'no reason given'}")

    def pause(self, part: PauseScope, reason: str, ttl_s: float = 0.0) -> OperatorPause:
        """Pause a part for `ttl_s` seconds or, if `ttl_s` is 0, until it is resumed. Raises ProblemFaults if `ttl_s` is
        out of range."""
        if faults := lifetime_faults(ttl_s, until="resumed"):
            raise ProblemFaults(faults)
        now_s = self._clock.now_s()
        pause = OperatorPause(now_s, reason, expiry_s(now_s, ttl_s))
        self._set({**self.pauses, part: pause})
        logger.warning("%s is paused: %s", part, reason)
        return pause

    def resume(self, part: PauseScope, reason: str) -> bool:
        """Resume a part, and return whether it was paused."""
        before = self.pauses
        if part not in before:
            return False
        self._set({other: pause for other, pause in before.items() if other is not part})
        logger.warning("%s is resumed: %s", part, reason)
        return True

    def _set(self, pauses: dict[PauseScope, OperatorPause]) -> None:
        self._journal.append(
            self._clock.now_s(), EntryKind.PAUSES, "", {"pauses": _PAUSES.dump_python(pauses, mode="json")}
        )
        self._pauses = pauses
