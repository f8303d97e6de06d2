"""Traffic of the demo's job, compared with a check at every tick."""

from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.integrations.instrument.rings import COLLECTIVE, MARK, RingEvent
from orchestrrl.lab.demo.fabric_stack import RecordedTraffic

NANO = 10**9
TICKS = st.integers(0, 30)


def event(kind: int, start: int, end: int) -> RingEvent:
    return RingEvent(0, kind, "all_reduce", 0, 0, start * NANO, end * NANO, -1, 0)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([COLLECTIVE, MARK]), TICKS, st.integers(1, 5)), max_size=12),
    TICKS,
    st.integers(1, 10),
)
def test_traffic_is_the_union_over_ranks(noted: list[tuple[int, int, int, int]], at: int, length: int) -> None:
    traces: dict[int, list[RingEvent]] = {}
    busy = set[int]()
    for rank, kind, start, lasts in noted:
        traces.setdefault(rank, []).append(event(kind, start, start + lasts))
        if kind == COLLECTIVE:
            busy |= set(range(start, start + lasts))  # each tick lasts until the next one
    traffic = RecordedTraffic(traces)
    assert traffic.during(at, at + length) == len(busy & set(range(at, at + length)))
    before, after = [tick for tick in busy if tick < at], [tick for tick in busy if tick > at]
    quiet = traffic.quiet_around(at + 0.5)
    if at in busy or not before or not after:
        assert quiet is None
    else:
        assert quiet == (max(before) + 1, min(after))
