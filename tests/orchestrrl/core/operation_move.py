"""The test world of request moves: a gateway that holds two requests, which are to move from one engine to another.

The network delays messages in both directions. A move cannot be rolled back: the gateway carries it out as a whole, and
an unknown outcome is determined by repeating the order or from telemetry.
"""

import asyncio
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, ClassVar

from builders import GATEWAY, gateway_hello, gateway_report, request
from operation_world import OperationWorld, unless_killed

from orchestrrl.core.clock import VirtualClock, stop
from orchestrrl.core.delivery import NotDone, ReceivedOrders
from orchestrrl.core.journal.kinds import NODE_OPERATIONS
from orchestrrl.core.journal.store import Journal
from orchestrrl.core.nodes import Attachment, NodeRegistry
from orchestrrl.core.operation_runner import OperationRunner
from orchestrrl.core.operations import (
    MoveRequests,
    MovesOutcome,
    Operation,
    OperationEvidence,
    OperationItemResult,
    OperationResult,
    OperationStatus,
    SetRoutes,
    status_of,
)
from orchestrrl.fleet.state import FleetState
from planner.model import EngineId, NodeId, RequestId, RequestMove

E0, E1 = EngineId("e0"), EngineId("e1")
MOVES = [RequestMove(RequestId(name), E0, E1) for name in "ab"]
VALID_S = 10.0
NETWORK_S = 0.1  # an order or a result in transit
NO_WAY_BACK = "a move cannot be rolled back: the gateway moves a request or leaves it in place"


class MovingGateway:
    """A gateway that moves requests if they are `movable`."""

    def __init__(self, clock: VirtualClock, movable: Iterable[str]) -> None:
        self.where: dict[str, str | None] = {"a": "e0", "b": "e0"}
        self.moved: list[str] = []
        self.moved_at_kill: list[str] | None = None
        self.received = ReceivedOrders(self._perform, self._not_done, clock, capacity=100)
        self.movable = set(movable)
        self._reports = 0

    async def _perform(self, operation: Operation) -> OperationResult:
        moves = operation.action.moves if isinstance(operation.action, MoveRequests) else ()
        items = tuple(self._move(move) for move in moves)
        return OperationResult(operation.id, GATEWAY, status_of(items), items=items)

    def _move(self, move: RequestMove) -> OperationItemResult:
        if move.request not in self.movable:
            return OperationItemResult(move.request, False, "was about to end")
        assert self.where[move.request] == move.from_engine
        self.where[move.request] = move.to_engine
        self.moved.append(move.request)
        return OperationItemResult(move.request, True)

    def _not_done(self, operation: Operation, why: NotDone, detail: str, began_s: float) -> OperationResult:
        return OperationResult(operation.id, GATEWAY, OperationStatus(why), detail)

    def evidence(self, state: FleetState, now_s: float) -> OperationEvidence:
        """Report to the daemon, and return the evidence that it then has."""
        self._reports += 1
        held = [request(name, engine) for name, engine in self.where.items()]
        state.fold_gateway(gateway_report(*held, sequence=self._reports), now_s)
        return OperationEvidence(state.snapshot(now_s), state.last_report_s(GATEWAY))


def evidence_of(evidence: OperationEvidence, _: NodeId) -> OperationEvidence:
    return evidence


class MoveWorld(OperationWorld):
    entries = NODE_OPERATIONS
    written = 3  # the intent, the send, the result
    steps = ("move",)
    moments_s = (0.0, 0.05, 0.15, 0.25)
    without: ClassVar[Mapping[str, str]] = {
        "test_failed_undo": NO_WAY_BACK,
        "test_failed_undo_and_killed_daemon": NO_WAY_BACK,
    }

    def __init__(self) -> None:
        super().__init__()
        self.gateway = MovingGateway(self.clock, "ab")
        self.late_s = 0.0
        self._loses = False
        self._lost = asyncio.Event()
        self._order: Operation | None = None
        self._tasks: list[asyncio.Task[Any]] = []

    async def start(self, journal: Journal) -> None:
        self.state_seen = FleetState()
        self.nodes = NodeRegistry()
        self.runner = OperationRunner(journal, self.nodes, self.clock, lambda *_: None)

    async def begin(self, journal: Journal) -> None:
        self._attach()
        moving: asyncio.Task[MovesOutcome] = asyncio.create_task(
            self.runner.run_moves(MOVES, lambda _: GATEWAY, VALID_S)
        )
        self._tasks.append(moving)
        await unless_killed(journal, self._until_over_or_lost(moving))

    async def _until_over_or_lost(self, moving: "asyncio.Task[MovesOutcome]") -> None:
        lost = asyncio.ensure_future(self._lost.wait())
        await asyncio.wait({moving, lost}, return_when=asyncio.FIRST_COMPLETED)
        lost.cancel()
        if moving.done():
            done = {item.id for item in moving.result().items if item.done}
            assert done == set(self.gateway.moved)

    async def repeat(self) -> None:
        assert self._order is not None
        await self._deliver(self._order)

    async def begin_late(self, journal: Journal) -> None:
        self.late_s = VALID_S + 1.0
        await self.begin(journal)

    async def settle(self) -> None:
        """Attach the gateway again after its stream broke."""
        self._attach()
        await self.clock.sleep(3 * NETWORK_S)

    async def crash(self) -> None:
        await stop(*self._tasks)
        self._tasks.clear()

    async def restart(self, journal: Journal) -> None:
        await unless_killed(journal, self._recover())

    async def _recover(self) -> None:
        self.runner.recover()
        self._attach()
        for _ in range(3):
            await self.clock.sleep(VALID_S)
            evidence = self.gateway.evidence(self.state_seen, self.clock.now_s())
            self.runner.settle(partial(evidence_of, evidence))

    def _attach(self) -> None:
        attachment = self.nodes.attach(gateway_hello("e0", "e1"), self.clock.now_s())
        self.nodes.send(GATEWAY, self.runner.next_operation(SetRoutes(()), 3600.0))
        self._tasks.append(asyncio.create_task(self._read(attachment)))
        self.runner.attached(GATEWAY)

    async def _read(self, attachment: Attachment) -> None:
        async for operation in attachment.orders():
            if isinstance(operation.action, MoveRequests):
                self._order = operation
            await self._deliver(operation)

    async def _deliver(self, operation: Operation) -> None:
        await self.clock.sleep(NETWORK_S + self.late_s)
        result = await self.gateway.received.result(operation)
        await self.clock.sleep(NETWORK_S)
        if self._loses and isinstance(operation.action, MoveRequests):
            self._loses = False
            self._lost.set()
        else:
            self.runner.receive(result)

    def state(self) -> str:
        assert len(self.gateway.moved) == len(set(self.gateway.moved)), "a request moves at most once"
        engines = set(self.gateway.where.values())
        return {E0: "old", E1: "new"}[EngineId(str(engines.pop()))] if len(engines) == 1 else "between"

    def reported(self, result: Mapping[str, Any]) -> str:
        if result["status"] == OperationStatus.UNKNOWN:
            return "unknown"
        done = {item["id"] for item in result["items"] if item["done"]}
        return {0: "old", len(MOVES): "new"}.get(len(done), "between")

    def fail(self, step: str) -> None:
        self.gateway.movable.clear()

    def lose(self, step: str) -> None:
        self._loses = True

    def fail_to_undo(self) -> None:
        raise AssertionError(NO_WAY_BACK)

    def mend(self) -> None:
        self.gateway.movable.update("ab")
