"""The test world of redeployments: a wide engine replaces two narrow engines with requests, and one engine stays."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from operation_world import OperationWorld, unless_killed
from redeployment_harness import Harness

from orchestrrl.core.errors import Permanent
from orchestrrl.core.journal.kinds import REDEPLOYMENTS
from orchestrrl.core.journal.store import EntryKind, Journal
from orchestrrl.core.operation import OperationState
from orchestrrl.fleet.redeployment.steps import RedeployRequest

TO_TP2 = RedeployRequest((("tp2", 0),))
OLD, NEW = {"a", "b", "w"}, {"s1.0", "w"}
STARTED_S = 1.0  # by then the gateway has attached and reported
SETTLED_S = 1.0  # by then the gateway has moved the requests that it held
STATES = {OperationState.DONE: "new", OperationState.ROLLED_BACK: "old", OperationState.DEGRADED: "between"}

# The orders of its steps are those of core/delivery.py.
NEVER_UNDER_WAY = "the daemon begins a redeployment at once, so its order is never in transit"


class RedeploymentWorld(OperationWorld):
    entries = REDEPLOYMENTS
    counted = (EntryKind.REDEPLOYMENT_BEGAN, EntryKind.REDEPLOYMENT_STEP, EntryKind.REDEPLOYMENT_ENDED)
    written = 26  # the intent, two for each of twelve steps, the result
    steps = ("start s1.0",)
    without: ClassVar[Mapping[str, str]] = {
        "test_order_delivered_late_has_no_effect": NEVER_UNDER_WAY,
    }
    moments_s = (0.0, 0.3, 1.1, 2.2)

    def __init__(self) -> None:
        super().__init__()
        self.harness = Harness(Path())
        self.clock = self.harness.clock
        for engine, configuration, *gpus in (("a", "tp1", 0), ("b", "tp1", 1), ("w", "tp2", 2, 3)):
            self.harness.place(str(engine), str(configuration), *map(int, gpus))
        for number in range(6):
            self.harness.gateway.put(f"r{number}", "abw"[number % 3])

    async def start(self, journal: Journal) -> None:
        self.harness.build(journal)
        await unless_killed(journal, self._start())

    async def _start(self) -> None:
        await self.harness.start()
        await self.clock.sleep(STARTED_S)

    async def begin(self, journal: Journal) -> None:
        self.harness.redeployer.begin(TO_TP2)
        await unless_killed(journal, self._until_over())

    async def repeat(self) -> None:
        with suppress(Permanent):
            self.harness.redeployer.begin(TO_TP2)
        await self._until_over()

    async def begin_late(self, journal: Journal) -> None:
        raise AssertionError(NEVER_UNDER_WAY)

    async def settle(self) -> None:
        raise AssertionError("nothing stays open here")

    async def crash(self) -> None:
        with suppress(asyncio.CancelledError):  # raised by its journal
            await self.harness.end()

    async def restart(self, journal: Journal) -> None:
        await unless_killed(journal, self._until_over())

    async def _until_over(self) -> None:
        while self.harness.redeployer.redeploying():
            await self.clock.sleep(0.5)
        await self.clock.sleep(SETTLED_S)

    def state(self) -> str:
        """Return the state. Requests must be on the engines of one state only, and must not be sent to any other."""
        gateway = self.harness.gateway
        engines = {str(engine) for engine in self.harness.machines.alive()}
        serving = {str(engine) for engine in gateway.usable()}
        having = {str(view.engine) for view in gateway.requests.values()}
        if engines != serving or not having <= engines or gateway.held:
            return "between"
        return "old" if engines == OLD else "new" if engines == NEW else "between"

    def reported(self, result: Mapping[str, Any]) -> str:
        return STATES[OperationState(result["report"]["state"])]

    def fail(self, step: str) -> None:
        kind, engine = step.split()
        self.harness.machines.faults[kind, engine] = Permanent("is broken")

    def lose(self, step: str) -> None:
        kind, engine = step.split()
        self.harness.machines.lost.add((kind, engine))

    def fail_to_undo(self) -> None:
        self.fail("start a")

    def mend(self) -> None:
        self.harness.machines.faults.clear()
