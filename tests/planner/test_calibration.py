"""Tests of calibration: predictions are corrected by the errors of earlier plans."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.calibration import Calibration

PAIRS = st.lists(st.tuples(st.floats(0.1, 1e4), st.floats(0.1, 1e4)), max_size=5)


def test_a_prediction_that_is_always_a_quarter_too_long_is_corrected() -> None:
    calibration = Calibration()
    corrections = []
    for _ in range(4):
        calibration = calibration.after([(125.0, 100.0), (12.5, 10.0)])
        corrections.append(calibration.correction)
    assert calibration.error == pytest.approx(0.25)
    assert calibration.bias == pytest.approx(0.25)
    assert corrections == [1.0, 1.0, pytest.approx(0.8), pytest.approx(0.8)]


def test_errors_to_both_sides_are_no_bias() -> None:
    calibration = Calibration().after([(80.0, 100.0), (120.0, 100.0)])
    assert (calibration.error, calibration.bias) == (pytest.approx(0.2), pytest.approx(0.0))


def test_plans_are_weighted_by_their_actual_seconds() -> None:
    """An error of one second in the last second of a step does not count as 100 %."""
    assert Calibration().after([(100.0, 100.0), (2.0, 1.0)]).error == pytest.approx(1 / 101)


def test_a_step_without_outcomes_changes_nothing() -> None:
    before = Calibration(3, 0.1, 0.1)
    assert before.after([]) == before
    assert before.after([(5.0, 0.0)]) == before


@given(st.lists(PAIRS, max_size=12))
def test_a_correction_stays_within_its_bounds(steps: list[list[tuple[float, float]]]) -> None:
    calibration = Calibration()
    for outcomes in steps:
        calibration = calibration.after(outcomes)
    assert 0.5 <= calibration.correction <= 2.0
    if calibration.error is not None:
        assert calibration.bias is not None
        assert abs(calibration.bias) <= calibration.error * (1 + 1e-9)
