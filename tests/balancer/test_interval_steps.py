"""Tests of the simulated step under a policy: moves lose no request and no token."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.lab.sim.static import lower_bound_s
from orchestrrl.lab.sim.workload import SimRequest
from orchestrrl.lab.simulated_engine.scheduler import EngineShape
from planner.model import RequestId
from tests.balancer.interval_steps import IntervalState, StepMove, run_step

SHAPE = EngineShape(0.01, 1e-4, 1e-6, max_num_seqs=3, kv_capacity_tokens=400, prefill_s_per_token=1e-4)


def step_of(lengths: list[tuple[int, int]]) -> list[SimRequest]:
    return [SimRequest(RequestId(f"r{i:02d}"), "g", *length) for i, length in enumerate(lengths)]


def dealt(requests: list[SimRequest], engines: int) -> list[list[RequestId]]:
    return [[request.id for request in requests[k::engines]] for k in range(engines)]


steps = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 200)), min_size=2, max_size=10).map(step_of)


@given(steps, st.integers(0, 1000))
def test_random_moves_lose_nothing(requests: list[SimRequest], seed: int):
    rng = random.Random(seed)

    def restless(state: IntervalState) -> list[StepMove]:
        movable = [r for r in sorted(state.engine_of) if rng.random() < 0.2]
        return [StepMove(r, state.engine_of[r], 1 - state.engine_of[r]) for r in movable]

    still = run_step(SHAPE, requests, dealt(requests, 2))
    moved = run_step(SHAPE, requests, dealt(requests, 2), restless, interval_s=0.1)
    assert set(moved.finish_s) == set(still.finish_s) == {request.id for request in requests}
    assert moved.makespan_s >= lower_bound_s(SHAPE, requests) - 1e-9


def test_impossible_placement_or_move_is_rejected():
    requests = step_of([(10, 10), (10, 10)])
    with pytest.raises(ValueError, match="exactly once"):
        run_step(SHAPE, requests, [[RequestId("r00")], []])
    with pytest.raises(ValueError, match="cannot move"):
        run_step(SHAPE, requests, dealt(requests, 2), lambda _: [StepMove(RequestId("r00"), 1, 0)], interval_s=0.01)
