"""Tests of which sender counts: while senders start and stop, reports that count arrive within seconds."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.fleet.reporters import LATE_MOST, TAKEOVER_S, Reporters

EVERY_S = 0.25


def lives(
    spans: Sequence[tuple[str, str, float, float]], until_s: float, *, tell_ends: bool = False
) -> list[tuple[float, int]]:
    """Return the (time, sender) pairs of reports that counted. Senders are (name, incarnation, from, until), each with
    a stream."""
    reporters, counted = Reporters(), []
    for turn in range(int(until_s / EVERY_S)):
        now_s = turn * EVERY_S
        for index, (name, incarnation, from_s, to_s) in enumerate(spans):
            if from_s <= now_s < to_s and reporters.admit(name, incarnation, index, turn, now_s):
                counted.append((now_s, index))
            elif tell_ends and to_s <= now_s < to_s + EVERY_S:
                reporters.stream_ended(index)
    return counted


@given(
    spans=st.lists(
        st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(["", "x", "y"]), st.floats(0, 60), st.floats(0, 60)).map(
            lambda s: (s[0], s[1], min(s[2:]), max(s[2:]))
        ),
        min_size=1,
        max_size=5,
        unique_by=lambda span: span[:2],
    ),
    tell_ends=st.booleans(),
)
def test_counted_reports_arrive_within_5_s_while_any_sender_reports(
    spans: list[tuple[str, str, float, float]], tell_ends: bool
) -> None:
    spans = sorted(spans, key=lambda span: span[2])
    counted = [at_s for at_s, _ in lives(spans, 61.0, tell_ends=tell_ends)]
    reported = [turn * EVERY_S for turn in range(244) if any(f <= turn * EVERY_S < t for *_, f, t in spans)]
    for at_s in reported:
        since = [earlier for earlier in reported if earlier >= at_s - 5.0]
        silent_before = any(later - earlier > EVERY_S for earlier, later in pairwise(since)) or since[0] > at_s - 5.0
        assert silent_before or any(at_s - 5.0 <= when <= at_s for when in counted)


@pytest.mark.parametrize(("second", "incarnation"), [("agent", ""), ("agent", "q"), ("other", ""), ("other", "q")])
def test_first_sender_leads_again_when_the_second_has_ended(second: str, incarnation: str) -> None:
    counted = lives([("agent", "p" if incarnation else "", 0, 100), (second, incarnation, 5, 10)], 100)
    assert max(later - at for (at, _), (later, _) in pairwise(counted)) <= TAKEOVER_S + (LATE_MOST + 1) * EVERY_S
    assert counted[-1] == (99.75, 0)


@pytest.mark.parametrize(("second", "incarnation"), [("agent", ""), ("agent", "q"), ("other", "")])
def test_second_sender_leads_when_the_first_has_died(second: str, incarnation: str) -> None:
    counted = lives([("agent", "", 0, 30), (second, incarnation, 5, 60)], 60)
    assert max(later - at for (at, _), (later, _) in pairwise(counted)) <= TAKEOVER_S + 2 * EVERY_S
    assert counted[-1] == (59.75, 1)


def test_late_reports_of_an_older_stream_change_nothing() -> None:
    reporters = Reporters()
    assert reporters.admit("a", "", 1, 5, 0.0)
    assert reporters.admit("a", "", 2, 6, 0.1)
    assert not any(reporters.admit("a", "", 1, 6 + late, 0.2) for late in range(20))  # at once, as from a buffer
    assert not any(reporters.admit("a", "", 1, 50 + late, 10.0 + late) for late in range(LATE_MOST - 1))
    named = Reporters()
    assert named.admit("a", "p", 1, 5, 0.0)
    assert named.admit("a", "p", 2, 6, 0.1)
    assert not any(named.admit("a", "p", 1, 6 + late, 100.0 + late) for late in range(100))


def test_sender_that_reads_the_engine_leads_over_one_that_cannot() -> None:
    reporters = Reporters()
    counted = []
    for turn in range(80):
        now_s = turn * EVERY_S
        counted += ["old"] * reporters.admit("old", "p", 1, turn, now_s, readable=now_s < 5.0)
        counted += ["new"] * (now_s >= 6.0 and reporters.admit("new", "q", 2, turn, now_s))
    assert counted[-8:] == ["new"] * 8
    assert counted.count("old") <= 1 + (5.0 + TAKEOVER_S) / EVERY_S + 1


def test_concurrent_senders_are_detected_and_replaced_ones_are_not() -> None:
    reporters = Reporters()
    for turn in range(100):
        now_s = turn * EVERY_S
        reporters.admit("a", "p", 1, turn, now_s)
        if now_s >= 10.0:
            reporters.admit("b", "q", 2, turn, now_s)
        beside = reporters.side_by_side(now_s)
        assert beside == (("a", "b") if now_s >= 11.0 else ())
    assert reporters.side_by_side(40.0) == ()
    replaced = Reporters()
    for turn in range(100):
        now_s = turn * EVERY_S
        if now_s < 10.0:
            replaced.admit("a", "p", 1, turn, now_s)
        else:
            replaced.admit("a", "q", 2, turn, now_s)
        assert replaced.side_by_side(now_s) == ()


def test_ended_stream_loses_the_lead_at_once() -> None:
    reporters = Reporters()
    reporters.admit("a", "p", 1, 1, 0.0)
    reporters.admit("b", "q", 2, 1, 0.0)
    reporters.stream_ended(1)
    assert reporters.admit("b", "q", 2, 2, 0.1)
    assert reporters.side_by_side(0.1) == ()
