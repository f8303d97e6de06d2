"""Tests of the load index (equation 5) and of the workers of a live fleet."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
from balance_builders import running
from hypothesis import given
from hypothesis import strategies as st

from balancer.balance import balanced_workers
from balancer.load_index import (
    Worker,
    concurrency_cap,
    load_index,
    stand_in_tokens_per_s,
)
from balancer.load_index_moves import decide
from orchestrrl.core.config.schema import FastSettings
from planner.model import EngineHealth, EngineId, EngineView, RequestId, RequestState, RequestView, Snapshot

COUNTS = st.integers(0, 1000)


@given(COUNTS, st.integers(1, 1000), st.integers(1, 10**9), st.integers(0, 10**9), COUNTS)
def test_the_cap_is_the_floor_of_the_exact_quotient(
    running: int, requests: int, context: int, free: int, slots: int
) -> None:
    exact = running + math.floor(free / Fraction(context, requests))
    assert concurrency_cap(running, requests, context, free, slots, (1, 1)) == max(1, min(slots, exact))


@pytest.mark.parametrize(("free", "slots", "cap"), [(0, 8, 1), (100, 8, 1), (200, 8, 2), (900, 8, 8), (900, 0, 1)])
def test_the_cap_is_at_least_one_and_at_most_the_slots(free: int, slots: int, cap: int) -> None:
    assert concurrency_cap(0, 2, 200, free, slots, (1, 1)) == cap
    assert concurrency_cap(0, 2, 0, free, slots, (1, 1)) == max(1, slots)


@given(COUNTS, st.integers(1, 100), st.integers(0, 10**6), st.integers(0, 10**6), COUNTS, st.integers(0, 10**6))
def test_more_free_kv_never_lowers_the_cap(
    running: int, requests: int, context: int, free: int, slots: int, more: int
) -> None:
    less = concurrency_cap(running, requests, context, free, slots, (1, 1))
    assert concurrency_cap(running, requests, context, free + more, slots, (1, 1)) >= less


def test_a_worker_without_requests_is_measured_by_the_fleets_mean() -> None:
    assert concurrency_cap(0, 0, 0, 1000, 64, fleet=(4, 400)) == 10
    assert concurrency_cap(0, 0, 0, 1000, 64, fleet=(0, 0)) == 64  # no worker has requests, so only the slots count


def test_the_index_grows_with_requests_and_falls_with_cap_and_rate() -> None:
    assert load_index(0, 4, 100.0) == 0.0
    assert load_index(4, 2, 180.0) == 4 / 2 / 180.0
    assert load_index(5, 2, 180.0) > load_index(4, 2, 180.0) > load_index(4, 3, 180.0) > load_index(4, 3, 181.0)


def test_stand_in_rate_is_the_median_of_known_positive_rates() -> None:
    def workers(*rates: float | None) -> list[Worker]:
        return [Worker(EngineId(f"w{i}"), (), (), 1, 1, 1, rate) for i, rate in enumerate(rates)]

    assert stand_in_tokens_per_s(workers(None, 0.0, 10.0, 30.0, 50.0)) == 30.0
    assert stand_in_tokens_per_s(workers(10.0, 30.0)) == 20.0
    assert stand_in_tokens_per_s(workers(0.0, None)) == 1.0


def test_invalid_worker_values_are_rejected() -> None:
    idle = Worker(EngineId("w"), (), (), 0, 0, 0, 0.0)
    assert not idle.stalled
    assert replace(idle, running=running(("r", 0))).stalled
    with pytest.raises(ValueError, match="theta must be >= 0, got -1"):
        decide(-1, ())
    with pytest.raises(ValueError, match="theta must be >= 0, got nan"):
        decide(math.nan, ())
    with pytest.raises(ValueError, match="kv_free_tokens must be >= 0, got -5"):
        Worker(EngineId("w"), (), (), 1, -5, 1, None)
    with pytest.raises(ValueError, match="decode_tokens_per_s must be >= 0, got nan"):
        Worker(EngineId("w"), (), (), 1, 1, 1, math.nan)


def engine(name: str, health: EngineHealth = EngineHealth.OK, age_s: float | None = 0.1) -> EngineView:
    return EngineView(EngineId(name), "", None, health, 1, 1, 2000, 500, 16, 0.0, age_s)


def request(name: str, where: str | None, state: RequestState) -> RequestView:
    return RequestView(RequestId(name), None if where is None else EngineId(where), state, 100, 7)


def test_workers_of_a_live_fleet() -> None:
    snapshot = Snapshot(
        now_s=100.0,
        engines=(engine("a"), engine("b", EngineHealth.GONE), engine("c", age_s=None)),
        requests=(
            request("r1", "a", RequestState.RUNNING),
            request("r2", "a", RequestState.WAITING),
            request("r3", "b", RequestState.RUNNING),
            request("r4", None, RequestState.WAITING),
        ),
        step_started_s=90.0,
    )
    (worker,) = balanced_workers(
        snapshot, FastSettings(theta=0.5, stall_grace_s=5.0)
    )  # b does not answer, c never reported
    assert worker.running == snapshot.requests[:1]
    assert worker.waiting == snapshot.requests[1:2]
    assert worker.stalled
    in_grace = balanced_workers(snapshot, FastSettings(stall_grace_s=10.1))
    assert in_grace[0].decode_tokens_per_s is None
    assert balanced_workers(snapshot, FastSettings(stall_grace_s=10.0))[0].stalled  # the grace is over
