"""The bound on another host's clock holds for all network delays."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.fabric import clocks
from planner.fabric.clocks import DRIFT_PPM, EXCHANGES, MOST_AGE_S, ClockExchange, ClockOffset, OffsetEstimator

DELAYS = st.floats(0, 0.2)
EXCHANGE = st.tuples(DELAYS, DELAYS, DELAYS, st.floats(0, 20))  # request, processing, reply, pause
EPSILON = 1e-9


def exchange(
    now_s: float, offset_s: float, rate: float, there_s: float, thinking_s: float, back_s: float
) -> ClockExchange:
    """Simulate an exchange; the other clock shows `offset_s + rate * t` more at our time t."""

    def theirs(ours_s: float) -> float:
        return ours_s * (1 + rate) + offset_s

    received_s = now_s + there_s
    answered_s = received_s + thinking_s
    return ClockExchange(now_s, theirs(received_s), theirs(answered_s), answered_s + back_s)


@given(
    st.lists(EXCHANGE, min_size=1, max_size=2 * EXCHANGES),
    st.floats(-1e4, 1e4),
    st.floats(-DRIFT_PPM, DRIFT_PPM),
    st.floats(0, 30),
)
def test_true_offset_lies_within_bound(
    exchanges: list[tuple[float, float, float, float]], offset_s: float, ppm: float, later_s: float
) -> None:
    estimator, now_s, rate, backs_s = OffsetEstimator(), 0.0, ppm * 1e-6, list[float]()
    for there_s, thinking_s, back_s, pause_s in exchanges:
        estimator.add(exchange(now_s, offset_s, rate, there_s, thinking_s, back_s))
        now_s += there_s + thinking_s + back_s
        backs_s.append(now_s)
        estimate = estimator.offset(now_s)
        assert estimate is not None
        assert abs(offset_s + rate * now_s - estimate.offset_s) <= estimate.bound_s + EPSILON
        now_s += pause_s
    estimate = estimator.offset(now_s - pause_s + later_s)
    assert estimate is not None
    truth_s = offset_s + rate * (now_s - pause_s + later_s)
    assert abs(truth_s - estimate.offset_s) <= estimate.bound_s + EPSILON
    earliest_s, latest_s = estimate.ours(100.0 + truth_s)
    assert earliest_s - EPSILON <= 100.0 <= latest_s + EPSILON
    # No exchange was rejected or treated as a set clock.
    young = [at_s for at_s in backs_s[-EXCHANGES:] if now_s - pause_s + later_s - at_s <= MOST_AGE_S]
    assert [each.back_s for each in estimator._recent] == pytest.approx(young)


def test_one_exchange_bounds_offset_by_half_its_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "DRIFT_PPM", 0.0)
    estimator = OffsetEstimator()
    estimator.add(ClockExchange(10.0, 110.004, 110.104, 10.110))
    estimate = estimator.offset(10.110)
    assert estimate is not None
    assert estimate.offset_s == pytest.approx(99.999)
    assert estimate.bound_s == pytest.approx(0.005)


def test_several_exchanges_give_tighter_bound_than_best_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """One exchange had a fast request, another a fast reply."""
    monkeypatch.setattr(clocks, "DRIFT_PPM", 0.0)
    estimator = OffsetEstimator()
    estimator.add(exchange(0.0, 5.0, 0.0, 0.0001, 0.0, 0.010))
    estimator.add(exchange(1.0, 5.0, 0.0, 0.010, 0.0, 0.0001))
    estimate = estimator.offset(1.1)
    assert estimate is not None
    assert estimate.offset_s == pytest.approx(5.0, abs=1e-9)
    assert estimate.bound_s == pytest.approx(0.0001)


def test_bound_widens_with_age_until_unknown() -> None:
    estimator = OffsetEstimator()
    estimator.add(exchange(0.0, 1.0, 0.0, 0.001, 0.0, 0.001))
    fresh, aged = estimator.offset(0.002), estimator.offset(40.002)
    assert fresh is not None
    assert aged is not None
    assert aged.bound_s - fresh.bound_s == pytest.approx(40 * DRIFT_PPM * 1e-6)
    assert estimator.offset(MOST_AGE_S + 0.1) is None
    assert OffsetEstimator().offset(0.0) is None


@given(st.floats(0.3, 1e4), st.booleans())
def test_set_clock_is_detected_at_next_exchange(by_s: float, forwards: bool) -> None:
    rng, estimator = random.Random(1), OffsetEstimator()
    jump_s = by_s if forwards else -by_s
    for second in range(20):
        offset_s = 3.0 + (jump_s if second >= 10 else 0.0)
        estimator.add(exchange(float(second), offset_s, 0.0, rng.uniform(0, 0.05), 0.0, rng.uniform(0, 0.05)))
    assert len(estimator._recent) == 10  # those since
    estimate = estimator.offset(20.0)
    assert estimate is not None
    assert abs(estimate.offset_s - 3.0 - jump_s) <= estimate.bound_s


def test_exchange_spanning_a_set_clock_is_rejected() -> None:
    estimator = OffsetEstimator()
    estimator.add(ClockExchange(0.0, 5.0, 9.0, 0.1))
    assert estimator.offset(0.2) is None


def test_impossible_times_are_named() -> None:
    with pytest.raises(ValueError, match=r"back_s must be >= sent_s, got 0.5 < 1.0"):
        ClockExchange(1.0, 2.0, 3.0, 0.5)
    with pytest.raises(ValueError, match="answered_s must be >= received_s"):
        ClockExchange(1.0, 3.0, 2.0, 1.5)


def test_other_clock_times_convert_to_ours() -> None:
    assert ClockOffset(10.0, 0.5).ours(15.0) == (4.5, 5.5)
