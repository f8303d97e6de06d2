"""Manage the daemon's mode and the reason for it. A mode set by an operator persists across restarts."""

import logging

from orchestrrl.core.clock import Clock
from orchestrrl.core.defects import ACTING, REPEATED, Defect, Defects
from orchestrrl.core.errors import few
from orchestrrl.core.journal.store import EntryKind, Journal
from planner.model import Mode

logger = logging.getLogger(__name__)


class ModeSwitch:
    """The daemon's mode. The mode falls back to `advise` if the journal is damaged, or if the same exception ends
    REPEATED consecutive ticks of a part that acts on the fleet. The constructor recovers the mode from the journal."""

    def __init__(self, configured: Mode, journal: Journal, clock: Clock) -> None:
        self.defects = Defects(clock, self._stop_acting)
        self.reason = ""  # empty: the mode is the configured one
        self._configured = configured
        self._journal = journal
        self._clock = clock
        self.current = self._recovered()

    def set(self, mode: Mode, reason: str) -> Mode:
        """Set the mode and return the previous mode. The new mode persists across restarts as long as the configured
        mode does not change. Setting the mode to `act` also confirms damage to the journal."""
        previous = self.current
        body = {"mode": mode, "previous": previous, "reason": reason, "configured": self._configured}
        if mode is Mode.ACT:
            self._journal.confirm_damage(self._clock.now_s(), reason)
        self._journal.append(self._clock.now_s(), EntryKind.MODE, mode, body)
        self.current, self.reason = mode, reason
        if mode is Mode.ACT:
            self.defects.start_anew()
        logger.info("mode is %s (was %s) %s", mode, previous, reason)
        return previous

    def reconfigure(self, mode: Mode) -> None:
        """Apply the mode of a reloaded configuration if it differs from the previously configured mode. The mode `act`
        is not applied while the journal has unconfirmed damage."""
        before, self._configured = self._configured, mode
        if mode is Mode.ACT and self._journal.damage:
            logger.warning("mode stays advise: %s", self.reason)
        elif mode is not before:
            self.set(mode, "configuration reloaded")

    def check_journal(self) -> None:
        """Switch from `act` to `advise` if the journal has become damaged."""
        if self.current is Mode.ACT and self._journal.damage:
            self._only_advise(_damage_of(self._journal))

    def _stop_acting(self, defect: Defect) -> None:
        """Switch to `advise` mode if the mode is `act` and `defect` occurred in a part of the daemon that acts on the
        fleet. It is called when ticks of one part have repeatedly failed with the same exception."""
        if self.current is not Mode.ACT or defect.part not in ACTING:
            return
        self._only_advise(f"{defect.part} failed {REPEATED} times in a row: {defect}")

    def _only_advise(self, reason: str) -> None:
        """Switch to `advise` until an operator sets the mode. This method does not raise exceptions."""
        logger.error("mode is advise from now on: %s; `orchestrrl mode act` sets it back", reason)
        try:
            self.set(Mode.ADVISE, reason)
        except Exception as error:  # noqa: BLE001  # the journal itself may be the cause
            self.current = Mode.ADVISE
            self.reason = f"{reason} (not journalled: {error})"

    def _recovered(self) -> Mode:
        """Return the mode in which the daemon starts. This is the mode that was set last or, if the configured mode has
        changed since then, the configured mode. If the journal is damaged or the last mode cannot be read, return
        `advise`."""
        journal, configured = self._journal, self._configured
        if journal.damage:
            self.reason = _damage_of(journal)
            return Mode.ADVISE
        written = journal.newest(
            EntryKind.MODE, lambda body: (Mode(body["mode"]), str(body["configured"]), str(body.get("reason", "")))
        )
        latest = journal.latest(EntryKind.MODE)
        if latest is not None and latest.sequence in journal.set_aside:
            self.reason = f"the last mode that was set cannot be read (journal entry {latest.sequence})"
            return Mode.ADVISE
        if written is None or written[1] != configured:
            return configured
        mode, _, self.reason = written
        if mode is not configured:
            words = (mode, self.reason or "no reason given", configured)
            logger.warning("mode is %s, as set earlier (%s); the configured mode is %s", *words)
        return mode


def _damage_of(journal: Journal) -> str:
    return f"the journal is damaged: {few(journal.damage, 4)}; `orchestrrl mode act` confirms it"
