"""Tests of remaining lengths: invariants of every forecast, and censored lengths that must not count as short ones."""

import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from planner_builders import request

from planner.model import FinishedLength, RequestView
from planner.workload.forecast import (
    MIN_LENGTHS,
    WORTH_SHARES,
    ConditionalLengths,
    Forecast,
    Survival,
    conditional_lengths,
    forecast,
)
from planner.workload.series import LengthCounts, StepForecast

BIN = 10
CAP = 205  # not a multiple of the bin: the last one is cut
LENGTHS = st.lists(st.integers(0, 300), max_size=60)
REQUESTS = st.lists(
    st.builds(lambda generated, limit: request("r", generated, limit=limit), st.integers(0, 250), st.integers(1, 300)),
    max_size=40,
)


def expected_tokens(found: Forecast) -> NDArray[np.float64]:
    assert found.lengths is not None
    return found.lengths.mean(found.generated_tokens, found.rows, found.limit_tokens)


def survival_curve(
    output_tokens: Sequence[int], generated_tokens: Sequence[int], bin_tokens: int, max_output_tokens: int
) -> tuple[Survival, str]:
    """Return the survival curve common to all tags, and its method."""
    known = [FinishedLength(tokens) for tokens in output_tokens]
    lengths = conditional_lengths(known, generated_tokens, (), bin_tokens, max_output_tokens)
    return lengths.survival[0], lengths.method


def limit_of(view: RequestView, cap: int = CAP) -> int:
    return min(view.max_tokens or cap, cap)


@given(REQUESTS, LENGTHS)
def test_every_request_is_counted_once_and_ends_between_one_token_and_its_limit(
    requests: list[RequestView], lengths: list[int]
) -> None:
    found = forecast(requests, lengths, BIN, CAP)
    assert found.remaining.total == pytest.approx(len(requests))
    assert len(found.remaining_tokens) == len(requests)
    for view, remaining in zip(requests, found.remaining_tokens, strict=True):
        assert 1 <= remaining <= max(1, limit_of(view) - view.generated_tokens)
    # No estimate lies in an empty bin of the histogram.
    for remaining in found.remaining_tokens:
        assert found.remaining.counts[(remaining - 1) // BIN] > 0


@given(LENGTHS, st.lists(st.integers(0, 300), max_size=60))
def test_survival_curve_falls_from_one_to_zero(lengths: list[int], generated: list[int]) -> None:
    survival, _ = survival_curve(lengths, generated, BIN, CAP)
    assert survival[0] == 1.0
    assert survival[-1] == 0.0
    assert (np.diff(survival) <= 0).all()
    assert (survival[:-1] > 0).all()  # no request can reach a bin whose survival is 0


@given(st.lists(st.integers(1, CAP), min_size=MIN_LENGTHS, max_size=200))
def test_without_anything_running_the_curve_is_the_empirical_one(lengths: list[int]) -> None:
    survival, method = survival_curve(lengths, [], BIN, CAP)
    assert method == "kaplan_meier"
    beyond = [sum(length > edge * BIN for length in lengths) / len(lengths) for edge in range(len(survival))]
    assert survival == pytest.approx(np.array(beyond), abs=1e-8)


@given(st.integers(0, 199), st.lists(st.integers(1, 200), min_size=MIN_LENGTHS, max_size=100))
def test_running_request_has_the_distribution_of_longer_outputs(generated: int, lengths: list[int]) -> None:
    done = generated // BIN
    further = [length for length in lengths if length > done * BIN]
    if not further:
        return
    # Waiting requests add no information, so the curve is the empirical one.
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


def test_running_requests_count_as_censored() -> None:
    # 20 have finished with 10 tokens, 80 are running at 100: without censoring all 100 would seem to have 10 tokens.
    running = [request(f"r{i:02}", 100) for i in range(80)]
    survival, _ = survival_curve([10] * 20, [view.generated_tokens for view in running], BIN, 1000)
    assert survival[1] == pytest.approx(0.8)
    found = forecast(running, [10] * 20, BIN, 1000)
    assert min(found.remaining_tokens) >= 1
    assert np.median(found.remaining_tokens) == pytest.approx(100, abs=20)  # half of the outputs reach twice the length


def test_short_history_falls_back_and_is_named_in_the_method() -> None:
    waiting = [request(f"r{i}") for i in range(50)]
    assert forecast([], [], BIN, CAP).method == "nothing_in_flight"
    assert forecast(waiting, [], BIN, CAP).method == "uniform"
    assert forecast(waiting, [0, 0], BIN, CAP).method == "uniform"
    assert forecast(waiting, [50] * (MIN_LENGTHS - 1), BIN, CAP).method == "exponential"
    assert forecast(waiting, [50] * MIN_LENGTHS, BIN, CAP).method == "kaplan_meier"
    uniform = forecast(waiting, [], BIN, 100).remaining
    assert uniform.counts == pytest.approx([5.0] * 10)


def test_exponential_mean_matches_finished_and_running_tokens() -> None:
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


# --- conditional, censored, by tag, and with the forecast made before the step

SHARES = st.lists(st.integers(0, 9), min_size=6, max_size=6).filter(any)


def with_shares(counts: list[int]) -> ConditionalLengths:
    survival = np.append(1.0, 1.0 - np.cumsum(counts) / sum(counts))
    return ConditionalLengths(BIN, 6 * BIN, survival.clip(0.0, 1.0)[None, :], {}, "given")


def outcomes(lengths: ConditionalLengths, generated: int, limit: int) -> list[tuple[int, float]]:
    """Yield every outcome of a request: remaining tokens and probability, bin by bin."""
    shares = -np.diff(lengths.survival[0])
    done = min(generated // BIN, len(shares) - 1)
    beyond = shares[done:].sum()
    ends = [min((done + 1 + place) * BIN, limit) for place in range(len(shares) - done)]
    return [(max(end - generated, 1), share / beyond) for end, share in zip(ends, shares[done:], strict=True)]


@given(SHARES, st.integers(0, 70), st.integers(1, 80), st.floats(0, 1))
def test_conditional_lengths_match_enumeration(counts: list[int], generated: int, limit: int, q: float) -> None:
    lengths = with_shares(counts)
    done = min(generated // BIN, 5)
    if not sum(counts[done:]):
        return
    ways = outcomes(lengths, generated, min(limit, 60))
    assert lengths.mean(generated, 0, limit) == pytest.approx(max(1.0, sum(tokens * share for tokens, share in ways)))
    found = int(lengths.quantile(generated, q, 0, limit))
    possible = [tokens for tokens, share in ways if share > 1e-12]
    assert found in possible
    assert sum(share for tokens, share in ways if tokens <= found) >= q - 1e-9
    assert sum(share for tokens, share in ways if tokens < found) <= q + 1e-9
    histogram = lengths.remaining(np.array([generated]), np.array([0]), np.array([limit]))
    counted = np.zeros(6)
    for tokens, share in ways:
        counted[(tokens - 1) // BIN] += share
    assert histogram.counts == pytest.approx(counted[: len(histogram.counts)])
    assert counted[len(histogram.counts) :].sum() == pytest.approx(0.0)


@given(SHARES, st.lists(st.tuples(st.integers(0, 59), st.integers(1, 60)), min_size=1, max_size=20))
def test_batched_requests_match_single_requests(counts: list[int], requests: list[tuple[int, int]]) -> None:
    lengths = with_shares([*counts[:5], counts[5] + 1])
    generated, limits = (np.array(values) for values in zip(*requests, strict=True))
    rows = np.zeros(len(requests), dtype=np.int64)
    quantiles = lengths.quantile(generated[:, None], [0.1, 0.5, 0.9], 0, limits[:, None])  # [request, quantile]
    assert (np.diff(quantiles, axis=1) >= 0).all()
    total = np.zeros(6)
    for place, (came, limit) in enumerate(requests):
        assert quantiles[place, 1] == lengths.quantile(came, 0.5, 0, limit)
        assert lengths.mean(generated, rows, limits)[place] == pytest.approx(float(lengths.mean(came, 0, limit)))
        alone = lengths.remaining(np.array([came]), np.array([0]), np.array([limit])).counts
        total[: len(alone)] += alone
    together = lengths.remaining(generated, rows, limits)
    assert together.total == pytest.approx(len(requests))
    assert together.counts == pytest.approx(total[: len(together.counts)])


@pytest.mark.parametrize("generated", [1600, 2500, 3000, 5000])
def test_requests_of_equal_length_do_not_count_as_ended(generated: int) -> None:
    """All requests of the step began together, so the newest ends lie in the bin of all running requests."""
    ratios = []
    for seed in range(8):
        lengths = np.minimum(np.random.default_rng(seed).lognormal(np.log(2000), 1.0, 256), 15_000).astype(int)
        running = lengths[lengths > generated]
        ended = [FinishedLength(int(tokens)) for tokens in lengths[lengths <= generated]]
        requests = [request(f"r{i}", generated, limit=15_000) for i in range(len(running))]
        found = forecast(requests, (), 512, 15_000, finished=ended)
        ratios.append(float(expected_tokens(found).mean() / (running - generated).mean()))
    assert 0.5 < float(np.median(ratios)) < 2.0


@given(
    st.lists(st.integers(1, 60), min_size=MIN_LENGTHS, max_size=60),
    st.lists(st.integers(0, 59), max_size=40),
    st.lists(st.integers(0, 59), max_size=40),
)
def test_censored_lengths_give_the_maximum_likelihood(ended: list[int], cut: list[int], running: list[int]) -> None:
    # Self-consistency: distributing each censored length over the bins beyond it in proportion, repeatedly, converges
    # to the maximum of the likelihood. A length in the last bin leaves nothing undetermined.
    ended = [*ended, 60]
    running = [tokens // BIN * BIN for tokens in running]  # at an edge: inside a bin it would count in that bin
    finished = [*(FinishedLength(tokens) for tokens in ended), *(FinishedLength(tokens, True) for tokens in cut)]
    found = conditional_lengths(finished, running, [""] * len(running), BIN, 60).survival[0]
    at = np.bincount([(tokens - 1) // BIN for tokens in ended], minlength=6).astype(float)
    outlived = [tokens // BIN for tokens in (*cut, *running)]
    shares = np.full(6, 1 / 6)
    for _ in range(600):
        ends = at.copy()
        for bins in outlived:
            ends[bins:] += shares[bins:] / shares[bins:].sum()
        shares = ends / ends.sum()
    assert -np.diff(found) == pytest.approx(shares, abs=2e-3)


def test_outputs_cut_by_max_tokens_count_as_censored() -> None:
    finished = [FinishedLength(20)] * 50 + [FinishedLength(100, censored=True)] * 50
    cut = conditional_lengths(finished, [], (), BIN, 1000)
    naive = conditional_lengths([FinishedLength(length.tokens) for length in finished], [], (), BIN, 1000)
    assert cut.survival[0][10] == pytest.approx(0.5)
    assert naive.survival[0][10] == pytest.approx(0.0, abs=1e-6)
    assert float(cut.mean(0)) > float(naive.mean(0)) + 50


def before(counts: list[float], worth: float, *, tags: tuple[tuple[str, LengthCounts], ...] = ()) -> StepForecast:
    shares = tuple(count / sum(counts) for count in counts)
    return StepForecast(BIN, shares, "arima", "told", 1.1, worth, tags=tags)


@given(SHARES.filter(lambda counts: counts[5] > 0), st.lists(st.integers(1, 60), max_size=12), st.floats(20, 5000))
def test_forecast_counts_as_its_worth_in_requests(counts: list[int], ended: list[int], worth: float) -> None:
    ended = [tokens for tokens in ended if counts[(tokens - 1) // BIN]]
    told = before([float(count) for count in counts], worth)
    found = conditional_lengths([FinishedLength(tokens) for tokens in ended], [], (), BIN, 60, told)
    assert found.method == "arima_updated"
    at = np.bincount([(tokens - 1) // BIN for tokens in ended], minlength=6)
    pooled = [
        (worth * share * np.array(told.shares) + at) / (worth * share + len(ended))
        for share in (WORTH_SHARES if len(ended) else (1.0,))
    ]
    shares = -np.diff(found.survival[0])
    assert any(shares == pytest.approx(one, abs=1e-6) for one in pooled)


def test_step_that_contradicts_its_forecast_prevails() -> None:
    rng = np.random.default_rng(3)
    told = before([60.0, 30.0, 10.0] + [1e-3] * 97, 5_000.0)
    long = [FinishedLength(int(tokens)) for tokens in rng.integers(400, 1000, 300)]
    as_told = [FinishedLength(int(tokens)) for tokens in rng.choice([5, 15, 25], 300, p=[0.6, 0.3, 0.1])]
    cost_estimates = conditional_lengths(long, [], (), BIN, 1000, told)
    confirmed = conditional_lengths(as_told, [], (), BIN, 1000, told)
    assert float(cost_estimates.mean(0)) == pytest.approx(705, abs=60)
    assert float(confirmed.mean(0)) == pytest.approx(15, abs=2)


def test_differing_tags_are_separated_and_rare_ones_pooled() -> None:
    rng = np.random.default_rng(4)
    finished = [FinishedLength(int(t), tag="short") for t in rng.integers(1, 100, 300)]
    finished += [FinishedLength(int(t), tag="long") for t in rng.integers(600, 1000, 300)]
    finished += [FinishedLength(950, tag="rare")] * 2
    tags = ["short", "long", "rare", "unheard", ""]
    lengths = conditional_lengths(finished, [0] * 5, tags, BIN, 1000)
    short, long, rare, unheard, common = lengths.mean(np.zeros(5, np.int64), lengths.rows_of(tags)).tolist()
    assert short == pytest.approx(55, rel=0.2)
    assert long == pytest.approx(805, rel=0.1)
    assert common == pytest.approx(430, rel=0.1)
    assert unheard == pytest.approx(common, rel=0.05)
    assert common < rare < 800  # two lengths have a small influence


@pytest.mark.parametrize("seed", range(6))
def test_tags_that_do_not_differ_share_one_distribution(seed: int) -> None:
    rng = np.random.default_rng(seed)
    finished = [FinishedLength(int(t), tag=f"t{i % 5}") for i, t in enumerate(rng.integers(1, 1000, 1000))]
    lengths = conditional_lengths(finished, [0], ["t1"], BIN, 1000)
    assert float(lengths.mean(0, lengths.rows_of(["t1"])[0])) == pytest.approx(float(lengths.mean(0)), rel=0.05)


def test_tag_counts_of_earlier_steps_are_used_at_the_start() -> None:
    counts = [50.0] + [0.0] * 98 + [50.0]
    tagged = LengthCounts((100.0, *[0.0] * 99), (0.0,) * 101)
    other = LengthCounts((*[0.0] * 99, 100.0), (0.0,) * 101)
    told = before(counts, 400.0, tags=(("easy", tagged), ("hard", other)))
    found = forecast([replace(request("e"), tag="easy"), replace(request("h"), tag="hard")], (), BIN, 1000, before=told)
    easy, hard = expected_tokens(found)
    assert easy < 300 < 700 < hard
    assert found.remaining_at(0.5).tolist() == [10, 1000]


def test_forecast_with_other_bins_is_rejected() -> None:
    with pytest.raises(ValueError, match="before must have 100 bins of 10 tokens, got 3 bins of 10 tokens"):
        conditional_lengths([], [], (), BIN, 1000, before([1.0, 1.0, 1.0], 10.0))
    assert forecast([], (), BIN, 1000).remaining_at(0.5).tolist() == []


def test_two_ends_in_a_barely_passed_bin_do_not_end_all_requests() -> None:
    """14 of 256 requests are running, all 20 tokens into a bin in which two have just ended."""
    finished = [FinishedLength(int(tokens)) for tokens in np.linspace(100, 12_200, 240)]
    finished += [FinishedLength(24 * 512 + 10), FinishedLength(24 * 512 + 15)]
    lengths = conditional_lengths(finished, [24 * 512 + 20] * 14, [""] * 14, 512, 25_000)
    assert lengths.mean(24 * 512 + 20) > 1_000


def test_fast_falling_tail_is_extrapolated_fast() -> None:
    """The lengths are Pareto with an exponent of 3, so the longest requests are expected to take half as long again."""
    tokens = 1000 * (1 - (np.arange(400) + 0.5) / 400) ** (-1 / 3)
    finished = [FinishedLength(int(length)) for length in tokens if length <= 3000]
    going_on = int((tokens > 3000).sum())
    found = conditional_lengths(finished, [3000] * going_on, [""] * going_on, 100, 30_000)
    assert 1_000 < found.mean(3000) < 2_500  # the true value is 1500; an exponent of 1 would give 6900
