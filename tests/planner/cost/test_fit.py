"""Tests of fits: they recover the lines and bends behind noisy samples with outliers, and never fall with load."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.fit import (
    StepSample,
    TimedSample,
    TooFewSamples,
    fit_curve,
    fit_rate,
    fit_step,
    refit_curve,
    refit_step,
)
from planner.cost.profile import Curve, EngineProfile, Parallelism, ProfileSource, Provenance, StepTime
from planner.model import ConfigurationId

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (100, 1000, 4000, 8000)

alphas = st.floats(min_value=1e-3, max_value=0.1)
betas = st.floats(min_value=0, max_value=1e-3)
gammas = st.floats(min_value=0, max_value=1e-6)
seeds = st.integers(min_value=0, max_value=10**6)


def grid(step: StepTime, noise: float = 0.0, seed: int = 0) -> list[StepSample]:
    rng = np.random.default_rng(seed)
    return [
        StepSample(b, b * c, step.at(b, b * c) * (1 + noise * rng.standard_normal())) for b in BATCHES for c in CONTEXTS
    ]


@given(alphas, betas, gammas)
def test_a_line_is_found_and_stays_a_line(alpha_s: float, beta_s: float, gamma_s: float) -> None:
    fit = fit_step(grid(StepTime(Curve.line(alpha_s, beta_s), gamma_s)))
    assert len(fit.step.base_s.xs) == 2
    assert fit.error.max < 1e-6
    for sequences, kv_tokens in ((1, 0), (100, 50_000), (300, 10**6)):
        expected = alpha_s + beta_s * sequences + gamma_s * kv_tokens
        assert fit.step.at(sequences, kv_tokens) == pytest.approx(expected, rel=1e-5)


@given(seeds, st.floats(min_value=3, max_value=20))
def test_outliers_lose_their_weight(seed: int, factor: float) -> None:
    truth = StepTime(Curve.line(0.0184, 8.1e-5), 4.1e-8)
    samples = grid(truth, noise=0.01, seed=seed)
    for place in np.random.default_rng(seed).choice(len(samples), size=3, replace=False):
        samples[place] = samples[place]._replace(step_s=samples[place].step_s * factor)
    step = fit_step(samples).step
    for sequences, kv_tokens in ((1, 0), (16, 16_000), (256, 10**6)):
        assert step.at(sequences, kv_tokens) == pytest.approx(truth.at(sequences, kv_tokens), rel=0.05)


@given(seeds, st.sampled_from([8, 16, 32, 64]), st.floats(min_value=2, max_value=20))
def test_a_bend_is_found(seed: int, knee: int, steeper: float) -> None:
    truth = StepTime(Curve((1, knee, 256), (0.01, 0.01 * steeper, 0.012 * steeper)), 2e-8)
    fit = fit_step(grid(truth, noise=0.005, seed=seed))
    assert fit.error.mean < 0.02
    for sequences in BATCHES:
        assert fit.step.at(sequences, 1000 * sequences) == pytest.approx(
            truth.at(sequences, 1000 * sequences), rel=0.06
        )


@given(
    st.lists(
        st.tuples(st.sampled_from(BATCHES), st.sampled_from(CONTEXTS), st.floats(min_value=1e-4, max_value=1)),
        min_size=8,
        max_size=40,
    )
)
def test_fitted_step_time_never_falls_with_load(seen: list[tuple[int, int, float]]) -> None:
    try:
        step = fit_step([StepSample(b, b * c, s) for b, c, s in seen]).step
    except TooFewSamples:
        return
    assert step.kv_s_per_token >= 0
    assert all(later >= sooner for sooner, later in pairwise(step.base_s.ys))


@pytest.mark.parametrize(
    "samples",
    [
        [],
        [StepSample(1, 100, 0.1)],
        [StepSample(b, 1000 * b, 0.01 + b) for b in BATCHES],  # equal contexts: KV tokens are proportional to sequences
        [StepSample(4, 1000, 0.1)] * 10,
    ],
    ids=["none", "one", "one context", "one batch"],
)
def test_dependent_samples_are_rejected(samples: list[StepSample]) -> None:
    with pytest.raises(TooFewSamples):
        fit_step(samples)


def test_rate_is_separated_from_the_fixed_part() -> None:
    rate, error = fit_rate([TimedSample(tokens, 0.05 + tokens / 18_000) for tokens in (100, 1000, 5000, 10_000)])
    assert rate == pytest.approx(18_000, rel=1e-3)
    assert error.max < 1e-6


def test_rate_too_high_to_measure_is_finite() -> None:
    rate, _ = fit_rate([TimedSample(tokens, 0.05) for tokens in (100, 1000, 5000)])
    assert 1e6 < rate < float("inf")


def test_a_curve_keeps_its_bend() -> None:
    truth = Curve((0, 1000, 10_000), (0.001, 0.002, 0.1))
    fit = fit_curve([TimedSample(x, truth.at(x)) for x in (10, 100, 500, 1000, 2000, 4000, 7000, 10_000)])
    assert fit.error.max < 0.05


PRIOR = StepTime(Curve((1, 512), (0.01, 0.04)), 2e-8)


def believed(step: StepTime, max_sequences: int, kv_capacity_tokens: int) -> EngineProfile:
    """Return a profile with this step time."""
    given = Provenance(ProfileSource.GIVEN, "2026-01-01")
    return EngineProfile(
        ConfigurationId("tp2"), Parallelism(tp=2), step, 9000.0, kv_capacity_tokens, max_sequences, 1.0, given
    )


BELIEF = believed(PRIOR, 512, 500_000)


@given(
    st.floats(min_value=3e-3, max_value=0.05),
    st.floats(min_value=0, max_value=2e-4),
    st.floats(min_value=0, max_value=1e-7),
    seeds,
)
def test_many_samples_replace_the_prior(alpha_s: float, beta_s: float, gamma_s: float, seed: int) -> None:
    truth = StepTime(Curve.line(alpha_s, beta_s), gamma_s)
    samples = [sample for sample in grid(truth, noise=0.01, seed=seed) if sample.kv_tokens <= 500_000] * 4
    fit = refit_step(BELIEF, samples, np.ones(len(samples)), trust=0.01)
    for sample in samples:
        expected = truth.at(sample.sequences, sample.kv_tokens)
        assert fit.step.at(sample.sequences, sample.kv_tokens) == pytest.approx(expected, rel=0.08)


@given(st.floats(min_value=0.5, max_value=2), st.sampled_from(BATCHES))
def test_samples_of_one_load_scale_the_whole_step_time(factor: float, batch: int) -> None:
    samples = [StepSample(batch, 1000 * batch, factor * PRIOR.at(batch, 1000 * batch))] * 50
    fit = refit_step(BELIEF, samples, np.ones(50), trust=0.01)
    for sequences, kv_tokens in ((1, 0), (100, 10**5)):
        assert fit.step.at(sequences, kv_tokens) == pytest.approx(factor * PRIOR.at(sequences, kv_tokens), rel=0.02)


def test_a_curve_of_one_knot_gets_a_slope() -> None:
    estimate = believed(StepTime(Curve((0,), (0.02,)), 0.0), 64, 10_000)
    truth = StepTime(Curve.line(0.01, 1e-3), 0.0)
    samples = [StepSample(b, 10 * b, truth.at(b, 0)) for b in (1, 8, 32, 64)] * 20
    fit = refit_step(estimate, samples, np.ones(80), trust=0.01)
    assert fit.step.at(48, 480) == pytest.approx(truth.at(48, 0), rel=0.05)


def test_refit_moves_a_curve_to_the_samples() -> None:
    prior = Curve.line(0.01, 1e-11)
    truth = Curve.line(0.05, 4e-11)
    seen = [TimedSample(size, truth.at(size)) for size in (1e7, 1e8, 1e9, 1e10)] * 5
    fit = refit_curve(prior, seen, np.ones(20), trust=0.01)
    for size in (1e8, 1e10):
        assert fit.curve.at(size) == pytest.approx(truth.at(size), rel=0.05)
