"""Tests of re-fitting the profile to reports, and of ignoring invalid ones."""

import math
from dataclasses import replace

import numpy as np
import pytest

from orchestrrl.daemon.profile_refit import (
    HALF_LIFE,
    MOST_CELLS,
    PER_CELL,
    ConfigurationEstimate,
    CurveRefitter,
    batch_between,
)
from orchestrrl.engines.base import EngineSample
from planner.cost.profile import (
    Curve,
    EngineProfile,
    Parallelism,
    ProfileSource,
    Provenance,
    StepTime,
)
from planner.model import ConfigurationId

TP2 = ConfigurationId("tp2")
PRIOR = EngineProfile(
    id=TP2,
    parallelism=Parallelism(tp=2),
    step=StepTime(Curve((1, 512), (0.01, 0.04)), 2e-8),
    prefill_tokens_per_s=18_000,
    kv_capacity_tokens=500_000,
    max_sequences=512,
    switch_s=1.7,
    provenance=Provenance(ProfileSource.ROOFLINE, "2026-01-01"),
)
TRUTH = StepTime(Curve.line(0.0184, 8.1e-5), 4.1e-8)
LOADS = ((1, 1000), (20, 9000), (64, 64_000), (200, 400_000))


def refitter() -> ConfigurationEstimate:
    return ConfigurationEstimate(PRIOR, lambda: "2026-02-02")


def feed(
    fitting: ConfigurationEstimate, count: int, truth: StepTime = TRUTH, seed: int = 0, outliers: float = 0.0
) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(count):
        sequences = int(np.exp(rng.uniform(0, np.log(400))))
        kv_tokens = min(500_000.0, sequences * rng.uniform(200, 3000))
        step_s = truth.at(sequences, kv_tokens) * (1 + 0.03 * rng.standard_normal())
        step_s *= rng.choice([0.3, 3.0]) if rng.random() < outliers else 1.0
        fitting.observe(sequences, kv_tokens, step_s)


def test_telemetry_determines_the_estimate() -> None:
    fitting = refitter()
    feed(fitting, 3000, outliers=0.05)
    engine = fitting.fitted()
    for load in LOADS:
        assert engine.step.at(*load) == pytest.approx(TRUTH.at(*load), rel=0.05)
    assert engine.provenance.source is ProfileSource.MEASURED
    assert engine.provenance.date == "2026-02-02"
    assert engine.provenance.detail == "telemetry; began as roofline, 2026-01-01"
    assert 0 < engine.provenance.samples <= PER_CELL * MOST_CELLS
    assert engine.provenance.fit_error_mean is not None
    assert replace(engine, step=PRIOR.step, provenance=PRIOR.provenance) == PRIOR


def test_few_samples_change_nothing() -> None:
    fitting = refitter()
    feed(fitting, 7)
    assert fitting.fitted() == PRIOR


def test_changed_engine_is_followed() -> None:
    fitting, slower = refitter(), StepTime(Curve.line(0.03, 1.6e-4), 8e-8)
    feed(fitting, 2000)
    feed(fitting, 3 * HALF_LIFE, truth=slower, seed=1)
    for load in LOADS:
        assert fitting.fitted().step.at(*load) == pytest.approx(slower.at(*load), rel=0.06)


def test_an_hour_at_one_load_keeps_samples_of_the_others() -> None:
    fitting = refitter()
    feed(fitting, 2000)
    for _ in range(HALF_LIFE):
        fitting.observe(4, 4000, TRUTH.at(4, 4000))
    for load in LOADS:
        assert fitting.fitted().step.at(*load) == pytest.approx(TRUTH.at(*load), rel=0.06)


@pytest.mark.parametrize(
    "values", [(0, 0, 0.01), (1, -1, 0.01), (1, 0, 0.0), (1, 0, math.nan), (1, 0, math.inf), (1, 0, 100.0)]
)
def test_invalid_sample_is_ignored(values: tuple[float, float, float]) -> None:
    fitting = refitter()
    fitting.observe(*values)
    assert (fitting.taken, fitting.refused) == (0, 1)


@pytest.mark.parametrize(
    ("prior", "truth", "unit"),
    [
        (Curve.line(0.01, 1e-11), Curve.line(0.05, 4e-11), 2e5),  # KV transfers: bytes
        (Curve.line(0.0, 1 / 18_000), Curve.line(0.02, 1 / 9000), 1),  # recomputation: tokens
    ],
)
def test_move_costs_are_learned_from_moves(prior: Curve, truth: Curve, unit: float) -> None:
    fitting = CurveRefitter(prior)
    fitting.observe(0, 1.0)
    fitting.observe(10 * unit, math.inf)
    assert fitting.fitted() is None
    for tokens in (500, 1000, 2000, 4000, 8000, 16_000) * 5:
        fitting.observe(tokens * unit, truth.at(tokens * unit))
    fitted = fitting.fitted()
    assert fitted is not None
    assert fitted.curve.at(8000 * unit) == pytest.approx(truth.at(8000 * unit), rel=0.05)
    assert fitted.error.samples > 0


def sample(
    at_s: float, made: int, *, running: int = 10, usage: float = 0.5, prompts: int = 0, **more: int
) -> EngineSample:
    return EngineSample(
        sampled_s=at_s,
        running=running,
        waiting=0,
        kv_usage_fraction=usage,
        kv_capacity_tokens=1000,
        generation_tokens_total=made,
        prompt_tokens_total=prompts,
        preemptions_total=more.get("preemptions", 0),
    )


def test_two_scrapes_of_one_batch_give_its_step() -> None:
    batch = batch_between(sample(0.0, 0), sample(1.0, 400, usage=0.6))
    assert batch is not None
    assert batch == pytest.approx((10, 550, 1 / 40))


@pytest.mark.parametrize(
    "later",
    [
        sample(1.0, 400, running=9),
        sample(1.0, 400, prompts=5),
        sample(1.0, 400, preemptions=1),
        sample(1.0, 400, usage=0.3),  # one finished and another replaced it
        sample(1.0, 0),
        sample(0.0, 400),
    ],
)
def test_scrapes_of_a_changed_batch_give_nothing(later: EngineSample) -> None:
    assert batch_between(sample(0.0, 0), later) is None
