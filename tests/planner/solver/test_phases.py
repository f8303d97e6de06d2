"""Tests of lines over the batch sizes ahead, and of the configurations to evaluate, which include the running ones."""

from dataclasses import replace

import pytest
from decode_oracle import curve_decode_s, decode_s
from hypothesis import given
from hypothesis import strategies as st
from planner_builders import RemainingWork, engine, request, snapshot

from planner.cost.profile import Curve, EngineProfile, Parallelism, ProfileSource, Provenance, StepTime
from planner.model import ConfigurationId
from planner.solver.layouts import StepPhase, biased
from planner.solver.phases import FEW, iterations_ahead, line_ahead, worth_evaluating

GIVEN = Provenance(ProfileSource.GIVEN, "")


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
lengths = st.lists(st.integers(1, 5000), min_size=1, max_size=60)


@given(st.floats(0, 1), st.floats(0, 1e-2), st.floats(2, 512), st.lists(st.tuples(lengths, fleets), min_size=2))
def test_straight_curve_is_its_own_line(
    intercept_s: float, slope_s: float, most: float, times: list[tuple[list[int], int]]
) -> None:
    """The line does not change during a step."""
    straight = profile(Curve((0.0, most), (intercept_s, intercept_s + slope_s * most)))
    lines = {line_ahead(straight, remaining, 1000.0, gpus) for remaining, gpus in times}
    lines.add(line_ahead(straight, (), 0.0, 8))
    (line,) = lines
    assert line.alpha_s == intercept_s
    assert line.beta_s == pytest.approx(slope_s, rel=1e-9, abs=1e-12)


@given(lengths, st.integers(1, 8), st.integers(1, 20))
def test_iterations_ahead_match_a_simulation(remaining: list[int], instances: int, most: int) -> None:
    """The share of one engine is simulated token by token; waiting requests are decoded in full batches."""
    share = sorted(remaining, reverse=True)[::instances]
    walked = [0.0] * min(len(share), most)
    for iteration in range(share[0]):
        batch = sum(length > iteration for length in share)
        walked[min(batch, most) - 1] += 1 if batch <= most else batch / most
    found = iterations_ahead(remaining, instances, most)
    assert found.tolist() == pytest.approx(walked, abs=1e-6)
    sizes = [size + 1 for size in range(len(found))]
    assert sum(size * count for size, count in zip(sizes, found, strict=True)) == pytest.approx(sum(share))


@given(rising(), lengths, st.integers(1, 8))
def test_a_bent_curves_line_is_right_over_the_step(curve: Curve, remaining: list[int], instances: int) -> None:
    """The oracle evaluates the curve at every change of the batch."""
    one = profile(curve, tp=1, slots=256, capacity=10**9)
    line = line_ahead(one, remaining, 0.0, instances)
    pending = [RemainingWork(0, length) for length in sorted(remaining, reverse=True)[::instances]]
    by_line_s, by_curve_s = decode_s(line, pending), curve_decode_s(one, pending)
    sizes = [float(size + 1) for size in range(max(2, len(pending)))]
    slack_s = (
        0.06 * max(abs(line.step_s(int(size), 0) - curve.at(size)) for size in sizes) * pending[0].remaining_tokens
    )
    assert abs(by_line_s - by_curve_s) <= slack_s + 1e-9 * by_curve_s
    assert line.alpha_s >= 0
    assert line.beta_s >= 0


@given(st.integers(3, 200), st.floats(1e-3, 0.1), st.floats(1.0, 100.0))
def test_a_steep_curves_line_never_begins_below_zero(count: int, first_s: float, steepness: float) -> None:
    """Spilling makes curves rise faster than in proportion; the line then starts at 0, without a rounding error."""
    knee = float(count // 2 + 1)
    curve = Curve((1.0, knee, 2 * knee), (first_s, first_s * 1.1, first_s * (1.1 + steepness)))
    line = line_ahead(profile(curve, tp=1), [1000] * count, 0.0, 1)
    assert line.alpha_s >= 0
    assert line.beta_s >= 0


@pytest.mark.parametrize("spill_s", [0.0, 1e-7, 1e-6, 1e-5])
@pytest.mark.parametrize("count", [4, 40, 100])
def test_line_includes_the_cost_of_spilling(spill_s: float, count: int) -> None:
    """The GPUs have room for 40 requests, and with CPU memory for 200; without it the others would wait."""
    straight = profile(Curve((0.0, 256.0), (0.01, 0.03)), tp=1, capacity=40 * 2000)
    step = replace(straight.step, spill_s_per_token=spill_s)
    spills = replace(straight, step=step, spill_capacity_tokens=160 * 2000)
    pending = [RemainingWork(1000, 1000 - 5 * (n % 3)) for n in range(count)]
    line = line_ahead(spills, [one.remaining_tokens for one in pending], 1000.0, 1)
    assert line.kv_capacity_tokens == (200 if count == 100 else 40) * 2000
    by_curve_s = curve_decode_s(spills, pending)
    assert decode_s(line, pending) == pytest.approx(by_curve_s, rel=0.03)
    if count == 100 and spill_s == 1e-5:
        without = line_ahead(straight, [one.remaining_tokens for one in pending], 1000.0, 1)
        assert decode_s(without, pending) < 0.8 * by_curve_s


def test_batches_that_fit_do_not_spill() -> None:
    one = profile(Curve((0.0, 256.0), (0.01, 0.03)), capacity=256 * 2000)
    spills = replace(one, step=replace(one.step, spill_s_per_token=1.0), spill_capacity_tokens=1)
    line, plain = (line_ahead(each, [1000.0] * 200, 1000.0, 2) for each in (spills, one))
    assert line == plain


def test_line_without_requests_covers_all_batch_sizes() -> None:
    one = profile(Curve((1.0, 8.0, 64.0), (0.01, 0.04, 0.05)))
    assert line_ahead(one, (), 0.0, 8) == one.configuration()


@given(st.lists(st.tuples(rising(), st.sampled_from([1, 2, 4, 8])), min_size=1, max_size=12), counts, fleets, st.data())
def test_worth_evaluating_depends_on_the_phase(
    kinds: list[tuple[Curve, int]], count: int, gpus: int, data: st.DataObject
) -> None:
    profiles = [profile(curve, tp, name=f"c{index}") for index, (curve, tp) in enumerate(kinds)]
    runs, wanted = (data.draw(st.sampled_from(profiles)).id for _ in range(2))
    now = snapshot([engine("e0", runs)], [request(f"r{i}") for i in range(count)])
    chosen = worth_evaluating(profiles, now, gpus, (wanted,))
    assert list(chosen) == [one.id for one in profiles if one.id in chosen]
    assert {runs, wanted} <= set(chosen)
    if len(profiles) <= FEW:
        assert len(chosen) == len(profiles)
    else:
        close = {one.id for one in biased(profiles, StepPhase.TAIL if count < 2 * gpus else StepPhase.BULK)}
        assert set(chosen) == close | {runs, wanted}
