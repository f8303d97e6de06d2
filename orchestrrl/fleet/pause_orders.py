"""Send orders to gateways to close and to open.

pause_barrier.py decides which lease the orders are for; pause_lease.py, whether it still lasts.
"""

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

from orchestrrl.core.clock import Clock
from orchestrrl.core.nodes import NodeRegistry
from orchestrrl.core.operation_runner import OperationRunner, answers
from orchestrrl.core.operations import Action, CloseBarrier, OpenBarrier, OperationResult, OperationStatus
from orchestrrl.fleet.pause_lease import LastRelease, PauseLease
from planner.model import NodeId

# How long gateways have for an answer beyond the time that it takes by itself.
ANSWER_S = 5.0
AGAIN_S = 1.0  # when it may be tried again, as far as anybody can tell

Order = asyncio.Task[OperationResult]
Answers = Mapping[NodeId, OperationResult | None]  # None: it has not answered in time


class PauseOrders:
    """What was ordered of gateways; nobody has to wait for the answers."""

    def __init__(self, runner: OperationRunner, nodes: NodeRegistry, clock: Clock) -> None:
        self._runner = runner
        self._nodes = nodes
        self._clock = clock
        self.waiting: set[Order] = set()

    def close(self, node: NodeId, lease: PauseLease, quiet_by_s: float, *, engines_run: bool = False) -> Order:
        action = CloseBarrier(
            lease.id,
            lease.holder,
            lease.mode,
            lease.frozen,
            lease.until_s,
            quiet_by_s,
            engines_run,
            lease.weights_change,
        )
        return self._order(node, action, quiet_by_s - self._clock.now_s() + ANSWER_S)

    def open(self, node: NodeId, opened: LastRelease) -> Order:
        return self._order(node, OpenBarrier(opened.lease, opened.policy_version, opened.without), ANSWER_S)

    def open_all(self, opened: LastRelease) -> dict[NodeId, Order]:
        return {node: self.open(node, opened) for node in self._nodes.gateways()}

    def withdraw_closes(self, node: NodeId, *, but: PauseLease | None) -> list[str]:
        """Leases for which it was to close and has not answered, other than this one. It is not told so again."""
        leases = []
        for each in self._runner.open_on(node):
            action = each.order.action
            if isinstance(action, CloseBarrier) and (but is None or action.lease != but.id):
                self._runner.withdraw(each, f"lease {action.lease} is over")
                leases.append(action.lease)
        return leases

    def opening(self, node: NodeId) -> bool:
        """Whether an order to open has no answer yet."""
        return any(isinstance(each.order.action, OpenBarrier) for each in self._runner.open_on(node))

    async def answers(self, orders: Mapping[NodeId, Order]) -> Answers:
        """Within ANSWER_S. The orders stand."""
        return await answers(orders, self._clock, ANSWER_S)

    def _order(self, node: NodeId, action: Action, valid_for_s: float) -> Order:
        order: Coroutine[Any, Any, OperationResult] = self._runner.run(node, action, valid_for_s)
        task = asyncio.create_task(order)
        self.waiting.add(task)
        task.add_done_callback(self.waiting.discard)
        return task


def rested(result: OperationResult | None) -> bool:
    """Whether the gateway has done as it was told; its items tell of engines that could not be reached."""
    return result is not None and result.status in (OperationStatus.DONE, OperationStatus.PARTIAL)


def why(result: OperationResult | None) -> str:
    """Why it has not."""
    if result is None:
        return "has not answered in time"
    items = "; ".join(f"{item.id}: {item.detail}" for item in result.items if not item.done)
    return result.detail or items or f"{result.status}, without a reason"
