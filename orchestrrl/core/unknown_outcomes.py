"""What telemetry says of an operation whose outcome is unknown. Pure."""

from dataclasses import dataclass

from orchestrrl.core.operations import (
    MoveRequests,
    Operation,
    OperationItemResult,
    OperationResult,
    OperationStatus,
    status_of,
)
from planner.model import EngineId, NodeId, RequestId, RequestMove, Snapshot


@dataclass(frozen=True, slots=True)
class OperationEvidence:
    """The fleet as last reported, and when the operation's node was last heard (None: not since we know of it)."""

    snapshot: Snapshot
    last_report_s: float | None


def settle(operation: Operation, node: NodeId, over_s: float, evidence: OperationEvidence) -> OperationResult | None:
    """The outcome as far as the node's reports show it; None while they cannot show it yet.

    After `over_s` the node does nothing more about the operation, so only what it reported later counts as "it did not
    happen". That it did happen may be seen earlier.
    """
    if evidence.last_report_s is None:
        return None
    over = evidence.last_report_s > over_s
    match operation.action:
        case MoveRequests(moves):
            where = {request.id: request.engine for request in evidence.snapshot.requests}
            items = tuple(_settled_move(move, where) for move in moves)
            if not over and not all(item.done for item in items):
                return None
            return OperationResult(operation.id, node, status_of(items), "seen in telemetry", items=items)
        case action:
            if not over:
                return None
            detail = f"no result came, and telemetry does not show the outcome of {action.kind}"
            return OperationResult(operation.id, node, OperationStatus.UNKNOWN, detail)


def _settled_move(move: RequestMove, where: dict[RequestId, EngineId | None]) -> OperationItemResult:
    if move.request not in where:
        return OperationItemResult(move.request, done=False, detail="no longer in flight")
    engine = where[move.request]
    if engine == move.to_engine:
        return OperationItemResult(move.request, done=True)
    return OperationItemResult(
        move.request, done=False, detail=f"is on {engine}" if engine else "is held by its gateway"
    )
