"""Compare policies and length estimates over whole generation steps on simulated engines, with `decide_balance`.

Each step runs under five arms: prompts placed on engines without moves (static), the paper's rule, packing with lengths
forecast from this step's finished outputs, packing as if every output had the mean length, and an oracle with exact
lengths. The oracle is the better of packing and of filling engines in descending order from the start.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp
from statistics import mean

from balancer.balance import BalanceSituation, decide_balance
from balancer.kv_headroom import LengthDistributions
from orchestrrl.core.config.schema import FastSettings
from orchestrrl.lab.sim.engines import EngineKind
from orchestrrl.lab.sim.workload import SimRequest
from planner.cost.profile import Curve, EngineProfile, ProfileSource, Provenance, StepTime
from planner.model import (
    Configuration,
    ConfigurationId,
    EngineHealth,
    EngineId,
    EngineView,
    FastPolicy,
    FinishedLength,
    Mode,
    Parallelism,
    RequestId,
    RequestState,
    RequestView,
    Snapshot,
)
from planner.workload.remaining_tokens import KnownLengths, RemainingTokensEstimator
from tests.balancer.interval_steps import IntervalState, Policy, StepMove, run_step

INTERVAL_S = 2.0
BIN_TOKENS = 512

_Expected = tuple[Mapping[RequestId, float], LengthDistributions | None]
Expect = Callable[[IntervalState, Snapshot], _Expected]

ENGINES = 8
SAMPLES = 8  # of each prompt, placed on one engine


@dataclass(frozen=True, slots=True)
class Setting:
    """The load of a step on engines of a 14B model at TP=2 on H800s."""

    requests_per_engine: int
    median_tokens: float
    max_tokens: int
    kv_capacity_tokens: int

    def requests(self, seed: int) -> list[SimRequest]:
        """Return requests with lognormal lengths, correlated within a prompt, and cut at the limit."""
        rng, correlation, sigma = random.Random(seed), 0.6, 1.2
        made = []
        for prompt in range(ENGINES * self.requests_per_engine // SAMPLES):
            of_prompt, prompt_tokens = rng.gauss(0, 1), rng.randint(64, 512)
            for sample in range(SAMPLES):
                score = correlation**0.5 * of_prompt + (1 - correlation) ** 0.5 * rng.gauss(0, 1)
                length = min(self.max_tokens, max(1, round(self.median_tokens * exp(sigma * score))))
                made.append(SimRequest(RequestId(f"p{prompt:03d}-s{sample}"), f"p{prompt:03d}", prompt_tokens, length))
        return made

    @property
    def kind(self) -> EngineKind:
        return EngineKind(
            EngineProfile(
                ConfigurationId("tp2"),
                Parallelism(tp=2),
                StepTime(Curve.line(0.0183738, 8.1e-5), 4.1e-8),
                prefill_tokens_per_s=18_000.0,
                kv_capacity_tokens=self.kv_capacity_tokens,
                max_sequences=1024,
                switch_s=1.7,
                provenance=Provenance(ProfileSource.MEASURED, ""),
            )
        )


TIGHT = Setting(64, 1500.0, 15_000, 70_000)


def makespans_by_arm(setting: Setting, requests: Sequence[SimRequest]) -> dict[str, float]:
    """Return the makespan by arm."""
    shape = setting.kind.shape
    ids = [request.id for request in requests]
    prompts = [ids[start : start + SAMPLES] for start in range(0, len(ids), SAMPLES)]
    dealt = [[id for prompt in prompts[k::ENGINES] for id in prompt] for k in range(ENGINES)]
    routed = [ids[k::ENGINES] for k in range(ENGINES)]

    def run(policy: FastPolicy, expect: Expect) -> float:
        decided = decided_by(FastSettings(policy=policy), setting, expect)
        return run_step(shape, requests, routed, decided, INTERVAL_S).makespan_s

    filled = run_step(shape, requests, descending(setting.kind.profile.configuration(), requests, ENGINES)).makespan_s
    return {
        "static": run_step(shape, requests, dealt).makespan_s,
        "paper": run(FastPolicy.PAPER, forecast_from(setting)),
        "packing": run(FastPolicy.PACKING, forecast_from(setting)),
        "mean": run(FastPolicy.PACKING, mean_only),
        "oracle": min(run(FastPolicy.PACKING, true_lengths), filled),
    }


def forecast_from(setting: Setting) -> Expect:
    """Return an estimator as the daemon uses it in its first step."""
    remaining = RemainingTokensEstimator()

    def expect(state: IntervalState, snapshot: Snapshot) -> _Expected:
        remaining_tokens = remaining.remaining_tokens(snapshot, BIN_TOKENS, setting.max_tokens)
        return remaining_tokens, remaining.distributions

    return expect


def mean_only(state: IntervalState, snapshot: Snapshot) -> _Expected:
    """Return remaining tokens as if every output had the mean length; longer ones are about to end."""
    mean_tokens = mean(request.output_tokens for request in state.requests.values())
    return {request: max(1.0, mean_tokens - done) for request, done in state.generated.items()}, None


def true_lengths(state: IntervalState, snapshot: Snapshot) -> _Expected:
    output_tokens = {id: state.requests[id].output_tokens for id in state.generated}
    left = {id: float(output_tokens[id] - done) for id, done in state.generated.items()}
    return left, KnownLengths(output_tokens)


def decided_by(settings: FastSettings, setting: Setting, expect: Expect) -> Policy:
    """Return a policy that applies the fast loop's decision to a snapshot of the step."""
    moved: dict[RequestId, int] = {}

    def policy(state: IntervalState) -> list[StepMove]:
        snapshot = _snapshot(state, setting, moved)
        remaining_tokens, distributions = expect(state, snapshot)
        situation = BalanceSituation(
            Mode.ACT,
            configurations=(setting.kind.profile.configuration(),),
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
    configuration, engines, requests = setting.kind.profile.configuration(), [], []
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
        finished=finished,
        requests_age_s=0.0,
        step_started_s=0.0,
    )


def _name(place: int) -> EngineId:
    return EngineId(f"e{place:03d}")


def _place(engine: EngineId) -> int:
    return int(engine[1:])


def descending(configuration: Configuration, requests: Sequence[SimRequest], engines: int) -> list[list[RequestId]]:
    """Fill engines one after the other with the longest remaining requests, each for as long as its first one takes."""
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
            # The number of iterations that fit in the time with a full KV cache.
            left_area = within_s / configuration.alpha_s * configuration.kv_capacity_tokens
        filled[-1].append(request.id)
        left_s, left_area = left_s - work_s, left_area - kv_area
    return filled


def preempted_share(setting: Setting, seed: int, *, lengths_known: bool) -> float:
    """Return the share of moved running requests after whose arrival a request was preempted there, before they ended
    or left again. Without lengths, room is judged by a flat headroom."""
    expect = forecast_from(setting)
    without_lengths: Expect = lambda state, snapshot: (expect(state, snapshot)[0], None)  # noqa: E731
    watched = _Watched(decided_by(FastSettings(), setting, expect if lengths_known else without_lengths))
    requests = setting.requests(seed)
    ids = [request.id for request in requests]
    routed = [ids[k::ENGINES] for k in range(ENGINES)]
    run_step(setting.kind.shape, requests, routed, watched.policy, INTERVAL_S)
    return watched.followed / watched.moved


@dataclass(slots=True)
class _Stay:
    """The stay of a running request that moved to an engine."""

    engine: int
    preemptions_before: int


class _Watched:
    """A policy that records the consequences of its moves of running requests."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._stays: dict[RequestId, _Stay] = {}
        self.moved = self.followed = 0

    def policy(self, state: IntervalState) -> Sequence[StepMove]:
        for request, stay in list(self._stays.items()):
            preempted = state.engines[stay.engine].preemptions_total > stay.preemptions_before
            if state.engine_of.get(request) != stay.engine or preempted:
                self.followed += preempted and state.engine_of.get(request) == stay.engine
                del self._stays[request]
        chosen = self._policy(state)
        for move in chosen:
            if any(sequence.id == move.request for sequence in state.engines[move.source].running):
                self.moved += 1
                before = state.engines[move.destination].preemptions_total
                self._stays[move.request] = _Stay(move.destination, before)
        return chosen
