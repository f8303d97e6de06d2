"""The test world of pauses: two gateways with two engines, which the pause barrier pauses.

A gateway that receives no order to open opens automatically when the lease ends, so the world waits for that.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar

from barrier_harness import CONFIG, Gateway
from operation_world import OperationWorld, unless_killed

from orchestrrl.core.clock import stop
from orchestrrl.core.errors import Permanent, Retryable
from orchestrrl.core.journal.kinds import FLEET_PAUSES
from orchestrrl.core.journal.store import EntryKind, Journal
from orchestrrl.core.operations import CloseBarrier, OpenBarrier, Operation, PauseMode
from orchestrrl.daemon.configuration import parse_config
from orchestrrl.daemon.control_plane import ControlPlane, run_loops
from orchestrrl.daemon.wiring import build_daemon
from orchestrrl.fleet.pause_barrier import PauseRequest
from orchestrrl.fleet.pause_operation import ANSWER_S
from orchestrrl.fleet.reports import BarrierPhase

PARSED = parse_config(CONFIG)
LEASE_S = 30.0
DEADLINE_S = 3.0
LATE_S = 10.0
STARTED_S = 0.5  # by then gateways have attached and reported
STATES = {BarrierPhase.OPEN: "old", BarrierPhase.QUIET: "new"}


class FaultyGateway(Gateway):
    loses = False  # its next result, because its stream breaks
    ignores_open = False
    late_s = 0.0  # delivery time of orders to close

    def start_with(self, plane: ControlPlane) -> None:
        self.plane = plane
        self.orders = []
        self.start()

    def cut(self) -> None:
        """Disconnect from a daemon that has ended: its orders are not answered any more."""
        for task in self._tasks:
            task.cancel()
        self.attachment = None

    async def _carry_out(self, operation: Operation) -> None:
        if isinstance(operation.action, OpenBarrier) and self.ignores_open:
            return
        closes = isinstance(operation.action, CloseBarrier)
        if closes:
            await self.clock.sleep(self.late_s)
        if closes and self.loses:
            self.loses = False
            await self._act(operation)
            self.leave()
            await self.clock.sleep(1.0)
            self.come_back()
        else:
            await super()._carry_out(operation)


class PauseWorld(OperationWorld):
    entries = FLEET_PAUSES
    counted = (EntryKind.BARRIER, EntryKind.PAUSE_BEGAN, EntryKind.PAUSE_STEP, EntryKind.PAUSE_ENDED)
    written = 8  # the lease, the intent, two for each of two steps, the pause, the result
    steps: ClassVar[tuple[str, ...]] = ("rest",)
    moments_s = (0.0, 0.05, 0.15, 0.3)
    request = PauseRequest(PauseMode.KEEP, lease_s=LEASE_S, deadline_s=DEADLINE_S)

    def __init__(self) -> None:
        super().__init__()
        self.plane: ControlPlane | None = None
        self.gateways: list[FaultyGateway] = []
        self._loops: asyncio.Task[None] | None = None

    async def start(self, journal: Journal) -> None:
        self.plane = build_daemon(PARSED, journal, self.clock).control_plane
        if not self.gateways:
            self.gateways = [FaultyGateway(self.plane, self.clock, name) for name in ("gw0", "gw1")]
            self._set_faults()
        for gateway in self.gateways:
            gateway.start_with(self.plane)
        self._loops = asyncio.create_task(run_loops(self.plane, self.clock))
        await unless_killed(journal, self.clock.sleep(STARTED_S))

    async def begin(self, journal: Journal) -> None:
        await unless_killed(journal, self._pause(journal))

    async def begin_late(self, journal: Journal) -> None:
        self.gateways[1].late_s = LATE_S
        await self._pause(journal)
        await self.clock.sleep(LATE_S)

    async def _pause(self, journal: Journal) -> None:
        assert self.plane is not None
        with suppress(Retryable):
            await self.plane.fleet.barrier.pause(self.request)
        await self._until_agreed(journal)

    async def repeat(self) -> None:
        assert self.plane is not None
        for gateway in self.gateways:
            for order in gateway.of(CloseBarrier):
                await gateway._carry_out(order)
        with suppress(Permanent):
            await self.plane.fleet.barrier.pause(self.request)

    async def settle(self) -> None:
        raise AssertionError("nothing stays open here")

    async def crash(self) -> None:
        if self.plane is None:  # killed before it was built
            return
        assert self._loops is not None
        plane, self.plane = self.plane, None
        await stop(self._loops, *plane.fleet.barrier.waiting)
        for gateway in self.gateways:
            gateway.cut()

    async def restart(self, journal: Journal) -> None:
        await unless_killed(journal, self._until_agreed(journal))

    async def _until_agreed(self, journal: Journal) -> None:
        """Wait until all agree; gateways that ignore the order to open do so at the end of the lease."""
        until_s = self.clock.now_s() + (LEASE_S if self._ignores_open else 2 * ANSWER_S) + 1.0
        while self.clock.now_s() < until_s:
            await self.clock.sleep(0.5)
            if self.state() != "between" and not journal.open_operations(self.entries):
                return

    def state(self) -> str:
        phases = {gateway.phase for gateway in self.gateways}
        if self.plane is not None:
            phases.add(self.plane.fleet.barrier.state.phase)
        return STATES.get(phases.pop(), "between") if len(phases) == 1 else "between"

    def reported(self, result: Mapping[str, Any]) -> str:
        return {"done": "new", "rolled_back": "old"}.get(result["state"], "between")

    def fail(self, step: str) -> None:
        self._drains_s = 1000.0

    def lose(self, step: str) -> None:
        self._loses = True

    def fail_to_undo(self) -> None:
        self._ignores_open = True

    def mend(self) -> None:
        self._drains_s, self._ignores_open = 0.1, False
        self._set_faults()

    _drains_s, _loses, _ignores_open = 0.1, False, False

    def _set_faults(self) -> None:
        for gateway in self.gateways:
            gateway.ignores_open = self._ignores_open
        if self.gateways:
            self.gateways[1].drains_s, self.gateways[1].loses = self._drains_s, self._loses


class WaitingPauseWorld(PauseWorld):
    """A world in which requests finish first."""

    written = 10
    steps = ("finish",)
    request = PauseRequest(PauseMode.WAIT, lease_s=LEASE_S, deadline_s=DEADLINE_S)
