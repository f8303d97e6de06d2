"""What the recorders of a job's ranks noted, as intervals: whether a change of circuits met traffic."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from orchestrrl.core.errors import Permanent
from orchestrrl.integrations.instrument.rings import RingEvent, RingReader, list_rings
from planner.fabric.windows import Interval

NANO = 1e-9
START, END = itemgetter(0), itemgetter(1)  # of an interval


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
        met = self.busy[bisect_right(self.busy, start_s, key=END) : bisect_left(self.busy, end_s, key=START)]
        return sum(min(until_s, end_s) - max(since_s, start_s) for since_s, until_s in met)

    def quiet_around(self, at_s: float) -> Interval | None:
        """The pause that this moment is in; None: it is in none, or outside of what was recorded."""
        index = bisect_right(self.busy, at_s, key=END)
        if index == 0 or index == len(self.busy) or self.busy[index][0] <= at_s:
            return None
        return self.busy[index - 1][1], self.busy[index][0]
