"""Tests of the demo's oracle: no worse than its initial placement, and no better than the longest request alone."""

from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.lab.sim.static import best_placed_s, lower_bound_s, placed_s
from orchestrrl.lab.sim.workload import SimRequest
from orchestrrl.lab.simulated_engine.scheduler import EngineShape
from planner.model import RequestId

SHAPE = EngineShape(0.01, 1e-4, 1e-6, max_num_seqs=3, kv_capacity_tokens=400, prefill_s_per_token=1e-4)
steps = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 200)), min_size=2, max_size=10)


@given(steps, st.integers(2, 4))
def test_oracle_is_between_the_bound_and_its_initial_placement(lengths: list[tuple[int, int]], engines: int):
    requests = [SimRequest(RequestId(f"r{i:02d}"), "g", *each) for i, each in enumerate(lengths)]
    dealt = [requests[k::engines] for k in range(engines)]
    oracle_s = best_placed_s(SHAPE, dealt)
    assert lower_bound_s(SHAPE, requests) - 1e-9 <= oracle_s <= placed_s(SHAPE, dealt)
