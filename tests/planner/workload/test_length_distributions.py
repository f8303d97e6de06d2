"""Tests of scenarios: they are spread over each request's distribution, equal in every tick, and within its limits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.model import EngineId, FinishedLength, RequestId, RequestState, RequestView, Snapshot
from planner.workload.forecast import FUTURES, conditional_lengths
from planner.workload.remaining_tokens import KnownLengths, RemainingTokensEstimator

BIN_TOKENS, MOST_TOKENS = 64, 4096
LENGTHS = conditional_lengths(
    [FinishedLength(round(20 * 1.05**i)) for i in range(100)], [], [], BIN_TOKENS, MOST_TOKENS
)


def view(name: str, generated: int = 0, max_tokens: int | None = None) -> RequestView:
    return RequestView(RequestId(name), EngineId("e0"), RequestState.RUNNING, 50, generated, max_tokens)


@given(st.lists(st.tuples(st.integers(0, 4000), st.integers(4001, 5000) | st.none()), max_size=6))
def test_no_request_goes_beyond_its_limits(held: list[tuple[int, int | None]]) -> None:
    requests = [view(f"r{i}", generated, most) for i, (generated, most) in enumerate(held)]
    found = LENGTHS.of(requests)
    assert [len(one) for one in found] == [FUTURES] * len(requests)
    for request, remaining in zip(requests, found, strict=True):
        limit = min(request.max_tokens or MOST_TOKENS, MOST_TOKENS)
        assert all(1 <= tokens <= max(1, limit - request.generated_tokens) for tokens in remaining)


def test_scenarios_follow_the_requests_distribution() -> None:
    requests = [view(f"r{i:03}", generated=512) for i in range(200)]
    found = np.array(LENGTHS.of(requests))
    for quantile in (0.25, 0.5, 0.75):
        whole = int(LENGTHS.quantile(512, quantile))
        assert np.quantile(found, quantile) == pytest.approx(whole, abs=2 * BIN_TOKENS)
    means = found.mean(axis=0)
    assert means.std() < 0.2 * means.mean()  # in no scenario are all requests long


def test_scenarios_of_a_request_do_not_depend_on_others() -> None:
    one, other = view("r1", 100), view("r2", 700)
    distributions = LENGTHS
    assert distributions.of([one]) + distributions.of([other]) == distributions.of([one, other])
    assert distributions.of([]) == []


def test_known_lengths_are_one_scenario() -> None:
    distributions = KnownLengths({RequestId("r1"): 300, RequestId("r2"): 100})
    assert distributions.of([view("r1", 100), view("r2", 100)]) == [[200], [1]]


def test_no_distribution_before_any_output_has_ended() -> None:
    remaining = RemainingTokensEstimator()
    assert remaining.distributions is None
    held = (view("r1", 10),)
    remaining.remaining_tokens(Snapshot(0.0, (), held), BIN_TOKENS, MOST_TOKENS)
    assert remaining.distributions is None
    ended = tuple(FinishedLength(tokens) for tokens in range(100, 140))
    remaining.remaining_tokens(Snapshot(0.0, (), held, finished=ended), BIN_TOKENS, MOST_TOKENS)
    assert remaining.distributions is not None
