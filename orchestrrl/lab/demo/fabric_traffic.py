"""What the recorders of a job's ranks noted, as intervals: whether a change of circuits met traffic."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from orchestrrl.core.errors import Permanent
from orchestrrl.integrations.instrument.rings import RingEvent, RingReader, list_rings
from planner.fabric.windows import Interval

NANO = 1e-9


def read_traces(rings: Path) -> dict[int, list[RingEvent]]:
    """Every rank's events. Raises Permanent where one has forgotten some."""
    found: dict[int, list[RingEvent]] = {}
    for path in list_rings(rings):
        with RingReader(path) as reader:
            events, lost = reader.events()
            rank = reader.header().rank
        if lost:
            raise Permanent(f"{path} has lost {lost} events: fewer iterations, or larger rings")
        found[rank] = events
    return found


@dataclass(frozen=True, slots=True)
class RecordedTraffic:
    """`busy`: some collective of some rank was in flight; disjoint and ascending, by the host's monotonic clock."""

    busy: Sequence[Interval]
    _starts_s: Sequence[float] = field(init=False)
    _ends_s: Sequence[float] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_starts_s", [start_s for start_s, _ in self.busy])
        object.__setattr__(self, "_ends_s", [end_s for _, end_s in self.busy])

    @classmethod
    def of(cls, traces: Mapping[int, Iterable[RingEvent]]) -> "RecordedTraffic":
        """One that has not ended lasts for ever."""
        intervals = sorted(
            (event.start_ns * NANO, (event.end_ns or 2**62) * NANO)
            for events in traces.values()
            for event in events
            if event.is_collective
        )
        busy: list[Interval] = []
        for start_s, end_s in intervals:
            if busy and start_s <= busy[-1][1]:
                busy[-1] = busy[-1][0], max(busy[-1][1], end_s)
            else:
                busy.append((start_s, end_s))
        return cls(busy)

    def during(self, start_s: float, end_s: float) -> float:
        """For how many of these seconds there was some."""
        met = self.busy[bisect_right(self._ends_s, start_s) : bisect_left(self._starts_s, end_s)]
        return sum(min(until_s, end_s) - max(since_s, start_s) for since_s, until_s in met)

    def quiet_around(self, at_s: float) -> Interval | None:
        """The pause that this moment is in; None: it is in none, or outside of what was recorded."""
        index = bisect_right(self._ends_s, at_s)
        if index == 0 or index == len(self.busy) or self.busy[index][0] <= at_s:
            return None
        return self._ends_s[index - 1], self._starts_s[index]
