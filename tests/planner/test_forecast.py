"""Remaining lengths: what must hold of every forecast, and that censored lengths do not pass for short ones."""

import random
from bisect import bisect_left

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_builders import request

from planner.forecast import MIN_LENGTHS, forecast, survival_curve
from planner.model import RequestView

BIN = 10
CAP = 205  # not a multiple of the bin: the last one is cut
LENGTHS = st.lists(st.integers(0, 300), max_size=60)
REQUESTS = st.lists(
    st.builds(lambda generated, limit: request("r", generated, limit=limit), st.integers(0, 250), st.integers(1, 300)),
    max_size=40,
)


def limit_of(view: RequestView, cap: int = CAP) -> int:
    return min(view.max_tokens or cap, cap)


@settings(max_examples=400, deadline=None)
@given(REQUESTS, LENGTHS)
def test_every_request_is_counted_once_and_ends_between_one_token_and_its_limit(
    requests: list[RequestView], lengths: list[int]
) -> None:
    found = forecast(requests, lengths, BIN, CAP)
    assert found.remaining.total == pytest.approx(len(requests))
    assert len(found.remaining_tokens) == len(requests)
    for view, remaining in zip(requests, found.remaining_tokens, strict=True):
        assert 1 <= remaining <= max(1, limit_of(view) - view.generated_tokens)
    # No estimate lies in a bin that the histogram gives to nobody.
    for remaining in found.remaining_tokens:
        assert found.remaining.counts[(remaining - 1) // BIN] > 0


@given(LENGTHS, st.lists(st.integers(0, 300), max_size=60))
def test_a_survival_curve_falls_from_one_to_nothing(lengths: list[int], generated: list[int]) -> None:
    survival, _ = survival_curve(lengths, generated, BIN, CAP)
    assert survival[0] == 1.0
    assert survival[-1] == 0.0
    assert (np.diff(survival) <= 0).all()
    assert (survival[:-1] > 0).all()  # no request can turn up where the curve says that none is left


@given(st.lists(st.integers(1, CAP), min_size=MIN_LENGTHS, max_size=200))
def test_without_anything_running_the_curve_is_the_empirical_one(lengths: list[int]) -> None:
    survival, method = survival_curve(lengths, [], BIN, CAP)
    assert method == "kaplan_meier"
    beyond = [sum(length > edge * BIN for length in lengths) / len(lengths) for edge in range(len(survival))]
    assert survival == pytest.approx(np.array(beyond), abs=1e-8)


@given(st.integers(0, 199), st.lists(st.integers(1, 200), min_size=MIN_LENGTHS, max_size=100))
def test_a_request_that_came_so_far_has_the_distribution_of_those_that_went_further(
    generated: int, lengths: list[int]
) -> None:
    done = generated // BIN
    further = [length for length in lengths if length > done * BIN]
    if not further:
        return
    # Waiting requests add nothing to what is known; the curve is the empirical one.
    survival, _ = survival_curve(lengths, [], BIN, 200)
    shares = -np.diff(survival[done:]) / survival[done]
    for place, share in enumerate(shares):
        low, high = (done + place) * BIN, (done + place + 1) * BIN
        assert share == pytest.approx(sum(low < length <= high for length in further) / len(further), abs=1e-6)


def test_a_bin_counts_as_its_upper_edge() -> None:
    lengths = [42] * MIN_LENGTHS
    found = forecast([request("w"), request("r", 35)], lengths, BIN, CAP)
    assert found.method == "kaplan_meier"
    # 42 lies in the bin up to 50: nothing generated leaves 50; 35 generated leave 15.
    assert found.remaining_tokens[0] == 50
    assert found.remaining_tokens[1] >= 15


def test_what_still_runs_is_not_taken_for_short() -> None:
    # 20 have finished with 10 tokens, 80 run on at 100: without censoring all of the 100 would look like 10 tokens.
    running = [request(f"r{i:02}", 100) for i in range(80)]
    survival, _ = survival_curve([10] * 20, [view.generated_tokens for view in running], BIN, 1000)
    assert survival[1] == pytest.approx(0.8)
    found = forecast(running, [10] * 20, BIN, 1000)
    assert min(found.remaining_tokens) >= 1
    assert np.median(found.remaining_tokens) == pytest.approx(100, abs=20)  # as likely as not to come twice as far


def test_with_short_history_it_says_so_and_falls_back() -> None:
    waiting = [request(f"r{i}") for i in range(50)]
    assert forecast([], [], BIN, CAP).method == "nothing_in_flight"
    assert forecast(waiting, [], BIN, CAP).method == "uniform"
    assert forecast(waiting, [0, 0], BIN, CAP).method == "uniform"
    assert forecast(waiting, [50] * (MIN_LENGTHS - 1), BIN, CAP).method == "exponential"
    assert forecast(waiting, [50] * MIN_LENGTHS, BIN, CAP).method == "kaplan_meier"
    uniform = forecast(waiting, [], BIN, 100).remaining
    assert uniform.counts == pytest.approx([5.0] * 10)


def test_an_exponential_is_as_long_as_finished_and_running_tokens_say() -> None:
    waiting = [request(f"r{i:03}") for i in range(400)]
    found = forecast(waiting, [90, 110, 100, 100], 1, 100_000)
    assert np.mean(found.remaining_tokens) == pytest.approx(100, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_estimates_together_show_the_histogram_with_its_tail(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [max(1, min(4000, int(rng.lognormvariate(6, 1)))) for _ in range(2000)]
    requests = [request(f"r{i:03}", rng.choice([0, 0, rng.randint(1, 500)])) for i in range(512)]
    found = forecast(requests, lengths, 64, 4096)
    ordered = sorted(found.remaining_tokens)
    counted = 0.0
    for place, count in enumerate(found.remaining.counts):
        counted += count
        shown = bisect_left(ordered, (place + 1) * 64 + 1)
        assert abs(shown - counted) < 0.06 * len(requests)
    assert max(ordered) > 2000


@pytest.mark.parametrize("seed", range(5))
def test_the_forecast_in_the_middle_of_a_step_is_near_the_truth(seed: int) -> None:
    rng = random.Random(seed)
    truth = [max(1, min(8000, int(rng.lognormvariate(6.5, 0.9)))) for _ in range(1000)]
    now = 600
    finished = [length for length in truth if length <= now]
    left = [length - now for length in truth if length > now]
    earlier = [max(1, min(8000, int(rng.lognormvariate(6.5, 0.9)))) for _ in range(2000)]
    found = forecast([request(f"r{i:03}", now) for i in range(len(left))], [*earlier, *finished], 64, 8192)
    assert sum(found.remaining_tokens) == pytest.approx(sum(left), rel=0.2)


def test_the_same_input_gives_the_same_forecast() -> None:
    requests = [request(f"r{i}", i) for i in range(100)]
    assert forecast(requests, range(100), BIN, CAP) == forecast(requests, range(100), BIN, CAP)
