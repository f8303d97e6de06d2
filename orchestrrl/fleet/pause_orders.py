"""Send orders to gateways to close and to open, and wait until all of them are at rest.

pause_barrier.py decides which lease the orders are for; pause_lease.py, whether it still lasts.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from orchestrrl.core.clock import Clock
from orchestrrl.core.errors import Retryable
from orchestrrl.core.nodes import NodeRegistry
from orchestrrl.core.operation_runner import OperationRunner, answers
from orchestrrl.core.operations import Action, CloseBarrier, OpenBarrier, OperationResult, OperationStatus
from orchestrrl.fleet.pause_lease import LastRelease, PauseLease
from orchestrrl.fleet.reports import BarrierReport
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
        self._tasks: set[Order] = set()

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
        for each in self._runner.open:
            action = each.operation.action
            if each.node == node and isinstance(action, CloseBarrier) and (but is None or action.lease != but.id):
                self._runner.withdraw(each.operation.id, f"lease {action.lease} is over")
                leases.append(action.lease)
        return leases

    def opening(self, node: NodeId) -> bool:
        """Whether an order to open has no answer yet."""
        return any(o.node == node and isinstance(o.operation.action, OpenBarrier) for o in self._runner.open)

    async def answers(self, orders: Mapping[NodeId, Order]) -> Answers:
        """Within ANSWER_S. The orders stand."""
        return await answers(orders, self._clock, ANSWER_S)

    def stop(self) -> list[Order]:
        """Stop waiting for gateways; what they were told they do."""
        for task in self._tasks:
            task.cancel()
        return [*self._tasks]

    def _order(self, node: NodeId, action: Action, valid_for_s: float) -> Order:
        order: Coroutine[Any, Any, OperationResult] = self._runner.run(node, action, valid_for_s)
        task = asyncio.create_task(order)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class Quieting:
    """One fleet on its way to rest. Whoever is told to close belongs to it, also who comes late. `engines_run` while
    requests finish."""

    def __init__(self, *, engines_run: bool) -> None:
        self.engines_run = engines_run
        self.orders: dict[NodeId, Order] = {}
        self._broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def broken(self) -> bool:
        return self._broken.done()

    def break_off(self, why: str) -> None:
        """It will not come to that."""
        if not self._broken.done():
            self._broken.set_result(why)

    async def wait(
        self, clock: Clock, until_s: float, reports: Callable[[], Mapping[NodeId, BarrierReport]]
    ) -> Iterable[OperationResult]:
        """The answers of all. Raises Retryable as soon as it is clear that they will not be at rest."""
        over = asyncio.ensure_future(clock.sleep(until_s - clock.now_s()))
        try:
            while not self._at_rest(over.done(), reports()):
                waiting: list[asyncio.Future[Any]] = [task for task in self.orders.values() if not task.done()]
                await asyncio.wait([*waiting, over, self._broken], return_when=asyncio.FIRST_COMPLETED)
        finally:
            over.cancel()
        return [task.result() for task in self.orders.values()]

    def _at_rest(self, over: bool, reports: Mapping[NodeId, BarrierReport]) -> bool:
        for node, task in self.orders.items() if not self.broken else ():
            if task.done() and not rested(task.result()):
                raise Retryable(f"gateway {node} did not come to rest: {why(task.result())}", AGAIN_S)
        running = [node for node, task in self.orders.items() if not task.done()]
        if self.broken or (running and over):
            because = self._broken.result() if self.broken else "not in time"
            words = "; ".join([because, *(_running_text(node, reports.get(node)) for node in running)])
            raise Retryable(f"the fleet did not come to rest: {words}", AGAIN_S)
        return not running


def rested(result: OperationResult | None) -> bool:
    """Whether the gateway has done as it was told; its items tell of engines that could not be reached."""
    return result is not None and result.status in (OperationStatus.DONE, OperationStatus.PARTIAL)


def why(result: OperationResult | None) -> str:
    """Why it has not."""
    if result is None:
        return "has not answered in time"
    items = "; ".join(f"{item.id}: {item.detail}" for item in result.items if not item.done)
    return result.detail or items or f"{result.status}, without a reason"


def _running_text(node: NodeId, report: BarrierReport | None) -> str:
    if report is None:
        return f"gateway {node} has not reported"
    return f"gateway {node} still has {report.running} running requests"
