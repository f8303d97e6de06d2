"""What the daemon orders on a node, as values: an operation has an id, a generation and an expiry, and one result.

A node carries an operation out once per id; a repeated one is answered with the stored result. `kind` names an
action in the journal.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NewType

from orchestrrl.engines.base import PauseMode
from planner.model import EngineHealth, EngineId, NodeId, RequestId

OperationId = NewType("OperationId", str)


@dataclass(frozen=True, slots=True)
class Route:
    """One engine that a gateway may route to.

    `health` None: no agent has reported the engine yet, so the gateway goes by what it sees itself. An empty `url`:
    the gateway knows better than the daemon where the engine is, and keeps its own.
    """

    engine: EngineId
    url: str
    health: EngineHealth | None = None
    load_index: float | None = None  # equation 5; None: unknown
    kv_capacity_tokens: int = 0  # 0: unknown
    kv_free_tokens: int = 0
    max_sequences: int = 0  # 0: unknown
    draining: bool = False


@dataclass(frozen=True, slots=True)
class RequestMove:
    """`hold_s`: for so long the gateway keeps the request for a destination that is not in its routes yet."""

    request: RequestId
    from_engine: EngineId
    to_engine: EngineId
    hold_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SetRoutes:
    """Replaces the set that a gateway routes to; requests on an engine that left the set stay where they are."""

    routes: tuple[Route, ...]
    kind: Literal["set_routes"] = "set_routes"


@dataclass(frozen=True, slots=True)
class MoveRequests:
    moves: tuple[RequestMove, ...]
    kind: Literal["move_requests"] = "move_requests"


@dataclass(frozen=True, slots=True)
class PauseEngine:
    engine: EngineId
    mode: PauseMode
    kind: Literal["pause_engine"] = "pause_engine"


@dataclass(frozen=True, slots=True)
class ResumeEngine:
    engine: EngineId
    kind: Literal["resume_engine"] = "resume_engine"


@dataclass(frozen=True, slots=True)
class AbortRequests:
    engine: EngineId
    requests: tuple[RequestId, ...]
    kind: Literal["abort_requests"] = "abort_requests"


@dataclass(frozen=True, slots=True)
class ProbeEngine:
    """One real completion of one token: an engine can be healthy before it can generate."""

    engine: EngineId
    kind: Literal["probe_engine"] = "probe_engine"


Action = SetRoutes | MoveRequests | PauseEngine | ResumeEngine | AbortRequests | ProbeEngine


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
class ItemResult:
    id: str
    done: bool
    detail: str = ""  # why not
    recomputed_tokens: int = 0
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True)
class OperationResult:
    operation: OperationId
    node: NodeId
    status: OperationStatus
    detail: str = ""
    duration_s: float = 0.0
    items: tuple[ItemResult, ...] = ()


def status_of(items: tuple[ItemResult, ...]) -> OperationStatus:
    """DONE, PARTIAL or FAILED, as the items say."""
    done = sum(item.done for item in items)
    if done == len(items):
        return OperationStatus.DONE
    return OperationStatus.PARTIAL if done else OperationStatus.FAILED
