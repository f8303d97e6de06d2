"""Tests of report ages by senders' clocks with any offset, against a brute force over the true times."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.fleet.reports import SendTimes
from orchestrrl.fleet.sender_clocks import BUCKET_S, BUCKETS, UNDATED_S, SenderClock

DAY_S = 86400.0
# Two clocks drift apart by 500 ppm while bounds are kept, and floats of Unix times are coarse.
SLACK_S = 0.05


@dataclass(frozen=True)
class Report:
    """One report, in true time, which is the daemon's time."""

    sampled_s: float
    sent_s: float
    received_s: float
    ack_s: float  # when its acknowledgement arrived


@dataclass(frozen=True)
class Clock:
    """A sender's clock as a function of true time."""

    offset_s: float
    drift: float
    set_at_s: float = float("inf")
    step_s: float = 0.0

    def at(self, true_s: float) -> float:
        return true_s * (1 + self.drift) + self.offset_s + (self.step_s if true_s >= self.set_at_s else 0.0)


def reports_of(
    gaps: Sequence[float], ages: Sequence[float], ways: Sequence[float], acks: Sequence[float]
) -> list[Report]:
    reports, sent_s, received_s = [], 2e9, 0.0
    for gap_s, age_s, way_s, ack_s in zip(gaps, ages, ways, acks, strict=True):
        sent_s += gap_s
        received_s = max(received_s, sent_s + way_s)  # in order, as on one stream
        reports.append(Report(sent_s - age_s, sent_s, received_s, received_s + ack_s))
    return reports


def echo(reports: Sequence[Report], index: int) -> Report | None:
    """Return the newest report whose acknowledgement the sender had when it sent this one."""
    had = [report for report in reports[:index] if report.ack_s <= reports[index].sent_s]
    return had[-1] if had else None


def ages(clock: Clock, reports: Sequence[Report], *, stamps: bool = True) -> list[float | None]:
    """Return the estimated age of each sample at its receipt."""
    estimator, found = SenderClock(), []
    for index, report in enumerate(reports):
        acked = echo(reports, index) if stamps else None
        times = SendTimes(
            clock.at(report.sent_s) if stamps else 0.0,
            acked.received_s if acked else 0.0,
            clock.at(acked.ack_s) if acked else 0.0,
        )
        taken_s = estimator.taken_s(clock.at(report.sampled_s), times, report.received_s)
        found.append(None if taken_s is None else report.received_s - taken_s)
    return found


delays = st.floats(0.0, 0.01) | st.floats(0.0, 40.0)
histories = st.integers(2, 40).flatmap(
    lambda n: st.builds(
        reports_of,
        *(
            st.lists(each, min_size=n, max_size=n)
            for each in (st.floats(0.01, 3.0), st.floats(0.0, 2.0), delays, delays)
        ),
    )
)
clocks = st.builds(Clock, offset_s=st.floats(-30 * DAY_S, 30 * DAY_S), drift=st.floats(-2e-4, 2e-4))


def settled(clock: Clock) -> Clock:
    """Adjust the clock so that its drift is small compared with its initial offset, as for any real clock."""
    return Clock(clock.offset_s - 2e9 * clock.drift, clock.drift, clock.set_at_s, clock.step_s)


@given(clock=clocks, reports=histories)
def test_age_with_echoes_is_never_too_small_and_too_large_by_at_most_the_acknowledgements_delay(
    clock: Clock, reports: list[Report]
) -> None:
    for index, age_s in enumerate(ages(settled(clock), reports)):
        report, acked = reports[index], echo(reports, index)
        true_s = report.received_s - report.sampled_s
        if acked is None:
            assert age_s is None or report.received_s - reports[0].received_s >= UNDATED_S
            continue
        assert age_s is not None
        assert age_s >= true_s - SLACK_S
        assert age_s <= true_s + (acked.ack_s - acked.received_s) + SLACK_S


@given(clock=clocks, reports=histories)
def test_age_without_echoes_is_never_too_large_and_too_small_by_at_most_the_quickest_delay(
    clock: Clock, reports: list[Report]
) -> None:
    for index, age_s in enumerate(ages(settled(clock), reports, stamps=False)):
        report = reports[index]
        true_s = report.received_s - report.sampled_s
        recent = [r for r in reports[: index + 1] if report.received_s - r.received_s <= BUCKET_S * (BUCKETS - 1)]
        quickest_s = min(r.received_s - r.sampled_s for r in recent)
        assert age_s is not None
        assert 0.0 <= age_s <= true_s + SLACK_S
        assert age_s >= true_s - quickest_s - SLACK_S


@pytest.mark.parametrize("offset_s", [0.0, -DAY_S, 7 * DAY_S])
def test_first_report_that_was_queued_is_old(offset_s: float) -> None:
    reports = reports_of([1.0, 0.25, 0.25], [0.0] * 3, [20.0, 0.01, 0.01], [0.01] * 3)
    assert ages(Clock(offset_s, 0.0), reports)[0] is None  # until an echo shows when it was sent
    later = [*reports, *reports_of([40.0, 0.25], [0.0] * 2, [0.01] * 2, [0.01] * 2)]
    *_, last = ages(Clock(offset_s, 0.0), later)
    assert last == pytest.approx(0.01, abs=SLACK_S)


@pytest.mark.parametrize("stamps", [True, False])
@pytest.mark.parametrize("offset_s", [0.0, -DAY_S, 0.4, 7 * DAY_S])
def test_report_queued_for_20_s_is_20_s_old(offset_s: float, stamps: bool) -> None:
    ways = [0.01] * 40 + [20.0]
    reports = reports_of([0.25] * 41, [0.1] * 41, ways, [0.02] * 41)
    assert ages(Clock(offset_s, 0.0), reports, stamps=stamps)[-1] == pytest.approx(20.1, abs=0.15)
    # After a silence, too.
    reports = reports_of([0.25] * 40 + [600.0], [0.1] * 41, ways, [0.02] * 41)
    assert ages(Clock(offset_s, 0.0), reports, stamps=stamps)[-1] == pytest.approx(20.1, abs=0.5)


@given(
    offset_s=st.floats(-DAY_S, DAY_S),
    step_s=st.floats(-DAY_S, DAY_S),
    way_s=st.floats(0.0, 0.05),
    stamps=st.booleans(),
)
def test_clock_change_makes_no_sender_stale_forever(offset_s: float, step_s: float, way_s: float, stamps: bool) -> None:
    reports = reports_of([0.25] * 320, [0.0] * 320, [way_s] * 320, [way_s] * 320)
    clock = Clock(offset_s, 0.0, reports[100].sent_s - 0.1, step_s)
    found = ages(clock, reports, stamps=stamps)
    heals = 104 if stamps else 100 + int((BUCKETS + 1) * BUCKET_S / 0.25)
    assert all(age_s is not None and age_s <= 2 * way_s + SLACK_S for age_s in found[heals:])


@pytest.mark.parametrize(
    "times",
    [
        SendTimes(float("nan"), float("nan"), float("nan")),
        SendTimes(float("inf"), 1e308, -1.0),
        SendTimes(5.0, 1e12, 4.0),  # an acknowledgement from the future
        SendTimes(1e9, 900.0, 1e300),
    ],
)
def test_impossible_times_are_ignored(times: SendTimes) -> None:
    clock = SenderClock()
    for at_s in (1000.0, 1001.0, 1004.0):
        taken_s = clock.taken_s(1e9 + at_s, times, at_s)
        assert taken_s is None or taken_s <= at_s
    assert clock.taken_s(1e9 + 1005.0, SendTimes(), 1005.0) == pytest.approx(1005.0, abs=SLACK_S)


@pytest.mark.parametrize("sampled_s", [0.0, -5.0, float("nan"), float("inf")])
def test_report_without_its_own_time_is_dated_by_receipt(sampled_s: float) -> None:
    assert SenderClock().taken_s(sampled_s, SendTimes(), 12.0) == 12.0
