"""Figure 20 and section 4.1: what the planner's solver takes, and how far its forecast is off."""

import time

from orchestrrl.lab.bench.solve import step
from orchestrrl.lab.scoreboard import constants as given
from orchestrrl.lab.scoreboard.forecast_error import BIN_TOKENS, client_shares, mean_errors
from orchestrrl.lab.scoreboard.model import ScoreboardRow
from orchestrrl.lab.scoreboard.rows import beyond, compared
from planner.solver.makespan import solve

GPUS, SEED = 1024, 1
FORECAST_SEEDS, QUICK_SEEDS = 20, 4


def solver(quick: bool) -> list[ScoreboardRow]:
    """In this process, on this machine: the only figure here that depends on where it is made."""
    solve(step(GPUS // 16, SEED))  # compiled code is loaded
    rows = []
    for gpus in (GPUS,) if quick else (GPUS, 4 * GPUS, 16 * GPUS):
        problem = step(gpus, SEED)
        started_s = time.perf_counter()
        solution = solve(problem)
        elapsed_s = time.perf_counter() - started_s
        what = f"solving, {gpus:,} GPUs, {len(problem.requests.ids):,} requests, on this machine"
        if gpus == GPUS:
            rows.append(compared("Figure 20", what, "headline.solve_s", elapsed_s, "a slow machine", "s"))
            gap = "of the makespan, to a proven lower bound; the paper has none"
            rows.append(beyond(f"gap to the bound, {gpus:,} GPUs", solution.gap or 0.0, "share", gap, "Figure 20"))
        else:
            rows.append(beyond(what, elapsed_s, "s", "beyond the paper's largest", "Figure 20"))
    return rows


def forecast(quick: bool) -> list[ScoreboardRow]:
    """With both readings of section 2.1's batch: so many answers, or so many prompts."""
    clients, source = client_shares()
    batch, rows = given.BATCH.value, []
    answers = {batch: QUICK_SEEDS if quick else FORECAST_SEEDS, batch * given.SAMPLES.value: QUICK_SEEDS}
    for requests, seeds in answers.items():
        errors = mean_errors(clients, requests, seeds)
        why = (
            f"a sample of {requests:,} is {errors['truth']:.1%} from the very distribution that it is of, in bins of"
            f" {BIN_TOKENS} tokens, so that no forecast can be nearer; the paper does not say what its error is of"
        )
        what = f"forecast's error, bins of {BIN_TOKENS} tokens, {requests:,} requests a step, {source}"
        rows.append(compared("Section 4.1", what, "headline.forecast_error", errors["chosen"], why, "share"))
        over = errors["chosen"] / errors["two_samples"]
        rows.append(beyond("the same over what two samples differ by", over, figure="Section 4.1"))
    return rows
