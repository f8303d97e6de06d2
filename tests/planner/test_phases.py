"""Lines follow the batches that are left, straight curves keep their own, and what runs is always among the choices."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_builders import engine, request, snapshot

from planner.layouts import Phase, biased
from planner.model import ConfigurationId
from planner.phases import FEW, line_ahead, sequences_ahead, worth_a_look
from planner.profile import Curve, EngineProfile, Parallelism, Provenance, Source, StepTime

GIVEN = Provenance(Source.GIVEN, "")


def profile(curve: Curve, tp: int = 2, *, slots: int = 256, capacity: int = 1_000_000, name: str = "") -> EngineProfile:
    step = StepTime(curve, 4e-8)
    return EngineProfile(
        ConfigurationId(name or f"tp{tp}"), Parallelism(tp=tp), step, 18_000.0, capacity, slots, 10.0, GIVEN
    )


@st.composite
def rising(draw: st.DrawFn) -> Curve:
    knots = draw(st.lists(st.integers(1, 512), min_size=2, max_size=5, unique=True))
    rises = draw(st.lists(st.floats(1e-4, 0.1), min_size=len(knots), max_size=len(knots)))
    ys = [sum(rises[: count + 1]) for count in range(len(rises))]
    return Curve(tuple(map(float, sorted(knots))), tuple(ys))


counts = st.integers(0, 600)
fleets = st.integers(1, 64)


@given(st.floats(0, 1), st.floats(0, 1e-2), st.floats(2, 512), st.lists(st.tuples(counts, fleets), min_size=2))
def test_a_straight_curve_is_its_own_line_whatever_is_ahead(
    intercept_s: float, slope_s: float, most: float, times: list[tuple[int, int]]
) -> None:
    """So nothing about a plan changes while a step goes on, but what happens in it."""
    straight = profile(Curve((0.0, most), (intercept_s, intercept_s + slope_s * most)))
    lines = {
        (line.alpha_s, line.beta_s)
        for count, gpus in times
        for line in [line_ahead(straight, snapshot([], [request(f"r{i}") for i in range(count)]), gpus)]
    }
    ((alpha_s, beta_s),) = lines
    assert alpha_s == intercept_s
    assert beta_s == pytest.approx(slope_s, rel=1e-9, abs=1e-12)


@given(rising(), counts, fleets, st.integers(1, 512), st.integers(200, 100_000))
def test_the_range_holds_what_an_engine_may_decode(
    curve: Curve, count: int, gpus: int, slots: int, capacity: int
) -> None:
    one = profile(curve, slots=slots, capacity=capacity)
    low, high = sequences_ahead(one, snapshot([], [request(f"r{i}", 10) for i in range(count)]), gpus)
    assert low == 1
    assert high >= 2
    if count:
        share = min(-(-count // max(1, gpus // 2)), slots, capacity // 110)
        assert share <= high <= max(2, 2 * (share - 1))
    else:
        assert high == max(2, slots)


@given(rising(), st.integers(1, 300), st.integers(1, 300), fleets)
def test_the_range_shrinks_with_the_requests(curve: Curve, some: int, more: int, gpus: int) -> None:
    few, many = (snapshot([], [request(f"r{i}", 10) for i in range(count)]) for count in (some, some + more))
    assert sequences_ahead(profile(curve), few, gpus)[1] <= sequences_ahead(profile(curve), many, gpus)[1]


def test_a_full_engine_counts_beside_the_even_share() -> None:
    one = profile(Curve((0.0, 1.0), (0.02, 0.0201)))
    requests = [request(f"r{i}", 10) for i in range(64)]
    full = replace(engine("e0"), running=60)
    assert sequences_ahead(one, snapshot([full], requests), 64) == (1, 64)
    assert sequences_ahead(one, snapshot([engine("e0")], requests), 64) == (1, 2)
    assert sequences_ahead(one, snapshot([replace(full, configuration=ConfigurationId("tp8"))], requests), 64) == (1, 2)


@given(rising(), st.integers(1, 9), st.data())
def test_a_line_changes_only_when_batches_have_halved(curve: Curve, power: int, data: st.DataObject) -> None:
    """On one engine: an ending request moves no line, and so no decision, by itself."""
    some, more = (data.draw(st.integers(2 ** (power - 1) + 1, 2**power)) for _ in range(2))
    lines = [
        line_ahead(profile(curve, 1, slots=1024), snapshot([], [request(f"r{i}") for i in range(count)]), 1)
        for count in (some, more)
    ]
    assert lines[0] == lines[1]


@given(st.lists(st.tuples(rising(), st.sampled_from([1, 2, 4, 8])), min_size=1, max_size=12), counts, fleets, st.data())
def test_what_is_looked_at(kinds: list[tuple[Curve, int]], count: int, gpus: int, data: st.DataObject) -> None:
    profiles = [profile(curve, tp, name=f"c{index}") for index, (curve, tp) in enumerate(kinds)]
    runs, wanted = (data.draw(st.sampled_from(profiles)).id for _ in range(2))
    now = snapshot([engine("e0", runs)], [request(f"r{i}") for i in range(count)])
    chosen = worth_a_look(profiles, now, gpus, (wanted,))
    assert list(chosen) == [one.id for one in profiles if one.id in chosen]
    assert {runs, wanted} <= set(chosen)
    if len(profiles) <= FEW:
        assert len(chosen) == len(profiles)
    else:
        close = {one.id for one in biased(profiles, Phase.TAIL if count < 2 * gpus else Phase.BULK)}
        assert set(chosen) == close | {runs, wanted}
