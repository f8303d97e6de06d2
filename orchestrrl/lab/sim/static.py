"""Generation steps as frameworks run them: a homogeneous fleet, prompts dealt in turn, nobody moves. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from orchestrrl.lab.sim.engines import EngineKind
from orchestrrl.lab.sim.workload import SimRequest
from orchestrrl.lab.simulated_engine.scheduler import Scheduler
from planner.model import RequestId


@dataclass(slots=True)
class StaticStep:
    """One step: when each answer was there (from the step's start), and what each engine did."""

    makespan_s: float
    finish_s: list[float]
    finish_s_by_engine: list[list[float]]
    busy_s: list[float]
    preemptions: int
    samples: int  # answers that the step delivered
    tokens: int = 0  # that passed the engines, generated and prefilled
    carried: list[tuple[SimRequest, int]] = field(default_factory=list)  # with the tokens they have: for the next step


def dealt(requests: Sequence[SimRequest], engines: int) -> list[list[SimRequest]]:
    """Whole prompts in turn, as veRL deals a batch over its engines."""
    return [[request for request in requests if request.group_index % engines == place] for place in range(engines)]


def run_static(kind: EngineKind, placement: Sequence[Sequence[SimRequest]]) -> StaticStep:
    """Every engine works off what it was given."""
    engines = [_loaded(kind, [(request, 0) for request in held]) for held in placement]
    by_engine = [_drained(engine) for engine in engines]
    return _step(engines, by_engine)


def run_partial(
    kind: EngineKind, placement: Sequence[Sequence[tuple[SimRequest, int]]], share: float, interval_s: float = 1.0
) -> StaticStep:
    """Partial rollout: the step is over once `share` of its requests are answered, and each that an earlier step had
    cut; the others go on in the next step, which prefills them again."""
    engines = [_loaded(kind, held) for held in placement]
    requests = {request.id: request for held in placement for request, _ in held}
    generated = {request.id: tokens for held in placement for request, tokens in held}
    second_time = {request for request, tokens in generated.items() if tokens}
    wanted = share * len(requests)
    by_engine: list[list[float]] = [[] for _ in engines]
    done, now_s = 0, 0.0
    while (done < wanted or second_time) and generated:
        now_s += interval_s
        for place, engine in enumerate(engines):
            for progress in engine.advance(now_s):
                generated[progress.id] += progress.tokens
                if progress.finished_s is not None:
                    by_engine[place].append(progress.finished_s)
                    second_time.discard(progress.id)
                    del generated[progress.id]
                    done += 1
    step = _step(engines, by_engine)
    step.carried = [(requests[request], tokens) for request, tokens in generated.items()]
    step.makespan_s = min(now_s, max(step.finish_s)) if not step.carried else now_s
    return step


def _loaded(kind: EngineKind, held: Sequence[tuple[SimRequest, int]]) -> Scheduler:
    engine = Scheduler(kind.shape)
    for request, tokens in held:
        engine.submit(
            0.0,
            request.id,
            request.prompt_tokens + tokens,
            request.output_tokens - tokens,
            group=request.group,
            prompt_tokens=request.prompt_tokens,
        )
    return engine


def _drained(engine: Scheduler) -> list[float]:
    ends: dict[RequestId, float] = {}
    horizon_s = 600.0
    while not engine.idle:
        for progress in engine.advance(horizon_s):
            if progress.finished_s is not None:
                ends[progress.id] = progress.finished_s
        horizon_s *= 2
    return sorted(ends.values())


def _step(engines: Sequence[Scheduler], by_engine: list[list[float]]) -> StaticStep:
    finish_s = sorted(at_s for ends in by_engine for at_s in ends)
    return StaticStep(
        finish_s[-1],
        finish_s,
        by_engine,
        [engine.busy_s for engine in engines],
        sum(engine.preemptions_total for engine in engines),
        len(finish_s),
        sum(engine.generated_tokens_total + engine.prefilled_tokens_total for engine in engines),
    )
