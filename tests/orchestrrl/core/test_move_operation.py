"""Moves of requests, interrupted after every entry and on every kind of network: each request ends on its old engine or
on its new one, moves at most once, and the result says where it is."""

import asyncio
import contextlib
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest
from builders import GATEWAY, gateway_hello, gateway_report, request
from operation_world import KilledJournal

from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.delivery import NotDone, ReceivedOrders
from orchestrrl.core.journal.store import EntryKind
from orchestrrl.core.nodes import NodeRegistry
from orchestrrl.core.operation_runner import OperationRunner
from orchestrrl.core.operations import (
    MoveRequests,
    Operation,
    OperationItemResult,
    OperationResult,
    OperationStatus,
    SetRoutes,
    status_of,
)
from orchestrrl.core.unknown_outcomes import OperationEvidence
from orchestrrl.fleet.move_orders import MovesOutcome, run_moves
from orchestrrl.fleet.state import FleetState
from planner.model import EngineId, NodeId, RequestId, RequestMove

E0, E1 = EngineId("e0"), EngineId("e1")
MOVES = [RequestMove(RequestId(name), E0, E1) for name in "ab"]
VALID_S = 10.0
ENTRIES = ("intent", "sent", "result")


class Gateway:
    """Really moves requests. `b` is where it is: its move fails, as it does once a request has ended its turn."""

    def __init__(self, clock: VirtualClock, movable: Iterable[str]) -> None:
        self.where: dict[str, str | None] = {"a": "e0", "b": "e0"}
        self.moved: list[str] = []
        self.moved_at_kill: list[str] | None = None
        self.received = ReceivedOrders(self._perform, self._not_done, clock, capacity=100)
        self._movable = set(movable)
        self._reports = 0

    async def _perform(self, operation: Operation) -> OperationResult:
        moves = operation.action.moves if isinstance(operation.action, MoveRequests) else ()
        items = tuple(self._move(move) for move in moves)
        return OperationResult(operation.id, GATEWAY, status_of(items), items=items)

    def _move(self, move: RequestMove) -> OperationItemResult:
        if move.request not in self._movable:
            return OperationItemResult(move.request, False, "was about to end")
        assert self.where[move.request] == move.from_engine
        self.where[move.request] = move.to_engine
        self.moved.append(move.request)
        return OperationItemResult(move.request, True)

    def _not_done(self, operation: Operation, why: NotDone, detail: str, began_s: float) -> OperationResult:
        return OperationResult(operation.id, GATEWAY, OperationStatus(why), detail)

    def report(self, state: FleetState, now_s: float) -> None:
        self._reports += 1
        held = [request(name, engine) for name, engine in self.where.items()]
        state.fold_gateway(gateway_report(*held, sequence=self._reports), now_s)


class Life:
    """One daemon. What it sends stays in `sent` until the test delivers it, or not."""

    def __init__(self, path: Path, clock: VirtualClock, killed_after: int | None = None) -> None:
        self.clock = clock
        self.path = path
        self.journal = KilledJournal(path, killed_after=killed_after)
        self.state = FleetState()
        self.nodes = NodeRegistry()
        self.runner = OperationRunner(self.journal, self.nodes, clock, lambda *_: None)
        self.runner.recover()
        self.sent: list[Operation] = []
        self._streams: list[asyncio.Task[None]] = []

    @property
    def is_killed(self) -> bool:
        return self.journal.killed.is_set()

    async def attach(self) -> None:
        attachment = self.nodes.attach(gateway_hello("e0", "e1"), self.clock.now_s())
        self.nodes.send(GATEWAY, self.runner.next_operation(SetRoutes(()), 3600.0))
        with contextlib.suppress(asyncio.CancelledError):
            self.runner.attached(GATEWAY)

        async def read() -> None:
            async for operation in attachment.orders():
                self.sent.append(operation)

        self._streams.append(asyncio.create_task(read()))
        await turns()

    async def exchange(self, gateway: Gateway, *, fault: str = "") -> list[Operation]:
        """Deliver what was sent, and the answers; return what is still on its way."""
        sent, self.sent = self.sent, []
        moves = [operation for operation in sent if isinstance(operation.action, MoveRequests)]
        if fault == "late":
            await self.clock.advance(VALID_S + 1.0)
        if fault == "overtaken":
            return moves
        if fault == "order lost":
            sent = [operation for operation in sent if operation not in moves]
        copies = 2 if fault == "doubled" else 1
        answers = await asyncio.gather(*(gateway.received.result(each) for each in sent for _ in range(copies)))
        for answer in () if fault == "result lost" else answers:
            if not self.is_killed:
                with contextlib.suppress(asyncio.CancelledError):
                    self.runner.receive(answer)
        return []

    async def settle(self, gateway: Gateway) -> None:
        for _ in range(3):
            await self.clock.advance(VALID_S)
            gateway.report(self.state, self.clock.now_s())
            evidence = OperationEvidence(self.state.snapshot(self.clock.now_s()), self.state.last_report_s(GATEWAY))
            with contextlib.suppress(asyncio.CancelledError):
                self.runner.settle(partial(_evidence, evidence))

    async def end(self) -> None:
        self.nodes.end_all()
        await asyncio.gather(*self._streams)
        self.journal.close()


def _evidence(evidence: OperationEvidence, _: NodeId) -> OperationEvidence:
    return evidence


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def survivor(life: Life, moving: asyncio.Task[MovesOutcome], gateway: Gateway) -> Life:
    """The daemon itself, or the next one where it was killed."""
    if not life.is_killed:
        return life
    gateway.moved_at_kill = list(gateway.moved)
    moving.cancel()
    await asyncio.wait({moving})
    await life.end()
    await life.clock.advance(1.0)
    return Life(life.path, life.clock)


@pytest.mark.parametrize("fault", ["", "order lost", "result lost", "doubled", "late", "overtaken"])
@pytest.mark.parametrize("then", ["", "order lost", "result lost", "doubled", "late"])
@pytest.mark.parametrize("movable", ["ab", "a"])
@pytest.mark.parametrize("killed_after", [None, *range(1, len(ENTRIES) + 1)])
async def test_a_request_is_where_the_result_says(
    tmp_path: Path, killed_after: int | None, movable: str, then: str, fault: str
) -> None:
    clock = VirtualClock(100.0)
    gateway = Gateway(clock, movable)
    life = Life(tmp_path / "journal.sqlite", clock, killed_after)
    await life.attach()
    moving: asyncio.Task[MovesOutcome] = asyncio.create_task(run_moves(life.runner, MOVES, lambda _: GATEWAY, VALID_S))
    await turns()
    on_their_way = await life.exchange(gateway, fault=fault)
    await turns()
    life = await survivor(life, moving, gateway)
    await life.attach()  # the next daemon, or the same one after a break
    if life.is_killed:
        life = await survivor(life, moving, gateway)
        await life.attach()
    await life.exchange(gateway, fault=then)
    for operation in on_their_way:
        await gateway.received.result(operation)
    life = await survivor(life, moving, gateway)
    await life.settle(gateway)
    life = await survivor(life, moving, gateway)

    assert life.runner.open == ()
    assert life.journal.open_operations() == []
    (entry,) = life.journal.since(0, (EntryKind.OPERATION_RESULT,))
    assert entry.body["status"] != OperationStatus.UNKNOWN
    done = {item["id"] for item in entry.body["items"] if item["done"]}
    assert gateway.where == {name: "e1" if name in done else "e0" for name in "ab"}
    assert len(gateway.moved) == len(set(gateway.moved))
    assert gateway.moved_at_kill in (None, gateway.moved), "a daemon that came later moves nothing"
    if not moving.cancelled():
        items = (await moving).items
        assert {item.id for item in items if item.done} == done
        assert all(item.done or item.detail for item in items)
    await life.end()


async def test_all_entries_are_covered(tmp_path: Path) -> None:
    clock = VirtualClock(100.0)
    life = Life(tmp_path / "journal.sqlite", clock)
    await life.attach()
    moving = asyncio.create_task(run_moves(life.runner, MOVES, lambda _: GATEWAY, VALID_S))
    await turns()
    await life.exchange(Gateway(clock, "ab"))
    await moving
    assert [entry.kind.rpartition(".")[2] for entry in life.journal.since(0)] == list(ENTRIES)
    await life.end()
