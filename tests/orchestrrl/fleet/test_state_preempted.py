"""Tests of preempted requests, which look running to their gateway but are counted as waiting by the engine."""

from dataclasses import replace

from builders import engine_report, gateway_report, request, sample
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.fleet.state import FleetState
from planner.model import RequestId, RequestState, RequestView


def waiting(state: FleetState, now_s: float) -> set[RequestId]:
    return {r.id for r in state.snapshot(now_s).requests if r.state is RequestState.WAITING}


def folded(engine_waiting: int, *held: RequestView, sampled_s: float = 10.0, reported_s: float = 10.0) -> FleetState:
    state = FleetState()
    state.fold_engine(engine_report("e0", 1, sample(running=2, waiting=engine_waiting)), sampled_s)
    state.fold_gateway(gateway_report(*held), reported_s)
    return state


def quiet(id: str, quiet_s: float, engine: str = "e0", generated: int = 10) -> RequestView:
    return replace(request(id, engine=engine, generated=generated), quiet_s=quiet_s)


def test_quietest_requests_are_the_preempted_ones() -> None:
    state = folded(2, quiet("a", 0.1), quiet("b", 3.0), quiet("c", 2.0), quiet("d", 5.0, engine="e1"))
    assert waiting(state, 10.05) == {"b", "c"}


def test_requests_without_a_token_are_counted_first() -> None:
    state = folded(2, quiet("new", 4.0, generated=0), quiet("b", 3.0), quiet("c", 2.0))
    assert waiting(state, 10.05) == {"new", "b"}


def test_token_since_the_last_sample_proves_that_a_request_runs() -> None:
    state = folded(2, quiet("a", 0.1), quiet("b", 0.2), sampled_s=9.0)
    assert waiting(state, 10.0) == set()


def test_engine_without_a_sample_changes_nothing() -> None:
    state = FleetState()
    state.fold_gateway(gateway_report(quiet("a", 9.0)), 10.0)
    assert waiting(state, 11.0) == set()


@given(
    st.integers(0, 8),
    st.lists(st.tuples(st.floats(0, 10), st.integers(0, 2), st.sampled_from(["e0", "e1"])), max_size=8),
)
def test_at_most_as_many_as_the_engine_counts_are_preempted(
    engine_waiting: int, requests: list[tuple[float, int, str]]
) -> None:
    held = [quiet(f"r{i}", quiet_s, engine, generated) for i, (quiet_s, generated, engine) in enumerate(requests)]
    state = folded(engine_waiting, *held)
    now = state.snapshot(10.0).requests
    reported = {r.id for r in held if r.state is RequestState.WAITING}
    marked = waiting(state, 10.0) - reported
    on_e0 = {r.id for r in held if r.engine == "e0"}
    assert reported <= waiting(state, 10.0)
    assert marked <= on_e0
    assert len(marked) <= max(0, engine_waiting - len(reported & on_e0))
    assert [replace(r, state=RequestState.RUNNING, quiet_s=0.0) for r in now] == [
        replace(r, state=RequestState.RUNNING, quiet_s=0.0) for r in sorted(held, key=lambda r: r.id)
    ]
