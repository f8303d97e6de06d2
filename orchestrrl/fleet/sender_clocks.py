"""Estimate when a report was made, in the daemon's time, from the sender's own timestamps. This module performs no I/O.

The time of receipt is only an upper bound: the report may have waited in a connection, or in a busy daemon. The
sender's timestamps add information, but its clock may be off by any amount. Let `offset` be the sender's clock minus
the daemon's.

A report that was sent at `sent` (sender clock) and received at `received` (daemon clock) bounds the offset from below:
`offset >= sent - received`, since it was not received before it was sent. An acknowledgement that the daemon sent at
`ack_sent` (daemon clock) and that arrived at `ack_received` (sender clock) bounds it from above: `offset <=
ack_received - ack_sent`. Both bounds hold for any network delay, and each widens with the drift of the two clocks.

If the sender echoes acknowledgements, the upper bound is used: the age is then never too small. It is too large by at
most the delays of the quickest acknowledgement and the quickest report. The first report of such a sender may have been
queued and cannot be dated, because only later reports contain an echo. If a sender echoes no acknowledgement for
UNDATED_S, or sends no timestamps with its reports, only the lower bound is used, which its quickest report determines.
The age is then too small by that report's delay. A first report that was queued is treated as fresh until a quicker
report arrives.

If a clock is set to another time, the bounds contradict each other and the earlier bounds are dropped. If a sender
echoes no acknowledgements and its clock is set back, its reports cannot be distinguished from queued reports. Its
earlier bounds are then dropped after it has reported for BUCKETS * BUCKET_S.
"""

import math
from dataclasses import dataclass, field

from orchestrrl.fleet.reports import SendTimes

# Quartz drifts by less than 50 ppm, and NTP slews by up to 500 ppm.
DRIFT_PPM = 500.0
# Bounds are kept per bucket of time in which the sender reported; silence drops none.
BUCKET_S = 5.0
BUCKETS = 6
# A sender that stamps its reports should have received an acknowledgement by then.
UNDATED_S = 2.0


@dataclass(slots=True)
class _Bounds:
    """The bounds of the clock offset at time `at_s`: at least `least_s` and at most `most_s`."""

    began_s: float
    at_s: float
    least_s: float
    most_s: float

    def widened(self, now_s: float) -> tuple[float, float]:
        drift_s = max(0.0, now_s - self.at_s) * DRIFT_PPM * 1e-6
        return self.least_s - drift_s, self.most_s + drift_s


@dataclass(slots=True)
class SenderClock:
    """An estimate of the offset of one sender's clock, derived from the sender's reports."""

    _buckets: list[_Bounds] = field(default_factory=list)
    first_s: float | None = None  # its first and its latest report, in the daemon's time
    last_report_s: float = 0.0

    def taken_s(self, sampled_s: float, times: SendTimes, received_s: float) -> float | None:
        """Return when a sample was taken, in the daemon's time and at most `received_s`, and update the estimate.

        `sampled_s` is the time of the sample by the sender's clock. If it is 0 or not finite, the time of receipt is
        returned. The result is None if the time cannot be determined before the next report.
        """
        self.last_report_s = received_s
        self.first_s = received_s if self.first_s is None else self.first_s
        if not (math.isfinite(sampled_s) and sampled_s > 0):
            return received_s
        sent_s = times.sent_s if math.isfinite(times.sent_s) and times.sent_s >= sampled_s else sampled_s
        most_s = math.inf
        if 0 < times.ack_sent_s <= received_s and 0 < times.ack_received_s <= sent_s:
            most_s = times.ack_received_s - times.ack_sent_s
        least_s, most_s = self._learn(sent_s - received_s, most_s, received_s)
        if most_s < math.inf:
            return min(received_s, sampled_s - most_s)
        if sent_s == times.sent_s and received_s - self.first_s < UNDATED_S:
            return None
        return min(received_s, sampled_s - least_s)

    def _learn(self, least_s: float, most_s: float, now_s: float) -> tuple[float, float]:
        """Add the bounds of one report, and return the combined bounds of all reports."""
        if not self._buckets or now_s - self._buckets[-1].began_s >= BUCKET_S:
            self._buckets = [*self._buckets[-BUCKETS + 1 :], _Bounds(now_s, now_s, least_s, most_s)]
        else:
            newest = self._buckets[-1]
            earlier_least_s, earlier_most_s = newest.widened(now_s)
            newest.at_s = max(newest.at_s, now_s)
            newest.least_s, newest.most_s = max(earlier_least_s, least_s), min(earlier_most_s, most_s)
        bounds = [bucket.widened(now_s) for bucket in self._buckets]
        all_least_s, all_most_s = max(least for least, _ in bounds), min(most for _, most in bounds)
        if all_least_s > all_most_s:  # the clock was set
            self._buckets = [_Bounds(now_s, now_s, least_s, most_s)]
            return least_s, most_s
        return all_least_s, all_most_s
