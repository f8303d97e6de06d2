"""Homogeneous fleets: against every spread of few requests, simulated step by step."""

import pytest
from decode_oracle import best_s, step_by_step_s
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_builders import configuration, configurations, pendings

from planner.cost import Pending, lower_bound_s
from planner.homogeneous import Job, as_placed_s, estimate, instances_that_fit, spread, why_none_fits
from planner.model import Configuration, ConfigurationId, EngineId


def jobs_of(requests: list[Pending]) -> list[Job]:
    return [Job(pending, running=place % 2 == 0) for place, pending in enumerate(requests)]


@settings(max_examples=300, deadline=None)
@given(configurations(), pendings(max_size=5, remaining=6), st.integers(1, 3))
def test_no_spread_at_all_beats_the_lower_bound_and_the_estimate_is_one_of_them(
    fleet: Configuration, requests: list[Pending], instances: int
) -> None:
    soonest_s = best_s(fleet, instances, requests)
    found = estimate(fleet, instances, jobs_of(requests))
    close = 1e-9 * soonest_s + 1e-12
    assert found.lower_bound_s <= soonest_s + close
    assert found.lower_bound_s == lower_bound_s(fleet, instances, requests)
    assert found.makespan_s >= soonest_s - close


@settings(max_examples=200, deadline=None)
@given(configurations(), pendings(max_size=30), st.integers(1, 5))
def test_the_makespan_is_that_of_the_spread_step_by_step(
    fleet: Configuration, requests: list[Pending], instances: int
) -> None:
    jobs = jobs_of(requests)
    held = spread(fleet, instances, jobs)
    assert len(held) == instances
    assert sorted(job.pending for each in held for job in each) == sorted(requests)
    for each in held:
        assert [job.running for job in each] == sorted((job.running for job in each), reverse=True)
    longest_s = max(step_by_step_s(fleet, [job.pending for job in each]) for each in held)
    assert estimate(fleet, instances, jobs).makespan_s == pytest.approx(longest_s, rel=1e-9, abs=1e-12)


@given(st.integers(0, 64), st.integers(1, 16), st.integers(1, 64))
def test_instances_share_no_gpu_and_stay_inside_nodes_or_take_whole_ones(count: int, per_node: int, gpus: int) -> None:
    fleet = configuration(gpus=gpus)
    fit = instances_that_fit(fleet, count, per_node)
    taken: set[int] = set()
    placed = 0
    if gpus <= per_node:  # one by one, wherever a node has room
        for first in range(count):
            ids = set(range(first, first + gpus))
            if max(ids) < count and not ids & taken and first // per_node == max(ids) // per_node:
                taken |= ids
                placed += 1
    elif gpus % per_node == 0:
        placed = (count // per_node) // (gpus // per_node)
    assert fit == placed
    assert fit * gpus <= count


def test_why_none_fits() -> None:
    assert why_none_fits(configuration(gpus=12), 64, 8) == (
        "an instance of 12 GPUs is neither inside a node of 8 nor whole nodes"
    )
    assert why_none_fits(configuration(gpus=16), 8, 8) == "an instance takes 16 GPUs; there are 8 in nodes of 8"


def test_long_requests_are_dealt_out_first() -> None:
    fleet = configuration(alpha_s=1.0, beta_s=0.0, gamma_s=0.0)
    jobs = [Job(Pending(0, remaining)) for remaining in (1, 9, 2, 8)]
    held = [[job.pending.remaining_tokens for job in each] for each in spread(fleet, 2, jobs)]
    assert held == [[9], [8, 2, 1]]
    assert estimate(fleet, 2, jobs).makespan_s == 9


def test_rebuilding_is_that_of_the_instance_with_the_most_to_prefill() -> None:
    fleet = configuration()
    jobs = [Job(Pending(18_000, 10), running=True), Job(Pending(36_000, 5), running=True), Job(Pending(90_000, 1))]
    assert estimate(fleet, 2, jobs).rebuild_s == pytest.approx(2.0)


def test_the_fleet_as_it_stands() -> None:
    tp2 = configuration(alpha_s=1.0, beta_s=0.0, gamma_s=0.0)
    tp4 = configuration("tp4", alpha_s=0.5, beta_s=0.0, gamma_s=0.0)
    known = {tp2.id: tp2, tp4.id: tp4}
    a, b = EngineId("a"), EngineId("b")
    jobs = [Job(Pending(0, 10), engine=a), Job(Pending(0, 30), engine=b)]
    assert as_placed_s(known, {a: tp2.id, b: tp4.id}, jobs) == 15.0
    # Those on no engine, or on one that is gone, are dealt in turn.
    stray = [*jobs, Job(Pending(0, 40)), Job(Pending(0, 20), engine=EngineId("gone"))]
    assert as_placed_s(known, {a: tp2.id, b: tp4.id}, stray) == 40.0
    assert as_placed_s(known, {a: tp2.id, b: None}, jobs) is None
    assert as_placed_s(known, {a: ConfigurationId("other")}, jobs) is None
    assert as_placed_s(known, {}, jobs) is None
    assert as_placed_s({tp2.id: configuration(capacity=20)}, {a: tp2.id, b: tp2.id}, jobs) is None
