"""Generation steps as frameworks run them: a homogeneous fleet, prompts dealt in turn, nobody moves. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from orchestrrl.lab.sim.engines import EngineKind, homogeneous
from orchestrrl.lab.sim.scenario import GenerationScenario
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
    tokens: int = 0  # that passed the engines, generated and prefilled
    carried: list[tuple[SimRequest, int]] = field(default_factory=list)  # with the tokens they have: for the next step

    @property
    def samples(self) -> int:
        """Answers that the step delivered."""
        return len(self.finish_s)


Steps = Sequence[Sequence[SimRequest]]
Ran = tuple[EngineKind, StaticStep]


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


def dealt_steps(scenario: GenerationScenario, kind: EngineKind, steps: Steps) -> list[Ran]:
    """Run each step on as many engines of one kind as there is room for."""
    engines = len(homogeneous(kind, scenario.gpus, scenario.gpus_per_node))
    return [(kind, _dealt_step(kind, engines, tuple(requests))) for requests in steps]


@lru_cache(maxsize=256)
def _dealt_step(kind: EngineKind, engines: int, requests: tuple[SimRequest, ...]) -> StaticStep:
    """Most configurations stay inside servers, and take the same on every fabric."""
    return run_static(kind, dealt(requests, engines))


def partial_steps(scenario: GenerationScenario, kind: EngineKind, steps: Steps) -> list[Ran]:
    """As `dealt_steps`, with partial rollout: what an earlier step cut goes first, dealt over all engines."""
    engines = len(homogeneous(kind, scenario.gpus, scenario.gpus_per_node))
    carried: list[tuple[SimRequest, int]] = []
    ran = []
    for requests in steps:
        placement = [carried[place::engines] for place in range(engines)]
        for place, held in enumerate(dealt(requests, engines)):
            placement[place] += [(request, 0) for request in held]
        step = run_partial(kind, placement, scenario.partial_share)
        carried = step.carried
        ran.append((kind, step))
    return ran


def widest(scenario: GenerationScenario, kinds: Iterable[EngineKind]) -> EngineKind:
    """Return the kind with the most GPUs, inside a node where there is one."""
    return max(kinds, key=lambda kind: (kind.gpus <= scenario.gpus_per_node, kind.gpus))


def countdown(finish_s: Sequence[float], left: int = 0) -> list[tuple[float, int]]:
    """Return (time, requests in flight) wherever that changes; `left` of them never finish."""
    total = len(finish_s) + left
    return [(at_s, total - done) for done, at_s in enumerate([0.0, *finish_s])]


def _loaded(kind: EngineKind, held: Sequence[tuple[SimRequest, int]]) -> Scheduler:
    engine = Scheduler(kind.shape)
    for request, tokens in held:
        request.submit(engine, 0.0, tokens)
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
        sum(engine.generated_tokens_total + engine.prefilled_tokens_total for engine in engines),
    )
