"""The daemon's orders to nodes, as values: an operation has an id, a generation and an expiry, and one result.

A node carries an operation out once per id, and answers a repetition with the stored result. `kind` names an action in
the journal. `settle` determines from telemetry the outcome of an operation without a result.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NewType

from planner.model import EngineHealth, EngineId, MoveMethod, NodeId, RequestId, RequestMove, Snapshot

OperationId = NewType("OperationId", str)


class PauseMode(StrEnum):
    """The treatment of running requests: frozen in place, finished first, or ended with the tokens they have."""

    KEEP = "keep"
    WAIT = "wait"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class EngineRoute:
    """One engine that a gateway may route to.

    If `health` is None, no agent has reported the engine yet, and the gateway uses its own observation. If `url` is
    empty, the gateway keeps the address it has.

    `kv_version` identifies the configuration and the weights on which KV depends. Engines with the same one can hand
    over the KV of requests to each other, as long as it is the one under which the request began. If empty, such moves
    are not made. The policy version is also part of it; the gateway adds it, because the gateway learns it first.
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
    pool: str = ""  # name of a group of similar engines, which requests' tags may prefer; empty: none
    policy_version: int | None = None  # of its weights; None: unknown
    waiting: int | None = None  # requests waiting on the engine, from all senders; None: unknown
    newest_policy_version: int | None = None  # of the fleet


@dataclass(frozen=True, slots=True)
class SetRoutes:
    """Replaces the set of engines that a gateway routes to. Requests on an engine that left the set stay on it.

    `expected` engines are being started. A request is kept for one of them regardless of its `hold_s`, and no request
    fails for lack of an engine, until the engine is among the routes, is no longer expected, or `expected_until_s` has
    passed.
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
    """The way in which requests frozen during a change of weights continue."""

    RECOMPUTE = "recompute"  # their KV is recomputed with the new weights
    CONTINUE = "continue"  # with their present KV, computed with the previous weights
    RESTART = "restart"  # from the beginning, except for those whose clients have received a part of the answer
    # requests are in gateways and engines are empty; as with recompute, they continue from their tokens
    TAKEN_BACK = "taken_back"


@dataclass(frozen=True, slots=True)
class CloseBarrier:
    """Stop sending requests to the engines and bring the engines to rest; the result has one item per engine. If that
    is not done by `quiet_by_s`, the pause barrier opens again and the operation has failed. The same operation with the
    same lease renews the lease.

    With `engines_run`, engines are not paused yet, because requests of other gateways must finish; the result covers
    this gateway's own requests. A later operation with the same lease and without `engines_run` pauses them. With
    `weights_change`, engines have unknown weights if the lease expires, and answers state that.
    """

    lease: str
    holder: str
    mode: PauseMode
    frozen: FrozenRequests
    lease_until_s: float  # the pause barrier then opens automatically
    quiet_by_s: float
    engines_run: bool = False
    weights_change: bool = False
    kind: Literal["close_barrier"] = "close_barrier"


@dataclass(frozen=True, slots=True)
class OpenBarrier:
    """Resume the engines, except those `without` the new weights, and send requests to them. If `policy_version` is
    None, the weights are unchanged."""

    lease: str
    policy_version: int | None = None
    without: tuple[EngineId, ...] = ()
    kind: Literal["open_barrier"] = "open_barrier"


@dataclass(frozen=True, slots=True)
class CancelRequests:
    """End all named requests, and all requests of the named groups."""

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
    PARTIAL = "partial"  # the items state which took effect
    FAILED = "failed"
    REFUSED = "refused"  # expired, or of an older generation
    UNKNOWN = "unknown"  # observe before acting again; as a final status: the outcome could not be determined


@dataclass(frozen=True, slots=True)
class OperationItemResult:
    """The result of one item. For a move, `duration_s` is the time until the next token, less one decode step; 0 if it
    was not observed. `method` is the method finally used; None if unknown, or if there was no context to bring."""

    id: str
    done: bool
    detail: str = ""  # why it is not done
    recomputed_tokens: int = 0
    duration_s: float = 0.0
    method: MoveMethod | None = None
    loaded_tokens: int = 0  # tokens whose KV was handed over
    predicted_s: float = 0.0  # as ordered


@dataclass(frozen=True, slots=True)
class OperationResult:
    operation: OperationId
    node: NodeId
    status: OperationStatus
    detail: str = ""
    duration_s: float = 0.0
    items: tuple[OperationItemResult, ...] = ()


def status_of(items: tuple[OperationItemResult, ...]) -> OperationStatus:
    """Return DONE, PARTIAL or FAILED, according to the items."""
    done = sum(item.done for item in items)
    if done == len(items):
        return OperationStatus.DONE
    return OperationStatus.PARTIAL if done else OperationStatus.FAILED


@dataclass(frozen=True, slots=True)
class MovesOutcome:
    """The outcome of each move, in the order of the request, and the operations that carried them out."""

    items: tuple[OperationItemResult, ...]
    operations: tuple[OperationResult, ...]


@dataclass(frozen=True, slots=True)
class OperationEvidence:
    """The last reported state of the fleet, and the time of the last report of the operation's node (None: no report
    yet)."""

    snapshot: Snapshot
    last_report_s: float | None


def settle(operation: Operation, node: NodeId, over_s: float, evidence: OperationEvidence) -> OperationResult | None:
    """Return the outcome that the node's reports show; None while they cannot show it yet.

    After `over_s` the node does nothing more for the operation, so only a later report proves that a move did not
    happen. That it did happen may be visible earlier.
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
            detail = f"no result was received, and telemetry does not show the outcome of {action.kind}"
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
