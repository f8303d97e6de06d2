"""The life cycle of operations, interrupted at every point: each is closed once, with its true outcome."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import GATEWAY, engine_report, gateway_report, request, sample

from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.errors import Retryable
from orchestrrl.core.journal.store import EntryKind, Journal
from orchestrrl.core.operation_runner import GIVE_UP_AFTER_S, OperationRunner, answers
from orchestrrl.core.operations import (
    CancelRequests,
    MoveRequests,
    Operation,
    OperationEvidence,
    OperationId,
    OperationItemResult,
    OperationResult,
    OperationStatus,
    status_of,
)
from orchestrrl.fleet.state import FleetState
from planner.model import EngineId, NodeId, RequestId, RequestMove

E0, E1 = EngineId("e0"), EngineId("e1")
VALID_S = 10.0


def move(id: str, to: EngineId = E1) -> RequestMove:
    return RequestMove(RequestId(id), E0, to)


MOVE = MoveRequests((move("a"), move("b")))


class FakeGateway:
    """A node that follows the protocol: runs each id once, and refuses expired or superseded operations. It really
    moves its requests."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.where: dict[str, str | None] = {"a": "e0", "b": "e0"}
        self.attached = True
        self.delivered: list[Operation] = []
        self.carried_out: list[OperationId] = []
        self._results: dict[OperationId, OperationResult] = {}
        self._newest_generation = 0
        self._sequence = 0

    def send(self, node: NodeId, operation: Operation) -> None:
        if not self.attached or node != GATEWAY:
            raise Retryable(f"node {node} is not attached", 1.0)
        self.delivered.append(operation)

    def hear(self, generation: int) -> None:
        self._newest_generation = max(self._newest_generation, generation)

    def perform(self, operation: Operation) -> OperationResult:
        if operation.id in self._results:
            return self._results[operation.id]
        self.hear(operation.generation)
        if operation.generation < self._newest_generation or self.clock.now_s() > operation.valid_until_s:
            return OperationResult(operation.id, GATEWAY, OperationStatus.REFUSED, "too late")
        assert isinstance(operation.action, MoveRequests)
        self.carried_out.append(operation.id)
        items = tuple(self._move(m) for m in operation.action.moves)
        self._results[operation.id] = OperationResult(operation.id, GATEWAY, status_of(items), items=items)
        return self._results[operation.id]

    def _move(self, m: RequestMove) -> OperationItemResult:
        if self.where.get(m.request) != m.from_engine:
            return OperationItemResult(m.request, False, "is elsewhere")
        self.where[m.request] = m.to_engine
        return OperationItemResult(m.request, True, recomputed_tokens=110)

    def forget(self) -> None:
        """Restart, keeping only the requests (which a real gateway would also lose)."""
        self._results.clear()
        self._newest_generation = 0

    def report(self, state: FleetState) -> None:
        self._sequence += 1
        held = [request(id, engine) for id, engine in self.where.items()]
        state.fold_gateway(gateway_report(*held, sequence=self._sequence), self.clock.now_s())


class Harness:
    """Several daemons one after another, with the same journal file and the same gateway."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = VirtualClock(100.0)
        self.gateway = FakeGateway(self.clock)
        self.journal: Journal | None = None
        self.start()

    def start(self) -> None:
        if self.journal is not None:
            self.journal.close()
        self.journal = Journal(self.path, self.clock.now_s())
        self.state = FleetState()
        self.closed: list[OperationResult] = []
        self.runner = OperationRunner(
            self.journal, self.gateway, self.clock, lambda _, result: self.closed.append(result)
        )
        self.runner.recover()

    def settle(self) -> None:
        snapshot = self.state.snapshot(self.clock.now_s())
        self.runner.settle(lambda node: OperationEvidence(snapshot, self.state.last_report_s(node)))

    def results(self) -> list[dict[str, object]]:
        assert self.journal is not None
        return [dict(entry.body) for entry in self.journal.since(0, (EntryKind.OPERATION_RESULT,))]


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    made = Harness(tmp_path / "journal.sqlite")
    yield made
    assert made.journal is not None
    made.journal.close()


async def begin(harness: Harness, action: MoveRequests | CancelRequests = MOVE) -> asyncio.Task[OperationResult]:
    task = asyncio.create_task(harness.runner.run(GATEWAY, action, VALID_S))
    await asyncio.sleep(0)
    return task


async def test_journal_has_intent_sent_and_result(harness: Harness) -> None:
    task = await begin(harness)
    (operation,) = harness.gateway.delivered
    harness.runner.receive(harness.gateway.perform(operation))
    assert (await task).status is OperationStatus.DONE
    assert harness.journal is not None
    assert operation.id == f"{harness.journal.generation}-1"
    entries = [(e.kind, e.subject) for e in harness.journal.since(0)]
    assert entries == [
        (EntryKind.OPERATION_INTENT, operation.id),
        (EntryKind.OPERATION_SENT, operation.id),
        (EntryKind.OPERATION_RESULT, operation.id),
    ]
    assert harness.runner.open == ()


async def test_result_delivered_twice_counts_once(harness: Harness) -> None:
    task = await begin(harness)
    result = harness.gateway.perform(harness.gateway.delivered[0])
    for _ in range(3):
        harness.runner.receive(result)
    await task
    assert len(harness.closed) == len(harness.results()) == 1


async def test_result_of_another_node_does_not_close_operation(harness: Harness) -> None:
    task = await begin(harness)
    operation = harness.gateway.delivered[0].id
    harness.runner.receive(OperationResult(operation, NodeId("stranger"), OperationStatus.DONE))
    assert len(harness.runner.open) == 1
    task.cancel()


async def test_operation_delivered_twice_is_carried_out_once(harness: Harness) -> None:
    task = await begin(harness)
    harness.runner.attached(GATEWAY)
    first, second = harness.gateway.delivered
    assert first == second
    for delivered in (first, second):
        harness.runner.receive(harness.gateway.perform(delivered))
    assert harness.gateway.carried_out == [first.id]
    assert (await task).status is OperationStatus.DONE
    assert len(harness.results()) == 1


async def test_operation_for_detached_node_is_not_sent(harness: Harness) -> None:
    harness.gateway.attached = False
    result = await harness.runner.run(GATEWAY, MOVE, VALID_S)
    assert result.status is OperationStatus.FAILED
    assert result.detail == "not sent: node gw is not attached"
    assert harness.runner.open == ()


async def test_refusal_of_only_delivery_is_the_outcome(harness: Harness) -> None:
    task = await begin(harness)
    await harness.clock.advance(VALID_S + 1)
    harness.runner.receive(harness.gateway.perform(harness.gateway.delivered[0]))
    assert (await task).status is OperationStatus.REFUSED
    assert harness.gateway.where["a"] == "e0"


@pytest.mark.parametrize("happened", [True, False])
async def test_missing_result_is_determined_from_telemetry(harness: Harness, happened: bool) -> None:
    task = await begin(harness)
    if happened:
        harness.gateway.perform(harness.gateway.delivered[0])
    for later_s in (0.0, VALID_S):
        await harness.clock.advance(later_s)
        harness.gateway.report(harness.state)
        harness.settle()
        assert harness.runner.open  # the result may still arrive
    await harness.clock.advance(1.0)
    harness.settle()
    # A report from before the expiry does not prove that nothing happened.
    assert bool(harness.runner.open) is not happened
    harness.gateway.report(harness.state)
    harness.settle()
    result = await asyncio.wait_for(task, 60)
    assert result.status is (OperationStatus.DONE if happened else OperationStatus.FAILED)
    assert [item.done for item in result.items] == [happened, happened]


@pytest.mark.parametrize(
    ("other", "seen"),
    [({"b": "e0"}, "is on e0"), ({"b": None}, "is held by its gateway"), ({}, "no longer in flight")],
)
async def test_unknown_result_is_determined_by_observation(
    harness: Harness, other: dict[str, str | None], seen: str
) -> None:
    task = await begin(harness)
    operation = harness.gateway.delivered[0]
    harness.gateway.where = {"a": "e1", **other}
    harness.runner.receive(OperationResult(operation.id, GATEWAY, OperationStatus.UNKNOWN, "the connection broke"))
    await harness.clock.advance(0.1)
    harness.gateway.report(harness.state)
    harness.settle()
    result = await asyncio.wait_for(task, 60)
    assert result.status is OperationStatus.PARTIAL
    assert [(item.id, item.done, item.detail) for item in result.items] == [("a", True, ""), ("b", False, seen)]


async def test_node_that_never_returns_leaves_unknown_outcome(harness: Harness) -> None:
    task = await begin(harness)
    await harness.clock.advance(VALID_S + GIVE_UP_AFTER_S)
    harness.settle()
    assert harness.runner.open
    await harness.clock.advance(1.0)
    harness.settle()
    assert (await asyncio.wait_for(task, 60)).status is OperationStatus.UNKNOWN


async def test_outcome_not_visible_in_telemetry_is_unknown(harness: Harness) -> None:
    task = await begin(harness, CancelRequests((), (), "enough"))
    await harness.clock.advance(VALID_S + 1)
    harness.state.fold_engine(engine_report("e0", 1, sample(), agent=GATEWAY), harness.clock.now_s())
    harness.settle()
    result = await asyncio.wait_for(task, 60)
    assert (result.status, result.detail) == (
        OperationStatus.UNKNOWN,
        "no result was received, and telemetry does not show the outcome of cancel_requests",
    )


async def test_withdrawn_operation_is_not_resent_and_its_result_ignored(harness: Harness) -> None:
    task = await begin(harness)
    (operation,) = harness.gateway.delivered
    (opened,) = harness.runner.open
    harness.runner.withdraw(opened, "its lease is over")
    result = await asyncio.wait_for(task, 60)
    assert (result.status, result.detail) == (OperationStatus.UNKNOWN, "withdrawn: its lease is over")
    harness.runner.attached(GATEWAY)
    harness.runner.receive(harness.gateway.perform(operation))
    harness.runner.withdraw(opened, "once more")
    assert harness.gateway.delivered == [operation]
    assert harness.closed == [result]
    assert harness.runner.open == ()


async def test_drain_waits_for_results_in_transit(harness: Harness) -> None:
    assert await harness.runner.drain(60.0) == 0
    await begin(harness)
    assert await harness.runner.drain(0.0) == 1
    draining = asyncio.create_task(harness.runner.drain(60.0))
    await asyncio.sleep(0)
    harness.runner.receive(harness.gateway.perform(harness.gateway.delivered[0]))
    assert await asyncio.wait_for(draining, 60) == 0
    await begin(harness)
    harness.start()
    assert await harness.runner.drain(60.0) == 1  # no caller waits for it: `settle` closes it


async def test_late_nodes_have_no_answer_and_their_orders_remain_open(harness: Harness) -> None:
    orders = {GATEWAY: await begin(harness), NodeId("gw2"): await begin(harness)}
    before = asyncio.all_tasks()
    for asked in (orders, {GATEWAY: orders[GATEWAY]}):
        asking = asyncio.create_task(answers(asked, harness.clock, 5.0))
        await harness.clock.advance(4.9)
        harness.runner.receive(harness.gateway.perform(harness.gateway.delivered[0]))
        await asyncio.sleep(0.01)
        assert asking.done() is (len(asked) == 1)
        await harness.clock.advance(0.0 if asking.done() else 0.2)
        assert await asking == dict.fromkeys(asked) | {GATEWAY: orders[GATEWAY].result()}
    assert not orders[NodeId("gw2")].done()
    assert asyncio.all_tasks() <= before  # no timer is left


# The events before the daemon is killed, one more in each case.
STEPS = ("intent journalled", "sent and journalled", "carried out by the node", "result received")


@pytest.mark.parametrize("reached", range(1, len(STEPS) + 1))
@pytest.mark.parametrize("node_remembers", [True, False])
@pytest.mark.parametrize("node_answers", [True, False])
async def test_next_daemon_determines_outcome_after_kill_at_any_step(
    harness: Harness, reached: int, node_remembers: bool, node_answers: bool
) -> None:
    if reached == 1:
        harness.gateway.send = _killed  # type: ignore[method-assign]
        with pytest.raises(_KilledError):
            await harness.runner.run(GATEWAY, MOVE, VALID_S)
        del harness.gateway.send  # type: ignore[method-assign]
    else:
        task = await begin(harness)
        operation = harness.gateway.delivered[0]
        if reached >= 3:
            result = harness.gateway.perform(operation)
        if reached >= 4:
            harness.runner.receive(result)
        task.cancel()
    truth = reached >= 3
    if not node_remembers:
        harness.gateway.forget()

    await harness.clock.advance(1.0)
    harness.start()
    assert harness.journal is not None
    assert len(harness.runner.open) == (0 if reached >= 4 else 1)
    harness.gateway.delivered.clear()
    harness.gateway.hear(harness.journal.generation)  # routes come first on a new stream
    harness.runner.attached(GATEWAY)
    sends = [entry.body["sends"] for entry in harness.journal.since(0, (EntryKind.OPERATION_SENT,))]
    assert sends == {1: [2], 4: [1]}.get(reached, [1, 2])  # possibly sent counts as sent
    for delivered in harness.gateway.delivered:
        answer = harness.gateway.perform(delivered)
        if node_answers:
            harness.runner.receive(answer)
    for _ in range(3):
        await harness.clock.advance(VALID_S)
        harness.gateway.report(harness.state)
        harness.settle()

    assert harness.runner.open == ()
    assert harness.journal.open_operations() == []
    (written,) = harness.results()
    assert written["status"] == ("done" if truth else "failed")
    assert len(harness.gateway.carried_out) == (1 if truth else 0)  # never by the later daemon
    assert harness.gateway.where == dict.fromkeys("ab", "e1" if truth else "e0")


class _KilledError(Exception):
    pass


def _killed(node: NodeId, operation: Operation) -> None:
    raise _KilledError


class TestMoves:
    async def test_each_gateway_moves_its_own_requests(self, harness: Harness) -> None:
        other = NodeId("gw2")
        sent: list[tuple[NodeId, Operation]] = []
        harness.gateway.send = lambda node, operation: sent.append((node, operation))  # type: ignore[method-assign]
        holders = {"a": GATEWAY, "b": other, "c": GATEWAY}
        task = asyncio.create_task(
            harness.runner.run_moves([move("a"), move("b"), move("c"), move("x")], lambda id: holders.get(id), VALID_S)
        )
        await asyncio.sleep(0.01)
        assert [node for node, _ in sent] == [GATEWAY, other]
        for node, operation in sent:
            assert isinstance(operation.action, MoveRequests)
            items = tuple(OperationItemResult(m.request, m.request != "c", "finished") for m in operation.action.moves)
            harness.runner.receive(OperationResult(operation.id, node, status_of(items), items=items))
        outcome = await task
        assert [(item.id, item.done) for item in outcome.items] == [
            ("a", True), ("b", True), ("c", False), ("x", False),
        ]  # fmt: skip
        assert outcome.items[3].detail == "the request is not in flight on any gateway"
        assert [result.node for result in outcome.operations] == [GATEWAY, other]

    async def test_operation_without_items_fails_all_moves(self, harness: Harness) -> None:
        harness.gateway.attached = False
        outcome = await harness.runner.run_moves([move("a")], lambda _: GATEWAY, VALID_S)
        assert outcome.items == (OperationItemResult(RequestId("a"), False, "not sent: node gw is not attached"),)
