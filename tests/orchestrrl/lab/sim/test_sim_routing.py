"""Many choices in columns are the choices that the gateway makes one by one."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.gateway.routing.strategies import EngineLoad, RoutedRequest, RoutingPolicy
from orchestrrl.lab.sim.gateway import ManyChoices
from planner.model import EngineId

loads = st.builds(
    EngineLoad,
    id=st.integers(0, 30).map(lambda n: EngineId(f"e{n}")),
    running=st.integers(0, 5),
    waiting=st.integers(0, 5),
    running_tokens=st.integers(0, 3000),
    waiting_tokens=st.integers(0, 3000),
    kv_capacity_tokens=st.sampled_from([0, 4096, 8192]),
    kv_free_tokens=st.integers(0, 8192),
    max_sequences=st.sampled_from([0, 4, 16]),
    seconds_per_token=st.sampled_from([None, 0.0, 0.001, 0.004]),
)


@given(st.lists(loads, max_size=6, unique_by=lambda load: load.id), st.lists(st.integers(1, 3000), max_size=12))
def test_the_same_engine_for_every_request(fleet: list[EngineLoad], contexts: list[int]) -> None:
    many = ManyChoices(fleet)
    for context_tokens in contexts:
        choice = RoutingPolicy().choose(fleet, RoutedRequest(context_tokens))
        assert many.choose(context_tokens) == (choice.id if choice else None)
        fleet = [
            replace(load, waiting=load.waiting + 1, waiting_tokens=load.waiting_tokens + context_tokens)
            if choice and load.id == choice.id
            else load
            for load in fleet
        ]
