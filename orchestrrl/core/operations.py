"""Data types for the daemon's orders to nodes. An operation has an id, a generation, an expiry, and one result.

A node carries out an operation only once, and responds to later deliveries of the same operation id with the stored
result. `kind` identifies the type of an action in the journal. If an operation has no result, `settle` determines its
outcome from telemetry.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NewType

from planner.model import EngineHealth, EngineId, MoveMethod, NodeId, RequestId, RequestMove, Snapshot

OperationId = NewType("OperationId", str)


class PauseMode(StrEnum):
    """The treatment of running requests during a pause. Requests are frozen in place (KEEP), finished before the pause
    (WAIT), or ended with the tokens generated so far (ABORT)."""

    KEEP = "keep"
    WAIT = "wait"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class EngineRoute:
    """One engine that a gateway may route to.

    If `health` is None, no agent has reported the engine yet, and the gateway uses its own observation. If `url` is
    empty, the gateway keeps the address that it uses.

    `kv_version` identifies the configuration and the weights on which the KV cache depends. Engines with the same
    `kv_version` can transfer the KV of a request to each other if the request began under that version. If `kv_version`
    is empty, KV is not transferred. The gateway adds the policy version to `kv_version`, because a new policy version
    reaches the gateway before the daemon.
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
    """Replaces the set of engines that a gateway routes to. Requests stay on their engine even if the engine is no
    longer in the set.

    The engines in `expected` are being started. While an engine is expected, a request is held for it regardless of the
    request's `hold_s`, and no request fails for lack of an engine. This ends when the engine is among the routes or no
    longer expected, or at `expected_until_s`.
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
    """The treatment of requests that were frozen during a change of weights."""

    RECOMPUTE = "recompute"  # their KV is recomputed with the new weights
    CONTINUE = "continue"  # with their present KV, computed with the previous weights
    RESTART = "restart"  # from the beginning, except for those whose clients have received a part of the answer
    # requests are in gateways and engines are empty; as with recompute, they continue from their tokens
    TAKEN_BACK = "taken_back"


@dataclass(frozen=True, slots=True)
class CloseBarrier:
    """Makes a gateway stop sending requests to the engines and pause the engines. The result has one item per engine.
    If the engines are not paused by `quiet_by_s`, the pause barrier opens again and the operation fails. A later
    CloseBarrier with the same lease renews the lease.

    If `engines_run` is True, the engines are not paused yet, because requests of other gateways must finish first. The
    result then covers only this gateway's own requests. A later operation with the same lease and without `engines_run`
    pauses the engines. If `weights_change` is True and the lease expires, the engines' weights are unknown, and
    responses to requests report this.
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
    """Makes a gateway resume the engines and send requests to them again, except the engines in `without`, which lack
    the new weights. If `policy_version` is None, the weights are unchanged."""

    lease: str
    policy_version: int | None = None
    without: tuple[EngineId, ...] = ()
    kind: Literal["open_barrier"] = "open_barrier"


@dataclass(frozen=True, slots=True)
class CancelRequests:
    """Makes a gateway end the given requests, and all requests of the given groups."""

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
    """The result of one item of an operation, such as one move. For a move, `duration_s` is the time until the
    request's next token minus one decode step, or 0 if this time was not observed. `method` is the method by which the
    request was finally moved, or None if it is unknown or the request had no context to transfer."""

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
    """Return DONE if all items are done, PARTIAL if some items are done, and FAILED if no item is done."""
    done = sum(item.done for item in items)
    if done == len(items):
        return OperationStatus.DONE
    return OperationStatus.PARTIAL if done else OperationStatus.FAILED


@dataclass(frozen=True, slots=True)
class MovesOutcome:
    """The outcome of each move, in the order of the given moves, and the results of the operations that carried the
    moves out."""

    items: tuple[OperationItemResult, ...]
    operations: tuple[OperationResult, ...]


@dataclass(frozen=True, slots=True)
class OperationEvidence:
    """The last reported state of the fleet, and the time of the last report from the operation's node (None if it has
    not reported yet)."""

    snapshot: Snapshot
    last_report_s: float | None


def settle(operation: Operation, node: NodeId, over_s: float, evidence: OperationEvidence) -> OperationResult | None:
    """Determine the outcome of an operation from the node's reports. Return None if the reports do not show the outcome
    yet.

    The node does nothing for the operation after the time `over_s`. Therefore only a report after `over_s` proves that
    a move did not take place, but an earlier report can prove that a move took place.
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
