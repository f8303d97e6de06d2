"""Manage the life cycle of operations. The intent is journalled, the order is sent, its outcome is observed, and the
result is journalled.

An operation whose result has not arrived is open. It is sent again when its node attaches again (see delivery.py). If
no result arrives, the outcome is determined from telemetry and never assumed. Open operations of an earlier generation
are recovered from the journal and handled in the same way.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence

from pydantic import TypeAdapter

from orchestrrl.core.clock import Clock
from orchestrrl.core.delivery import OpenOrder, OpenOrders
from orchestrrl.core.errors import Retryable
from orchestrrl.core.journal.kinds import NODE_OPERATIONS
from orchestrrl.core.journal.store import Journal, JournalEntry
from orchestrrl.core.nodes import NodeRegistry
from orchestrrl.core.operation_journal import OperationJournal
from orchestrrl.core.operations import (
    Action,
    MoveRequests,
    MovesOutcome,
    Operation,
    OperationEvidence,
    OperationId,
    OperationItemResult,
    OperationResult,
    OperationStatus,
    settle,
)
from planner.model import NodeId, RequestId, RequestMove

logger = logging.getLogger(__name__)

_OPERATION = TypeAdapter(Operation)
_RESULT = TypeAdapter(OperationResult)

# Time after its end for which an operation waits for evidence before it is closed as unknown.
GIVE_UP_AFTER_S = 60.0


Closed = Callable[[Operation, OperationResult], None]


OpenOperation = OpenOrder[NodeId, Operation, OperationResult]


class OperationRunner:
    """Sends operations to nodes and ensures that each operation is closed exactly once."""

    def __init__(self, journal: Journal, nodes: NodeRegistry, clock: Clock, on_closed: Closed) -> None:
        self._log = OperationJournal(journal, clock, NODE_OPERATIONS)
        self._nodes = nodes
        self._clock = clock
        self._on_closed = on_closed
        self._count = itertools.count(1)
        self._open: OpenOrders[NodeId, Operation, OperationResult] = OpenOrders()

    @property
    def open(self) -> tuple[OpenOperation, ...]:
        return tuple(self._open)

    def open_on(self, node: NodeId) -> tuple[OpenOperation, ...]:
        """Return the node's open operations, in order of creation."""
        return self._open.to(node)

    def recover(self) -> int:
        """Load the open operations of earlier generations from the journal, and return their number."""
        for left in self._log.left_open(_written):
            operation, node = left.intent
            # It may have been sent, so it is treated as sent.
            self._open.add(OpenOperation(node, operation, operation.valid_until_s, None, sends=1))
        return len(self.open)

    def next_operation(self, action: Action, valid_for_s: float) -> Operation:
        """Return a new operation of this generation that expires after `valid_for_s` seconds. The operation is not sent
        or journalled. This suffices for standing orders such as routes, which are not tracked because each order
        supersedes the previous one."""
        generation = self._log.generation
        id = OperationId(f"{generation}-{next(self._count)}")
        return Operation(id, generation, self._clock.now_s() + valid_for_s, action)

    async def run(self, node: NodeId, action: Action, valid_for_s: float) -> OperationResult:
        """Journal the action as an operation, send it to the node and wait for its result. If the node is not attached,
        the status of the result is FAILED."""
        operation = self.next_operation(action, valid_for_s)
        future: asyncio.Future[OperationResult] = asyncio.get_running_loop().create_future()
        opened = OpenOperation(node, operation, operation.valid_until_s, future)
        body = {"node": node, "operation": _OPERATION.dump_python(operation, mode="json")}
        self._log.begin(operation.id, body)
        self._open.add(opened)
        try:
            self._send(opened)
        except Retryable as error:
            self._end(opened, OperationStatus.FAILED, f"not sent: {error}")
        return await future

    async def run_moves(
        self, moves: Sequence[RequestMove], gateway_of: Callable[[RequestId], NodeId | None], valid_for_s: float
    ) -> MovesOutcome:
        """Send the moves to the gateways of the requests, to all gateways in parallel, and return the outcome.
        `gateway_of` returns None for a request that is not in flight. `moves` must contain each request at most once.
        """
        by_gateway: dict[NodeId, list[RequestMove]] = {}
        outcome: dict[RequestId, OperationItemResult] = {}
        for move in moves:
            gateway = gateway_of(move.request)
            if gateway is None:
                detail = "the request is not in flight on any gateway"
                outcome[move.request] = OperationItemResult(move.request, done=False, detail=detail)
            else:
                by_gateway.setdefault(gateway, []).append(move)
        results = await asyncio.gather(
            *(self.run(gateway, MoveRequests(tuple(held)), valid_for_s) for gateway, held in by_gateway.items())
        )
        for held, result in zip(by_gateway.values(), results, strict=True):
            told = {item.id: item for item in result.items}
            silent = result.detail or f"{result.status}, without a reason"
            for move in held:
                outcome[move.request] = told.get(move.request) or OperationItemResult(
                    move.request, done=False, detail=silent
                )
        return MovesOutcome(tuple(outcome[move.request] for move in moves), tuple(results))

    def receive(self, result: OperationResult) -> None:
        """Accept a result that a node has sent for an operation. A result for an operation that is already closed is
        ignored."""
        opened = self._open.find(result.node, result.operation)
        if opened is None:
            return
        # A refusal after an earlier delivery leaves that delivery's outcome open, but it ends the operation.
        refused_again = result.status is OperationStatus.REFUSED and opened.sends > 1
        if result.status is OperationStatus.UNKNOWN or refused_again:
            opened.over_s = min(opened.over_s, self._clock.now_s())
            return
        self._close(opened, result)

    def attached(self, node: NodeId) -> None:
        """Send the open operations of a node again after it has attached, to obtain their results."""
        for opened in self._open.to(node):
            self._send(opened)

    def withdraw(self, opened: OpenOperation, why: str) -> None:
        """Close the operation with status UNKNOWN. The operation is not sent again, and late results are ignored."""
        if self._open.find(opened.destination, opened.order.id) is not None:
            self._end(opened, OperationStatus.UNKNOWN, f"withdrawn: {why}")

    def settle(self, evidence_of: Callable[[NodeId], OperationEvidence]) -> None:
        """Close each operation whose outcome is visible in telemetry. An operation whose outcome can no longer be
        determined is closed with status UNKNOWN."""
        now_s = self._clock.now_s()
        for opened in self._open:
            node = opened.destination
            if opened.result is not None and now_s <= opened.over_s:
                continue  # its result is still expected
            result = settle(opened.order, node, opened.over_s, evidence_of(node))
            if result is not None:
                self._close(opened, result)
            elif now_s > opened.over_s + GIVE_UP_AFTER_S:
                self._end(opened, OperationStatus.UNKNOWN, f"node {node} has sent no report since")

    async def drain(self, timeout_s: float) -> int:
        """Wait up to `timeout_s` seconds for the results of open operations. Return the number of operations that are
        still open. The next generation recovers these operations."""
        waiting = [opened.result for opened in self._open if opened.result is not None]
        if waiting:
            await asyncio.wait(waiting, timeout=timeout_s)
        return len(self.open)

    def _send(self, opened: OpenOperation) -> None:
        self._nodes.send(opened.destination, opened.order)
        opened.sends += 1
        self._log.step(opened.order.id, {"node": opened.destination, "sends": opened.sends})

    def _end(self, opened: OpenOperation, status: OperationStatus, detail: str) -> None:
        self._close(opened, OperationResult(opened.order.id, opened.destination, status, detail))

    def _close(self, opened: OpenOperation, result: OperationResult) -> None:
        self._log.end(opened.order.id, _RESULT.dump_python(result, mode="json"))
        self._open.close(opened, result)
        why = result.detail or "; ".join(f"{item.id}: {item.detail}" for item in result.items if not item.done)
        logger.info("operation %s on %s: %s %s", opened.order.id, opened.destination, result.status, why)
        self._on_closed(opened.order, result)


def _written(intent: JournalEntry) -> tuple[Operation, NodeId]:
    return _OPERATION.validate_python(intent.body["operation"]), NodeId(str(intent.body["node"]))


async def answers(
    orders: Mapping[NodeId, "asyncio.Task[OperationResult]"], clock: Clock, within_s: float
) -> dict[NodeId, OperationResult | None]:
    """Wait up to `within_s` seconds for the results of orders to several nodes. Return a mapping from each node to its
    result, or to None if the node has not responded. Orders without a response remain in effect."""
    over = asyncio.ensure_future(clock.sleep(within_s))
    try:
        while (waiting := [task for task in orders.values() if not task.done()]) and not over.done():
            await asyncio.wait([*waiting, over], return_when=asyncio.FIRST_COMPLETED)
    finally:
        over.cancel()
    return {node: task.result() if task.done() else None for node, task in orders.items()}
