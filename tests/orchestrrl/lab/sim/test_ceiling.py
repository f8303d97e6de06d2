"""Tests of the ceiling of re-planning against a sum over tokens."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.lab.sim.engines import EngineKind
from orchestrrl.lab.sim.static import alive_at, ceiling, position_s
from orchestrrl.lab.sim.workload import SimRequest
from planner.cost.paper import named_profile
from planner.cost.profile import EngineProfile
from planner.model import RequestId
from tests.orchestrrl.lab.sim.gen_scenarios import kinds, scenario

TP1, _, _, TP8 = named_profile("paper-32b-h800").configurations
NARROW, WIDE = kinds(scenario()).values()

workloads = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 40)), min_size=1, max_size=12).map(
    lambda pairs: [SimRequest(RequestId(f"r{i}"), "g", p, o, 0, 40) for i, (p, o) in enumerate(pairs)]
)


def one_by_one(profile: EngineProfile, instances: int, requests: list[SimRequest]) -> list[float]:
    """Return the seconds of each position, computed from the definition."""
    seconds = []
    for position in range(max(request.output_tokens for request in requests)):
        alive = [request for request in requests if request.output_tokens > position]
        used = min(instances, len(alive))
        batch = len(alive) / used
        kv = sum(request.prompt_tokens + position for request in alive) / used
        ways = []
        for room in {profile.kv_capacity_tokens, profile.kv_capacity_tokens + profile.spill_capacity_tokens}:
            rounds = max(1.0, kv / room, batch / profile.max_sequences)
            ways.append(rounds * profile.step.at(batch / rounds, kv / rounds, profile.kv_capacity_tokens))
        seconds.append(min(ways))
    return seconds


@given(workloads, st.sampled_from([TP1, TP8, NARROW.profile, WIDE.profile]), st.integers(1, 16))
def test_position_time_matches_the_definition(
    requests: list[SimRequest], profile: EngineProfile, instances: int
) -> None:
    seconds = position_s(profile, instances, *alive_at(requests))
    assert seconds.tolist() == pytest.approx(one_by_one(profile, instances, requests))


@given(workloads)
def test_free_redeployments_are_no_slower_than_static_fleets(requests: list[SimRequest]) -> None:
    found = ceiling(scenario(), [NARROW, WIDE], [requests, requests])
    narrow, wide = one_by_one(NARROW.profile, 8, requests), one_by_one(WIDE.profile, 2, requests)
    assert found.static_s == pytest.approx({"narrow": 2 * sum(narrow), "wide": 2 * sum(wide)})
    assert found.redeploying_s == pytest.approx(2 * math.fsum(map(min, narrow, wide)))
    assert found.gain >= 1 - 1e-12


def test_ceiling_gain_is_one_with_one_configuration() -> None:
    requests = [SimRequest(RequestId(f"r{i}"), "g", 50, 10 + i, 0, 100) for i in range(64)]
    for kind in (NARROW, EngineKind(TP1), EngineKind(TP8)):
        assert ceiling(scenario(), [kind], [requests]).gain == pytest.approx(1.0)
