"""How packing sees a snapshot, and the load indices around the moves that it chooses. Pure."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from statistics import median

from balancer.load_index import BalanceProblem, LoadRequest, Worker
from balancer.load_index_moves import Balance, Move, decide
from balancer.packing import Packing, PackingEngine, PackingRequest
from orchestrrl.daemon.cost_estimates import StepTimeEstimates, unknown_step_times
from planner.model import Configuration, ConfigurationId, EngineId, EngineView, Hold, RequestId, RequestState, Snapshot

# An engine counts as slower than its configuration says if it takes this many times longer, against the median engine:
# rates are measured over windows with prefills in them.
FAR_SLOWER = 2.0


def packing_engines(
    snapshot: Snapshot,
    problem: BalanceProblem,
    configurations: Sequence[Configuration],
    remaining_tokens: Mapping[RequestId, float],
    stuck: AbstractSet[RequestId],
    step_times: Mapping[EngineId, StepTimeEstimates],
) -> tuple[PackingEngine, ...] | Hold:
    """The usable engines as packing sees them; why there are none where a step time or a request's outlook is unknown,
    or an engine is stalled, so that its end cannot be predicted. `step_times`: where those of engines come from."""
    if not snapshot.engines:
        return Hold("no_engines", "no engine is well by fresh reports")
    known = {configuration.id: configuration for configuration in configurations}
    unknown = {
        engine.id: step_times[engine.id].detail if engine.id in step_times else "its configuration is not known"
        for engine in snapshot.engines
        if engine.configuration not in known
    }
    if unknown:
        return Hold("no_step_times", unknown_step_times(unknown))
    workers = {worker.id: worker for worker in problem.workers}
    stalled = [worker.id for worker in problem.workers if worker.stalled]
    if stalled:
        return Hold("stalled", f"{', '.join(stalled)} stands still, so that its end cannot be predicted")
    outlooks: dict[EngineId, list[PackingRequest]] = {engine.id: [] for engine in snapshot.engines}
    for request in snapshot.requests:
        held = None if request.engine is None else outlooks.get(request.engine)
        if held is not None:
            name = request.id
            left_tokens = remaining_tokens.get(name)
            if left_tokens is None:
                return Hold("no_lengths", f"the remaining length of request {name} is not known")
            tokens = request.prompt_tokens + request.generated_tokens
            held.append(
                PackingRequest(
                    name,
                    request.state,
                    tokens,
                    left_tokens,
                    name not in stuck,
                    request.group,
                    request.prompt_tokens,
                )
            )
    alike: dict[tuple[ConfigurationId | None, int, int], Configuration] = {}
    for engine in snapshot.engines:
        kind = engine.configuration, engine.kv_capacity_tokens, engine.max_sequences
        if engine.configuration is not None and kind not in alike:
            alike[kind] = _with_own_limits(known[engine.configuration], engine)
    own = {
        engine.id: alike[engine.configuration, engine.kv_capacity_tokens, engine.max_sequences]
        for engine in snapshot.engines
    }
    slowdowns = _slowdowns(problem.workers, own)
    return tuple(
        PackingEngine(
            id=engine.id,
            configuration=own[engine.id],
            requests=tuple(outlooks[engine.id]),
            kv_free_tokens=workers[engine.id].kv_free_tokens,
            slowdown=slowdowns.get(engine.id, 1.0),
        )
        for engine in snapshot.engines
    )


def _with_own_limits(configuration: Configuration, engine: EngineView) -> Configuration:
    return replace(
        configuration,
        kv_capacity_tokens=engine.kv_capacity_tokens or configuration.kv_capacity_tokens,
        max_sequences=engine.max_sequences or configuration.max_sequences,
    )


def _slowdowns(workers: Sequence[Worker], configurations: Mapping[EngineId, Configuration]) -> dict[EngineId, float]:
    """Of the engines that are far slower than their configurations say, against the median: how many times."""
    ratios = {}
    for worker in workers:
        kv_tokens = sum(request.context_tokens for request in worker.running)
        expected_s = configurations[worker.id].step_s(len(worker.running), kv_tokens)
        if worker.running and worker.decode_tokens_per_s and expected_s > 0:
            ratios[worker.id] = len(worker.running) / worker.decode_tokens_per_s / expected_s
    typical = median(ratios.values()) if ratios else 1.0
    return {engine: ratio / typical for engine, ratio in ratios.items() if ratio > FAR_SLOWER * typical}


def packed(problem: BalanceProblem, packing: Packing) -> Balance:
    """The moves, with the load indices around them."""
    before = decide(problem, max_moves=0)
    after = decide(_carried_out(problem, packing.moves), max_moves=0) if packing.moves else before
    return Balance(
        load_before=before.load_before,
        load_after=after.load_before,
        spread_before=before.spread_before,
        spread_after=after.spread_before,
        moves=packing.moves,
        stopped_because=packing.stopped_because,
    )


def _carried_out(problem: BalanceProblem, moves: Sequence[Move]) -> BalanceProblem:
    """The fleet after the moves: who arrives runs where a seat and KV are free, and waits where not."""
    workers = {worker.id: worker for worker in problem.workers}
    for move in moves:
        source = workers[move.source]
        (request,) = (request for request in source.running + source.waiting if request.id == move.request)
        workers[move.source] = _without(source, request, move.state)
        workers[move.destination] = _with(workers[move.destination], request)
    return replace(problem, workers=tuple(workers[worker.id] for worker in problem.workers))


def _without(worker: Worker, request: LoadRequest, state: RequestState) -> Worker:
    if state is RequestState.WAITING:
        return replace(worker, waiting=tuple(other for other in worker.waiting if other is not request))
    return replace(
        worker,
        running=tuple(other for other in worker.running if other is not request),
        kv_free_tokens=worker.kv_free_tokens + request.context_tokens,
    )


def _with(worker: Worker, request: LoadRequest) -> Worker:
    if len(worker.running) >= worker.max_sequences or worker.kv_free_tokens < request.context_tokens:
        return replace(worker, waiting=(*worker.waiting, request))
    return replace(
        worker,
        running=(*worker.running, request),
        kv_free_tokens=worker.kv_free_tokens - request.context_tokens,
    )
