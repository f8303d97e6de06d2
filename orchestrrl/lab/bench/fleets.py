"""Seeded fleets of any size for the benchmarks: one under pressure, with stragglers, and what it may be changed to."""

import random

from planner.model import (
    Configuration,
    ConfigurationId,
    EngineHealth,
    EngineId,
    EngineView,
    GpuId,
    RequestId,
    RequestState,
    RequestView,
    Snapshot,
)
from planner.plan import PlannerConfig

GPUS_PER_ENGINE = 2
KV_TOKENS_PER_GPU = 36_864  # one GPU alone holds the longest request
KV_CAPACITY_TOKENS = KV_TOKENS_PER_GPU * GPUS_PER_ENGINE
MAX_SEQUENCES = 48
MAX_OUTPUT_TOKENS = 32_768
FINISHED = 2_000  # output lengths that a step has shown already
DEPLOYED = ConfigurationId("tp2")


def congested(engines: int, requests: int, seed: int) -> Snapshot:
    """Requests with heavy-tailed lengths on engines that some of them crowd: a fifth takes half of all."""
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
    finished = tuple(_length(rng) for _ in range(FINISHED))
    return Snapshot(1_000.0, fleet, tuple(views), finished, requests_age_s=0.2, step_started_s=900.0)


def deployments(engines: int) -> PlannerConfig:
    """Four ways to use the GPUs of that many engines: more GPUs per engine are faster, and fewer engines."""
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
    """Median 600 tokens, the last percent beyond 6,000."""
    return min(MAX_OUTPUT_TOKENS, int(rng.lognormvariate(6.4, 1.0)))
