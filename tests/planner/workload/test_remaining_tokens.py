"""Tests of expected remaining tokens: conditional means that are smooth in age and rebuilt after enough new lengths."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.model import EngineId, FinishedLength, RequestId, RequestState, RequestView, Snapshot
from planner.workload.forecast import conditional_lengths
from planner.workload.remaining_tokens import RemainingTokensEstimator, smooth_means

LONGEST = 8_192
BIN = 256


def request(name: str, generated: int, limit: int | None = None) -> RequestView:
    return RequestView(RequestId(name), EngineId("e0"), RequestState.RUNNING, 100, generated, limit)


def heavy_tailed(count: int, seed: int = 1) -> tuple[FinishedLength, ...]:
    rng = random.Random(seed)
    lengths = (round(rng.lognormvariate(6.5, 1.2)) + 1 for _ in range(count))
    return tuple(FinishedLength(min(LONGEST, tokens), tokens >= LONGEST) for tokens in lengths)


def snapshot(*requests: RequestView, finished: tuple[FinishedLength, ...] = (), started_s: float = 0.0) -> Snapshot:
    return Snapshot(10.0, (), requests, finished, 0.1, started_s)


@given(st.lists(st.tuples(st.integers(0, LONGEST), st.none() | st.integers(1, LONGEST)), min_size=1, max_size=20))
def test_expected_tokens_are_positive_and_within_limits(held: list[tuple[int, int | None]]) -> None:
    requests = [request(f"r{i}", min(age, limit or LONGEST), limit) for i, (age, limit) in enumerate(held)]
    remaining = RemainingTokensEstimator().remaining_tokens(
        snapshot(*requests, finished=heavy_tailed(200)), BIN, LONGEST
    )
    assert set(remaining) == {one.id for one in requests}
    for one in requests:
        assert 1.0 <= remaining[one.id] <= (one.max_tokens or LONGEST) + 1e-6


def test_expected_tokens_are_smooth_in_age() -> None:
    """A jump between bins would look like a gain from a move between engines."""
    requests = [request(f"r{age}", age) for age in range(0, LONGEST, 16)]
    remaining = RemainingTokensEstimator().remaining_tokens(
        snapshot(*requests, finished=heavy_tailed(100)), BIN, LONGEST
    )
    means = np.array([remaining[one.id] for one in requests])
    assert np.abs(np.diff(means)).max() < 6 * 16


def test_with_a_heavy_tail_older_means_longer() -> None:
    requests = [request(f"r{age}", age) for age in (0, 256, 1024, 3000)]
    remaining = RemainingTokensEstimator().remaining_tokens(
        snapshot(*requests, finished=heavy_tailed(2000)), BIN, LONGEST
    )
    assert list(remaining.values()) == sorted(remaining.values())


def test_expected_tokens_equal_the_conditional_mean_at_the_knots() -> None:
    ages = [0, 256, 1024, 4096]
    requests = [request(f"r{age}", age) for age in ages]
    lengths = conditional_lengths(heavy_tailed(500), ages, [""] * 4, BIN, LONGEST)
    assert list(smooth_means(lengths, requests).values()) == pytest.approx(lengths.mean(np.array(ages)).tolist())


def test_distribution_is_rebuilt_after_enough_ends_and_for_a_new_step() -> None:
    remaining, one = RemainingTokensEstimator(), request("r0", 1000)
    short = tuple(FinishedLength(1200) for _ in range(160))
    before = remaining.remaining_tokens(snapshot(one, finished=short), BIN, LONGEST)
    few = (*short, *(FinishedLength(6000) for _ in range(5)))
    assert remaining.remaining_tokens(snapshot(one, finished=few), BIN, LONGEST) == before
    more = (*short, *(FinishedLength(6000) for _ in range(50)))
    assert remaining.remaining_tokens(snapshot(one, finished=more), BIN, LONGEST)[one.id] > before[one.id] * 1.5
    began = replace(snapshot(one, finished=short), step_started_s=5.0)
    assert remaining.remaining_tokens(began, BIN, LONGEST) == before


def test_no_requests_give_no_expectations() -> None:
    assert RemainingTokensEstimator().remaining_tokens(snapshot(), BIN, LONGEST) == {}
