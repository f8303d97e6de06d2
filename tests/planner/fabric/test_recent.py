"""Bounds on the next value from a bounded history."""

import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.fabric.recent import HALF_LIFE, MEMORY, RUN, RecentSamples

EVEN = 1e12  # a half-life that weights all values equally
VALUES = st.lists(st.floats(0.001, 1000), min_size=1, max_size=60)


def recent_of(values: Iterable[float], memory: int = MEMORY, half_life: float = HALF_LIFE) -> RecentSamples:
    made = RecentSamples(memory, half_life)
    for value in values:
        made.add(value)
    return made


def shuffled(values: list[float], seed: int = 0) -> list[float]:
    """Return the values in an order that does not look like a new regime."""
    return random.Random(seed).sample(values, len(values))


@given(VALUES, st.sampled_from([0.01, 0.05, 0.1, 0.3, 0.5]), st.floats(0, 500))
def test_lower_bound_matches_counting(values: list[float], q: float, above: float) -> None:
    recent = recent_of(values, memory=64, half_life=EVEN)
    left = sorted(value for value in recent.newest() if value > above)
    # The largest value v with (values below v + the next one) / (n + 1) <= q.
    allowed = [value for value in left if (1 + left.index(value)) / (len(left) + 1) <= q + 1e-9]
    bound = recent.lower(q, above)
    assert (bound.value_s if bound else None) == (max(allowed) if allowed else None)
    if bound is not None:
        assert bound.risk <= q + 1e-9
        assert bound.samples == len(left)


@given(VALUES, st.sampled_from([0.5, 0.9, 0.95]))
def test_upper_bound_mirrors_lower_bound(values: list[float], q: float) -> None:
    up = recent_of(values, memory=64, half_life=16).upper(q)
    down = recent_of([-value for value in values], memory=64, half_life=16).lower(1 - q)
    assert (up and -up.value_s) == (down and down.value_s)


@pytest.mark.parametrize(("q", "needed"), [(0.5, 1), (0.1, 9), (0.05, 19), (0.01, 99)])
def test_values_needed_for_quantile(q: float, needed: int) -> None:
    values = shuffled([float(value) for value in range(1, needed + 1)])
    bound = recent_of(values, half_life=EVEN).lower(q)
    assert bound is not None
    assert bound.value_s == 1.0
    assert recent_of(values[1:], half_life=EVEN).lower(q) is None


@given(st.lists(st.floats(0, 1), max_size=200), st.integers(16, 64))
def test_history_keeps_newest_values_only(values: list[float], memory: int) -> None:
    kept = recent_of(values, memory=memory).newest()
    assert len(kept) <= memory
    assert kept == values[::-1][: len(kept)]


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_new_regime_drops_old_values(factor: float) -> None:
    rng = random.Random(5)
    before = [rng.uniform(0.9, 1.1) for _ in range(100)]
    after = [factor * rng.uniform(0.9, 1.1) for _ in range(RUN)]
    recent = recent_of([*before, *after])
    assert recent.newest()[:RUN] == after[::-1]
    assert len(recent) < 2 * RUN  # the value before them may have been as far off by chance


def test_chance_run_is_no_new_regime() -> None:
    rng = random.Random(6)
    recent = recent_of((rng.lognormvariate(0, 0.5) for _ in range(5000)), memory=256)
    assert len(recent) == 256


@given(VALUES)
def test_recent_values_weigh_more(values: list[float]) -> None:
    """A quantile lies among the stored values; with a short half-life the newest value is the median."""
    recent = recent_of(values, memory=64, half_life=0.5)
    assert recent.quantile(0.5) == recent.newest()[0]
    assert recent_of([]).quantile(0.5) is None


def test_least_value_is_returned_only_while_all_exceed_elapsed_time() -> None:
    recent = recent_of([3.0, 2.0, 4.0], half_life=EVEN)
    least = recent.least(1.9)
    assert least is not None
    assert (least.value_s, least.risk) == (2.0, pytest.approx(0.25))
    assert recent.least(2.0) is None
    assert recent_of([]).least() is None


def test_invalid_settings_are_rejected() -> None:
    for settings in ((8, 1.0), (64, 0.0)):
        with pytest.raises(ValueError, match="must be"):
            recent_of([], *settings)
