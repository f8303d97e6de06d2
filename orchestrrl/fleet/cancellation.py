"""Cancel requests on their engines: requests that a caller names, and requests that are redundant because their group
has enough answers."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from orchestrrl.core.clock import Clock
from orchestrrl.core.errors import Permanent, ProblemFaults
from orchestrrl.core.nodes import NodeRegistry
from orchestrrl.core.operation_runner import OperationRunner, answers
from orchestrrl.core.operations import CancelRequests, OperationResult, OperationStatus
from planner.model import NodeId, RequestId

logger = logging.getLogger(__name__)

ANSWER_S = 5.0
ASKED = "cancelled"  # the stop_reason of answers cancelled without a reason
REDUNDANT = "redundant"


@dataclass(frozen=True, slots=True)
class CancelOutcome:
    requests: tuple[RequestId, ...]
    silent: tuple[NodeId, ...]  # gateways that have not reported what they cancelled


@dataclass(slots=True, eq=False)
class Canceller:
    """Sends cancellation orders to gateways. `totals` counts the cancelled requests by reason (requested by a caller,
    or redundant)."""

    _runner: OperationRunner
    _nodes: NodeRegistry
    _clock: Clock
    waiting: set[asyncio.Task[OperationResult]] = field(default_factory=set)
    totals: Counter[str] = field(default_factory=lambda: Counter({ASKED: 0, REDUNDANT: 0}))

    async def cancel(self, requests: Iterable[RequestId], groups: Iterable[str], reason: str) -> CancelOutcome:
        """Cancel the named requests, and all requests of the named groups, on every gateway. Return the cancelled
        requests and the gateways that did not report. Raises ProblemFaults if no id is given or an id is empty, and
        Permanent if no gateway is attached."""
        action = CancelRequests(tuple(requests), tuple(groups), reason or ASKED)
        named = (*action.requests, *action.groups)
        if not named or not all(named):
            raise ProblemFaults(
                [f"request_ids, group_ids: must contain at least one id and no empty ids, got {list(named)}"]
            )
        orders = {node: self._order(node, action, ASKED) for node in self._nodes.gateways()}
        if not orders:
            raise Permanent("no gateway is attached, so no request can be cancelled; see `orchestrrl status`")
        collected = await answers(orders, self._clock, ANSWER_S)
        results = {node: result for node, result in collected.items() if result is not None}
        ended = [RequestId(item.id) for result in results.values() for item in result.items if item.done]
        silent = [node for node in orders if node not in results or results[node].status is not OperationStatus.DONE]
        return CancelOutcome(tuple(sorted(ended)), tuple(silent))

    def redundant(self, groups: Mapping[NodeId, tuple[str, ...]]) -> None:
        """Order gateways to cancel the unfinished requests of groups that have enough answers. `groups` lists these
        groups for each gateway. If only one gateway is attached, no order is sent, because this gateway cancels the
        requests without an order."""
        attached = self._nodes.gateways()
        for node in attached if len(attached) > 1 else ():
            if groups.get(node):
                self._order(node, CancelRequests((), groups[node], REDUNDANT), REDUNDANT)

    def _order(self, node: NodeId, action: CancelRequests, why: str) -> asyncio.Task[OperationResult]:
        task = asyncio.create_task(self._counted(node, action, why))
        self.waiting.add(task)
        task.add_done_callback(self.waiting.discard)
        return task

    async def _counted(self, node: NodeId, action: CancelRequests, why: str) -> OperationResult:
        result = await self._runner.run(node, action, ANSWER_S)
        self.totals[why] += sum(item.done for item in result.items)
        return result
