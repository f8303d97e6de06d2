"""How far another host's clock is off, with a bound that holds whatever the way there and back take. Pure.

The four times of NTP (RFC 5905, section 8), but the bound is kept beside the estimate: an answer was given after the
question was sent and before it arrived, so the offset lies within half of the time spent on the way. Of several
exchanges what all of them allow is left, each of them wider by what two clocks may drift apart since.
"""

from collections import deque
from dataclasses import dataclass, field

DRIFT_PPM = 50.0  # between two clocks; quartz is within that, and NTP slews by up to 500
EXCHANGES = 32
MOST_AGE_S = 60.0


@dataclass(frozen=True, slots=True)
class ClockExchange:
    """`sent_s` and `back_s` in our clock, `received_s` and `answered_s` in the other's."""

    sent_s: float
    received_s: float
    answered_s: float
    back_s: float

    def __post_init__(self) -> None:
        for first, second in (("sent_s", "back_s"), ("received_s", "answered_s")):
            if not getattr(self, second) >= getattr(self, first):
                raise ValueError(f"{second} must be >= {first}, got {getattr(self, second)} < {getattr(self, first)}")

    @property
    def least_s(self) -> float:
        """The other's clock minus ours is at least this: the answer cannot have come back before it was given."""
        return self.answered_s - self.back_s

    @property
    def most_s(self) -> float:
        """And at most this: the question cannot have been received before it was sent."""
        return self.received_s - self.sent_s


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """The other's clock minus ours is `offset_s`, more or less `bound_s`."""

    offset_s: float
    bound_s: float

    def ours(self, theirs_s: float) -> tuple[float, float]:
        """The earliest and the latest time in our clock that `theirs_s` may be."""
        return theirs_s - self.offset_s - self.bound_s, theirs_s - self.offset_s + self.bound_s


@dataclass(slots=True)
class OffsetEstimator:
    """Of one host. Where an exchange contradicts the earlier ones, a clock was set: those are forgotten."""

    _recent: deque[ClockExchange] = field(default_factory=lambda: deque(maxlen=EXCHANGES))
    _edges: tuple[float, float] | None = None  # what they allow together when the newest came back

    def add(self, exchange: ClockExchange) -> None:
        """In order of time. More time spent there than in between is a clock that was set meanwhile: refused."""
        if exchange.most_s < exchange.least_s - _drift_s(exchange.back_s - exchange.sent_s):
            return
        self._recent.append(exchange)
        self._edges = None
        least_s, most_s = self._allowed(exchange.back_s)
        if least_s > most_s:
            self._recent.clear()
            self._recent.append(exchange)
            self._edges = None

    def offset(self, now_s: float) -> ClockOffset | None:
        """At `now_s` in our clock; None before the first exchange, and when all are too old."""
        while self._recent and now_s - self._recent[0].back_s > MOST_AGE_S:
            self._recent.popleft()
            self._edges = None
        if not self._recent:
            return None
        least_s, most_s = self._allowed(now_s)
        return ClockOffset((least_s + most_s) / 2, max(0.0, most_s - least_s) / 2)

    def _allowed(self, now_s: float) -> tuple[float, float]:
        """The least and the greatest offset that every exchange allows, its age considered. After the newest one all
        widen alike, so what they allow together is worked out once."""
        newest_s = self._recent[-1].back_s
        if self._edges is None:
            drifts = [(each, _drift_s(max(0.0, newest_s - each.sent_s))) for each in self._recent]
            least_s = max(each.least_s - drift for each, drift in drifts)
            self._edges = least_s, min(each.most_s + drift for each, drift in drifts)
        drift_s = _drift_s(max(0.0, now_s - newest_s))
        return self._edges[0] - drift_s, self._edges[1] + drift_s


def _drift_s(age_s: float) -> float:
    return age_s * DRIFT_PPM * 1e-6
