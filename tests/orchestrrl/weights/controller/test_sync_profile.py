"""Profiles of weight syncs: each moment counts for one phase, and phases that delay nothing are left out."""

from dataclasses import replace
from itertools import pairwise

import pytest
from fake_syncs import BEGAN_S, done, phases
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.weights.controller.profile import BESIDE, PHASE_WORDS, STILL, critical_path, profile
from orchestrrl.weights.controller.reports import PhaseTime, SyncPhase, SyncReport, SyncState

TICKS = st.integers(0, 20)  # whole numbers, so that sums are exact


@st.composite
def runs(draw: st.DrawFn) -> PhaseTime:
    began, took = draw(TICKS), draw(st.none() | TICKS)
    return PhaseTime(draw(st.sampled_from(SyncPhase)), float(began), None if took is None else float(began + took))


RUNS = st.lists(runs(), max_size=8).map(tuple)


def until(run: PhaseTime, end_s: float) -> float:
    return end_s if run.ended_s is None else min(run.ended_s, end_s)


@given(RUNS, TICKS)
def test_critical_path_has_one_running_phase_per_moment(took: tuple[PhaseTime, ...], end: int) -> None:
    path = critical_path(took, float(end))
    lasting = [run for run in took if until(run, end) > run.began_s]
    if not lasting:
        assert path == ()
        return
    assert path[0].began_s == min(run.began_s for run in lasting)
    assert path[-1].ended_s == end
    assert all(a.ended_s == b.began_s for a, b in pairwise(path))
    for stretch in path:
        assert stretch.seconds > 0
        for tick in range(int(stretch.began_s), int(stretch.ended_s)):
            running = {run.phase for run in lasting if run.began_s <= tick < until(run, end)}
            assert stretch.phase in running if stretch.phase else not running


@given(RUNS, TICKS)
def test_critical_path_prefers_the_phase_that_ends_last(took: tuple[PhaseTime, ...], end: int) -> None:
    """The phase on the path ends last among all running phases, unless a phase that began before its end and ends later
    follows on the path."""
    path = critical_path(took, float(end))
    lasting = [run for run in took if until(run, end) > run.began_s]
    for stretch in path:
        rivals = [run for run in lasting if run.began_s < stretch.ended_s <= until(run, end)]
        if stretch.phase is not None:
            assert stretch.began_s == max(run.began_s for run in rivals)


@given(RUNS, st.none() | TICKS)
def test_shares_are_fractions_of_the_critical_path(took: tuple[PhaseTime, ...], ended: int | None) -> None:
    report = replace(done(), phases=took, began_s=0.0, ended_s=None if ended is None else float(ended))
    found = profile(report, now_s=40.0)
    waited_s = sum(row.waited_s for row in found.rows if row.phase not in BESIDE)
    assert found.whole_s == pytest.approx(waited_s + found.unnamed_s)
    assert {row.phase for row in found.rows} == {run.phase for run in took}
    assert all(row.share == 0 for row in found.rows if row.phase in BESIDE)
    assert all(0 <= row.waited_s <= row.seconds + 1e-9 for row in found.rows)
    if found.whole_s:
        named = sum(row.share for row in found.rows)
        assert named + found.unnamed_s / found.whole_s == pytest.approx(1.0)


@given(st.permutations(SyncPhase), st.lists(st.integers(1, 9), min_size=len(SyncPhase), max_size=len(SyncPhase)))
def test_consecutive_phases_have_their_own_durations(order: list[SyncPhase], seconds: list[int]) -> None:
    took = phases(*((phase, float(each)) for phase, each in zip(order, seconds, strict=True)), began_s=0.0)
    found = profile(replace(done(), phases=took, began_s=0.0, ended_s=took[-1].ended_s))
    ran = dict(zip(order, seconds, strict=True))
    assert [row.phase for row in found.rows] == list(SyncPhase)
    assert {row.phase: row.seconds for row in found.rows} == ran
    assert {row.phase: row.waited_s for row in found.rows} == ran
    assert found.whole_s == sum(seconds) - sum(ran[phase] for phase in BESIDE)
    assert found.unnamed_s == 0
    assert found.still_s == sum(ran[phase] for phase in STILL)
    assert found.transfer_s == ran[SyncPhase.PHASE_A] + ran[SyncPhase.PHASE_B]


def test_profile_of_an_example() -> None:
    found = profile(done())
    assert found.whole_s == pytest.approx(4.0)
    assert found.dominating is SyncPhase.PHASE_A
    assert found.transfer_s == pytest.approx(2.0)
    assert found.still_s == pytest.approx(1.5)
    assert found.carried_gbps == pytest.approx(16.0)
    assert found.over_estimate == pytest.approx(2.0 / 1.8)
    assert found.over_bound == pytest.approx(2.0 / 1.6)
    assert found.transfer_share == pytest.approx(0.5)


def test_negligible_estimate_gives_no_ratio() -> None:
    found = profile(replace(done(), estimate_s=0.0001, lower_bound_s=0.00009))
    assert (found.over_estimate, found.over_bound) == (None, None)
    assert found.transfer_s == pytest.approx(2.0)


def test_tear_down_of_circuits_is_not_part_of_the_whole() -> None:
    took = phases(
        (SyncPhase.PHASE_A, 1.0), (SyncPhase.NEXT_PAUSE, 60.0), (SyncPhase.INSTALL, 1.0), (SyncPhase.TEAR_DOWN, 30.0)
    )
    found = profile(replace(done(), phases=took, ended_s=BEGAN_S + 62.0))
    assert found.whole_s == pytest.approx(2.0)
    assert {row.phase: row.seconds for row in found.rows}[SyncPhase.TEAR_DOWN] == pytest.approx(30.0)


def test_open_phase_counts_until_now_or_the_end_of_its_sync() -> None:
    lasting = (PhaseTime(SyncPhase.PHASE_A, BEGAN_S),)
    report = replace(done(), state=SyncState.CARRYING, phases=lasting, ended_s=None)
    assert profile(report, now_s=BEGAN_S + 3).transfer_s == pytest.approx(3.0)
    assert profile(report).transfer_s == 0
    over = replace(report, state=SyncState.ABORTED, ended_s=BEGAN_S + 2)
    assert profile(over, now_s=BEGAN_S + 100).transfer_s == pytest.approx(2.0)


TRANSFERRED = ((SyncPhase.GATHER, 1.0), (SyncPhase.PHASE_A, 1.0), (SyncPhase.PHASE_B, 1.0))
CHECKED = (*TRANSFERRED, (SyncPhase.CHECK, 1.0))


@pytest.mark.parametrize(
    ("state", "took", "is_carried"),
    [
        (SyncState.CARRYING, TRANSFERRED, False),
        (SyncState.PREPARED, CHECKED, True),
        (SyncState.DONE, TRANSFERRED, True),  # a backend with its own checks
        (SyncState.ABORTED, TRANSFERRED, False),
        (SyncState.ABORTED, CHECKED, True),
        (SyncState.ABORTED, (*TRANSFERRED, (SyncPhase.TEAR_DOWN, 1.0)), False),
        (SyncState.ABORTED, (*CHECKED, *TRANSFERRED), False),  # the second attempt got no further
        (SyncState.SUPERSEDED, (*CHECKED, (SyncPhase.NEXT_PAUSE, 1.0)), True),
    ],
)
def test_only_a_complete_transfer_has_a_ratio_to_its_plan(
    state: SyncState, took: tuple[tuple[SyncPhase, float], ...], is_carried: bool
) -> None:
    found = profile(replace(done(7, *took), state=state))
    assert found.transfer_s > 0
    assert (found.over_estimate is not None) is is_carried
    assert (found.over_bound is not None) is is_carried


def test_profile_without_phases_is_empty() -> None:
    found = profile(SyncReport("s", 1, SyncState.PUBLISHING, BEGAN_S))
    assert (found.whole_s, found.rows, found.path, found.dominating) == (0, (), (), None)
    assert (found.carried_gbps, found.over_estimate, found.over_bound, found.transfer_share) == (None, None, None, 0)


def test_every_phase_has_a_display_name() -> None:
    assert set(PHASE_WORDS) == set(SyncPhase)
    assert len(set(PHASE_WORDS.values())) == len(SyncPhase)
