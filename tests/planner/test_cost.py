"""Decode time of one instance: against a simulation iteration by iteration, and as it must bend."""

from dataclasses import replace

import pytest
from decode_oracle import step_by_step_s
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_builders import configuration, configurations, pendings

from planner.cost import DoesNotFit, Pending, all_at_once_s, decode_s, lower_bound_s
from planner.model import Configuration

CLOSE = {"rel": 1e-9, "abs": 1e-12}


@settings(max_examples=500, deadline=None)
@given(configurations(), pendings())
def test_decoding_takes_what_it_takes_step_by_step(instance: Configuration, requests: list[Pending]) -> None:
    assert decode_s(instance, requests) == pytest.approx(step_by_step_s(instance, requests), **CLOSE)


@given(configurations(), pendings())
def test_with_room_for_all_the_closed_form_holds(instance: Configuration, requests: list[Pending]) -> None:
    roomy = replace(instance, max_sequences=100, kv_capacity_tokens=10_000)
    assert all_at_once_s(roomy, requests) == pytest.approx(step_by_step_s(roomy, requests), **CLOSE)
    assert all_at_once_s(roomy, requests) == decode_s(roomy, requests)
    assert decode_s(instance, requests) >= all_at_once_s(instance, requests)


@given(configurations(), pendings(), st.integers(0, 50), st.integers(0, 3))
def test_more_room_never_takes_longer(
    instance: Configuration, requests: list[Pending], tokens: int, sequences: int
) -> None:
    larger = replace(
        instance,
        kv_capacity_tokens=instance.kv_capacity_tokens + tokens,
        max_sequences=instance.max_sequences + sequences,
    )
    assert decode_s(larger, requests) <= decode_s(instance, requests)


@given(configurations(), pendings(), st.data())
def test_more_to_decode_never_takes_less(instance: Configuration, requests: list[Pending], data: st.DataObject) -> None:
    more = [
        Pending(
            context + data.draw(st.integers(0, 20 - context)), remaining + data.draw(st.integers(0, 20 - remaining))
        )
        for context, remaining in requests
    ] + data.draw(pendings(max_size=2))
    longer_s, shorter_s = decode_s(instance, more), decode_s(instance, requests)
    assert longer_s >= shorter_s or longer_s == pytest.approx(shorter_s, **CLOSE)


@given(configurations(), pendings(), st.integers(1, 3))
def test_no_order_beats_the_lower_bound_of_one_instance(
    instance: Configuration, requests: list[Pending], instances: int
) -> None:
    assert lower_bound_s(instance, 1, requests) <= decode_s(instance, requests)
    assert lower_bound_s(instance, instances, requests) <= lower_bound_s(instance, 1, requests)


def test_the_lead_by_hand() -> None:
    instance = configuration(alpha_s=1.0, beta_s=0.1, gamma_s=0.01)
    # 2 iterations of 2 sequences holding 30 and 32 tokens, then 1 of 1 holding 22.
    assert decode_s(instance, [Pending(10, 2), Pending(20, 3)]) == pytest.approx(
        (1 + 0.2 + 0.3) + (1 + 0.2 + 0.32) + (1 + 0.1 + 0.22)
    )


def test_admission_is_first_come_first_served_even_past_a_smaller_one() -> None:
    instance = configuration(alpha_s=1.0, beta_s=0.0, gamma_s=0.0, capacity=100, slots=2)
    # The second (90) waits for the first (20); the third (10) waits behind it although it would fit at once.
    assert decode_s(instance, [Pending(10, 10), Pending(85, 5), Pending(5, 5)]) == 15


def test_a_request_that_never_fits_is_named() -> None:
    with pytest.raises(DoesNotFit, match="a request of 101 tokens does not fit into a KV cache of 100"):
        decode_s(configuration(capacity=100), [Pending(1, 1), Pending(51, 50)])
