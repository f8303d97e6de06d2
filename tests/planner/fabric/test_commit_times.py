"""Expected times of commits: stated at first, then measured."""

import random

import pytest

from planner.fabric import windows
from planner.fabric.model import OcsId
from planner.fabric.windows import CONTROL_S, CommitTimes, SwitchTimes

FAST, SLOW = OcsId("ocs0"), OcsId("ocs1")
STATED_S = {FAST: 0.010, SLOW: 0.025}


def test_stated_delay_has_allowance_before_measurements() -> None:
    times = CommitTimes(STATED_S, route_s=0.003)
    need = times.need([FAST, SLOW], 0.001)
    assert need.device_s == pytest.approx(0.025 * 1.5 + 0.005)
    assert (need.route_s, need.control_s, need.margin_s) == (0.003, 0.005, 0.001)
    assert CommitTimes(STATED_S).need([FAST], 0.0).route_s == 0.005
    assert times.need([FAST], 0.001).device_s == pytest.approx(0.020)
    assert times.need([], 0.001).total_s == pytest.approx(0.001)


def test_few_measurements_expect_at_least_their_worst() -> None:
    times = CommitTimes(STATED_S)
    times.measured(SwitchTimes(SLOW, 0.001, 2.0, 0.001))  # a device that takes seconds to restart
    assert times.need([SLOW], 0.0).device_s == pytest.approx(3.0)
    assert times.need([SLOW], 0.0).control_s == pytest.approx(CONTROL_S)
    assert times.samples(SLOW) == 1
    assert times.samples(FAST) == 0


def test_one_slow_commit_does_not_prevent_later_ones() -> None:
    times = CommitTimes(STATED_S)
    times.measured(SwitchTimes(SLOW, 0.001, 0.030, 0.001))
    times.measured(SwitchTimes(SLOW, 0.001, 0.200, 0.001))
    assert times.need([SLOW], 0.0).device_s == pytest.approx(0.300)
    for _ in range(100):
        times.unfit([SLOW, SLOW])
    assert times.need([SLOW], 0.0).device_s == pytest.approx(0.025 * 1.5 + 0.005)
    times.measured(SwitchTimes(SLOW, 0.001, 0.200, 0.001))
    assert times.need([SLOW], 0.0).device_s == pytest.approx(0.300)


def test_expectation_never_falls_below_fastest_measurement() -> None:
    times = CommitTimes(STATED_S)
    for device_s in (0.120, 0.100, 0.110):
        times.measured(SwitchTimes(SLOW, 0.001, device_s, 0.001))
    for _ in range(1000):
        times.unfit([SLOW])
    assert times.need([SLOW], 0.0).device_s == 0.100


@pytest.mark.parametrize("q", [0.9, 0.95])
def test_commits_exceed_expectation_as_rarely_as_configured(q: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "COVERED", q)
    rng, times, longer = random.Random(4), CommitTimes(STATED_S), 0
    for commit in range(3000):
        device_s = 0.025 * rng.lognormvariate(0.2, 0.3)
        if commit >= 100:
            longer += device_s > times.need([SLOW], 0.0).device_s
        times.measured(SwitchTimes(SLOW, 0.001, device_s, 0.002))
    assert longer / 2900 <= (1 - q) * 1.2
    assert times.need([SLOW], 0.0).device_s < 0.025 * 1.22 * 2.5


def test_enough_measurements_replace_allowances() -> None:
    times = CommitTimes(STATED_S)
    for _ in range(30):
        times.measured(SwitchTimes(SLOW, 0.0005, 0.026, 0.001))
    need = times.need([SLOW], 0.0)
    assert (need.control_s, need.device_s, need.route_s) == (0.0005, 0.026, 0.001)


def test_invalid_times_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"device_s of a commit on ocs1 must be >= 0, got -0\.1"):
        CommitTimes(STATED_S).measured(SwitchTimes(SLOW, 0.0, -0.1, 0.0))
