"""Section 2.1's six phase times and section 6.2.2's switch.

The paper's engine here is fitted to the six times (planner/cost/paper.py), so each of them is predicted by a fit that
has not seen it: four numbers, of the other five.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from orchestrrl.lab.scoreboard import constants as given
from orchestrrl.lab.scoreboard.claims import ScoreboardRow, compared, put_in
from orchestrrl.lab.scoreboard.generation import on_testbed
from orchestrrl.lab.sim.engines import EngineKind
from orchestrrl.lab.sim.net.fabrics.base import SimulatedFailures
from orchestrrl.lab.sim.rl.stages import FabricStages
from orchestrrl.lab.sim.run import steps_of
from orchestrrl.lab.sim.static import dealt
from orchestrrl.lab.simulated_engine.scheduler import Scheduler
from planner.cost.engines import engine_named, with_constants
from planner.cost.hardware import gpu_named
from planner.cost.models import model_named
from planner.cost.paper import EARLY_S, FITTED, TAIL_S, HostFit, phase_seconds
from planner.cost.predict import predict
from planner.cost.profile import MoveCosts, Parallelism

Floats = NDArray[np.float64]
LEFT_OUT = "predicted by a fit of four numbers to the other five times; one more or less moves the others' fit far"


def example(quick: bool) -> Iterator[ScoreboardRow]:
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


# --- the switch of the case study

GPUS = given.PHASE_GPUS.value[0]


def case_study(quick: bool) -> list[ScoreboardRow]:
    asked = given.BATCH.value
    contexts, after, again_s = _change(asked)
    more, _, more_s = _change(2 * asked)
    switch_s = after.profile.switch_s
    why = (
        f"of {asked} requests {len(contexts)} with {sum(contexts):,} tokens are left then, and are computed again at"
        f" {after.profile.prefill_tokens_per_s:,.0f} tokens/s by each of two engines; section 6 does not say how many"
        f" are asked for: of {2 * asked:,} it would be {len(more)} with {sum(more):,}, and {more_s:.1f} s"
    )
    given_why = "an engine's start is set from this figure; loading weights over PCIe is a tenth of a second of it"
    at_why = "given: what is left then is what is computed again"
    at, figure = given.CASE_AT_S.value, "Figure 11"
    return [
        put_in(figure, "when engines change, 8 x TP=2 to 2 x TP=8", "headline.case_study.at_s", at, at_why, "s"),
        put_in(figure, "switching", "headline.case_study.switching_s", switch_s, given_why, "s"),
        compared(figure, "KV computed again", "headline.case_study.kv_recompute_s", again_s, why, "s"),
        compared(figure, "the change in all", "headline.case_study.total_s", switch_s + again_s, why, "s"),
    ]


def _change(requests: int) -> tuple[list[int], EngineKind, float]:
    """Tokens of the requests that are left, what they go to, and seconds of computing their KV again."""
    stages = on_testbed("qwen2.5-14b", given.MAX_TOKENS.value[-1], requests=requests)
    profile = stages.ready(SimulatedFailures()).profile
    kinds = {str(each.id): EngineKind(each) for each in profile.configurations}
    assert profile.moves is not None
    contexts, after = _left(stages, kinds["tp2"]), kinds["tp8"]
    return contexts, after, _recompute_s(contexts, after, profile.moves)


def _left(stages: FabricStages, kind: EngineKind) -> list[int]:
    """Tokens that each request holds that still runs."""
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
    """Until the last engine has all of its own: each to the one that has least, the largest first."""
    tokens, rebuilt = np.array(sorted(contexts, reverse=True), np.float64), moves.rebuilt_tokens()
    seconds = (tokens if rebuilt is None else rebuilt.over(tokens)) / kind.profile.prefill_tokens_per_s
    loads_s = np.zeros(GPUS // kind.gpus)
    for each_s in seconds:
        loads_s[np.argmin(loads_s)] += each_s
    return float(loads_s.max())
