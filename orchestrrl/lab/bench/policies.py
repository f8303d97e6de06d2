"""What the fast loop's policies are worth: whole generation steps on simulated engines, decided by `decide_balance`.

Each step runs under five arms: prompts dealt to engines and left there (static), the paper's rule, packing with lengths
forecast from this step's own finished ones, packing as if every output had the mean length, and an oracle that knows
every length: the better of packing with the lengths known and of engines filled from the start in descending order.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp
from statistics import mean

from balancer.balance import BalanceSituation, decide_balance
from balancer.kv_headroom import LengthDistributions
from orchestrrl.core.config.schema import FastSettings
from orchestrrl.lab.bench.figure import Figure
from orchestrrl.lab.sim.step import IntervalState, Policy, StepMove, run_step
from orchestrrl.lab.sim.workload import SimRequest
from orchestrrl.lab.simulated_engine.scheduler import EngineShape
from planner.model import (
    Configuration,
    ConfigurationId,
    EngineHealth,
    EngineId,
    EngineView,
    FastPolicy,
    FinishedLength,
    Mode,
    RequestId,
    RequestState,
    RequestView,
    Snapshot,
)
from planner.workload.remaining_tokens import KnownLengths, RemainingTokensEstimator

ENGINES = 8
SAMPLES = 8  # of each prompt, dealt to one engine
SEEDS = (1, 2, 3, 4)
INTERVAL_S = 2.0
BIN_TOKENS = 512
# A 14B model at TP=2 on H800s.
TP2 = Configuration(ConfigurationId("tp2"), 2, 0.0183738, 8.1e-5, 4.1e-8, 582_885, 1024, 18_000.0, 1.7)

_Expected = tuple[Mapping[RequestId, float], LengthDistributions | None]
Expect = Callable[[IntervalState, Snapshot], _Expected]


@dataclass(frozen=True, slots=True)
class Setting:
    """A step's load. Lengths are lognormal, correlated within a prompt, and cut."""

    name: str
    requests_per_engine: int
    median_tokens: float
    sigma: float
    max_tokens: int
    kv_capacity_tokens: int
    correlation: float = 0.6

    def requests(self, seed: int) -> list[SimRequest]:
        rng = random.Random(seed)
        made = []
        for prompt in range(ENGINES * self.requests_per_engine // SAMPLES):
            of_prompt, prompt_tokens = rng.gauss(0, 1), rng.randint(64, 512)
            for sample in range(SAMPLES):
                score = self.correlation**0.5 * of_prompt + (1 - self.correlation) ** 0.5 * rng.gauss(0, 1)
                length = min(self.max_tokens, max(1, round(self.median_tokens * exp(self.sigma * score))))
                made.append(SimRequest(RequestId(f"p{prompt:03d}-s{sample}"), f"p{prompt:03d}", prompt_tokens, length))
        return made

    @property
    def configuration(self) -> Configuration:
        return replace(TP2, kv_capacity_tokens=self.kv_capacity_tokens)


SETTINGS = (
    Setting("KV ample, 15k", 64, 1500.0, 1.2, 15_000, 582_885),
    Setting("KV tight, 15k", 64, 1500.0, 1.2, 15_000, 70_000),
    Setting("KV tight, 25k", 48, 2500.0, 1.0, 25_000, 80_000),
)


def policies(settings: Sequence[Setting] = SETTINGS, seeds: Sequence[int] = SEEDS) -> list[Figure]:
    """Mean makespans: packing against the paper's rule, and how much of the oracle's gain each knowledge keeps."""
    figures = []
    for setting in settings:
        runs = [_arms(setting, setting.requests(seed)) for seed in seeds]
        means = {arm: mean(run[arm] for run in runs) for arm in runs[0]}
        gain = means["static"] - means["oracle"]
        ratios = ", ".join(f"{arm} {means['static'] / means[arm]:.3f}" for arm in means if arm != "static")
        share = (means["static"] - means["packing"]) / gain if gain > 0 else 1.0
        note = f"static over: {ratios}; packing keeps {share:.0%} of the oracle's gain"
        packing, paper = means["packing"], means["paper"]
        figures.append(Figure(f"step_policy ({setting.name})", packing, "s", "paper's rule", paper, note))
    return figures


def _arms(setting: Setting, requests: Sequence[SimRequest]) -> dict[str, float]:
    """Makespan by arm."""
    shape = shape_of(setting.configuration)
    ids = [request.id for request in requests]
    prompts = [ids[start : start + SAMPLES] for start in range(0, len(ids), SAMPLES)]
    dealt = [[id for prompt in prompts[k::ENGINES] for id in prompt] for k in range(ENGINES)]
    routed = [ids[k::ENGINES] for k in range(ENGINES)]

    def run(policy: FastPolicy, expect: Expect) -> float:
        decided = decided_by(FastSettings(policy=policy), setting, expect)
        return run_step(shape, requests, routed, decided, INTERVAL_S).makespan_s

    filled = run_step(shape, requests, descending(setting.configuration, requests, ENGINES)).makespan_s
    return {
        "static": run_step(shape, requests, dealt).makespan_s,
        "paper": run(FastPolicy.PAPER, forecast_from(setting)),
        "packing": run(FastPolicy.PACKING, forecast_from(setting)),
        "mean": run(FastPolicy.PACKING, mean_only),
        "oracle": min(run(FastPolicy.PACKING, true_lengths), filled),
    }


def forecast_from(setting: Setting) -> Expect:
    """As the daemon expects it in its first step."""
    remaining = RemainingTokensEstimator()

    def expect(state: IntervalState, snapshot: Snapshot) -> _Expected:
        remaining_tokens = remaining.remaining_tokens(snapshot, BIN_TOKENS, setting.max_tokens)
        return remaining_tokens, remaining.distributions

    return expect


def mean_only(state: IntervalState, snapshot: Snapshot) -> _Expected:
    """Every output has the mean length; one that has outgrown it is about to end."""
    mean_tokens = mean(request.output_tokens for request in state.requests.values())
    return {request: max(1.0, mean_tokens - done) for request, done in state.generated.items()}, None


def true_lengths(state: IntervalState, snapshot: Snapshot) -> _Expected:
    output_tokens = {id: state.requests[id].output_tokens for id in state.generated}
    left = {id: float(output_tokens[id] - done) for id, done in state.generated.items()}
    return left, KnownLengths(output_tokens)


def decided_by(settings: FastSettings, setting: Setting, expect: Expect) -> Policy:
    """The fast loop's own decision, on the step as a snapshot."""
    moved: dict[RequestId, int] = {}

    def policy(state: IntervalState) -> list[StepMove]:
        snapshot = _snapshot(state, setting, moved)
        remaining_tokens, distributions = expect(state, snapshot)
        situation = BalanceSituation(
            Mode.ACT,
            configurations=(setting.configuration,),
            remaining_tokens=remaining_tokens,
            distributions=distributions,
        )
        moves = []
        for move in decide_balance(snapshot, settings, situation).moves:
            moved[move.request] = moved.get(move.request, 0) + 1
            moves.append(StepMove(move.request, _place(move.from_engine), _place(move.to_engine)))
        return moves

    return policy


def _snapshot(state: IntervalState, setting: Setting, moved: Mapping[RequestId, int]) -> Snapshot:
    configuration, engines, requests = setting.configuration, [], []
    for place, engine in enumerate(state.engines):
        kv_tokens = sum(sequence.context_tokens for sequence in engine.running)
        step_s = configuration.step_s(len(engine.running), kv_tokens)
        engines.append(
            EngineView(
                id=_name(place),
                url="",
                configuration=configuration.id,
                health=EngineHealth.OK,
                running=len(engine.running),
                waiting=len(engine.waiting),
                kv_capacity_tokens=configuration.kv_capacity_tokens,
                kv_free_tokens=max(0, configuration.kv_capacity_tokens - engine.kv_used_tokens),
                max_sequences=configuration.max_sequences,
                decode_tokens_per_s=len(engine.running) / step_s,
                age_s=0.0,
            )
        )
        for request_state, queue in ((RequestState.RUNNING, engine.running), (RequestState.WAITING, engine.waiting)):
            requests += [
                RequestView(
                    id=sequence.id,
                    engine=_name(place),
                    state=request_state,
                    prompt_tokens=state.requests[sequence.id].prompt_tokens,
                    generated_tokens=state.generated[sequence.id],
                    max_tokens=setting.max_tokens,
                    group=state.requests[sequence.id].group,
                    moves=moved.get(sequence.id, 0),
                )
                for sequence in queue
            ]
    lengths = [request.output_tokens for id, request in state.requests.items() if id not in state.generated]
    finished = tuple(FinishedLength(tokens, tokens >= setting.max_tokens) for tokens in lengths)
    return Snapshot(
        now_s=state.now_s,
        engines=tuple(engines),
        requests=tuple(requests),
        finished_output_tokens=tuple(lengths),
        requests_age_s=0.0,
        step_started_s=0.0,
        finished=finished,
    )


def _name(place: int) -> EngineId:
    return EngineId(f"e{place:03d}")


def _place(engine: EngineId) -> int:
    return int(engine[1:])


def shape_of(configuration: Configuration) -> EngineShape:
    return EngineShape(
        configuration.alpha_s,
        configuration.beta_s,
        configuration.gamma_s,
        configuration.max_sequences,
        configuration.kv_capacity_tokens,
        1 / configuration.prefill_tokens_per_s,
    )


def descending(configuration: Configuration, requests: Sequence[SimRequest], engines: int) -> list[list[RequestId]]:
    """Engines filled one after the other with the longest that are left, each for as long as the first one takes."""
    longest_first = sorted(requests, key=lambda request: (-request.output_tokens, request.id))
    low_s, high_s = 0.0, 1e6
    best: list[list[RequestId]] = []
    while high_s - low_s > 0.01 * max(low_s, 1.0):
        middle_s = (low_s + high_s) / 2
        filled = _filled(configuration, longest_first, middle_s)
        if len(filled) <= engines:
            best, high_s = filled, middle_s
        else:
            low_s = middle_s
    return best + [[] for _ in range(engines - len(best))]


def _filled(
    configuration: Configuration, longest_first: Sequence[SimRequest], within_s: float
) -> list[list[RequestId]]:
    filled: list[list[RequestId]] = []
    left_s, left_area = -1.0, 0.0
    for request in longest_first:
        tokens, prompt_tokens = request.output_tokens, request.prompt_tokens
        kv_area = tokens * (prompt_tokens + tokens / 2)
        work_s = configuration.beta_s * tokens + configuration.gamma_s * kv_area
        work_s += prompt_tokens / configuration.prefill_tokens_per_s
        if not filled or work_s > left_s or kv_area > left_area:
            filled.append([])
            left_s = within_s - configuration.alpha_s * tokens
            # As many iterations as there is time for, with the KV cache full.
            left_area = within_s / configuration.alpha_s * configuration.kv_capacity_tokens
        filled[-1].append(request.id)
        left_s, left_area = left_s - work_s, left_area - kv_area
    return filled
