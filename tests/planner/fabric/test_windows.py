"""Windows of many ranks together, and whether a commit fits in."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.fabric.clocks import ClockOffset
from planner.fabric.intent import Stage
from planner.fabric.slack import RemainingQuiet
from planner.fabric.windows import CommitNeed, ReportedQuiet, Window, common_quiet, intersect, may_commit
from planner.model import Act, Hold

NEED = CommitNeed(device_s=0.025, route_s=0.003, control_s=0.004, margin_s=0.002)
NOTHING = CommitNeed(0.0, 0.0, 0.0, 0.0)
SAME_CLOCK = ClockOffset(0.0, 0.0)
STAGES = list(Stage)

WHOLE = st.tuples(st.integers(0, 60), st.integers(0, 8)).map(lambda span: (span[0], span[0] + span[1]))


def window(left_s: float, now_s: float = 100.0, risk: float = 0.05) -> Window:
    return Window(now_s - 0.010, now_s + left_s, "node7, rank 3", risk)


# The windows of all ranks.


@given(st.lists(st.lists(WHOLE, min_size=1, max_size=8), min_size=1, max_size=4))
def test_common_quiet_matches_check_of_every_moment(ranks: list[list[tuple[int, int]]]) -> None:
    """Busy intervals have integer ends, so every half between two of them is checked."""
    moments = [number + 0.5 for number in range(-1, 70)]

    def quiet(busy: list[tuple[int, int]], at: float) -> bool:
        recorded = min(start for start, _ in busy) <= at <= max(end for _, end in busy)
        return recorded and not any(start <= at <= end for start, end in busy)

    found = common_quiet(ranks)
    for at in moments:
        assert any(start <= at <= end for start, end in found) == all(quiet(busy, at) for busy in ranks)
    assert all(start < end for start, end in found)
    assert all(one[1] <= other[0] for one, other in pairwise(found))
    assert common_quiet([]) == []


PROMISES = st.tuples(st.floats(0, 50), st.floats(50.001, 100), st.floats(0, 0.1))
CLOCKS = st.builds(ClockOffset, st.floats(-1000, 1000), st.floats(0, 5))


@given(
    st.lists(st.tuples(CLOCKS, st.lists(PROMISES, min_size=1, max_size=3)), min_size=1, max_size=4), st.floats(0, 100)
)
def test_window_lies_within_every_prediction_for_all_clock_errors(
    hosts: list[tuple[ClockOffset, list[tuple[float, float, float]]]], now_s: float
) -> None:
    """Predictions are made in our time, then converted to the host's, whose clock may be off by its full bound."""
    reports, opened, until, risk = [], [], [], 0.0
    for number, (clock, promises) in enumerate(hosts):
        for rank, (opened_s, until_s, broken) in enumerate(promises):
            quiet = RemainingQuiet(0, opened_s + clock.offset_s, until_s + clock.offset_s, 20, broken)
            reported_s = now_s + clock.offset_s + clock.bound_s
            reports.append(ReportedQuiet(f"node{number}", reported_s, rank, quiet, clock))
            for off_s in (-clock.bound_s, 0.0, clock.bound_s):
                opened.append(opened_s + off_s)
                until.append(until_s + off_s)
            risk += broken
    found = intersect(reports, now_s)
    assert isinstance(found, Window)
    assert found.opened_s == pytest.approx(max(opened))
    assert found.until_s == pytest.approx(min(until))
    assert found.risk == pytest.approx(min(1.0, risk))
    assert found.limiting.startswith("node")
    margin, verdict = 1e-9, may_commit(Stage.TRAIN, found, NOTHING, now_s, boundary=False)
    if isinstance(verdict, Act):
        assert max(opened) - margin <= now_s < min(until) + margin
    else:
        assert verdict.code == "window_closed"
        assert now_s < max(opened) + margin or now_s >= min(until) - margin


def test_host_without_window_is_named() -> None:
    open_now = RemainingQuiet(3, 99.0, 101.0, 20, 0.05)
    quiet = ReportedQuiet("node1", 100.0, 0, open_now, SAME_CLOCK)
    for report, code, detail in (
        (ReportedQuiet("node2", 100.0, 0, open_now, None), "clock_unknown", "node2: the offset of its clock"),
        (
            ReportedQuiet("node2", 97.0, 0, open_now, SAME_CLOCK),
            "stale_window",
            "node2: the last report is 3000.0 ms old, limit 1000.0",
        ),
    ):
        found = intersect([report, quiet], 100.0)
        assert isinstance(found, Hold)
        assert found.code == code
        assert detail in found.detail
    no_window = intersect([], 100.0)
    assert isinstance(no_window, Hold)
    assert no_window.code == "no_ranks"


def test_limiting_rank_is_the_one_whose_prediction_ends_first() -> None:
    quiet = [RemainingQuiet(0, 99.0, 101.0 + 0.1 * ((rank - 5) % 8), 20, 0.01) for rank in range(8)]
    clock = ClockOffset(0.0, 0.002)
    found = intersect([ReportedQuiet("node1", 100.0, rank, each, clock) for rank, each in enumerate(quiet)], 100.0)
    assert isinstance(found, Window)
    assert found.limiting == "node1, rank 5"
    assert found.until_s - 100.0 == pytest.approx(0.998)
    assert found.risk == pytest.approx(0.08)


# Whether a commit fits in.


def test_reason_contains_every_number() -> None:
    found = may_commit(Stage.TRAIN, window(0.0121), NEED, 100.0, boundary=False)
    assert found == Hold(
        "window_too_short",
        "12.1 ms remain, limited by node7, rank 3 (risk 5.0%), "
        "34.0 ms needed: device 25.0 ms, route 3.0 ms, control 4.0 ms, margin 2.0 ms",
    )


@given(
    st.sampled_from(STAGES),
    st.floats(-0.1, 0.2),
    st.floats(0, 0.3),
    st.tuples(*[st.floats(0, 0.05)] * 4),
    st.booleans(),
)
def test_commit_is_made_only_if_it_fits(
    stage: Stage, left_s: float, risk: float, parts: tuple[float, float, float, float], boundary: bool
) -> None:
    need, now_s = CommitNeed(*parts), 100.0
    given_window = Window(now_s - 0.010, now_s + left_s, "node7, rank 3", risk)
    found = may_commit(stage, given_window, need, now_s, boundary, most_risk=0.1)
    left = given_window.until_s - now_s
    fits = left > 0 and left >= need.total_s and risk <= 0.1 and (boundary or stage is Stage.TRAIN)
    assert isinstance(found, Act) == fits


@pytest.mark.parametrize("stage", [Stage.GEN, Stage.WEIGHT_SYNC])
def test_gen_and_weight_sync_change_only_at_boundaries(stage: Stage) -> None:
    for offered in (window(10.0), None):
        assert may_commit(stage, offered, NEED, 100.0, boundary=False).code == "no_boundary"
        assert isinstance(may_commit(stage, offered, NEED, 100.0, boundary=True), Act)
    held = Hold("traffic", "rank 1: 2 in flight")
    assert may_commit(stage, held, NEED, 100.0, boundary=True) == held


def test_train_changes_only_inside_a_window() -> None:
    assert may_commit(Stage.TRAIN, None, NEED, 100.0, boundary=True).code == "no_ranks"
    held = Hold("unlearnt", "rank 1")
    assert may_commit(Stage.TRAIN, held, NEED, 100.0, boundary=True) == held
    assert may_commit(Stage.TRAIN, window(0.035), NEED, 100.0, boundary=False).code == "in_window"
    late = may_commit(Stage.TRAIN, window(0.035, now_s=90.0), NEED, 100.0, boundary=False)
    assert late == Hold(
        "window_closed", "the window ended 9965.0 ms ago, according to the prediction for node7, rank 3"
    )
    early = may_commit(Stage.TRAIN, window(0.035, now_s=100.015), NEED, 100.0, boundary=False)
    assert early == Hold(
        "window_closed", "the window opens in at most 5.0 ms, given the uncertainty of the clock offsets"
    )


def test_slow_device_never_fits_into_short_windows() -> None:
    """A switch of 100 ms and windows of 50 ms."""
    need = CommitNeed(device_s=0.100, route_s=0.0, control_s=0.0, margin_s=0.0)
    for left_ms in range(51):
        found = may_commit(Stage.TRAIN, window(left_ms * 1e-3, risk=0.0), need, 100.0, boundary=True)
        assert isinstance(found, Hold)


def test_invalid_needs_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"route_s must be >= 0, got -1"):
        CommitNeed(0.0, -1, 0.0, 0.0)
    with pytest.raises(ValueError, match=r"control_s must be >= 0, got nan"):
        CommitNeed(0.0, 0.0, float("nan"), 0.0)
