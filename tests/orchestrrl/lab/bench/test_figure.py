"""What is measured in turn, and what a figure makes of it."""

import pytest

from orchestrrl.lab.bench.figure import Figure, side_by_side


def figure(value: float, baseline_value: float) -> Figure:
    return Figure("name", value, "s", "other", baseline_value, "")


def test_the_ratio_is_value_by_baseline() -> None:
    assert figure(3.0, 2.0).ratio == pytest.approx(1.5)


@pytest.mark.parametrize("noise", [0.0, -0.1])
def test_a_baseline_lost_in_noise_gives_no_ratio(noise: float) -> None:
    assert figure(3.0, noise).ratio is None


def test_both_are_called_in_turn_once_more_than_counted() -> None:
    calls: list[str] = []
    side_by_side(lambda: calls.append("a"), lambda: calls.append("b"), repetitions=2)
    assert calls == ["a", "b"] * 3
