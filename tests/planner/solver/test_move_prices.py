"""Tests of the cost of moving a running request in a plan: expensive long prefills, and transfers over links."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_builders import configuration, engine, request, snapshot

from planner.cost.profile import Curve
from planner.model import RequestState
from planner.solver.candidates import CandidateFleet, candidate, longest, moves_of, rebalanced
from planner.solver.from_snapshot import NO_TRANSFER, live_fleet
from planner.solver.makespan import solve
from planner.solver.problem import KvTransferCost, MakespanProblem

TP2 = configuration("tp2", capacity=400_000)
BENT = Curve((0.0, 2048.0, 20_000.0), (0.0, 2048.0, 60_000.0))  # three times the time per token of a usual prompt
CONTEXT_TOKENS = 20_000


def crowded(transfer: KvTransferCost) -> tuple[MakespanProblem, CandidateFleet]:
    """Return six requests of one length on the first of two engines, and the rebalanced fleet."""
    requests = [request(f"r{n}", CONTEXT_TOKENS - 100, where="e0") for n in range(6)]
    seen = snapshot([engine("e0"), engine("e1")], requests)
    transfer = replace(transfer, kv_bytes_per_token=2e5)
    fleet = live_fleet(seen, (TP2,), 4, 8, 4, transfer, work_budget=1000).expecting(np.full(6, 50_000))
    return fleet.problem, rebalanced(fleet, longest(fleet.problem))


@pytest.mark.parametrize(
    ("transfer", "each_s", "method"),
    [
        (NO_TRANSFER, CONTEXT_TOKENS / TP2.prefill_tokens_per_s, "recompute"),
        (KvTransferCost(0.0, 0.0, 0.0, BENT), 3 * CONTEXT_TOKENS / TP2.prefill_tokens_per_s, "recompute"),
        (KvTransferCost(0.0, 400.0, 0.01, BENT), 0.01 + CONTEXT_TOKENS * 2e5 * 8 / (2 * 400e9), "transfer"),
        (KvTransferCost(1e3, 0.1, 0.01, BENT), 3 * CONTEXT_TOKENS / TP2.prefill_tokens_per_s, "recompute"),
    ],
    ids=["by rate", "by curve", "by link", "by curve, the link being slow"],
)
def test_move_costs_the_seconds_of_its_method(transfer: KvTransferCost, each_s: float, method: str) -> None:
    problem, spread = crowded(transfer)
    moved = moves_of(problem, spread)
    assert [(move.method, move.cost_s) for move in moved] == [(method, pytest.approx(each_s))] * len(moved)
    assert moved
    assert spread.migration_s.max() == pytest.approx(each_s * len(moved))
    assert _costs_s(problem) == pytest.approx([each_s] * len(_costs_s(problem)))


@pytest.mark.parametrize(
    ("transfer", "each_s", "once_s", "method"),
    [
        (
            KvTransferCost(0.0, 0.0, 0.0, transfer_fixed_s=0.1, recompute_fixed_s=0.7),
            CONTEXT_TOKENS / TP2.prefill_tokens_per_s,
            0.7,
            "recompute",
        ),
        # Without its fixed part, recomputing would take less than the link.
        (
            KvTransferCost(
                0.0, 400.0, CONTEXT_TOKENS / TP2.prefill_tokens_per_s, transfer_fixed_s=0.5, recompute_fixed_s=0.7
            ),
            CONTEXT_TOKENS / TP2.prefill_tokens_per_s + CONTEXT_TOKENS * 2e5 * 8 / (2 * 400e9),
            0.5,
            "transfer",
        ),
    ],
)
def test_requests_that_arrive_together_pay_the_fixed_part_once(
    transfer: KvTransferCost, each_s: float, once_s: float, method: str
) -> None:
    problem, spread = crowded(transfer)
    moved = moves_of(problem, spread)
    assert len(moved) > 1
    assert [(move.method, move.cost_s) for move in moved] == [(method, pytest.approx(each_s + once_s))] * len(moved)
    assert spread.migration_s.tolist() == [0.0, pytest.approx(each_s * len(moved) + once_s)]


@given(
    st.lists(st.tuples(st.integers(1, 20_000), st.sampled_from([0, 1, 2]), st.booleans()), min_size=1, max_size=12),
    st.data(),
    st.floats(0, 2.0),
    st.floats(0, 2.0),
    st.sampled_from([0.0, 50.0]),
)
def test_moves_cost_an_instance_the_sum_over_contexts_and_the_fixed_part_of_each_method_once(
    held: list[tuple[int, int, bool]], data: st.DataObject, transfer_fixed_s: float, fixed_s: float, gbps: float
) -> None:
    """The cost is compared with each instance's arrivals, one by one. Waiting requests cost nothing."""
    requests = [
        replace(
            request(f"r{n:02d}", tokens, where=f"e{at}"), state=RequestState.RUNNING if runs else RequestState.WAITING
        )
        for n, (tokens, at, runs) in enumerate(held)
    ]
    seen = snapshot([engine(f"e{n}") for n in range(3)], requests)
    transfer = KvTransferCost(
        gbps, gbps, 0.3, kv_bytes_per_token=2e5, transfer_fixed_s=transfer_fixed_s, recompute_fixed_s=fixed_s
    )
    fleet = live_fleet(seen, (TP2,), 6, 8, 4, transfer, work_budget=1000).expecting(np.full(len(held), 10))
    at = np.array(data.draw(st.lists(st.integers(0, 2), min_size=len(held), max_size=len(held))), dtype=np.int64)
    spread = candidate("dealt", fleet, fleet.problem.current, np.arange(len(held)), at)
    for place in range(3):
        prefills_s, transfers_s = [], []
        for view, to, (_, home, runs) in zip(requests, at.tolist(), held, strict=True):
            if to != place or home == place or not runs:
                continue
            prefill_s = view.context_tokens / TP2.prefill_tokens_per_s
            transfer_s = 0.3 + view.context_tokens * 2e5 * 8 / (2 * gbps * 1e9) if gbps else np.inf
            if transfer_s + transfer_fixed_s < prefill_s + fixed_s:
                transfers_s.append(transfer_s)
            else:
                prefills_s.append(prefill_s)
        pays_s = sum(transfers_s) + sum(prefills_s) + (fixed_s if prefills_s else 0.0)
        pays_s += transfer_fixed_s if transfers_s else 0.0
        assert spread.migration_s[place] == pytest.approx(pays_s, abs=1e-9)


def _costs_s(problem: MakespanProblem) -> Sequence[float]:
    """Return the costs by the solver's columns."""
    return [move.cost_s for move in solve(problem).migrations]
