"""Check moves that operators order, and compare completed moves with their predictions."""

from collections.abc import Iterable
from dataclasses import dataclass

from orchestrrl.core.errors import Permanent, ProblemFaults
from orchestrrl.core.operations import OperationItemResult
from planner.model import EngineHealth, EngineId, MoveMethod, RequestId, RequestMove, Snapshot


@dataclass(frozen=True, slots=True)
class MovedRequest:
    """A completed move of a request, with its result."""

    ended_s: float
    move: RequestMove
    item: OperationItemResult


def checked_move(snapshot: Snapshot, request: RequestId, to_engine: EngineId) -> RequestMove:
    """Return the move that an operator orders. Raises ProblemFaults if an id is unknown, and Permanent if the request
    cannot move or the engine cannot accept it."""
    found = next((view for view in snapshot.requests if view.id == request), None)
    engines = {engine.id: engine for engine in snapshot.engines}
    faults = []
    if found is None:
        faults.append(f"request_id: is not in flight, got {request!r}")
    if to_engine not in engines:
        known = ", ".join(engines) or "none"
        faults.append(f"to_engine_id: must be a known engine ({known}), got {to_engine!r}")
    if found is None or faults:
        raise ProblemFaults(faults)
    if not found.movable:
        raise Permanent(f"request {request} cannot move: {found.movable_detail or 'its gateway does not allow it'}")
    if found.engine is None or found.engine == to_engine:
        where = "held by its gateway" if found.engine is None else f"already assigned to engine {to_engine}"
        raise Permanent(f"request {request} cannot move, because it is {where}")
    if engines[to_engine].health is not EngineHealth.OK:
        health = f"{engines[to_engine].health}, {engines[to_engine].health_detail}"
        raise Permanent(f"request {request} cannot move to engine {to_engine}, whose health is {health}")
    if engines[to_engine].draining:
        raise Permanent(f"engine {to_engine} is draining; run `orchestrrl engines drain {to_engine} --undo` first")
    if engines[to_engine].outdated:
        raise Permanent(f"engine {to_engine} does not have the fleet's weights; see `orchestrrl barrier`")
    return RequestMove(request, found.engine, to_engine, state=found.state)


def moved_requests(
    at_s: float, moves: Iterable[RequestMove], items: Iterable[OperationItemResult]
) -> list[MovedRequest]:
    """Return the moves that were carried out, with their results in `items`. `at_s` is the time at which they ended."""
    by_id = {item.id: item for item in items}
    return [
        MovedRequest(at_s, move, by_id[move.request])
        for move in moves
        if move.request in by_id and by_id[move.request].done
    ]


def fixed_parts(moved: Iterable[MovedRequest]) -> list[tuple[MoveMethod, float]]:
    """Return, for each move, its method and the fixed part of its duration in seconds. The fixed part is the measured
    duration minus the predicted time that grows with the context. Moves without a prediction or a duration are skipped,
    as are moves whose actual method differs from the ordered method."""
    return [
        (each.move.method, each.item.duration_s - (each.move.predicted_s - each.move.fixed_s))
        for each in moved
        if each.move.predicted_s > 0 and each.item.duration_s > 0 and each.item.method is each.move.method
    ]
