"""What a plan pays for moving a running request: the bend of long prefills, and transfers where there are links."""

from collections.abc import Sequence

import numpy as np
import pytest
from planner_builders import configuration, engine, request, snapshot

from planner.candidates import Candidate, longest, moves_of, rebalanced
from planner.live import NO_TRANSFER, live_fleet, problem_of
from planner.makespan import solve
from planner.problem import Problem, Transfer
from planner.profile import Curve

TP2 = configuration("tp2", capacity=400_000)
BENT = Curve((0.0, 2048.0, 20_000.0), (0.0, 2048.0, 60_000.0))  # three times a usual prompt's rate, at 20,000 tokens
CONTEXT_TOKENS = 20_000


def crowded(transfer: Transfer, kv_bytes: float = 0.0) -> tuple[Problem, Candidate]:
    """Six requests of one length on the first of two engines, and what rebalancing makes of it."""
    requests = [request(f"r{n}", CONTEXT_TOKENS - 100, where="e0") for n in range(6)]
    seen = snapshot([engine("e0"), engine("e1")], requests)
    fleet = live_fleet(seen, (TP2,), 4, 8, 4)
    left = np.full(6, 50_000)
    problem = problem_of(fleet, left, per_node=8, kv_bytes_per_token=kv_bytes, transfer=transfer, work_budget=1000)
    return problem, rebalanced(problem, fleet, longest(problem))


@pytest.mark.parametrize(
    ("transfer", "each_s", "method"),
    [
        (NO_TRANSFER, CONTEXT_TOKENS / TP2.prefill_tokens_per_s, "recompute"),
        (Transfer(0.0, 0.0, 0.0, BENT), 3 * CONTEXT_TOKENS / TP2.prefill_tokens_per_s, "recompute"),
        (Transfer(0.0, 400.0, 0.01, BENT), 0.01 + CONTEXT_TOKENS * 2e5 * 8 / (2 * 400e9), "transfer"),
        (Transfer(1e3, 0.1, 0.01, BENT), 3 * CONTEXT_TOKENS / TP2.prefill_tokens_per_s, "recompute"),
    ],
    ids=["by rate", "by curve", "by link", "by curve, the link being slow"],
)
def test_a_move_costs_what_its_way_takes(transfer: Transfer, each_s: float, method: str) -> None:
    problem, spread = crowded(transfer, 2e5)
    moved = moves_of(problem, spread)
    assert [(move.method, move.cost_s) for move in moved] == [(method, pytest.approx(each_s))] * len(moved)
    assert moved
    assert spread.migration_s.max() == pytest.approx(each_s * len(moved))
    assert _costs_s(problem) == pytest.approx([each_s] * len(_costs_s(problem)))


def _costs_s(problem: Problem) -> Sequence[float]:
    """The solver's word on the same."""
    return [move.cost_s for move in solve(problem).migrations]
