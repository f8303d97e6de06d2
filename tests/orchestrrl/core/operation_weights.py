"""The test world of weight versions: engines on three hosts with version 1, and a trainer that publishes version 2."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from operation_world import KilledJournal, OperationWorld, unless_killed
from weights_harness import Harness

from orchestrrl.core.journal.kinds import WEIGHT_SYNCS
from orchestrrl.core.journal.store import EntryKind, Journal
from orchestrrl.weights.controller.state import WeightBook

NEVER_LATE = "a published version does not expire; test_sync_operation covers late orders to peers"
REPAIRED_WITHIN_S = 60.0


class WeightVersionWorld(OperationWorld):
    entries = WEIGHT_SYNCS
    counted = (EntryKind.SYNC_BEGAN, EntryKind.SYNC_STEP, EntryKind.WEIGHTS, EntryKind.SYNC_ENDED)
    written = 19  # the intent, two for each of eight steps, the commit, the result
    steps = ("install e1",)
    without: ClassVar[Mapping[str, str]] = {"test_order_delivered_late_has_no_effect": NEVER_LATE}
    moments_s = (0.0, 0.5, 1.0, 2.0)

    def __init__(self) -> None:
        super().__init__()
        self.harness = Harness(Path(), attempts=1, install_within_s=10.0)
        self.clock = self.harness.clock
        self._has_old = False
        self._dying: asyncio.Task[None] | None = None
        self._faults: list[Callable[[], None]] = []  # of version 2

    async def start(self, journal: Journal) -> None:
        self.harness.start(journal)
        self._dying = asyncio.ensure_future(self._die_with(journal))
        if not self._has_old:
            await self.clock.sleep(0.5)
            self.harness.publish(1)
            await self._until_over()
            self._has_old = True

    async def _die_with(self, journal: Journal) -> None:
        """End the daemon at once, whichever of its tasks wrote the last entry."""
        assert isinstance(journal, KilledJournal)
        await journal.killed.wait()
        self.harness.kill()

    async def begin(self, journal: Journal) -> None:
        for fault in self._faults:
            fault()
        self.harness.publish(2)
        await unless_killed(journal, self._until_over())

    async def repeat(self) -> None:
        self.harness.publish(2)
        await self._until_over()

    async def begin_late(self, journal: Journal) -> None:
        raise AssertionError(NEVER_LATE)

    async def settle(self) -> None:
        raise AssertionError("nothing stays open here")

    async def crash(self) -> None:
        assert self._dying is not None
        self._dying.cancel()
        self.harness.kill()

    async def restart(self, journal: Journal) -> None:
        await unless_killed(journal, self._until_over())

    async def _until_over(self) -> None:
        """Wait until no version is in progress, and outdated engines are repaired as far as possible."""
        sync, until_s = self.harness.sync, self.clock.now_s() + REPAIRED_WITHIN_S
        while not all(report.over for report in sync.history(0)) or (
            sync.book.fleet.quarantined and self.clock.now_s() < until_s
        ):
            await self.clock.sleep(0.5)
        await self.clock.sleep(2.0)

    def state(self) -> str:
        weights = {engine.weights for engine in self.harness.engines.values()}
        return "new" if weights == {2} else "old" if weights == {1} else "between"

    def reported(self, result: Mapping[str, Any]) -> str:
        raise AssertionError("what the fleet has is in entries of its own")

    def outcome(self, journal: Journal) -> str | None:
        if journal.open_operations(self.entries):
            return None
        book = WeightBook(journal, self.clock)
        book.recover()
        if book.fleet.quarantined:
            return "between"
        return {1: "old", 2: "new"}[book.fleet.version or 0]

    def fail(self, step: str) -> None:
        self._fails(1, spoils=False)

    def fail_to_undo(self) -> None:
        self._fails(1000, spoils=True)

    def _fails(self, times: int, *, spoils: bool) -> None:
        engine = self.harness.engine("e1")

        def fails() -> None:
            engine.fails, engine.spoils = times, spoils

        self._faults.append(fails)

    def lose(self, step: str) -> None:
        """Disconnect the peer before it sends a result, and let it attach again later."""
        peer = self.harness.peer("p1")

        def dies() -> None:
            peer.die()
            self.harness.later(2.0, peer.come_back)

        self._faults.append(lambda: self.harness.when("p1 has done install", dies))

    def mend(self) -> None:
        self.harness.engine("e1").fails = 0
