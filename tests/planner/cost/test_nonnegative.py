"""Tests of least squares with coefficients >= 0, compared with scipy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from planner.cost.fit import Floats, nonnegative_least_squares


@st.composite
def problems(draw: st.DrawFn) -> tuple[Floats, Floats]:
    """Draw columns of many scales, some of them equal, opposite, or equal to others except for noise."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = draw(st.integers(1, 8))
    rows = rng.normal(draw(st.sampled_from([0.0, 1.0, 10.0])), 1.0, (draw(st.integers(1, 30)), count))
    for column in range(1, count):
        alike = draw(st.sampled_from(["own", "own", "equal", "opposite", "near", "none"]))
        other = rows[:, draw(st.integers(0, column - 1))]
        if alike != "own":
            noise = 1e-4 * rng.normal(size=len(rows)) if alike == "near" else 0.0
            rows[:, column] = {"equal": 1.0, "opposite": -1.0, "near": 1.0, "none": 0.0}[alike] * other + noise
    target = rows @ np.maximum(0, rng.normal(size=count)) + draw(st.sampled_from([0.0, 0.01, 1.0])) * rng.normal(
        size=len(rows)
    )
    return rows * 10.0 ** draw(st.integers(-3, 3)), target


@pytest.mark.exact
@given(problems())
def test_no_nonnegative_solution_is_closer(problem: tuple[Floats, Floats]) -> None:
    rows, target = problem
    found = nonnegative_least_squares(rows, target)
    assert (found >= 0).all()
    _, least = nnls(rows, target, maxiter=1000)
    assert np.linalg.norm(rows @ found - target) <= least + 1e-6 * max(1.0, np.linalg.norm(target))


def test_coefficients_of_unreachable_targets_stay_zero() -> None:
    assert nonnegative_least_squares(np.ones((3, 2)), np.full(3, -1.0)).tolist() == [0.0, 0.0]
    assert nonnegative_least_squares(np.zeros((3, 1)), np.ones(3)).tolist() == [0.0]


def test_a_line_is_found_exactly() -> None:
    sizes = np.array([1.0, 2.0, 5.0])
    found = nonnegative_least_squares(np.stack([np.ones(3), sizes], axis=1), 3.0 + 2.0 * sizes)
    assert found == pytest.approx([3.0, 2.0])
