"""How short a generation step could be if every answer's length were known: an upper mark for any scheduler. Pure.

Lengths known, the oracle places each request where it likes, in the order it likes, and may move requests by recompute
at the same intervals as the daemon. It searches placements (longest first onto the least loaded engine; the longest
packed together and the rest spread) and takes the best; it is not proven optimal, so `lower_bound_s` stands beside it.
"""

from collections.abc import Iterator, Sequence

from orchestrrl.lab.sim.step import IntervalState, Policy, StepMove, StepRequest, StepResult, run_step
from orchestrrl.lab.simulated_engine.scheduler import EngineShape, Scheduler, decode_alone_s
from planner.model import RequestId

# Requests on the engine that takes the longest, and on the next one.
PACKED_LONGEST = (1, 2, 3, 4, 6, 8, 12)
PACKED_NEXT = (20, 30, 40)
MOVES_PER_INTERVAL = 6
WORTH_S = 0.1  # a move must shorten the predicted step by this much


def best_step(
    shape: EngineShape, engines: int, requests: Sequence[StepRequest], routed: Sequence[Sequence[RequestId]]
) -> StepResult:
    """The shortest step found. `routed`: the placement that OrchestrRL's gateway would begin with."""
    candidates = [run_step(shape, requests, placement) for placement in (routed, *_placements(engines, requests))]
    candidates.append(run_step(shape, requests, routed, known_lengths_policy(shape)))
    return min(candidates, key=lambda result: result.makespan_s)


def lower_bound_s(shape: EngineShape, requests: Sequence[StepRequest]) -> float:
    """No schedule is shorter: the longest single request on an engine of its own."""
    return max(decode_alone_s(shape, request.prompt_tokens, request.output_tokens) for request in requests)


def _placements(engines: int, requests: Sequence[StepRequest]) -> Iterator[list[list[RequestId]]]:
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
