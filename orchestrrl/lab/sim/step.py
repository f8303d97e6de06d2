"""One generation step over simulated engines, in one process and virtual time: same schedulers as the HTTP engines.

Serves the oracle of the demo and the comparison of policies. Every request is there at time 0; a policy places each
one and may move requests at fixed intervals, by recompute: the destination queues the request and prefills its context.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from orchestrrl.lab.simulated_engine.scheduler import EngineShape, Scheduler
from planner.model import RequestId


@dataclass(frozen=True, slots=True)
class StepRequest:
    """One request of a step. `output_tokens` is how long its answer will be: only an oracle may look at it."""

    id: RequestId
    group: str
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class StepMove:
    request: RequestId
    source: int
    destination: int


@dataclass(slots=True)
class IntervalState:
    """What a policy sees at an interval."""

    now_s: float
    engines: list[Scheduler]
    generated: dict[RequestId, int]  # tokens of the answer so far, by request in flight
    engine_of: dict[RequestId, int]
    requests: dict[RequestId, StepRequest]


Policy = Callable[[IntervalState], Sequence[StepMove]]


@dataclass(frozen=True, slots=True)
class StepResult:
    makespan_s: float
    finish_s: dict[RequestId, float]
    idle_s: tuple[float, ...]  # per engine, from its last busy moment to the makespan and any gap before
    moves: int
    tokens_recomputed: int
    preemptions: int
    tokens_prefilled: int = 0  # at first, after moves and after preemptions
    remaining: list[tuple[float, int]] = field(default_factory=list)  # (time, requests in flight)


def run_step(
    shape: EngineShape,
    requests: Sequence[StepRequest],
    placement: Sequence[Sequence[RequestId]],
    policy: Policy | None = None,
    interval_s: float = 1.0,
) -> StepResult:
    """Run a step to its end.

    placement: per engine, its requests in order of submission; every request exactly once.
    Raises ValueError for a placement that is not one, and for a move of a request that is not where the move says.
    """
    by_id = {request.id: request for request in requests}
    placed = [request_id for ids in placement for request_id in ids]
    if sorted(placed) != sorted(by_id):
        raise ValueError("placement must name every request exactly once")
    engines = [Scheduler(shape) for _ in placement]
    state = IntervalState(0.0, engines, dict.fromkeys(by_id, 0), {}, by_id)
    for index, ids in enumerate(placement):
        for request_id in ids:
            request = by_id[request_id]
            engines[index].submit(
                0.0,
                request_id,
                request.prompt_tokens,
                request.output_tokens,
                group=request.group,
                prompt_tokens=request.prompt_tokens,
            )
            state.engine_of[request_id] = index
    finish_s: dict[RequestId, float] = {}
    remaining = [(0.0, len(by_id))]
    moves = recomputed = 0
    while state.generated:
        state.now_s += interval_s if policy is not None else 5.0
        for engine in engines:
            _advance(engine, state, finish_s)
        remaining.append((state.now_s, len(state.generated)))
        if policy is not None and state.generated:
            for move in policy(state):
                recomputed += _move(state, move)
                moves += 1
    makespan_s = max(finish_s.values())
    return StepResult(
        makespan_s,
        finish_s,
        tuple(makespan_s - engine.busy_s for engine in engines),
        moves,
        recomputed,
        sum(engine.preemptions_total for engine in engines),
        sum(engine.prefilled_tokens_total for engine in engines),
        remaining,
    )


def _advance(engine: Scheduler, state: IntervalState, finish_s: dict[RequestId, float]) -> None:
    for progress in engine.advance(state.now_s):
        state.generated[progress.id] += progress.tokens
        if progress.finished_s is not None:
            finish_s[progress.id] = progress.finished_s
            del state.generated[progress.id], state.engine_of[progress.id]


def _move(state: IntervalState, move: StepMove) -> int:
    """Stop a request at its source and queue it at its destination; tokens to prefill again."""
    if state.engine_of.get(move.request) != move.source or move.source == move.destination:
        raise ValueError(f"cannot move {move.request} from engine {move.source} to {move.destination}")
    (sequence,) = state.engines[move.source].abort([move.request])
    request = state.requests[move.request]
    state.engines[move.destination].submit(
        state.now_s,
        move.request,
        sequence.context_tokens,
        sequence.to_generate,
        group=request.group,
        prompt_tokens=request.prompt_tokens,
    )
    state.engine_of[move.request] = move.destination
    return sequence.context_tokens if state.generated[move.request] else 0
