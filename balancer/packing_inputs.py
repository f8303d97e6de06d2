"""The step times that packing needs, and the load indices around the moves that it chooses. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from balancer.load_index import Worker
from balancer.load_index_moves import Balance, decide
from balancer.packing import Packing
from planner.model import (
    Configuration,
    ConfigurationId,
    EngineId,
    EngineView,
    Hold,
    RequestId,
    RequestMove,
    RequestState,
    RequestView,
    StepTimeEstimates,
    unknown_step_times,
)

# An engine counts as slower than its configuration says if it takes this many times longer, against the median engine:
# rates are measured over windows with prefills in them.
FAR_SLOWER = 2.0


def packing_configurations(
    workers: Sequence[Worker],
    engines: Sequence[EngineView],
    configurations: Sequence[Configuration],
    remaining_tokens: Mapping[RequestId, float],
    step_times: Mapping[EngineId, StepTimeEstimates],
) -> dict[EngineId, Configuration] | Hold:
    """Return each engine's step times, with its own KV capacity and slots.

    `engines` are those of the workers. Hold where packing cannot decide: a step time or a request's remaining length is
    unknown, or an engine is stalled, so that its end cannot be predicted. `step_times`: where those of engines come
    from.
    """
    if not engines:
        return Hold("no_engines", "no engine is well by fresh reports")
    known = {configuration.id: configuration for configuration in configurations}
    unknown = {
        engine.id: step_times[engine.id].detail if engine.id in step_times else "its configuration is not known"
        for engine in engines
        if engine.configuration not in known
    }
    if unknown:
        return Hold("no_step_times", unknown_step_times(unknown))
    stalled = [worker.id for worker in workers if worker.stalled]
    if stalled:
        return Hold("stalled", f"{', '.join(stalled)} stands still, so that its end cannot be predicted")
    held = [request.id for worker in workers for request in worker.requests]
    if missing := [request for request in held if request not in remaining_tokens]:
        return Hold("no_lengths", f"the remaining length of request {min(missing)} is not known")
    alike: dict[tuple[ConfigurationId | None, int, int], Configuration] = {}
    own = {}
    for engine in engines:
        kind = engine.configuration, engine.kv_capacity_tokens, engine.max_sequences
        if engine.configuration is not None and kind not in alike:
            alike[kind] = known[engine.configuration].limited_as(engine)
        own[engine.id] = alike[kind]
    return own | {engine: _slowed(own[engine], times) for engine, times in _slowdowns(workers, own).items()}


def _slowed(configuration: Configuration, times: float) -> Configuration:
    return replace(
        configuration,
        alpha_s=configuration.alpha_s * times,
        beta_s=configuration.beta_s * times,
        gamma_s=configuration.gamma_s * times,
        prefill_tokens_per_s=configuration.prefill_tokens_per_s / times,
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


def packed(theta: float, workers: Sequence[Worker], packing: Packing) -> Balance:
    """The moves, with the load indices around them."""
    before = decide(theta, workers, max_moves=0)
    after = decide(theta, _carried_out(workers, packing.moves), max_moves=0) if packing.moves else before
    return Balance(
        load_before=before.load_before,
        load_after=after.load_before,
        spread_before=before.spread_before,
        spread_after=after.spread_before,
        moves=packing.moves,
        stopped_because=packing.stopped_because,
    )


def _carried_out(listed: Sequence[Worker], moves: Sequence[RequestMove]) -> Sequence[Worker]:
    """Return the fleet after the moves: what arrives runs where a seat and KV are free, and waits where not."""
    workers = {worker.id: worker for worker in listed}
    for move in moves:
        source = workers[move.from_engine]
        (request,) = (request for request in source.running + source.waiting if request.id == move.request)
        workers[move.from_engine] = _without(source, request, move.state)
        workers[move.to_engine] = _with(workers[move.to_engine], request)
    return list(workers.values())


def _without(worker: Worker, request: RequestView, state: RequestState) -> Worker:
    if state is RequestState.WAITING:
        return replace(worker, waiting=tuple(other for other in worker.waiting if other is not request))
    return replace(
        worker,
        running=tuple(other for other in worker.running if other is not request),
        kv_free_tokens=worker.kv_free_tokens + request.context_tokens,
    )


def _with(worker: Worker, request: RequestView) -> Worker:
    if len(worker.running) >= worker.max_sequences or worker.kv_free_tokens < request.context_tokens:
        return replace(worker, waiting=(*worker.waiting, request))
    return replace(
        worker, running=(*worker.running, request), kv_free_tokens=worker.kv_free_tokens - request.context_tokens
    )
