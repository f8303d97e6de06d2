"""Tests of step times of engines without a configuration: a prior or a shape, corrected by observed batches."""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from builders import engine_report, sample
from hypothesis import given
from hypothesis import strategies as st
from implicit_fleet import ON_A100, ON_H200, UNKNOWN, step_of

from orchestrrl.daemon.configuration import parse_config
from orchestrrl.daemon.live_profile import LiveProfile
from orchestrrl.daemon.priors import AssumedProfile, assumed_of
from orchestrrl.daemon.profile_refit import LEAST_SAMPLES, STEADY, ConfigurationEstimate, batch_between, steady_batch
from orchestrrl.engines.base import EngineCapabilities, EngineSample
from orchestrrl.engines.serving import ServingFacts
from planner.cost.profile import EngineProfile
from planner.model import EngineHealth, EngineId, FastPolicy

E0 = EngineId("e0")
CAPACITY_TOKENS = 100_000


def assumed(facts: ServingFacts) -> AssumedProfile:
    return assumed_of(E0, EngineCapabilities("vllm", "1", ("m",), serving=facts))


class Bench:
    """A LiveProfile with one implicit configuration, and an engine of known speed that feeds it."""

    def __init__(self, facts: ServingFacts) -> None:
        self.assumed = assumed(facts)
        self.costs = LiveProfile(parse_config("").fleet, lambda *_: None, lambda: "2026-01-31")
        self.costs.assume(self.assumed)
        self._now_s, self._total, self._prompts, self._sequence = 0.0, 0, 0, 0

    def decode(self, sequences: int, usage: float, step_s: float, scrapes: int = 8, prompts: int = 0) -> None:
        """Scrape each eighth of a second, or each step if that is longer."""
        for _ in range(scrapes):
            steps = max(1, round(0.125 / step_s))
            self._now_s += steps * step_s
            self._total += steps * sequences
            self._prompts += prompts
            self._report(sequences, usage)

    def _report(self, sequences: int, usage: float) -> None:
        self._sequence += 1
        fields = {"kv_usage_fraction": usage, "kv_capacity_tokens": CAPACITY_TOKENS}
        reading = sample(self._now_s, sequences, 0, self._total, **fields)
        reading = replace(reading, prompt_tokens_total=self._prompts)
        report = engine_report("e0", self._sequence, reading, EngineHealth.OK)
        self.costs.observe(report, self.assumed.profile.id)

    def estimate(self) -> ConfigurationEstimate | None:
        self.costs.refit([E0])
        return next(iter(self.costs.estimates()), None)


def real(factor: float, sequences: int, kv_tokens: float) -> float:
    return factor * (0.018 + 8e-5 * sequences + 4e-8 * kv_tokens)


def is_step_time(profile: EngineProfile) -> bool:
    """Return whether step times are finite, positive and never falling, over all batches that an engine may have."""
    sequences = [1, 3, 16, 100, profile.max_sequences]
    times = [profile.step.at(count, share * count) for count in sequences for share in (0, 100, 5000)]
    rising = all(
        profile.step.at(more, kv) >= profile.step.at(few, kv)
        for few, more in pairwise(sequences)
        for kv in (0, 50_000, 1_000_000)
    )
    rising_kv = all(profile.step.at(8, more) >= profile.step.at(8, few) for few, more in pairwise((0, 10, 1e5, 1e7)))
    return rising and rising_kv and all(math.isfinite(seconds) and seconds > 0 for seconds in times)


def test_prior_is_used_at_once_and_described() -> None:
    estimate = Bench(ON_H200).estimate()
    assert estimate is not None
    assert (estimate.source, estimate.source_detail) == ("prior", "prior: qwen2.5-14b on H200, TP=1")


def test_without_a_prior_no_estimate_is_used_until_enough_was_observed() -> None:
    bench = Bench(UNKNOWN)
    assert bench.estimate() is None
    assert bench.costs.cost_estimates().profiles == ()
    while bench.costs.batches_taken(bench.assumed.profile.id) < LEAST_SAMPLES - 1:
        bench.decode(8, 0.2, real(1.0, 8, 20_000), scrapes=1)
    assert bench.estimate() is None
    bench.decode(8, 0.2, real(1.0, 8, 20_000))
    estimate = bench.estimate()
    assert estimate is not None
    assert estimate.source == "observed"
    assert estimate.source_detail == f"observed: {estimate.taken} batches"
    assert estimate.profile.step.at(8, 20_000) == pytest.approx(real(1.0, 8, 20_000), rel=0.02)


@pytest.mark.parametrize("facts", [ON_H200, ON_A100, UNKNOWN], ids=["h200", "a100", "unknown"])
@pytest.mark.parametrize("factor", [0.05, 0.5, 1.0, 2.0, 40.0])
def test_observed_batches_correct_a_prior_with_any_error(facts: ServingFacts, factor: float) -> None:
    bench = Bench(facts)
    for turn in range(24):
        sequences, usage = 4 + 3 * (turn % 8), 0.1 + 0.1 * (turn % 5)
        bench.decode(sequences, usage, real(factor, sequences, usage * CAPACITY_TOKENS), scrapes=16)
    estimate = bench.estimate()
    assert estimate is not None
    for sequences, kv_tokens in ((4, 10_000), (16, 40_000)):
        assert estimate.profile.step.at(sequences, kv_tokens) == pytest.approx(
            real(factor, sequences, kv_tokens), rel=0.05
        )
    assert is_step_time(estimate.profile)


def test_changing_batch_is_a_sample_too() -> None:
    bench = Bench(ON_H200)
    for turn in range(200):  # no two consecutive scrapes have the same sequences, and none is without prompts
        sequences = 20 + turn % 3
        bench.decode(sequences, 0.3, real(1.0, sequences, 30_000), scrapes=1, prompts=5)
    estimate = bench.estimate()
    assert estimate is not None
    assert estimate.refitted
    assert estimate.profile.step.at(21, 30_000) == pytest.approx(real(1.0, 21, 30_000), rel=0.15)


batches = st.lists(
    st.tuples(st.integers(1, 300), st.floats(0, 1), st.floats(1e-4, 5.0)), min_size=LEAST_SAMPLES, max_size=24
)


@given(st.sampled_from([ON_H200, UNKNOWN]), batches)
def test_estimate_is_a_valid_step_time_for_any_observations(
    facts: ServingFacts, observed: list[tuple[int, float, float]]
) -> None:
    bench = Bench(facts)
    for sequences, usage, step_s in observed:
        bench.decode(sequences, usage, step_s, scrapes=16)
    estimate = bench.estimate()
    assert estimate is not None
    assert estimate.taken >= LEAST_SAMPLES
    assert is_step_time(estimate.profile)
    assert estimate.profile.prefill_tokens_per_s > 0
    (line,) = (profile.configuration() for profile in bench.costs.cost_estimates().profiles)
    assert line.step_s(1, 0) >= 0


@given(batches, st.floats(1.01, 3.0))
def test_slower_batches_never_give_faster_step_times(observed: list[tuple[int, float, float]], factor: float) -> None:
    """The same batches, each slower by one factor, must not become faster at the observed loads."""
    estimates = []
    for times in (1.0, factor):
        bench = Bench(UNKNOWN)
        for sequences, usage, _ in observed:
            step_s = times * real(1.0, sequences, usage * CAPACITY_TOKENS)
            bench.decode(sequences, usage, step_s, scrapes=24)
        estimate = bench.estimate()
        assert estimate is not None
        estimates.append(estimate.profile.step)
    for sequences, usage, _ in observed:
        fast_s, slow_s = (step.at(sequences, usage * CAPACITY_TOKENS) for step in estimates)
        assert slow_s >= fast_s * (1 - 1e-6)


counts = st.integers(0, 50)
readings = st.builds(
    EngineSample,
    sampled_s=st.floats(0, 10),
    running=counts,
    waiting=counts,
    kv_usage_fraction=st.floats(0, 1),
    kv_capacity_tokens=st.sampled_from([0, 1000]),
    generation_tokens_total=st.integers(0, 1000),
    prompt_tokens_total=st.integers(0, 100),
    preemptions_total=st.integers(0, 1),
)


@given(readings, readings)
def test_steady_batch_matches_its_definition(earlier: EngineSample, later: EngineSample) -> None:
    batch = batch_between(earlier, later, steady_batch)
    made = later.generation_tokens_total - earlier.generation_tokens_total
    prompts = later.prompt_tokens_total - earlier.prompt_tokens_total
    if batch is None:
        return
    assert min(earlier.running, later.running) <= batch.sequences <= max(earlier.running, later.running)
    assert max(earlier.running, later.running) <= STEADY * min(earlier.running, later.running)
    assert 0 <= 4 * prompts <= made
    assert later.preemptions_total == earlier.preemptions_total
    assert 0 < batch.step_s < math.inf
    elapsed_s = later.sampled_s - earlier.sampled_s
    assert batch.step_s * made == pytest.approx(batch.sequences * elapsed_s)


def test_reload_keeps_what_was_learned_from_engines() -> None:
    bench = Bench(UNKNOWN)
    bench.decode(8, 0.2, 0.02, scrapes=80)
    before = bench.estimate()
    tp2 = "{id: tp2, gpus: 2, alpha_s: 0.02, beta_s: 1e-4, gamma_s: 4e-8, kv_capacity_tokens: 100000,"
    config = parse_config(
        f"fleet: {{configurations: [{tp2} max_sequences: 64, prefill_tokens_per_s: 9, switch_s: 1}}]}}"
    )
    bench.costs.configured(config.fleet)
    assert before in bench.costs.estimates()
    assert [estimate.source for estimate in bench.costs.estimates()] == ["configured", "observed"]
    bench.costs.forget_implicit(())
    assert [estimate.source for estimate in bench.costs.estimates()] == ["configured"]


@pytest.mark.parametrize("facts", [ON_H200, UNKNOWN], ids=["wrong GPU", "unknown GPU"])
async def test_balancing_with_a_wrong_prior_is_no_worse_than_by_load_index(facts: ServingFacts, tmp_path: Path) -> None:
    """Engines are A100s. Reported as H200s, they are predicted twice as fast as they are. On a virtual clock."""
    makespans_s: dict[FastPolicy, list[float]] = {FastPolicy.PACKING: [], FastPolicy.PAPER: []}
    for seed in (1, 2):
        for policy, taken_s in makespans_s.items():
            elapsed_s, world = await step_of(tmp_path / f"{policy}-{seed}.sqlite", facts, policy, seed)
            taken_s.append(elapsed_s)
            (estimate,) = world.control_plane.planning.costs.estimates()
            (kind,) = world.kinds.values()
            for sequences in (1, 8, 40):
                assert estimate.profile.step.at(sequences, 1000 * sequences) == pytest.approx(
                    kind.profile.step.at(sequences, 1000 * sequences), rel=0.05
                )
            assert world.control_plane.balance is not None
            assert world.control_plane.balance.policy.name == (
                "packing" if policy is FastPolicy.PACKING else "load_index"
            )
            if facts is ON_H200:
                assert estimate.factor == pytest.approx(2.0, rel=0.05)
    assert sum(makespans_s[FastPolicy.PACKING]) <= sum(makespans_s[FastPolicy.PAPER])
