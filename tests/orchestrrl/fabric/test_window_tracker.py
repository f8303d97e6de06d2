"""Windows of whole jobs, from agents' reports in different clocks."""

import asyncio

import pytest
from fabric_harness import Agent, RestingClock
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.fabric.window_tracker import FORGET_AFTER_S, WindowTracker
from planner.fabric.clocks import ClockExchange
from planner.fabric.slack import RemainingQuiet
from planner.fabric.windows import Window
from planner.model import Hold

RANKS = frozenset(range(4))


@pytest.fixture
def clock() -> RestingClock:
    return RestingClock(1000.0)


@pytest.fixture
def hub(clock: RestingClock) -> WindowTracker:
    return WindowTracker(clock)


def code(window: Window | Hold, clock: RestingClock) -> str:
    if isinstance(window, Hold):
        return window.code
    return "open" if window.opened_s <= clock.now_s() < window.until_s else "window_closed"


async def test_window_is_intersection_of_all_hosts(hub: WindowTracker, clock: RestingClock) -> None:
    ahead = Agent(hub, clock, "a", {"": frozenset({0, 1})}, ahead_s=50.0, way_s=0.001)
    behind = Agent(hub, clock, "b", {"": frozenset({2, 3})}, ahead_s=-3.0, way_s=0.001)
    ahead.attach()
    behind.attach()
    watch = hub.watch({"": RANKS}, 0.01)
    assert code(watch.window(), clock) == "host_silent"
    await clock.advance(0.1)
    ahead.quiet(0.5, since_s=0.1)
    assert code(watch.window(), clock) == "host_silent"
    watch.changed.clear()
    behind.quiet(0.2, since_s=0.05)
    assert watch.changed.is_set()
    window = watch.window()
    assert isinstance(window, Window)
    # The bound is half of the 2 ms round trip, plus the possible drift since.
    assert window.limiting.startswith("b")
    assert clock.now_s() + 0.2 - window.until_s == pytest.approx(0.001, abs=1e-4)
    assert window.opened_s - (clock.now_s() - 0.05) == pytest.approx(0.001, abs=1e-4)
    behind.busy()
    assert code(watch.window(), clock) == "traffic"
    watch.close()
    ahead.leave()
    behind.leave()


async def test_window_delayed_by_clock_bound_sets_changed_when_it_opens(
    hub: WindowTracker, clock: RestingClock
) -> None:
    agent = Agent(hub, clock, "a", {"": RANKS}, ahead_s=1.0, way_s=0.004)
    agent.attach()
    await clock.advance(0.5)
    watch = hub.watch({"": RANKS}, 0.01)
    await clock.advance(0.0)
    agent.quiet(0.5)  # as of this instant
    assert code(watch.window(), clock) == "window_closed"
    watch.changed.clear()
    await clock.advance(0.0039)
    assert not watch.changed.is_set()
    await clock.advance(0.0002)
    assert watch.changed.is_set()
    assert code(watch.window(), clock) == "open"
    watch.close()
    agent.leave()


async def test_missing_hosts_and_ranks_have_codes(hub: WindowTracker, clock: RestingClock) -> None:
    one = Agent(hub, clock, "a", {"": frozenset({0, 1})})
    other = Agent(hub, clock, "b", {"": frozenset({2, 3})})
    one.attach()
    watch = hub.watch({"": RANKS}, 0.01)
    assert code(watch.window(), clock) == "untraced"
    other.attach()
    await clock.advance(0.1)
    for agent in (one, other):
        agent.quiet(500.0, since_s=0.1)
    assert code(watch.window(), clock) == "open"
    await clock.advance(1.5)
    assert code(watch.window(), clock) == "stale_window"
    other.leave()
    one.quiet(500.0, since_s=0.1)
    assert code(watch.window(), clock) == "host_gone"
    await clock.advance(FORGET_AFTER_S + 1.0)
    one.quiet(500.0, since_s=0.1)
    assert code(watch.window(), clock) == "untraced"
    assert code(hub.watch({"": frozenset({0, 1})}, 0.01).window(), clock) in ("host_silent", "open")
    one.leave()


async def test_other_jobs_are_ignored(hub: WindowTracker, clock: RestingClock) -> None:
    agent = Agent(hub, clock, "a", {"": RANKS, "other": frozenset({0, 1})})
    agent.attach()
    await clock.advance(0.1)
    watch = hub.watch({"": RANKS}, 0.01)
    await clock.advance(0.0)
    agent.quiet(5.0, since_s=0.1)
    watch.changed.clear()
    agent.busy("other")
    assert not watch.changed.is_set()
    assert code(watch.window(), clock) == "open"
    assert code(hub.window({"other": RANKS}), clock) == "untraced"
    agent.leave()


async def test_second_agent_replaces_the_first(hub: WindowTracker, clock: RestingClock) -> None:
    first = Agent(hub, clock, "a", {"": RANKS}, ahead_s=9.0)
    second = Agent(hub, clock, "a", {"": RANKS}, ahead_s=0.0)
    first.attach()
    await clock.advance(0.1)
    watch = hub.watch({"": RANKS}, 0.01)
    await clock.advance(0.0)
    first.quiet(5.0, since_s=0.1)
    assert code(watch.window(), clock) == "open"
    second.attach()
    await clock.advance(0.1)
    assert code(watch.window(), clock) == "host_silent"
    first.quiet(5.0, since_s=0.1)  # under way when it was replaced: ignored, like its clock and its end
    assert code(watch.window(), clock) == "host_silent"
    first.leave()
    second.quiet(5.0, since_s=0.1)
    assert code(watch.window(), clock) == "open"
    second.leave()
    assert code(watch.window(), clock) == "host_gone"


async def test_clock_known_later_opens_window(hub: WindowTracker, clock: RestingClock) -> None:
    agent = Agent(hub, clock, "a", {"": RANKS}, way_s=0.002)
    watch = hub.watch({"": RANKS}, 0.01)
    agent.attach()
    await clock.advance(0.001)
    agent.quiet(5.0, since_s=1.0)
    assert code(watch.window(), clock) == "clock_unknown"
    watch.changed.clear()
    await clock.advance(0.01)
    assert watch.changed.is_set()
    assert code(watch.window(), clock) == "open"
    agent.leave()


async def test_report_for_earlier_watch_is_discarded(hub: WindowTracker, clock: RestingClock) -> None:
    agent = Agent(hub, clock, "a", {"": RANKS})
    agent.attach()
    await clock.advance(0.1)
    first = hub.watch({"": RANKS}, 0.01)
    await clock.advance(0.0)
    agent.quiet(500.0, since_s=0.1)
    first.close()
    await clock.advance(0.0)
    assert agent.armed == {}
    agent.found.clear()
    assert code(hub.watch({"": RANKS}, 0.01).window(), clock) == "host_silent"
    agent.leave()


@given(
    hosts=st.lists(
        st.tuples(
            st.floats(-100, 100),  # ahead
            st.floats(0, 0.01),  # to the host
            st.floats(0, 0.01),  # and back
            st.floats(-0.05, 0.2),  # quiet since
            st.floats(0, 0.2),  # and for
        ),
        min_size=1,
        max_size=4,
    )
)
def test_window_begins_and_ends_within_quiet_of_all_ranks(hosts: list[tuple[float, ...]]) -> None:
    """Clock offsets and delays in each direction are random."""

    async def scene() -> None:
        clock = RestingClock(1000.0)
        hub = WindowTracker(clock)
        streams = []
        for number, (ahead_s, there_s, back_s, _, _) in enumerate(hosts):
            stream = hub.attach(str(number), {"": frozenset({number})})
            sent_s = clock.now_s()
            await clock.advance(there_s)
            received_s = clock.now_s() + ahead_s
            await clock.advance(back_s)
            stream.answers(ClockExchange(sent_s, received_s, received_s, clock.now_s()))
            streams.append(stream)
        ranks = frozenset(range(len(hosts)))
        watch = hub.watch({"": ranks}, 0.01)
        now_s = clock.now_s()
        for number, (stream, (ahead_s, _, _, since_s, for_s)) in enumerate(zip(streams, hosts, strict=True)):
            quiet = RemainingQuiet(1, now_s - since_s + ahead_s, now_s + for_s + ahead_s, 10, 0.0)
            stream.on_remaining_quiet("", now_s + ahead_s, number, quiet)
        window = watch.window()
        assert isinstance(window, Window)
        if code(window, clock) == "open":
            assert all(since_s >= -1e-9 for _, _, _, since_s, _ in hosts)
            assert window.until_s <= now_s + min(for_s for *_, for_s in hosts) + 1e-9
            assert window.opened_s >= now_s - min(since_s for *_, since_s, _ in hosts) - 1e-9
        watch.close()

    asyncio.run(scene())


async def test_missing_ranks_are_reported_with_traced_ones(hub: WindowTracker, clock: RestingClock) -> None:
    def reason(job: str, ranks: set[int]) -> str:
        window = hub.window({job: frozenset(ranks)})
        assert isinstance(window, Hold)
        return window.detail

    assert reason("", {0, 1, 4}) == "no agent reads the recorder of rank 0-1, 4; recorders that are read: none"
    agents = [
        Agent(hub, clock, "a", {"trainer": frozenset(range(4)), "": frozenset({7})}),
        Agent(hub, clock, "b", {"trainer": frozenset({5})}),
    ]
    for agent in agents:
        agent.attach()
    there = "an unnamed job (rank 7), trainer (rank 0-3, 5)"
    assert (
        reason("trainer", {3, 4})
        == f"no agent reads the recorder of rank 4 of trainer; recorders that are read: {there}"
    )
    assert reason("trainr", {0}) == f"no agent reads the recorder of rank 0 of trainr; recorders that are read: {there}"
    assert hub.hosts_of_jobs() == {"trainer": {"a", "b"}, "": {"a"}}
    for agent in agents:
        agent.leave()
