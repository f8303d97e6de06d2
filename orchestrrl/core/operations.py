"""What the daemon orders on a node, as values: an operation has an id, a generation and an expiry, and one result.

A node carries an operation out once per id; a repeated one is answered with the stored result. `kind` names an
action in the journal. `settle` finds out from telemetry what became of an operation without a result.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NewType

from planner.model import EngineHealth, EngineId, MoveMethod, NodeId, RequestId, RequestMove, Snapshot

OperationId = NewType("OperationId", str)


class PauseMode(StrEnum):
    """What becomes of running requests: frozen where they are, finished first, or ended with what they have."""

    KEEP = "keep"
    WAIT = "wait"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class EngineRoute:
    """One engine that a gateway may route to.

    `health` None: no agent has reported the engine yet, so the gateway goes by what it sees itself. An empty `url`:
    the gateway knows better than the daemon where the engine is, and keeps its own.

    `kv_version` names what KV depends on, configuration and weights: engines that have the same can hand the KV of
    requests over to each other, as long as it is the one under which the request began. Empty: such moves are none. The
    policy version belongs to it, too, and is added by the gateway, which is the first to know of it.
    """

    engine: EngineId
    url: str
    health: EngineHealth | None = None
    load_index: float | None = None  # equation 5; None: unknown
    kv_capacity_tokens: int = 0  # 0: unknown
    kv_free_tokens: int = 0
    max_sequences: int = 0  # 0: unknown
    draining: bool = False
    kv_version: str = ""
    pool: str = ""  # engines of a kind, which requests' tags may prefer; empty: none
    policy_version: int | None = None  # of its weights; None: not known here
    waiting: int | None = None  # requests that wait on the engine, whoever sent them; None: not known
    newest_policy_version: int | None = None  # the fleet's


@dataclass(frozen=True, slots=True)
class SetRoutes:
    """Replaces the set that a gateway routes to; requests on an engine that left the set stay where they are.

    `expected` engines are being started: a request is kept for one of them, whatever its `hold_s`, and nobody gives up
    for want of an engine, until it is among the routes, is no longer expected, or `expected_until_s` has passed.
    """

    routes: tuple[EngineRoute, ...]
    expected: tuple[EngineId, ...] = ()
    expected_until_s: float = 0.0
    kind: Literal["set_routes"] = "set_routes"


@dataclass(frozen=True, slots=True)
class MoveRequests:
    moves: tuple[RequestMove, ...]
    kind: Literal["move_requests"] = "move_requests"


class FrozenRequests(StrEnum):
    """How requests go on that were frozen while the weights changed."""

    RECOMPUTE = "recompute"  # their KV is computed again, by the weights that are there then
    CONTINUE = "continue"  # with the KV that they have, of the weights before
    RESTART = "restart"  # from the beginning, but for those whose clients have had some of the answer
    TAKEN_BACK = "taken_back"  # gateways have them, engines are empty; as with recompute they go on from their tokens


@dataclass(frozen=True, slots=True)
class CloseBarrier:
    """Take nothing new to the engines and bring them to rest: one item of the result for each. Where that is not done
    by `quiet_by_s`, the pause barrier opens again and the operation has failed. The same lease again renews it.

    `engines_run`: no engine is paused yet, since what other gateways have there is to finish, and the result is of this
    gateway's own requests. The same lease again without it pauses them. `weights_change`: if the lease ends by itself
    nobody knows which weights engines have, and answers say so."""

    lease: str
    holder: str
    mode: PauseMode
    frozen: FrozenRequests
    lease_until_s: float  # the pause barrier opens by itself then
    quiet_by_s: float
    engines_run: bool = False
    weights_change: bool = False
    kind: Literal["close_barrier"] = "close_barrier"


@dataclass(frozen=True, slots=True)
class OpenBarrier:
    """Engines run again, but for those `without` the new weights, and requests go to them. `policy_version` None: the
    weights are those from before."""

    lease: str
    policy_version: int | None = None
    without: tuple[EngineId, ...] = ()
    kind: Literal["open_barrier"] = "open_barrier"


@dataclass(frozen=True, slots=True)
class CancelRequests:
    """All the named requests, and all of the named groups, end where they are."""

    requests: tuple[RequestId, ...]
    groups: tuple[str, ...]
    reason: str
    kind: Literal["cancel_requests"] = "cancel_requests"


Action = SetRoutes | MoveRequests | CloseBarrier | OpenBarrier | CancelRequests


@dataclass(frozen=True, slots=True)
class Operation:
    id: OperationId
    generation: int
    valid_until_s: float
    action: Action


class OperationStatus(StrEnum):
    DONE = "done"
    PARTIAL = "partial"  # the items say which took
    FAILED = "failed"
    REFUSED = "refused"  # past its expiry, or of an older generation
    UNKNOWN = "unknown"  # observe before acting again; as a final word: it could not be found out


@dataclass(frozen=True, slots=True)
class OperationItemResult:
    """Of a move: `duration_s` until its next token, less a decode step; 0 where that was not seen. `method` is the one
    that it went by in the end, None where that is not known, or nothing was to be brought."""

    id: str
    done: bool
    detail: str = ""  # why not
    recomputed_tokens: int = 0
    duration_s: float = 0.0
    method: MoveMethod | None = None
    loaded_tokens: int = 0  # whose KV was handed over
    predicted_s: float = 0.0  # as it was ordered


@dataclass(frozen=True, slots=True)
class OperationResult:
    operation: OperationId
    node: NodeId
    status: OperationStatus
    detail: str = ""
    duration_s: float = 0.0
    items: tuple[OperationItemResult, ...] = ()


def status_of(items: tuple[OperationItemResult, ...]) -> OperationStatus:
    """DONE, PARTIAL or FAILED, as the items say."""
    done = sum(item.done for item in items)
    if done == len(items):
        return OperationStatus.DONE
    return OperationStatus.PARTIAL if done else OperationStatus.FAILED


@dataclass(frozen=True, slots=True)
class MovesOutcome:
    """What became of each move, in the order in which they were asked for, and the operations behind them."""

    items: tuple[OperationItemResult, ...]
    operations: tuple[OperationResult, ...]


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
