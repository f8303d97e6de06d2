"""Measure the time of decisions on large fleets: ticks of the fast and the slow loop, and a simulated step with the
real control plane.

The ticks use a congested fleet with stragglers, which is generated from a seed for any number of engines. The fleet can
be redeployed to engines of four sizes.
"""

import random
import time
from dataclasses import replace

from balancer.balance import BalanceSituation, balanced_workers, decide_balance, staying
from balancer.load_index_moves import decide
from orchestrrl.core.config.schema import FastSettings
from orchestrrl.lab.bench.figure import Figure, side_by_side
from orchestrrl.lab.sim.run import ControlledRun, steps_of, usable_kinds
from orchestrrl.lab.sim.scenario import load_scenario
from planner.model import (
    Configuration,
    ConfigurationId,
    EngineHealth,
    EngineId,
    EngineView,
    FinishedLength,
    GpuId,
    Mode,
    PlanId,
    RequestId,
    RequestState,
    RequestView,
    Snapshot,
)
from planner.plan import PlannerConfig, make_plan
from planner.workload.remaining_tokens import RemainingTokensEstimator

GPUS_PER_ENGINE = 2
KV_TOKENS_PER_GPU = 36_864  # one GPU can hold the longest request
KV_CAPACITY_TOKENS = KV_TOKENS_PER_GPU * GPUS_PER_ENGINE
MAX_SEQUENCES = 48
MAX_OUTPUT_TOKENS = 32_768
FINISHED = 2_000  # requests of the step that have finished
DEPLOYED = ConfigurationId("tp2")
SEED = 1
SETTINGS = FastSettings()

WORKERS, REQUESTS = 1_024, 16_384
AIM_S = 0.05
ENGINES_TO_PLAN, REQUESTS_TO_PLAN = 512, 16_384
INTERVAL_S = 30.0  # until the next plan, to which a redeployment can be deferred


def balancer_tick() -> list[Figure]:
    """Measure the balancer's time on a large fleet without a limit on moves, and compare it with the time on half the
    fleet."""
    large, half = (balanced_workers(congested(WORKERS // n, REQUESTS // n, SEED), SETTINGS) for n in (1, 2))
    theta = SETTINGS.theta
    large_s, half_s = side_by_side(lambda: decide(theta, large), lambda: decide(theta, half), repetitions=7)
    half_moves, moves = (len(decide(theta, workers).moves) for workers in (half, large))
    note = f"{WORKERS:,} workers, {REQUESTS:,} requests, {moves:,} moves; the target is {AIM_S:g} s"
    return [Figure("balancer_tick", large_s, "s", f"half the fleet, {half_moves:,} moves", half_s, note)]


def fast_tick() -> list[Figure]:
    """Measure the time of all decisions in one tick of the fast loop, and compare it with the time of the balancer
    alone. Also measure a tick that packs requests onto engines by known step times, and compare it with a tick that
    spreads them by load index."""
    snapshot = congested(WORKERS, REQUESTS, SEED)
    situation, most = BalanceSituation(Mode.ACT), SETTINGS.max_moves_per_tick
    workers = balanced_workers(snapshot, SETTINGS)
    stuck = staying(workers)
    tick_s, decide_s = side_by_side(
        lambda: decide_balance(snapshot, SETTINGS, situation),
        lambda: decide(SETTINGS.theta, workers, max_moves=most, excluded=stuck, forget_stuck=True),
        repetitions=9,
    )
    note = f"{WORKERS:,} engines, {REQUESTS:,} requests, at most {most} moves: snapshot to verdict"
    remaining = RemainingTokensEstimator()

    def packing() -> None:
        remaining_tokens = remaining.remaining_tokens(snapshot, lines.bin_tokens, lines.max_output_tokens)
        decide_balance(
            snapshot, SETTINGS, replace(packs, remaining_tokens=remaining_tokens, distributions=remaining.distributions)
        )

    lines = deployments(WORKERS)
    packs = replace(situation, configurations=lines.configurations)
    packing_s, spreading_s = side_by_side(packing, lambda: decide_balance(snapshot, SETTINGS, situation), repetitions=9)
    why = f"{note}; with estimated lengths for packing and for KV headroom"
    return [
        Figure("fast_tick", tick_s, "s", "the balancer alone", decide_s, note),
        Figure("fast_tick_packing", packing_s, "s", "by load index", spreading_s, why),
    ]


def plan_tick() -> list[Figure]:
    """Measure the time of one decision of the slow loop, and compare it with the time for half the requests. A decision
    consists of the forecast, the candidate fleets, their step times for samples of the requests' lengths, and plan
    admission."""
    config = replace(deployments(ENGINES_TO_PLAN), interval_s=INTERVAL_S)
    all_of_them, half = (congested(ENGINES_TO_PLAN, REQUESTS_TO_PLAN // n, SEED) for n in (1, 2))

    def plan(snapshot: Snapshot) -> None:
        make_plan(PlanId("bench"), snapshot, config, mode=Mode.ACT)

    whole_s, half_s = side_by_side(lambda: plan(all_of_them), lambda: plan(half), repetitions=3)
    note = (
        f"{config.gpus_count:,} GPUs, {len(config.configurations)} configurations, {REQUESTS_TO_PLAN:,} requests, "
        f"{config.scenarios} samples of their lengths, KV scarce on all engines"
    )
    return [Figure("plan_tick", whole_s, "s", "half the requests", half_s, note)]


SIM_SCENARIO, ARM, INITIAL = "scale", "both", "tp2"
SIM_AIM_S = 30.0


def sim_step() -> list[Figure]:
    """Measure the CPU time of a simulated step of the size in figure 20 of the paper, and compare it with a step of
    half that size."""
    whole, half, warm_up = (_simulation(divisor) for divisor in (1, 2, 64))
    _, half_s, whole_s = (_cpu_s(run) for run in (warm_up, half, whole))
    gpus, requests = whole.scenario.gpus, len(whole.steps[0])
    note = f"{requests:,} requests on {gpus:,} GPUs, planning and balancing; the target is {SIM_AIM_S:g} s"
    return [Figure("sim_step", whole_s, "s", "half the fleet, half the requests", half_s, note)]


def _cpu_s(run: ControlledRun) -> float:
    started_s = time.process_time()
    run.run(lambda *_: None)
    return time.process_time() - started_s


def _simulation(divisor: int) -> ControlledRun:
    scenario = load_scenario(SIM_SCENARIO)
    workload = scenario.workload.model_copy(update={"prompts": scenario.workload.prompts // divisor})
    scenario = scenario.model_copy(update={"gpus": scenario.gpus // divisor, "workload": workload})
    kinds = usable_kinds(scenario)
    initial = next(name for name in kinds if name == INITIAL)
    return ControlledRun(scenario, kinds, initial, ARM, SEED, steps_of(scenario, SEED))


# --- fleets


def congested(engines: int, requests: int, seed: int) -> Snapshot:
    """Return a snapshot of heavy-tailed requests on unevenly loaded engines. On average, a fifth of the engines has
    half of all requests."""
    rng = random.Random(seed)
    shares = [rng.choice((4.0, 1.0, 1.0, 1.0, 1.0)) for _ in range(engines)]
    places = rng.choices(range(engines), shares, k=requests)
    free_tokens, running, waiting = [KV_CAPACITY_TOKENS] * engines, [0] * engines, [0] * engines
    views = []
    for number, place in enumerate(places):
        prompt_tokens, generated_tokens = rng.randint(512, 4_096), _length(rng)
        context_tokens = prompt_tokens + generated_tokens
        runs = running[place] < MAX_SEQUENCES and context_tokens <= free_tokens[place]
        if runs:
            running[place] += 1
            free_tokens[place] -= context_tokens
        else:
            waiting[place] += 1
        state = RequestState.RUNNING if runs else RequestState.WAITING
        views.append(
            RequestView(
                RequestId(f"r{number:06}"), _engine(place), state, prompt_tokens, generated_tokens, MAX_OUTPUT_TOKENS
            )
        )
    fleet = tuple(
        EngineView(
            id=_engine(place),
            url=f"http://engine-{place}",
            configuration=DEPLOYED,
            health=EngineHealth.OK,
            running=running[place],
            waiting=waiting[place],
            kv_capacity_tokens=KV_CAPACITY_TOKENS,
            kv_free_tokens=free_tokens[place],
            max_sequences=MAX_SEQUENCES,
            decode_tokens_per_s=rng.uniform(600.0, 1_800.0),
            age_s=rng.uniform(0.0, 0.5),
            gpus=tuple(GpuId(GPUS_PER_ENGINE * place + gpu) for gpu in range(GPUS_PER_ENGINE)),
        )
        for place in range(engines)
    )
    finished = tuple(FinishedLength(_length(rng)) for _ in range(FINISHED))
    return Snapshot(1_000.0, fleet, tuple(views), finished, requests_age_s=0.2, step_started_s=900.0)


def deployments(engines: int) -> PlannerConfig:
    """Return the planner's settings for the GPUs of `engines` engines of two GPUs, with engine configurations of four
    sizes. Larger engines are faster, but fewer of them fit on the GPUs."""
    configurations = tuple(
        Configuration(
            ConfigurationId(f"tp{gpus}"),
            gpus,
            alpha_s=0.0184 * (2 / gpus) ** 0.6,
            beta_s=8.1e-5 * 2 / gpus,
            gamma_s=4.1e-8 * 2 / gpus,
            kv_capacity_tokens=KV_TOKENS_PER_GPU * gpus,
            max_sequences=MAX_SEQUENCES * gpus // 2,
            prefill_tokens_per_s=9_000.0 * gpus,
            switch_s=1.7,
        )
        for gpus in (1, 2, 4, 8)
    )
    return PlannerConfig(configurations, gpus_count=GPUS_PER_ENGINE * engines, max_output_tokens=MAX_OUTPUT_TOKENS)


def _engine(place: int) -> EngineId:
    return EngineId(f"e{place:04}")


def _length(rng: random.Random) -> int:
    """Sample a length with a median of 600 tokens; 1 % of the lengths exceed 6,000 tokens."""
    return min(MAX_OUTPUT_TOKENS, int(rng.lognormvariate(6.4, 1.0)))
