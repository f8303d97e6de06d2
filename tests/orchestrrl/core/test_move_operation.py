"""Moves of requests over any network, with two faults one after the other. Each request ends on its old or its new
engine, moves at most once, and the result states its engine, even if only one of two requests has moved.

Single faults are in test_operation_descriptions.py, except those that only a network has.
"""

import asyncio
import contextlib
from functools import partial
from pathlib import Path

import pytest
from builders import GATEWAY, gateway_hello
from operation_move import MOVES, VALID_S, MovingGateway, evidence_of
from operation_world import KilledJournal

from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.journal.store import EntryKind
from orchestrrl.core.nodes import NodeRegistry
from orchestrrl.core.operation_runner import OperationRunner
from orchestrrl.core.operations import MoveRequests, MovesOutcome, Operation, OperationStatus, SetRoutes
from orchestrrl.fleet.state import FleetState

ENTRIES = 3  # the intent, the send, the result
FAULTS = ("order lost", "result lost", "doubled", "late")
CASES = [
    (movable, fault, then)
    for movable in ("ab", "a")
    for fault in ("", *FAULTS, "overtaken")
    for then in ("", *FAULTS)
    if movable == "a" or (fault and then) or fault in ("order lost", "overtaken")
]


class Life:
    """One daemon. Its messages stay in `sent` until the test delivers or drops them."""

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

    async def exchange(self, gateway: MovingGateway, *, fault: str = "") -> list[Operation]:
        """Deliver the sent messages and the answers; return those still in transit."""
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

    async def settle(self, gateway: MovingGateway) -> None:
        for _ in range(3):
            await self.clock.advance(VALID_S)
            evidence = gateway.evidence(self.state, self.clock.now_s())
            with contextlib.suppress(asyncio.CancelledError):
                self.runner.settle(partial(evidence_of, evidence))

    async def end(self) -> None:
        self.nodes.end_all()
        await asyncio.gather(*self._streams)
        self.journal.close()


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def survivor(life: Life, moving: asyncio.Task[MovesOutcome], gateway: MovingGateway) -> Life:
    """Return the daemon itself, or the next one if it was killed."""
    if not life.is_killed:
        return life
    gateway.moved_at_kill = list(gateway.moved)
    moving.cancel()
    await asyncio.wait({moving})
    await life.end()
    await life.clock.advance(1.0)
    return Life(life.path, life.clock)


@pytest.mark.parametrize(("movable", "fault", "then"), CASES)
@pytest.mark.parametrize("killed_after", [None, *range(1, ENTRIES + 1)])
async def test_request_is_on_engine_in_result(
    tmp_path: Path, killed_after: int | None, movable: str, then: str, fault: str
) -> None:
    clock = VirtualClock(100.0)
    gateway = MovingGateway(clock, movable)
    life = Life(tmp_path / "journal.sqlite", clock, killed_after)
    await life.attach()
    moving: asyncio.Task[MovesOutcome] = asyncio.create_task(life.runner.run_moves(MOVES, lambda _: GATEWAY, VALID_S))
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
