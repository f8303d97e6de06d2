"""What the two loops' decisions cost on large fleets."""

from dataclasses import replace

from balancer.balance import BalanceSituation, balanced_workers, decide_balance, staying
from balancer.load_index_moves import decide
from orchestrrl.core.config.schema import FastSettings
from orchestrrl.lab.bench.figure import Figure, side_by_side
from orchestrrl.lab.bench.fleets import congested, deployments
from planner.model import FinishedLength, Mode, PlanId, Snapshot
from planner.plan import make_plan
from planner.workload.remaining_tokens import RemainingTokensEstimator

SEED = 1
SETTINGS = FastSettings()

WORKERS, REQUESTS = 1_024, 16_384
AIM_S = 0.05
ENGINES_TO_PLAN, REQUESTS_TO_PLAN = 512, 16_384
INTERVAL_S = 30.0  # until the next plan, which a change of engines may be left to


def balancer_tick() -> list[Figure]:
    """The balancer without a limit on moves: how it grows."""
    large, half = (balanced_workers(congested(WORKERS // n, REQUESTS // n, SEED), SETTINGS) for n in (1, 2))
    theta = SETTINGS.theta
    large_s, half_s = side_by_side(lambda: decide(theta, large), lambda: decide(theta, half), repetitions=7)
    half_moves, moves = (len(decide(theta, workers).moves) for workers in (half, large))
    note = f"{WORKERS:,} workers, {REQUESTS:,} requests, {moves:,} moves; the aim is {AIM_S:g} s"
    return [Figure("balancer_tick", large_s, "s", f"half the fleet, {half_moves:,} moves", half_s, note)]


def fast_tick() -> list[Figure]:
    """All that the daemon decides in one fast tick, against its innermost part; and with step times known."""
    snapshot = congested(WORKERS, REQUESTS, SEED)
    situation, most = BalanceSituation(Mode.ACT), SETTINGS.max_moves_per_tick
    workers = balanced_workers(snapshot, SETTINGS)
    stuck = staying(workers, SETTINGS.crowded_ratio)
    tick_s, decide_s = side_by_side(
        lambda: decide_balance(snapshot, SETTINGS, situation),
        lambda: decide(SETTINGS.theta, workers, max_moves=most, excluded=stuck, forget_stuck=True),
        repetitions=9,
    )
    note = f"{WORKERS:,} engines, {REQUESTS:,} requests, at most {most} moves: snapshot to verdict"
    remaining = RemainingTokensEstimator()

    def packing() -> None:
        remaining_tokens = remaining.remaining_tokens(ended, lines.bin_tokens, lines.max_output_tokens)
        decide_balance(
            ended, SETTINGS, replace(packs, remaining_tokens=remaining_tokens, distributions=remaining.distributions)
        )

    lines = deployments(WORKERS)
    ended = replace(snapshot, finished=tuple(map(FinishedLength, snapshot.finished_output_tokens)))
    packs = replace(situation, configurations=lines.configurations)
    packing_s, spreading_s = side_by_side(packing, lambda: decide_balance(snapshot, SETTINGS, situation), repetitions=9)
    why = f"{note}; lengths looked up, engines packed by them and room judged by them"
    return [
        Figure("fast_tick", tick_s, "s", "the balancer alone", decide_s, note),
        Figure("fast_tick_packing", packing_s, "s", "by load index", spreading_s, why),
    ]


def plan_tick() -> list[Figure]:
    """One decision of the slow loop: forecast, fleets, their seconds over samples of the lengths, plan admission."""
    config = replace(deployments(ENGINES_TO_PLAN), interval_s=INTERVAL_S)
    all_of_them, half = (congested(ENGINES_TO_PLAN, REQUESTS_TO_PLAN // n, SEED) for n in (1, 2))

    def plan(snapshot: Snapshot) -> None:
        make_plan(PlanId("bench"), snapshot, config, mode=Mode.ACT)

    whole_s, half_s = side_by_side(lambda: plan(all_of_them), lambda: plan(half), repetitions=3)
    note = (
        f"{config.gpus_count:,} GPUs, {len(config.configurations)} configurations, {REQUESTS_TO_PLAN:,} requests, "
        f"{config.scenarios} samples of their lengths, KV short everywhere"
    )
    return [Figure("plan_tick", whole_s, "s", "half the requests", half_s, note)]
