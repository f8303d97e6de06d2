"""Figures of benchmarks, and alternating measurement."""

import pytest

from orchestrrl.lab.bench.figure import Figure, side_by_side


def figure(value: float, baseline_value: float) -> Figure:
    return Figure("name", value, "s", "other", baseline_value, "")


def test_ratio_is_value_divided_by_baseline() -> None:
    assert figure(3.0, 2.0).ratio == pytest.approx(1.5)


@pytest.mark.parametrize("noise", [0.0, -0.1])
def test_ratio_is_none_without_positive_baseline(noise: float) -> None:
    assert figure(3.0, noise).ratio is None


def test_calls_alternate_with_one_uncounted_round() -> None:
    calls: list[str] = []
    side_by_side(lambda: calls.append("a"), lambda: calls.append("b"), repetitions=2)
    assert calls == ["a", "b"] * 3
