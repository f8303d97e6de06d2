"""Tests of the cost that requests add to an instance, against a simulation of every iteration, and of the simulations
that other tests use."""

from dataclasses import replace

import pytest
from decode_oracle import DoesNotFit, along_the_curve_s, curve_decode_s, decode_s, step_by_step_s
from hypothesis import given
from hypothesis import strategies as st
from planner_builders import RemainingWork, configuration, configurations, pendings

from planner.cost.profile import Curve, EngineProfile, Parallelism, ProfileSource, Provenance, StepTime
from planner.model import Configuration, ConfigurationId

CLOSE = {"rel": 1e-9, "abs": 1e-12}


@given(configurations(), pendings())
def test_decode_s_matches_stepping_every_iteration(instance: Configuration, requests: list[RemainingWork]) -> None:
    assert decode_s(instance, requests) == pytest.approx(step_by_step_s(instance, requests), **CLOSE)


@given(configurations(), pendings())
def test_with_room_for_all_the_closed_form_holds(instance: Configuration, requests: list[RemainingWork]) -> None:
    roomy = replace(instance, max_sequences=100, kv_capacity_tokens=10_000)
    longest = max((pending.remaining_tokens for pending in requests), default=0)
    all_at_once_s = roomy.alpha_s * longest + sum(roomy.work_s(*pending) for pending in requests)
    assert all_at_once_s == pytest.approx(step_by_step_s(roomy, requests), **CLOSE)
    assert decode_s(instance, requests) >= all_at_once_s


@given(configurations(), pendings(), st.integers(0, 50), st.integers(0, 3))
def test_more_room_never_takes_longer(
    instance: Configuration, requests: list[RemainingWork], tokens: int, sequences: int
) -> None:
    larger = replace(
        instance,
        kv_capacity_tokens=instance.kv_capacity_tokens + tokens,
        max_sequences=instance.max_sequences + sequences,
    )
    assert decode_s(larger, requests) <= decode_s(instance, requests)


@given(configurations(), pendings(), st.data())
def test_more_to_decode_never_takes_less(
    instance: Configuration, requests: list[RemainingWork], data: st.DataObject
) -> None:
    more = [
        RemainingWork(
            context + data.draw(st.integers(0, 20 - context)), remaining + data.draw(st.integers(0, 20 - remaining))
        )
        for context, remaining in requests
    ] + data.draw(pendings(max_size=2))
    longer_s, shorter_s = decode_s(instance, more), decode_s(instance, requests)
    assert longer_s >= shorter_s or longer_s == pytest.approx(shorter_s, **CLOSE)


def test_decode_s_matches_a_hand_calculation() -> None:
    instance = configuration(alpha_s=1.0, beta_s=0.1, gamma_s=0.01)
    # 2 iterations of 2 sequences with 30 and 32 tokens, then 1 iteration of 1 sequence with 22.
    assert decode_s(instance, [RemainingWork(10, 2), RemainingWork(20, 3)]) == pytest.approx(
        (1 + 0.2 + 0.3) + (1 + 0.2 + 0.32) + (1 + 0.1 + 0.22)
    )


def test_admission_is_first_come_first_served_even_past_a_smaller_one() -> None:
    instance = configuration(alpha_s=1.0, beta_s=0.0, gamma_s=0.0, capacity=100, slots=2)
    # The second (90) waits for the first (20); the third (10) waits behind it although it would fit at once.
    assert decode_s(instance, [RemainingWork(10, 10), RemainingWork(85, 5), RemainingWork(5, 5)]) == 15


def test_request_that_never_fits_is_rejected_by_name() -> None:
    with pytest.raises(DoesNotFit, match="a request of 101 tokens does not fit into a KV cache of 100"):
        decode_s(configuration(capacity=100), [RemainingWork(1, 1), RemainingWork(51, 50)])


def profile(step: StepTime, capacity: int = 1_000, slots: int = 4, spill: int = 0, name: str = "tp1") -> EngineProfile:
    return EngineProfile(
        ConfigurationId(name),
        Parallelism(),
        step,
        1.0,
        capacity,
        slots,
        0.0,
        Provenance(ProfileSource.GIVEN, ""),
        spill,
    )


bent_steps = st.builds(
    lambda ys, kv_s, spill_s: StepTime(Curve((1.0, 2.0, 4.0), tuple(ys)), kv_s, spill_s),
    st.lists(st.sampled_from([0.0, 0.01, 0.05, 1.0]), min_size=3, max_size=3),
    st.sampled_from([0.0, 1e-4, 1e-2]),
    st.sampled_from([0.0, 1e-3, 1e-1]),
)


@given(bent_steps, pendings(), st.sampled_from([40, 60, 1_000]), st.integers(1, 6), st.sampled_from([0, 10, 100]))
def test_curve_decode_s_matches_stepping_every_iteration(
    step: StepTime, requests: list[RemainingWork], capacity: int, slots: int, spill: int
) -> None:
    instance = profile(step, capacity, slots, spill)
    assert curve_decode_s(instance, requests) == pytest.approx(along_the_curve_s(instance, requests), **CLOSE)


@given(configurations(), pendings())
def test_a_straight_curve_decodes_as_the_affine_step_time(
    instance: Configuration, requests: list[RemainingWork]
) -> None:
    step = StepTime(Curve.line(instance.alpha_s, instance.beta_s), instance.gamma_s)
    straight = profile(step, instance.kv_capacity_tokens, instance.max_sequences)
    assert curve_decode_s(straight, requests) == pytest.approx(decode_s(instance, requests), **CLOSE)


def test_spilling_pays_where_it_costs_less_than_waiting() -> None:
    """Two requests of 20 tokens and room for one: together in 20 iterations, or one after the other in 40."""
    two = [RemainingWork(0, 20), RemainingWork(0, 20)]
    waits = profile(StepTime(Curve.line(1.0, 0.0), 0.0), capacity=20)
    assert curve_decode_s(waits, two) == 40.0
    # From the 11th iteration on they hold 20, 22, ... 38 tokens: 0 + 2 + ... + 18 = 90 of them spilled.
    cheap = profile(StepTime(Curve.line(1.0, 0.0), 0.0, spill_s_per_token=0.01), capacity=20, spill=20)
    assert curve_decode_s(cheap, two) == pytest.approx(20.9)
    dear = profile(StepTime(Curve.line(1.0, 0.0), 0.0, spill_s_per_token=1.0), capacity=20, spill=20)
    assert curve_decode_s(dear, two) == pytest.approx(110.0)


def test_request_that_fits_neither_gpu_nor_cpu_is_rejected() -> None:
    with pytest.raises(DoesNotFit, match="41 tokens does not fit into a KV cache of 40"):
        curve_decode_s(profile(StepTime(Curve.line(1.0, 0.0), 0.0), capacity=20, spill=20), [RemainingWork(1, 40)])
