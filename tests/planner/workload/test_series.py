"""Tests of the forecast before a step: invariants of every series, the choice of the method, and the spread."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from planner.model import FinishedLength
from planner.workload.arima import MIN_STEPS, NotForecast, choose_order, fit_components
from planner.workload.series import (
    ALPHAS,
    MIN_SCORED,
    STEPS_REMEMBERED,
    LengthCounts,
    SeriesForecaster,
    StepForecast,
    StepStatistics,
    dispersion,
    extended,
)

BIN, CAP = 10, 80
BINS = CAP // BIN
EMPTY = SeriesForecaster(BIN, CAP)
LENGTHS = st.lists(st.builds(FinishedLength, st.integers(0, 90), st.booleans(), st.sampled_from(["", "a", "b"])))
COUNTS = st.lists(st.integers(0, 40), min_size=BINS, max_size=BINS)


def step(counts: NDArray[np.int64] | list[int]) -> StepStatistics:
    ended = tuple(float(count) for count in counts)
    return StepStatistics(BIN, LengthCounts(ended, (0.0,) * (BINS + 1)))


def folded(*steps: NDArray[np.int64] | list[int]) -> SeriesForecaster:
    series = EMPTY
    for counts in steps:
        series = series.fold(step(counts))
    return series


def expected(series: SeriesForecaster) -> StepForecast:
    assert series.next is not None
    return series.next


def samples(shares: list[NDArray[np.float64]], requests: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).multinomial(requests, np.array(shares))


FLAT = np.full(BINS, 1 / BINS)
SLOPE = np.arange(1, BINS + 1) / np.arange(1, BINS + 1).sum()


@given(LENGTHS)
def test_counts_match_a_simple_loop(lengths: list[FinishedLength]) -> None:
    found = LengthCounts.of(lengths, BIN, CAP)
    for place in range(BINS):
        low, high = place * BIN, (place + 1) * BIN
        inside = [
            length
            for length in lengths
            if not length.censored
            and (low < length.tokens <= high or (place == 0 and not length.tokens) or (high == CAP < length.tokens))
        ]
        assert found.ended[place] == len(inside)
    for outlived in range(BINS + 1):
        cut = [length for length in lengths if length.censored and min(length.tokens // BIN, BINS) == outlived]
        assert found.outlived[outlived] == len(cut)
    assert found.total == len(lengths)


@given(LENGTHS)
def test_shares_sum_to_one_and_are_empirical_without_cuts(lengths: list[FinishedLength]) -> None:
    shares = LengthCounts.of(lengths, BIN, CAP).shares()
    assert shares.sum() == pytest.approx(1.0)
    assert (shares >= -1e-12).all()
    natural = [length for length in lengths if not length.censored]
    if natural:
        counts = LengthCounts.of(natural, BIN, CAP)
        longest = max(place for place, count in enumerate(counts.ended) if count)
        assert counts.shares()[: longest + 1] == pytest.approx(np.array(counts.ended[: longest + 1]) / len(natural))


def test_statistics_keep_the_tags_apart() -> None:
    lengths = [FinishedLength(5, tag="a"), FinishedLength(15, tag="b"), FinishedLength(25), FinishedLength(35, tag="a")]
    found = StepStatistics.of(lengths, BIN, CAP)
    assert found.lengths.total == 4
    assert {tag: counts.total for tag, counts in found.tags} == {"a": 2, "b": 1}


@given(st.lists(COUNTS, min_size=1, max_size=14))
def test_every_forecast_is_a_distribution_and_explains_itself(series: list[list[int]]) -> None:
    found = folded(*series)
    if not any(map(any, series)):
        assert found.next is None
        return
    told = expected(found)
    assert sum(told.shares) == pytest.approx(1.0)
    assert min(told.shares) >= -1e-12
    assert told.method in {"arima", "ewma", "last_step"}
    assert told.why
    assert told.dispersion >= 1.0
    assert told.worth_requests > 0
    assert told.histogram(100).total == pytest.approx(100)
    assert expected(folded(*series)) == told  # deterministic


def test_short_histories_fall_back_with_a_reason() -> None:
    counts = samples([FLAT] * MIN_STEPS, 400, 0)
    assert (expected(folded(counts[0])).method, expected(folded(counts[0])).why) == (
        "last_step",
        "only one step is known",
    )
    told = expected(folded(*counts[:3]))
    assert told.method == "ewma"
    assert "a forecast requires at least 10 steps, got 3" in told.why
    assert not told.components
    assert "arima" in folded(*counts).forecasts
    assert [error.method for error in told.backtest] == ["ewma", "last_step"]


def test_a_constant_series_has_no_movement_to_fit() -> None:
    found = folded(*[[10] * BINS] * (MIN_STEPS + 5))
    told = expected(found)
    assert told.method in {"ewma", "last_step"}
    assert "steps are equal" in told.why
    assert told.shares == pytest.approx([1 / BINS] * BINS)


def test_failed_fit_raises_with_a_reason() -> None:
    with pytest.raises(NotForecast, match="must be finite and > 0, got 0"):
        choose_order(np.ones(20))
    with pytest.raises(NotForecast, match="must be finite and > 0, got nan"):
        choose_order(np.array([1.0, np.nan] * 10))
    with pytest.raises(
        NotForecast, match=r"order \(0, 1, 1\): a model with 2 parameters requires at least .* values, got 4; order"
    ):
        choose_order(np.array([1.0, 2.0, 0.0, 1.0]))
    with pytest.raises(NotForecast, match="a forecast requires at least 10 steps, got 9"):
        fit_components(np.tile(FLAT, (9, 1)), 100.0)


def test_the_order_follows_the_series() -> None:
    rng = np.random.default_rng(1)
    steps = np.arange(40)
    assert choose_order(rng.normal(size=40)).order == (0, 0, 0)
    assert choose_order(0.3 * steps + rng.normal(size=40) * 0.1).order[1] >= 1
    assert choose_order((steps / 8.0) ** 2 + rng.normal(size=40) * 0.05).order == (0, 2, 2)
    model = choose_order(0.5 * steps + rng.normal(size=40) * 0.05)
    mean, std = model.forecast(0.5 * steps)
    assert mean == pytest.approx(20.0, abs=0.3)
    assert 0 < std < 1.0


def test_arima_is_chosen_for_a_lasting_trend() -> None:
    way = np.linspace(0.0, 1.0, 40)[:, None]
    counts = samples(list((1 - way) * SLOPE + way * SLOPE[::-1]), 50_000, 3)
    told = expected(folded(*counts))
    errors = {error.method: error.error for error in told.backtest}
    assert told.method == "arima"
    assert errors["arima"] < errors["ewma"]
    assert errors["arima"] < errors["last_step"]
    assert 1 <= len(told.components) <= 2
    assert all(component.std > 0 for component in told.components)


def test_slowest_average_is_chosen_without_movement_and_its_spread_holds() -> None:
    counts = samples([SLOPE] * 40, 1_000, 5)
    found = folded(*counts[:30])
    told = expected(found)
    assert told.method in {"ewma", "arima"}
    assert told.dispersion < 1.5
    assert told.worth_requests > 1_000  # worth more than one step
    off = np.abs(counts[30:] - 1_000 * np.array(told.shares))
    assert (off <= 1.645 * told.std(1_000)).mean() > 0.8


@given(st.lists(COUNTS.filter(any), min_size=1, max_size=8), st.sampled_from(ALPHAS))
def test_average_matches_the_recursive_definition(series: list[list[int]], alpha: float) -> None:
    found = folded(*series)
    level, weight = np.zeros(BINS), 0.0
    for kept in found.steps:
        level = (1 - alpha) * level + alpha * kept.lengths.shares()
        weight = (1 - alpha) * weight + alpha
    assert found.forecasts[f"ewma alpha={alpha:g}"] == pytest.approx(level / weight)


def test_sharp_change_starts_a_new_series() -> None:
    before, after = samples([SLOPE] * 12, 2_000, 7), samples([SLOPE[::-1]] * 2, 2_000, 8)
    settled, changed = folded(*before), folded(*before, after[0])
    assert len(changed.steps) == 1
    shares = np.array(expected(changed).shares)
    assert np.abs(shares - SLOPE[::-1]).sum() < 0.2 < np.abs(np.array(expected(settled).shares) - SLOPE[::-1]).sum()
    assert len(folded(*before, *after).steps) == 2  # the following steps are no further change


def test_fits_are_reused_and_history_is_bounded() -> None:
    found = folded(*samples([SLOPE] * (STEPS_REMEMBERED + 6), 300, 2))
    assert len(found.steps) == STEPS_REMEMBERED
    assert found.fits <= (STEPS_REMEMBERED + 6 - MIN_STEPS) / 8 + 3
    assert max(len(errors) for errors in found.errors.values()) == STEPS_REMEMBERED


def test_tags_of_recent_steps_count_less_the_older_they_are() -> None:
    series = EMPTY
    for tokens in (15, 25):
        series = series.fold(StepStatistics.of([FinishedLength(tokens, tag="math")] * 8, BIN, CAP))
    ((tag, counts),) = expected(series).tags
    assert tag == "math"
    assert counts.ended[1:3] == (4.0, 8.0)


def test_backtest_needs_several_steps_before_it_chooses() -> None:
    counts = samples([FLAT] * 6, 100, 4)
    assert "least recent error" not in expected(folded(*counts[:MIN_SCORED])).why
    assert "least recent error" in expected(folded(*counts)).why


def test_mismatched_step_is_rejected_and_empty_step_changes_nothing() -> None:
    with pytest.raises(ValueError, match="step must have 8 bins of 10 tokens, got 8 bins of 20 tokens"):
        EMPTY.fold(StepStatistics(20, LengthCounts((0.0,) * BINS, (0.0,) * (BINS + 1))))
    with pytest.raises(ValueError, match="outlived must have 3 entries, got 2"):
        LengthCounts((1.0, 0.0), (0.0, 0.0))
    with pytest.raises(ValueError, match="bin_tokens must be >= 1, got 0"):
        SeriesForecaster(0, 10)
    assert EMPTY.fold(step([0] * BINS)) == EMPTY


@pytest.mark.parametrize("seed", range(3))
def test_dispersion_is_one_for_samples_of_the_forecast_itself(seed: int) -> None:
    counts = samples([SLOPE] * 200, 500, seed)
    assert np.mean([dispersion(SLOPE, row / 500, 500) for row in counts]) == pytest.approx(1.0, abs=0.15)
    assert dispersion(SLOPE, SLOPE[::-1], 500) > 20
    assert dispersion(SLOPE, SLOPE, 500) == pytest.approx(0.0, abs=1e-9)


@given(st.lists(st.floats(0.0, 1.0), min_size=2, max_size=60), st.integers(1, 60), st.floats(1.0, 8.0, allow_nan=False))
def test_an_extended_curve_never_rises_not_even_by_rounding(falls: list[float], longest: int, exponent: float) -> None:
    """The extended part once rose by the last bit, and the histogram made from it had a negative count."""
    survival = np.append(1.0, np.cumprod(1.0 - np.array(falls)))
    longest = min(longest, len(survival) - 1)
    onwards = extended(survival, longest, exponent)
    assert (np.diff(onwards) <= 0).all()
    assert (onwards[: longest + 1] == survival[: longest + 1]).all()
