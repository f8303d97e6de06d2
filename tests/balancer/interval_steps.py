"""Simulate a generation step in virtual time, under a policy that may move requests at fixed intervals.

Every request arrives at time 0. Moves are by recompute: the destination queues the request and prefills its context.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orchestrrl.lab.sim.workload import SimRequest
from orchestrrl.lab.simulated_engine.scheduler import EngineShape, Scheduler
from planner.model import RequestId


@dataclass(frozen=True, slots=True)
class StepMove:
    request: RequestId
    source: int
    destination: int


@dataclass(slots=True)
class IntervalState:
    """The state of a step at an interval, as input of a policy."""

    now_s: float
    engines: list[Scheduler]
    generated: dict[RequestId, int]  # tokens of the answer so far, by request in flight
    engine_of: dict[RequestId, int]
    requests: dict[RequestId, SimRequest]


Policy = Callable[[IntervalState], Sequence[StepMove]]


@dataclass(frozen=True, slots=True)
class StepResult:
    makespan_s: float
    finish_s: dict[RequestId, float]


def run_step(
    shape: EngineShape,
    requests: Sequence[SimRequest],
    placement: Sequence[Sequence[RequestId]],
    policy: Policy | None = None,
    interval_s: float = 1.0,
) -> StepResult:
    """Run a step to its end.

    placement: per engine, its requests in order of submission; every request exactly once.
    Raises ValueError for an invalid placement, and for a move whose request is not on its source.
    """
    by_id = {request.id: request for request in requests}
    placed = [request_id for ids in placement for request_id in ids]
    if sorted(placed) != sorted(by_id):
        raise ValueError("placement must name every request exactly once")
    engines = [Scheduler(shape) for _ in placement]
    state = IntervalState(0.0, engines, dict.fromkeys(by_id, 0), {}, by_id)
    for index, ids in enumerate(placement):
        for request_id in ids:
            by_id[request_id].submit(engines[index], 0.0)
            state.engine_of[request_id] = index
    finish_s: dict[RequestId, float] = {}
    while state.generated:
        state.now_s += interval_s if policy is not None else 5.0
        for engine in engines:
            _advance(engine, state, finish_s)
        if policy is not None and state.generated:
            for move in policy(state):
                _move(state, move)
    return StepResult(max(finish_s.values()), finish_s)


def _advance(engine: Scheduler, state: IntervalState, finish_s: dict[RequestId, float]) -> None:
    for progress in engine.advance(state.now_s):
        state.generated[progress.id] += progress.tokens
        if progress.finished_s is not None:
            finish_s[progress.id] = progress.finished_s
            del state.generated[progress.id], state.engine_of[progress.id]


def _move(state: IntervalState, move: StepMove) -> None:
    """Stop a request at its source and queue it at its destination, which recomputes its context."""
    if state.engine_of.get(move.request) != move.source or move.source == move.destination:
        raise ValueError(f"cannot move {move.request} from engine {move.source} to {move.destination}")
    state.engines[move.source].abort([move.request])
    generated = state.generated[move.request]
    state.requests[move.request].submit(state.engines[move.destination], state.now_s, generated)
    state.engine_of[move.request] = move.destination
