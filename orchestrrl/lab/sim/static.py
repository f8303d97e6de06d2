"""Simulate static baselines (a homogeneous fleet, round-robin prompts, no moves) and compute reference values for them.
The functions have no side effects.

The reference values are the results of static placements with known lengths or known prompts, and a ceiling for
re-planning without this information.

Placements with known lengths either spread requests (longest first onto the least loaded engine) or pack them
(contiguous blocks in descending order of length, so that the longest requests are together). The best configuration is
used. With known prompts, only the distribution of each prompt's sample lengths is known. This distribution is an upper
bound on the information that finished samples of the prompt, in this step or in earlier epochs, can provide.

The ceiling assumes that lengths are known only as a distribution. Requests are then spread evenly, and the fleet's
configuration is chosen by the number of remaining requests. A change of configuration is free and instant: at each
output position, the whole fleet has the fastest configuration. Prefill, redeployments and moves take no time, and the
number of requests per engine may be fractional. Heterogeneous fleets are not considered.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from statistics import median
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from orchestrrl.lab.sim.engines import EngineKind, homogeneous
from orchestrrl.lab.sim.scenario import GenerationScenario
from orchestrrl.lab.sim.workload import SimRequest, redrawn
from orchestrrl.lab.simulated_engine.scheduler import EngineShape, Scheduler, decode_alone_s
from planner.cost.profile import EngineProfile
from planner.model import Configuration, ConfigurationId, RequestId


@dataclass(slots=True)
class StaticStep:
    """The results of one step. Completion times are in seconds from the step's start, and `busy_s` contains the busy
    time of each engine."""

    makespan_s: float
    finish_s: list[float]
    finish_s_by_engine: list[list[float]]
    busy_s: list[float]
    preemptions: int
    tokens: int = 0  # generated and prefilled by the engines
    carried: list[tuple[SimRequest, int]] = field(default_factory=list)  # unfinished requests with generated tokens

    @property
    def samples(self) -> int:
        """The number of samples whose answers were completed in the step."""
        return len(self.finish_s)


Steps = Sequence[Sequence[SimRequest]]
Ran = tuple[EngineKind, StaticStep]
Step = TypeVar("Step")


def dealt(requests: Sequence[SimRequest], engines: int) -> list[list[SimRequest]]:
    """Return the requests of each engine. Prompts with all of their samples are assigned round-robin, as veRL
    distributes a batch."""
    return [[request for request in requests if request.group_index % engines == place] for place in range(engines)]


def run_static(kind: EngineKind, placement: Sequence[Sequence[SimRequest]]) -> StaticStep:
    """Run a step in which every engine completes the requests that are placed on it."""
    engines = loaded_engines(kind, placement)
    by_engine = [drained(engine) for engine in engines]
    return _step(engines, by_engine)


def run_partial(
    kind: EngineKind, placement: Sequence[Sequence[tuple[SimRequest, int]]], share: float, interval_s: float = 1.0
) -> StaticStep:
    """Run a step of partial rollout. The step ends when the fraction `share` of its requests, and all requests that
    already have tokens from an earlier step, are complete. This condition is checked every `interval_s` seconds. The
    unfinished requests continue in the next step, which prefills them again."""
    engines = [_loaded(kind.shape, held) for held in placement]
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


def static_arm(
    scenario: GenerationScenario, kinds: Mapping[ConfigurationId, EngineKind], arm: str, steps: Mapping[int, Steps]
) -> dict[int, list[Ran]]:
    """Return the steps of each seed under a static arm, together with the engine kind that each step uses. Raises
    ValueError if the arm is not static."""
    every = list(kinds.values())
    match arm:
        case "verl_to":
            return dealt_steps(scenario, kinds[tuned(scenario, kinds, steps)], steps)
        case "verl_lo":
            inside = scenario.gpus_per_node
            return dealt_steps(scenario, max(every, key=lambda kind: (kind.gpus <= inside, kind.gpus)), steps)
        case "partial_rollout":
            tried = [{seed: _partial_steps(scenario, kind, its) for seed, its in steps.items()} for kind in every]
            return max(tried, key=lambda ran: median(_samples_per_s(scenario, its) for its in ran.values()))
        case "packed_known":
            return {seed: [best_known(scenario, every, requests) for requests in its] for seed, its in steps.items()}
        case "prompts_known":
            return {
                seed: [
                    best_prompts_known(scenario, every, requests, redrawn(scenario.workload, seed, step, FUTURES))
                    for step, requests in enumerate(its)
                ]
                for seed, its in steps.items()
            }
    raise ValueError(f"arm must be a static arm of sim gen, got {arm!r}")


def tuned(
    scenario: GenerationScenario, kinds: Mapping[ConfigurationId, EngineKind], steps: Mapping[int, Steps]
) -> ConfigurationId:
    """Return the configuration whose measured steps take the shortest total time (median over seeds) under round-robin
    prompts."""

    def elapsed_s(name: ConfigurationId) -> float:
        by_seed = dealt_steps(scenario, kinds[name], steps).values()
        return median(sum(step.makespan_s for _, step in measured(scenario, ran)) for ran in by_seed)

    return min(kinds, key=elapsed_s)


def measured(scenario: GenerationScenario, steps: Sequence[Step]) -> Sequence[Step]:
    """Return the steps after the warm-up steps."""
    return steps[scenario.workload.warmup_steps :]


def _samples_per_s(scenario: GenerationScenario, ran: Sequence[Ran]) -> float:
    steps = [step for _, step in measured(scenario, ran)]
    return sum(step.samples for step in steps) / sum(step.makespan_s for step in steps)


def dealt_steps(scenario: GenerationScenario, kind: EngineKind, steps: Mapping[int, Steps]) -> dict[int, list[Ran]]:
    """Run each step of each seed on as many engines of one kind as fit on the GPUs."""
    engines = len(homogeneous(kind, scenario.gpus, scenario.gpus_per_node))
    return {seed: [(kind, _dealt_step(kind, engines, tuple(some))) for some in its] for seed, its in steps.items()}


@lru_cache(maxsize=256)
def _dealt_step(kind: EngineKind, engines: int, requests: tuple[SimRequest, ...]) -> StaticStep:
    """Run one step under round-robin prompts. The result is cached, because engines inside servers take the same time
    on every fabric."""
    return run_static(kind, dealt(requests, engines))


def _partial_steps(scenario: GenerationScenario, kind: EngineKind, steps: Steps) -> list[Ran]:
    """Run consecutive steps with partial rollout. Requests carried over from an earlier step are placed first, and are
    spread over all engines."""
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


def countdown(finish_s: Sequence[float], left: int = 0) -> list[tuple[float, int]]:
    """Return pairs (time, requests in flight): one for time 0, and one for each completion time in `finish_s`. `left`
    is the number of additional requests that never finish."""
    total = len(finish_s) + left
    return [(at_s, total - done) for done, at_s in enumerate([0.0, *finish_s])]


def loaded_engines(kind: EngineKind, placement: Sequence[Sequence[SimRequest]]) -> list[Scheduler]:
    return [_loaded(kind.shape, ((request, 0) for request in held)) for held in placement]


def _loaded(shape: EngineShape, held: Iterable[tuple[SimRequest, int]]) -> Scheduler:
    engine = Scheduler(shape)
    for request, tokens in held:
        request.submit(engine, 0.0, tokens)
    return engine


def drained(engine: Scheduler) -> list[float]:
    """Run the engine until it is idle, and return the end times of all its requests in ascending order."""
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


BISECTIONS = 40
FUTURES = 8  # draws of a step's lengths over which a placement by prompt is evaluated
QUANTILES = (0.5, 0.8, 0.95)


def best_known(scenario: GenerationScenario, kinds: Sequence[EngineKind], requests: Sequence[SimRequest]) -> Ran:
    """Return the shortest step that is found with known output lengths, together with the kind of the step's
    engines."""
    tried = []
    for kind in kinds:
        engines = len(homogeneous(kind, scenario.gpus, scenario.gpus_per_node))
        configuration = kind.profile.configuration((1.0, max(2.0, len(requests) / engines)))
        for place in (spread, packed):
            tried.append((kind, run_static(kind, place(configuration, engines, requests))))
    return min(tried, key=lambda found: found[1].makespan_s)


def best_prompts_known(
    scenario: GenerationScenario,
    kinds: Sequence[EngineKind],
    requests: Sequence[SimRequest],
    redrawn_tokens: NDArray[np.int64],
) -> Ran:
    """Return the step under the placement that has the shortest mean makespan over `redrawn_tokens` (alternative output
    lengths for the same prompts, indexed by [draw, request]), together with the kind of the step's engines. Placements
    are based on quantiles of each prompt's lengths."""
    distributions = [_with_lengths(requests, tokens) for tokens in redrawn_tokens]
    of_prompt = redrawn_tokens.reshape(len(redrawn_tokens), -1, scenario.workload.samples)
    tried = []
    for kind in kinds:
        engines = len(homogeneous(kind, scenario.gpus, scenario.gpus_per_node))
        configuration = kind.profile.configuration((1.0, max(2.0, len(requests) / engines)))
        placements = [dealt(requests, engines)]
        for quantile in QUANTILES:
            guess = np.quantile(of_prompt, quantile, axis=(0, 2)).astype(np.int64).repeat(scenario.workload.samples)
            placements += [place(configuration, engines, _with_lengths(requests, guess)) for place in (spread, packed)]
        for placement in placements:
            ends_s = [run_static(kind, _placed_like(placement, future)).makespan_s for future in distributions]
            tried.append((float(np.mean(ends_s)), kind, placement))
    _, kind, placement = min(tried, key=lambda found: found[0])
    return kind, run_static(kind, _placed_like(placement, requests))


def _with_lengths(requests: Sequence[SimRequest], tokens: NDArray[np.int64]) -> list[SimRequest]:
    return [replace(request, output_tokens=int(length)) for request, length in zip(requests, tokens, strict=True)]


def _placed_like(placement: Sequence[Sequence[SimRequest]], requests: Sequence[SimRequest]) -> list[list[SimRequest]]:
    by_id = {request.id: request for request in requests}
    return [[by_id[request.id] for request in held] for held in placement]


def _work_s(configuration: Configuration, request: SimRequest) -> float:
    return configuration.work_s(request.prompt_tokens, request.output_tokens)


def _longest_first(requests: Sequence[SimRequest]) -> list[SimRequest]:
    return sorted(requests, key=lambda request: (-request.output_tokens, request.id))


def spread(configuration: Configuration, engines: int, requests: Sequence[SimRequest]) -> list[list[SimRequest]]:
    placement: list[list[SimRequest]] = [[] for _ in range(engines)]
    loads_s = [0.0] * engines
    for request in _longest_first(requests):
        place = loads_s.index(min(loads_s))
        if not placement[place]:
            loads_s[place] += configuration.alpha_s * request.output_tokens
        loads_s[place] += _work_s(configuration, request)
        placement[place].append(request)
    return placement


def packed(configuration: Configuration, engines: int, requests: Sequence[SimRequest]) -> list[list[SimRequest]]:
    """Return one contiguous block of requests per engine, in descending order of output length. The blocks are chosen
    for the shortest predicted makespan."""
    ordered = _longest_first(requests)
    high_s = sum(configuration.alpha_s * request.output_tokens + _work_s(configuration, request) for request in ordered)
    low_s, best = 0.0, [ordered]
    for _ in range(BISECTIONS):
        middle_s = (low_s + high_s) / 2
        blocks = _blocks(configuration, ordered, middle_s, engines)
        if blocks is None:
            low_s = middle_s
        else:
            high_s, best = middle_s, blocks
    return best + [[] for _ in range(engines - len(best))]


def _blocks(
    configuration: Configuration, ordered: Sequence[SimRequest], makespan_s: float, engines: int
) -> list[list[SimRequest]] | None:
    blocks: list[list[SimRequest]] = []
    left_s, room = 0.0, 0
    for request in ordered:
        work, footprint = _work_s(configuration, request), request.prompt_tokens + request.output_tokens
        if not blocks or work > left_s or footprint > room or len(blocks[-1]) >= configuration.max_sequences:
            if len(blocks) == engines:
                return None
            blocks.append([])
            left_s = makespan_s - configuration.alpha_s * request.output_tokens
            room = configuration.kv_capacity_tokens
            if work > left_s or footprint > room:
                return None
        blocks[-1].append(request)
        left_s -= work
        room -= footprint
    return blocks


Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The total durations, in seconds, of a series of steps whose requests are spread evenly."""

    static_s: Mapping[ConfigurationId, float]  # with one configuration throughout
    redeploying_s: float  # with the fastest configuration at each position

    @property
    def gain(self) -> float:
        return min(self.static_s.values()) / self.redeploying_s


def ceiling(
    scenario: GenerationScenario, kinds: Sequence[EngineKind], steps: Sequence[Sequence[SimRequest]]
) -> Ceiling:
    """Return two kinds of total durations of `steps`: with each configuration throughout, and with the fastest
    configuration at each output position."""
    instances = {kind.id: len(homogeneous(kind, scenario.gpus, scenario.gpus_per_node)) for kind in kinds}
    static_s, redeploying_s = dict.fromkeys(instances, 0.0), 0.0
    for requests in steps:
        alive, kv_tokens = alive_at(requests)
        seconds = np.stack([position_s(kind.profile, instances[kind.id], alive, kv_tokens) for kind in kinds])
        redeploying_s += float(seconds.min(axis=0).sum())
        for kind, row in zip(kinds, seconds, strict=True):
            static_s[kind.id] += float(row.sum())
    return Ceiling(static_s, redeploying_s)


def alive_at(requests: Sequence[SimRequest]) -> tuple[Floats, Floats]:
    """Return two arrays indexed by output position: the number of requests that generate a token at this position, and
    the number of KV tokens that these requests hold before the token."""
    outputs = np.array([request.output_tokens for request in requests])
    prompts = np.array([request.prompt_tokens for request in requests], dtype=np.float64)
    order = np.argsort(outputs, kind="stable")
    positions = np.arange(int(outputs.max()))
    gone = np.searchsorted(outputs[order], positions, side="right")
    prompts_left = np.concatenate([np.cumsum(prompts[order][::-1])[::-1], [0.0]])
    alive = (len(requests) - gone).astype(np.float64)
    return alive, prompts_left[gone] + alive * positions


def position_s(profile: EngineProfile, instances: int, alive: Floats, kv_tokens: Floats) -> Floats:
    """Return the time in seconds to generate one token for each request on `instances` engines, as an array indexed by
    output position. Requests whose KV does not fit wait for another round, or their KV is spilled if the engine
    supports spilling, whichever is faster."""
    sequences, kv = np.maximum(1.0, alive / instances), kv_tokens / np.minimum(instances, alive)
    waiting_s = _rounds_s(profile, sequences, kv, profile.kv_capacity_tokens)
    if not profile.spill_capacity_tokens:
        return waiting_s
    room = profile.kv_capacity_tokens + profile.spill_capacity_tokens
    return np.minimum(waiting_s, _rounds_s(profile, sequences, kv, room))


def _rounds_s(profile: EngineProfile, sequences: Floats, kv_tokens: Floats, room_tokens: int) -> Floats:
    """Return the time in seconds to generate one token for each sequence of an engine, as an array indexed by output
    position. The (fractional) number of rounds follows from the KV capacity `room_tokens` and from max_sequences."""
    rounds = np.maximum(1.0, np.maximum(kv_tokens / room_tokens, sequences / profile.max_sequences))
    batch, held = sequences / rounds, kv_tokens / rounds
    spilled = np.maximum(0.0, held - profile.kv_capacity_tokens)
    step = profile.step
    one_s = step.base_s.over(batch) + step.kv_s_per_token * held + step.spill_s_per_token * spilled
    return rounds * one_s


# --- The oracle of the demo: every request arrives at time 0, and every length is known. The result is not proven
# --- optimal; `lower_bound_s` bounds the gap.

# Numbers of requests on the engine with the longest requests, and on the next one.
PACKED_LONGEST = (1, 2, 3, 4, 6, 8, 12)
PACKED_NEXT = (20, 30, 40)


def placed_s(shape: EngineShape, placement: Sequence[Sequence[SimRequest]]) -> float:
    """Return the time, in seconds, at which the last answer is complete. `placement` contains each engine's requests in
    the order of submission."""
    return max(max(drained(_loaded(shape, ((request, 0) for request in held))), default=0.0) for held in placement)


def best_placed_s(shape: EngineShape, routed: Sequence[Sequence[SimRequest]]) -> float:
    """Return the duration, in seconds, of the step under the best of several placements. The candidates are `routed`
    (the initial placement by OrchestrRL's gateway) and placements with known output lengths."""
    requests = [request for held in routed for request in held]
    return min(placed_s(shape, placement) for placement in (routed, *_placements(len(routed), requests)))


def lower_bound_s(shape: EngineShape, requests: Iterable[SimRequest]) -> float:
    """Return a lower bound, in seconds, on the duration of a step: the time of the longest request alone on an
    engine."""
    return max(decode_alone_s(shape, request.prompt_tokens, request.output_tokens) for request in requests)


def _placements(engines: int, requests: Sequence[SimRequest]) -> Iterator[list[list[SimRequest]]]:
    """Yield candidate placements. In the first, requests are placed longest first onto the least loaded engine. In the
    others, the longest requests are packed together."""
    ordered = _longest_first(requests)
    loads, placement = [0] * engines, [list[SimRequest]() for _ in range(engines)]
    for request in ordered:
        target = loads.index(min(loads))
        placement[target].append(request)
        loads[target] += request.prompt_tokens + request.output_tokens
    yield placement
    for longest, following in product(PACKED_LONGEST, PACKED_NEXT) if engines > 2 else ():
        rest = ordered[longest + following :]
        spread_out = [rest[place :: engines - 2] for place in range(engines - 2)]
        yield [ordered[:longest], ordered[longest : longest + following], *spread_out]
