"""The life of an operation: intent journalled -> sent -> observed -> result journalled.

An operation whose result did not arrive is open. It is sent again when its node attaches again (a node answers a
repeated one with the stored result) and otherwise settled from telemetry; its outcome is never assumed. Open operations
of an earlier generation come back from the journal and go the same way.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pydantic import TypeAdapter

from orchestrrl.core.clock import Clock
from orchestrrl.core.errors import Retryable
from orchestrrl.core.journal.kinds import NODE_OPERATIONS
from orchestrrl.core.journal.store import Journal, JournalEntry
from orchestrrl.core.operation_journal import OperationJournal
from orchestrrl.core.operations import Action, Operation, OperationId, OperationResult, OperationStatus
from orchestrrl.core.unknown_outcomes import OperationEvidence, settle
from planner.model import NodeId

logger = logging.getLogger(__name__)

_OPERATION = TypeAdapter(Operation)
_RESULT = TypeAdapter(OperationResult)

# How long after its end an operation waits for evidence before it is closed as unknown.
GIVE_UP_AFTER_S = 60.0


class NodeOrders(Protocol):
    """Where operations go."""

    def send(self, node: NodeId, operation: Operation) -> None:
        """Hand the operation to the node's stream. Raises Retryable when the node is not attached."""
        ...


Closed = Callable[[Operation, OperationResult], None]


@dataclass(slots=True)
class OpenOperation:
    """An operation without a result. `over_s`: from then on its node does nothing more about it."""

    operation: Operation
    node: NodeId
    over_s: float
    sends: int = 0
    result: asyncio.Future[OperationResult] | None = field(default=None)


class OperationRunner:
    """Sends operations to nodes and sees every one of them closed, once."""

    def __init__(self, journal: Journal, nodes: NodeOrders, clock: Clock, on_closed: Closed) -> None:
        self._log = OperationJournal(journal, clock, NODE_OPERATIONS)
        self._nodes = nodes
        self._clock = clock
        self._on_closed = on_closed
        self._count = itertools.count(1)
        self._open: dict[OperationId, OpenOperation] = {}

    @property
    def open(self) -> tuple[OpenOperation, ...]:
        """In order of creation."""
        return tuple(self._open.values())

    def recover(self) -> int:
        """Take up the open operations of earlier generations; their number."""
        for left in self._log.left_open(_written):
            operation, node = left.intent
            # It may have been sent, so it counts as sent.
            self._open[operation.id] = OpenOperation(operation, node, operation.valid_until_s, sends=1)
        return len(self._open)

    def next_operation(self, action: Action, valid_for_s: float) -> Operation:
        """An operation of this generation that nobody has yet. Standing orders such as routes are sent as such,
        without a life of their own: the next one supersedes them."""
        generation = self._log.generation
        id = OperationId(f"{generation}-{next(self._count)}")
        return Operation(id, generation, self._clock.now_s() + valid_for_s, action)

    async def run(self, node: NodeId, action: Action, valid_for_s: float) -> OperationResult:
        """Have the node do it, and wait for the outcome."""
        operation = self.next_operation(action, valid_for_s)
        future: asyncio.Future[OperationResult] = asyncio.get_running_loop().create_future()
        opened = OpenOperation(operation, node, operation.valid_until_s, result=future)
        body = {"node": node, "operation": _OPERATION.dump_python(operation, mode="json")}
        self._log.begin(operation.id, body)
        self._open[operation.id] = opened
        try:
            self._send(opened)
        except Retryable as error:
            self._close(opened, self._failed(opened, f"nothing was sent: {error}"))
        return await future

    def receive(self, result: OperationResult) -> None:
        """A node's word. A repeated one, or one about a closed operation, changes nothing."""
        opened = self._open.get(result.operation)
        if opened is None or result.node != opened.node:
            return
        # A refusal after an earlier delivery does not say what became of that one; it says that nothing follows.
        refused_again = result.status is OperationStatus.REFUSED and opened.sends > 1
        if result.status is OperationStatus.UNKNOWN or refused_again:
            opened.over_s = min(opened.over_s, self._clock.now_s())
            return
        self._close(opened, result)

    def attached(self, node: NodeId) -> None:
        """Deliver the node's open operations again, to learn their results."""
        for opened in self.open:
            if opened.node == node:
                self._send(opened)

    def withdraw(self, id: OperationId, why: str) -> None:
        """It is not sent again, and its result means nothing to anybody any more."""
        opened = self._open.get(id)
        if opened is not None:
            self._close(opened, OperationResult(id, opened.node, OperationStatus.UNKNOWN, f"withdrawn: {why}"))

    def settle(self, evidence_of: Callable[[NodeId], OperationEvidence]) -> None:
        """Close what telemetry shows, and give up on what nothing will show any more."""
        now_s = self._clock.now_s()
        for opened in self.open:
            if opened.result is not None and now_s <= opened.over_s:
                continue  # its result is still to be expected
            result = settle(opened.operation, opened.node, opened.over_s, evidence_of(opened.node))
            if result is None and now_s > opened.over_s + GIVE_UP_AFTER_S:
                detail = f"node {opened.node} has not been heard since"
                result = OperationResult(opened.operation.id, opened.node, OperationStatus.UNKNOWN, detail)
            if result is not None:
                self._close(opened, result)

    async def drain(self, timeout_s: float) -> int:
        """Wait for results that are on their way; the number of operations left open, for the next generation."""
        waiting = [opened.result for opened in self.open if opened.result is not None]
        if waiting:
            await asyncio.wait(waiting, timeout=timeout_s)
        return len(self._open)

    def _send(self, opened: OpenOperation) -> None:
        self._nodes.send(opened.node, opened.operation)
        opened.sends += 1
        self._log.step(opened.operation.id, {"node": opened.node, "sends": opened.sends})

    def _failed(self, opened: OpenOperation, detail: str) -> OperationResult:
        return OperationResult(opened.operation.id, opened.node, OperationStatus.FAILED, detail)

    def _close(self, opened: OpenOperation, result: OperationResult) -> None:
        self._log.end(opened.operation.id, _RESULT.dump_python(result, mode="json"))
        del self._open[opened.operation.id]
        why = result.detail or "; ".join(f"{item.id}: {item.detail}" for item in result.items if not item.done)
        logger.info("operation %s on %s: %s %s", opened.operation.id, opened.node, result.status, why)
        self._on_closed(opened.operation, result)
        if opened.result is not None and not opened.result.done():
            opened.result.set_result(result)


def _written(intent: JournalEntry) -> tuple[Operation, NodeId]:
    return _OPERATION.validate_python(intent.body["operation"]), NodeId(str(intent.body["node"]))


async def answers(
    orders: Mapping[NodeId, "asyncio.Task[OperationResult]"], clock: Clock, within_s: float
) -> dict[NodeId, OperationResult | None]:
    """What came of orders to several nodes; None where no answer came in time. The orders stand."""
    over = asyncio.ensure_future(clock.sleep(within_s))
    try:
        while (waiting := [task for task in orders.values() if not task.done()]) and not over.done():
            await asyncio.wait([*waiting, over], return_when=asyncio.FIRST_COMPLETED)
    finally:
        over.cancel()
    return {node: task.result() if task.done() else None for node, task in orders.items()}
