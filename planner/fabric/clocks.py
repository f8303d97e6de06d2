"""Estimate the offset of another host's clock, with an error bound that holds for any network delay. Has no side
effects.

The estimate uses the four timestamps of NTP (RFC 5905, section 8). Each request and each reply arrives after it was
sent. Each exchange therefore limits the offset to a range at most as wide as the round trip. The ranges of several
exchanges are intersected, each widened by the drift that is possible since the exchange.
"""

from collections import deque
from dataclasses import dataclass, field

DRIFT_PPM = 50.0  # between two clocks; quartz stays within it, NTP slews by up to 500
EXCHANGES = 32
MOST_AGE_S = 60.0


@dataclass(frozen=True, slots=True)
class ClockExchange:
    """One request and its reply. `sent_s` and `back_s` are times of our clock. `received_s` and `answered_s` are times
    of the other host's clock."""

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
        """The lower bound of the other clock minus ours. It holds because the reply arrived after it was sent."""
        return self.answered_s - self.back_s

    @property
    def most_s(self) -> float:
        """The upper bound of the other clock minus ours. It holds because the request arrived after it was sent."""
        return self.received_s - self.sent_s


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """An estimated clock offset: the other clock minus ours is `offset_s`, plus or minus `bound_s`."""

    offset_s: float
    bound_s: float

    def ours(self, theirs_s: float) -> tuple[float, float]:
        """Return the earliest and the latest time of our clock to which `theirs_s` of the other clock may
        correspond."""
        return theirs_s - self.offset_s - self.bound_s, theirs_s - self.offset_s + self.bound_s


@dataclass(slots=True)
class OffsetEstimator:
    """An estimator of the clock offset of one host. If an exchange contradicts earlier exchanges, one of the clocks was
    set, so the earlier exchanges are dropped."""

    _recent: deque[ClockExchange] = field(default_factory=lambda: deque(maxlen=EXCHANGES))
    _edges: tuple[float, float] | None = None  # their intersection when the newest reply arrived

    def add(self, exchange: ClockExchange) -> None:
        """Add an exchange. Exchanges must be added in order of time. An exchange that contradicts itself is ignored,
        because one of the clocks was set during the exchange."""
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
        """Return the offset at the time `now_s` of our clock; None before the first exchange, or if all exchanges are
        too old."""
        while self._recent and now_s - self._recent[0].back_s > MOST_AGE_S:
            self._recent.popleft()
            self._edges = None
        if not self._recent:
            return None
        least_s, most_s = self._allowed(now_s)
        return ClockOffset((least_s + most_s) / 2, max(0.0, most_s - least_s) / 2)

    def _allowed(self, now_s: float) -> tuple[float, float]:
        """Return the least and the greatest offset that the ranges of all exchanges allow. Each range is widened by the
        drift that is possible since its exchange. After the newest exchange, all ranges widen at the same rate, so
        their intersection is computed only once."""
        newest_s = self._recent[-1].back_s
        if self._edges is None:
            drifts = [(each, _drift_s(max(0.0, newest_s - each.sent_s))) for each in self._recent]
            least_s = max(each.least_s - drift for each, drift in drifts)
            self._edges = least_s, min(each.most_s + drift for each, drift in drifts)
        drift_s = _drift_s(max(0.0, now_s - newest_s))
        return self._edges[0] - drift_s, self._edges[1] + drift_s


def _drift_s(age_s: float) -> float:
    return age_s * DRIFT_PPM * 1e-6
