"""One generation step over simulated engines in virtual time, and the shortest one if every length were known. Pure.

Serves the oracle of the demo and the comparison of policies. Every request is there at time 0; a policy places each
one and may move requests at fixed intervals, by recompute: the destination queues the request and prefills its context.

Lengths known, the oracle places each request where it likes, in the order it likes, and may move requests by recompute
at the same intervals as the daemon. It searches placements (longest first onto the least loaded engine; the longest
packed together and the rest spread) and takes the best; it is not proven optimal, so `lower_bound_s` stands beside it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from orchestrrl.lab.sim.workload import SimRequest
from orchestrrl.lab.simulated_engine.scheduler import EngineShape, Scheduler, decode_alone_s
from planner.model import RequestId


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
    requests: dict[RequestId, SimRequest]


Policy = Callable[[IntervalState], Sequence[StepMove]]


@dataclass(frozen=True, slots=True)
class StepResult:
    makespan_s: float
    finish_s: dict[RequestId, float]
    moves: int
    tokens_recomputed: int
    preemptions: int
    tokens_prefilled: int = 0  # at first, after moves and after preemptions
    remaining: list[tuple[float, int]] = field(default_factory=list)  # (time, requests in flight)


def run_step(
    shape: EngineShape,
    requests: Sequence[SimRequest],
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
            by_id[request_id].submit(engines[index], 0.0)
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
    return StepResult(
        max(finish_s.values()),
        finish_s,
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
    generated = state.generated[move.request]
    state.requests[move.request].submit(state.engines[move.destination], state.now_s, generated)
    state.engine_of[move.request] = move.destination
    return sequence.context_tokens if generated else 0


# Requests on the engine that takes the longest, and on the next one.
PACKED_LONGEST = (1, 2, 3, 4, 6, 8, 12)
PACKED_NEXT = (20, 30, 40)
MOVES_PER_INTERVAL = 6
WORTH_S = 0.1  # a move must shorten the predicted step by this much


def best_step(
    shape: EngineShape, engines: int, requests: Sequence[SimRequest], routed: Sequence[Sequence[RequestId]]
) -> StepResult:
    """The shortest step found. `routed`: the placement that OrchestrRL's gateway would begin with."""
    candidates = [run_step(shape, requests, placement) for placement in (routed, *_placements(engines, requests))]
    candidates.append(run_step(shape, requests, routed, known_lengths_policy(shape)))
    return min(candidates, key=lambda result: result.makespan_s)


def lower_bound_s(shape: EngineShape, requests: Sequence[SimRequest]) -> float:
    """No schedule is shorter: the longest single request on an engine of its own."""
    return max(decode_alone_s(shape, request.prompt_tokens, request.output_tokens) for request in requests)


def _placements(engines: int, requests: Sequence[SimRequest]) -> Iterator[list[list[RequestId]]]:
    longest_first = sorted(requests, key=lambda request: (-request.output_tokens, request.id))
    loads, placement = [0] * engines, [[] for _ in range(engines)]  # type: tuple[list[int], list[list[RequestId]]]
    for request in longest_first:
        target = loads.index(min(loads))
        placement[target].append(request.id)
        loads[target] += request.prompt_tokens + request.output_tokens
    yield placement
    if engines < 3:
        return
    for longest in PACKED_LONGEST:
        for following in PACKED_NEXT:
            rest = longest_first[longest + following :]
            packed = [
                [request.id for request in longest_first[:longest]],
                [request.id for request in longest_first[longest : longest + following]],
            ]
            yield packed + [[request.id for request in rest[k :: engines - 2]] for k in range(engines - 2)]


def known_lengths_policy(shape: EngineShape) -> Policy:
    """Moves that shorten the predicted end of the step, with the remaining tokens of every request known."""

    def policy(state: IntervalState) -> list[StepMove]:
        loads = [_Load(shape, engine) for engine in state.engines]
        moves: list[StepMove] = []
        while len(moves) < MOVES_PER_INTERVAL:
            move = _best_move(loads, {move.request for move in moves})
            if move is None:
                break
            source, request, destination = move
            loads[destination].items.append(request)
            loads[source].items.remove(request)
            moves.append(StepMove(request[1], source, destination))
        return moves

    return policy


_Item = tuple[int, RequestId, int]  # remaining tokens, id, context tokens


class _Load:
    """What is on one engine, and when it would be through if all of it ran at once."""

    def __init__(self, shape: EngineShape, engine: Scheduler) -> None:
        self.shape = shape
        self.items: list[_Item] = [(s.to_generate, s.id, s.context_tokens) for s in (*engine.running, *engine.waiting)]

    def end_s(self, without: _Item | None = None, plus: _Item | None = None) -> float:
        items = sorted([item for item in self.items if item is not without] + ([plus] if plus else []))
        footprint = sum(remaining + context for remaining, _, context in items)
        if footprint > self.shape.kv_capacity_tokens or len(items) > self.shape.max_num_seqs:
            # They cannot all run at once: as long as their work takes at full occupancy, roughly.
            rounds = max(footprint / self.shape.kv_capacity_tokens, len(items) / self.shape.max_num_seqs)
            return rounds * self._together_s(items)
        return self._together_s(items)

    def _together_s(self, items: Sequence[_Item]) -> float:
        shape, end_s, done = self.shape, 0.0, 0
        kv_tokens = sum(context for _, _, context in items)
        for index, (remaining, _, context) in enumerate(items):
            batch, steps = len(items) - index, remaining - done
            end_s += steps * (shape.alpha_s + shape.beta_s * batch)
            end_s += shape.gamma_s * (kv_tokens * steps + batch * steps * (steps - 1) / 2)
            kv_tokens += batch * steps - (context + remaining)
            done = remaining
        return end_s


def _best_move(loads: list[_Load], moved: set[RequestId]) -> tuple[int, _Item, int] | None:
    ends_s = [load.end_s() for load in loads]
    source = ends_s.index(max(ends_s))
    best: tuple[float, int, _Item] | None = None
    for item in loads[source].items:
        if item[1] in moved:
            continue
        left_s = loads[source].end_s(without=item)
        prefill_s = item[2] * loads[source].shape.prefill_s_per_token
        for destination, load in enumerate(loads):
            if destination == source or left_s >= ends_s[source] - WORTH_S:
                continue
            worst_s = max(left_s, load.end_s(plus=item) + prefill_s)
            if worst_s < ends_s[source] - WORTH_S and (best is None or worst_s < best[0]):
                best = (worst_s, destination, item)
    return None if best is None else (source, best[2], best[1])
