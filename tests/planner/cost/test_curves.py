"""Tests of curves and their affine fits: a curve is linear between and beyond its knots, and a line fits itself."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.profile import (
    Curve,
    EngineProfile,
    MoveCosts,
    Parallelism,
    ProfileSource,
    Provenance,
    StepTime,
    affine_fit,
)
from planner.model import ConfigurationId
from planner.solver.problem import KvTransferCost

sizes = st.floats(min_value=0, max_value=1e4)
seconds = st.floats(min_value=0, max_value=10)


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    gaps = draw(st.lists(st.floats(min_value=0.5, max_value=1e3), min_size=1, max_size=6))
    xs = np.cumsum(gaps).tolist()
    return Curve(tuple(xs), tuple(draw(seconds) for _ in xs))


@given(curves())
def test_a_curve_goes_through_its_knots(curve: Curve) -> None:
    assert [curve.at(x) for x in curve.xs] == pytest.approx(list(curve.ys), abs=1e-9)


@given(curves(), sizes)
def test_between_its_knots_a_curve_is_what_numpy_interpolates(curve: Curve, x: float) -> None:
    inside = min(max(x, curve.xs[0]), curve.xs[-1])
    assert curve.at(inside) == pytest.approx(float(np.interp(inside, curve.xs, curve.ys)), abs=1e-9)
    assert curve.at(x) >= 0


@given(curves(), st.floats(min_value=0, max_value=100))
def test_curve_is_extrapolated_linearly(curve: Curve, further: float) -> None:
    if len(curve.xs) == 1:
        assert curve.at(curve.xs[0] + further) == curve.ys[0]
        return
    (x0, x1), (y0, y1) = curve.xs[-2:], curve.ys[-2:]
    expected = y1 + (y1 - y0) / (x1 - x0) * further
    assert curve.at(x1 + further) == pytest.approx(max(0.0, expected), abs=1e-6)


@given(curves(), st.lists(sizes, max_size=9))
def test_array_values_match_single_values(curve: Curve, xs: list[float]) -> None:
    assert curve.over(np.array(xs)).tolist() == pytest.approx([curve.at(x) for x in xs], rel=1e-9, abs=1e-9)


@given(st.floats(0, 1), st.floats(1e-6, 1e-2), st.floats(0, 1e-7), st.floats(64, 2e5))
def test_rebuilt_tokens_count_as_usual_prompts(waits_s: float, token_s: float, attention_s: float, x: float) -> None:
    """The prefill grows with the square of its length, as the share of attention does."""

    def prefill_s(tokens: float) -> float:
        return waits_s + token_s * tokens + attention_s * tokens**2

    knots = (0.0, *(float(2**k) for k in range(4, 19)))
    moves = MoveCosts(1.0, Curve.line(0.0, 1e-9), Curve(knots, tuple(map(prefill_s, knots))))
    rebuilt = moves.rebuilt_tokens()
    assert rebuilt is not None
    per_usual_s = (prefill_s(2048) - waits_s) / 2048
    assert rebuilt.at(x) * per_usual_s == pytest.approx(prefill_s(x) - waits_s, rel=0.15, abs=1e-6)
    by_rate = KvTransferCost(0.0, 0.0, 0.0).recompute_s(np.array([x]), np.array([1 / per_usual_s]))
    bent = KvTransferCost(0.0, 0.0, 0.0, rebuilt).recompute_s(np.array([x]), np.array([1 / per_usual_s]))
    assert by_rate.tolist() == [x / (1 / per_usual_s)]
    assert (bent >= by_rate * (1 - 1e-9)).all() if x >= 2048 else (bent <= by_rate * (1 + 1e-9)).all()


def test_rebuilt_tokens_is_none_for_a_curve_without_sizes() -> None:
    moves = MoveCosts(1.0, Curve((0.0,), (0.01,)), Curve((5.0,), (0.3,)))
    assert moves.rebuilt_tokens() is None
    assert moves.transfer_gbps == 0.0
    assert replace(moves, transfer_s=Curve((0.0, 1e10), (0.01, 0.41))).transfer_gbps == pytest.approx(200.0)


@given(st.floats(min_value=1e-4, max_value=1), st.floats(min_value=0, max_value=1e-2), st.floats(2, 1000))
def test_the_fit_of_a_line_is_the_line(intercept: float, slope: float, high: float) -> None:
    assert affine_fit(Curve.line(intercept, slope), 1, high) == pytest.approx((intercept, slope), rel=1e-5, abs=1e-9)


@given(curves(), st.floats(1, 100), st.floats(1, 1000))
def test_no_part_of_a_fit_is_negative(curve: Curve, low: float, width: float) -> None:
    alpha_s, beta_s = affine_fit(curve, low, low + width)
    assert alpha_s >= 0
    assert beta_s >= 0


@given(st.lists(st.floats(1e-3, 1), min_size=2, max_size=6))
def test_the_fit_of_a_rising_curve_lies_within_it(rises: list[float]) -> None:
    """Parts of the curve lie below the fit and parts above it: the fit is a middle and not a bound."""
    curve = Curve(tuple(float(10**k) for k in range(len(rises))), tuple(np.cumsum(rises).tolist()))
    alpha_s, beta_s = affine_fit(curve, curve.xs[0], curve.xs[-1])
    fitted = [(alpha_s + beta_s * x) / curve.at(x) for x in np.geomspace(curve.xs[0], curve.xs[-1], 33)]
    assert min(fitted) <= 1 + 1e-6
    assert max(fitted) >= 1 - 1e-6


@pytest.mark.parametrize(
    ("xs", "ys", "fault"),
    [
        ((), (), "must have equal lengths >= 1, got 0 and 0"),
        ((1.0, 2.0), (1.0,), "must have equal lengths >= 1, got 2 and 1"),
        ((1.0, 1.0), (1.0, 2.0), "xs must be strictly increasing"),
        ((1.0,), (-1.0,), "ys must be >= 0"),
        ((1.0,), (float("nan"),), "ys must be >= 0"),
    ],
)
def test_invalid_curve_is_rejected(xs: tuple[float, ...], ys: tuple[float, ...], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        Curve(xs, ys)


def test_spilled_tokens_cost_more_each() -> None:
    step = StepTime(Curve.line(0.01, 1e-4), kv_s_per_token=1e-7, spill_s_per_token=1e-6)
    assert step.at(10, 1000, kv_capacity_tokens=1000) == pytest.approx(0.011 + 1e-4)
    assert step.at(10, 1500, kv_capacity_tokens=1000) == pytest.approx(0.011 + 1.5e-4 + 5e-4)


def test_configuration_is_fitted_to_the_requested_batches() -> None:
    """The fit of a bent curve uses the first part for small batches and the last part for large ones."""
    bent = Curve((1.0, 64.0, 1024.0), (0.010, 0.010, 0.106))
    profile = EngineProfile(
        ConfigurationId("tp1"),
        Parallelism(),
        StepTime(bent, 0.0),
        1.0,
        1,
        1024,
        0.0,
        Provenance(ProfileSource.GIVEN, ""),
    )
    assert profile.configuration((1, 64)).beta_s == pytest.approx(0.0, abs=1e-9)
    assert profile.configuration((64, 1024)).beta_s == pytest.approx(1e-4)
