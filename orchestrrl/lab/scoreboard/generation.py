"""Reproduce figures 5 and 9 to 11 and section 2 of the OrchestrRL paper: gains from planning and balancing, windows
between collectives, phase times, and the redeployment of the case study.

The paper's engine is fitted to section 2.1's six phase times (planner/cost/paper.py). To predict a phase time
independently, the engine's four parameters are fitted to the other five phase times.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from orchestrrl.lab.scoreboard import constants as given
from orchestrrl.lab.scoreboard.cases import TITLES, Case, measured, stages_of
from orchestrrl.lab.scoreboard.claims import ScoreboardRow, beyond, compared, put_in
from orchestrrl.lab.sim.engines import EngineKind, homogeneous
from orchestrrl.lab.sim.net.fabrics.base import SimulatedFailures
from orchestrrl.lab.sim.rl.stages import TUNED, FabricStages
from orchestrrl.lab.sim.run import steps_of
from orchestrrl.lab.sim.static import dealt, run_static
from orchestrrl.lab.simulated_engine.scheduler import Scheduler
from planner.cost.engines import engine_named, with_constants
from planner.cost.hardware import gpu_named
from planner.cost.models import model_named
from planner.cost.paper import EARLY_S, FITTED, TAIL_S, HostFit, phase_seconds
from planner.cost.predict import predict
from planner.cost.profile import MoveCosts, Parallelism

TESTBED = "rail_optimized"  # section 6
MODELS = dict(zip(("qwen2.5-14b", "qwen2.5-32b"), given.PHASE_GPUS.value, strict=True))
LITTLE_TO_SWITCH_FOR = (
    "with the step times of section 2.1, redeployments gain little (free and instant ones 1.01 to 1.05 over even"
    " spreading), and the tuned static fleet here is already wide: {tuned}; "
    "see tests/orchestrrl/lab/sim/scenarios/README.md"
)
NARROW = "lengths and batch are assumptions; such a narrow fleet is not the best static one here"
CUT = "each worker is busy until its longest answer ends, and on most workers that answer reaches the limit"
NEWER = "carries the longest tenth over to the next step, under newer weights"


def on_testbed(
    model: str,
    max_tokens: int,
    layouts: tuple[str, ...] = given.TESTBED_LAYOUTS.value,
    requests: int = given.BATCH.value,
    **more: Any,
) -> FabricStages:
    """Return the stages of a job with two steps on the paper's testbed. The second step is measured. `more` contains
    further fields of Case."""
    gpus = MODELS[model]
    prompts = requests // given.SAMPLES.value
    case = Case(model, gpus, gpus, prompts, max_tokens, layouts, steps=2, **more)
    return stages_of(case.scenario([TESTBED]), TESTBED)


Rates = Mapping[str, Sequence[float]]  # [arm][seed], samples per second


def rates(stages: FabricStages, arms: Sequence[str], seeds: Sequence[int]) -> Rates:
    return {arm: [measured(stages, arm, seed).samples_per_s for seed in seeds] for arm in arms}


def gain(found: Sequence[float], base: Sequence[float]) -> float:
    """Return the median over seeds of the ratio of two throughputs. `found` and `base` contain one throughput per
    seed."""
    return median(ours / theirs for ours, theirs in zip(found, base, strict=True))


def headline(quick: bool) -> Iterator[ScoreboardRow]:
    for model in list(MODELS)[: 1 if quick else None]:
        for max_tokens in given.MAX_TOKENS.value[: 1 if quick else None]:
            yield from _headline(model, max_tokens, quick)


def _headline(model: str, max_tokens: int, quick: bool) -> Iterator[ScoreboardRow]:
    stages, narrow = on_testbed(model, max_tokens), on_testbed(model, max_tokens, (given.PAPERS_STATIC.value,))
    seeds = given.SEEDS.value[: 1 if quick else None]
    found = rates(stages, (TUNED, "both") if quick else (TUNED, "both", "partial_rollout"), seeds)
    of = f"{TITLES[model]}, {MODELS[model]} GPUs generate, {max_tokens:,} tokens"
    claim = f"headline.throughput.{model}.{max_tokens}"
    as_theirs = gain(found["both"], rates(narrow, (TUNED,), seeds)[TUNED])
    engines = f"static {given.PAPERS_STATIC.value.upper()} engines, as veRL-TO in the paper's figure 11"
    yield compared("Figure 9", f"OrchestrRL over veRL-TO, {of}", claim, gain(found["both"], found[TUNED]), _why(stages))
    yield compared("Figure 9", f"OrchestrRL over {engines}, {of}", claim, as_theirs, NARROW)
    if "partial_rollout" in found:
        ours = gain(found["partial_rollout"], found[TUNED])
        yield beyond(f"partial rollout over veRL-TO, {of}", ours, "x", NEWER, "Figure 9")


def ablation(quick: bool) -> Iterator[ScoreboardRow]:
    for model in list(MODELS)[: 1 if quick else None]:
        stages = on_testbed(model, given.MAX_TOKENS.value[-1])
        arms = ("planning", "balancing") if quick else ("planning", "balancing", "both")
        found = rates(stages, (TUNED, *arms), given.SEEDS.value[: 1 if quick else None])
        for arm in arms:
            what = f"{arm} over veRL-TO, {TITLES[model]}, {given.MAX_TOKENS.value[-1]:,} tokens"
            ours = gain(found[arm], found[TUNED])
            yield compared("Figure 10", what, f"headline.ablation.{model}.{arm}", ours, _why(stages))


def _why(stages: FabricStages) -> str:
    gen = stages.gen(SimulatedFailures(), TUNED, 1)[-1]
    return LITTLE_TO_SWITCH_FOR.format(tuned=f"{next(iter(gen.phases_s))}, {gen.seconds:.0f} s")


def workload(quick: bool) -> Iterator[ScoreboardRow]:
    """Reproduce section 2 of the paper: 72 GPUs, TP=8 engines, round-robin prompts. The paper states neither whether
    its batch of 512 counts prompts or answers, nor the maximum length of answers."""
    batch, each = given.BATCH.value, given.SAMPLES.value
    for prompts, of in ((batch // each, f"{batch} answers"), (batch, f"{batch} prompts")):
        found = measured(section_2(prompts, given.MAX_TOKENS.value[0]))
        why = (
            f"training takes {found.train.seconds:.0f} s here, including two passes for log-probabilities, at"
            f" {found.train.mfu:.0%} of the peak; generation takes {found.gen.seconds:.0f} s, as long as its longest"
            " answers; fewer answers shorten training, but hardly generation"
        )
        what, ratio = f"generation time over training time, Qwen2.5-14B, {of}", found.gen.seconds / found.train.seconds
        yield compared("Section 2", what, "gen_vs_train_time", ratio, why)
    for max_tokens in given.MAX_TOKENS.value:
        skew = worker_skew(section_2(batch // each, max_tokens))
        what = f"longest worker time over the shortest, answers of at most {max_tokens:,} tokens"
        yield compared("Section 2", what, "worker_time_skew", skew, CUT)


def section_2(prompts: int, max_tokens: int) -> FabricStages:
    train_gpus, gen_gpus = given.WORKLOAD_GPUS.value
    case = Case("qwen2.5-14b", train_gpus, gen_gpus, prompts, max_tokens, ("tp8",))
    return stages_of(case.scenario([TESTBED]), TESTBED)


def worker_skew(stages: FabricStages) -> float:
    """Return the ratio of the latest to the earliest completion time of engines under a static assignment of
    requests."""
    ready = stages.ready(SimulatedFailures())
    scenario = ready.scenario(1)
    (kind,) = (EngineKind(each) for each in ready.profile.configurations)
    engines = len(homogeneous(kind, scenario.gpus, scenario.gpus_per_node))
    ends_s = [run_static(kind, [held]).makespan_s for held in dealt(steps_of(scenario, 1)[0], engines)]
    return max(ends_s) / min(ends_s)


COLLECTIVES_OF_A_LAYER = 2  # TP collectives per layer in a decode iteration


def slack(quick: bool) -> list[ScoreboardRow]:
    """Reproduce the paper's figure 5 with the job of section 2: Qwen2.5-14B on 72 GPUs."""
    _, gen_gpus = given.WORKLOAD_GPUS.value
    stages = section_2(given.BATCH.value // given.SAMPLES.value, given.MAX_TOKENS.value[0])
    found = measured(stages)
    (engine,) = stages.ready(SimulatedFailures()).profile.configurations
    alive = given.BATCH.value / (gen_gpus // 8) / 2  # requests per engine at the median, with half of the batch left
    iteration_s = engine.step.at(alive, alive * given.LENGTH_MEDIAN.value)
    gen_s = iteration_s / (COLLECTIVES_OF_A_LAYER * stages.scenario.model_value.layers)
    windows_s = [each.length_s for each in found.train.update.windows]
    idle_s = found.gen.seconds - found.sync.seconds
    why = "windows are between pipeline and gradient messages only: TP stays inside a server and uses no circuits"
    most = beyond("the longest window of an optimiser step", max(windows_s), "s", figure="Figure 5")
    return [
        compared("Figure 5", "TP in generation: median slack", "slack.gen_tp_median_s", gen_s, unit="s"),
        compared("Figure 5", "training: median window", "slack.train_window_s", median(windows_s), why, "s"),
        most,
        compared("Figure 5", "between two weight syncs", "slack.weight_sync_idle_s", idle_s, unit="s"),
    ]


# --- The phases of section 2.1

Floats = NDArray[np.float64]
LEFT_OUT = "predicted by a fit of four parameters to the other five times; each time has a large effect on the fit"


def phases(quick: bool) -> Iterator[ScoreboardRow]:
    measured_s = [*EARLY_S.values(), *TAIL_S.values()]
    names = [f"{phase}.tp{tp}" for phase in ("early", "tail") for tp in EARLY_S]
    for place, name in enumerate(names):
        ours = _seconds(_fitted_without(place, measured_s))[place]
        phase, tp = name.split(".")
        what = f"{phase} phase on 8 GPUs, {tp.upper()}, Qwen2.5-14B"
        yield compared("Section 2.1", what, f"phase_example.{phase}.{tp}_s", float(ours), LEFT_OUT, "s")


def _fitted_without(place: int, measured_s: Sequence[float]) -> HostFit:
    kept = [other for other in range(len(measured_s)) if other != place]
    logs_s = np.log(np.array(measured_s))

    def residuals(logs: Floats) -> Floats:
        return np.asarray((np.log(_seconds(HostFit(*np.exp(logs).tolist()))) - logs_s)[kept])

    start = np.log([FITTED.step_s, FITTED.sequence_s, FITTED.early_iterations, FITTED.tail_iterations])
    return HostFit(*np.exp(least_squares(residuals, start).x).tolist())


def _seconds(host: HostFit) -> Floats:
    engine = with_constants(engine_named("vllm"), step_s=host.step_s, sequence_s=host.sequence_s)
    model, gpu = model_named("qwen2.5-14b"), gpu_named(given.GPU.value)
    return phase_seconds([predict(model, gpu, Parallelism(tp=tp), engine) for tp in EARLY_S], host)


# --- The engine change of the case study

GPUS = given.PHASE_GPUS.value[0]


def case_study(quick: bool) -> list[ScoreboardRow]:
    asked = given.BATCH.value
    contexts, after, again_s = _change(asked)
    more, _, more_s = _change(2 * asked)
    switch_s = after.profile.switch_s
    why = (
        f"of {asked} requests, {len(contexts)} with {sum(contexts):,} tokens remain and are recomputed at"
        f" {after.profile.prefill_tokens_per_s:,.0f} tokens/s by each of two engines; section 6 does not state the"
        f" number of requests: of {2 * asked:,}, {len(more)} with {sum(more):,} tokens would take {more_s:.1f} s"
    )
    given_why = "an engine's start time is set from this figure; loading weights over PCIe takes 0.1 s of it"
    at_why = "given: it determines the requests that are recomputed"
    at, figure = given.CASE_AT_S.value, "Figure 11"
    return [
        put_in(figure, "time of the change, 8 x TP=2 to 2 x TP=8", "headline.case_study.at_s", at, at_why, "s"),
        put_in(figure, "switching", "headline.case_study.switching_s", switch_s, given_why, "s"),
        compared(figure, "KV recomputation", "headline.case_study.kv_recompute_s", again_s, why, "s"),
        compared(figure, "duration of the change", "headline.case_study.total_s", switch_s + again_s, why, "s"),
    ]


def _change(requests: int) -> tuple[list[int], EngineKind, float]:
    """Return the number of context tokens of each request that is running at the time of the redeployment, the new
    engine kind, and the time, in seconds, to recompute the requests' KV cache. `requests` is the number of requests of
    the step."""
    stages = on_testbed("qwen2.5-14b", given.MAX_TOKENS.value[-1], requests=requests)
    profile = stages.ready(SimulatedFailures()).profile
    kinds = {str(each.id): EngineKind(each) for each in profile.configurations}
    assert profile.moves is not None
    contexts, after = _left(stages, kinds["tp2"]), kinds["tp8"]
    return contexts, after, _recompute_s(contexts, after, profile.moves)


def _left(stages: FabricStages, kind: EngineKind) -> list[int]:
    """Return the number of context tokens of each running request at the time of the redeployment."""
    requests = steps_of(stages.ready(SimulatedFailures()).scenario(1), 1)[0]
    held = []
    for some in dealt(requests, GPUS // kind.gpus):
        engine, prompts = Scheduler(kind.shape), {request.id: request.prompt_tokens for request in some}
        for request in some:
            engine.submit(0.0, request.id, request.prompt_tokens, request.output_tokens)
        engine.advance(given.CASE_AT_S.value)
        held += [prompts[each.id] + each.generated for each in engine.running]
    return held


def _recompute_s(contexts: Sequence[int], kind: EngineKind, moves: MoveCosts) -> float:
    """Return the time, in seconds, in which engines of the given kind recompute the KV cache of all requests. Requests
    are assigned in descending order of context length, each to the least loaded engine."""
    tokens, rebuilt = np.array(sorted(contexts, reverse=True), np.float64), moves.rebuilt_tokens()
    seconds = (tokens if rebuilt is None else rebuilt.over(tokens)) / kind.profile.prefill_tokens_per_s
    loads_s = np.zeros(GPUS // kind.gpus)
    for each_s in seconds:
        loads_s[np.argmin(loads_s)] += each_s
    return float(loads_s.max())
