"""A measurement finds the engine's constants within its limits and its budget, and leaves the engine idle."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual_engine import VirtualEngine, in_virtual_time

from orchestrrl.core.clock import VirtualClock, WallClock
from orchestrrl.core.errors import Permanent, ProblemFaults
from orchestrrl.engines.base import CompletionEndpoint, EngineCapabilities, GenerationRequest
from orchestrrl.engines.profiles.measure import (
    KV_FILL,
    EngineCapacity,
    MeasuredProfile,
    MeasurementInputs,
    grid,
    measure,
    sample_of,
)
from orchestrrl.engines.profiles.spill import overfills
from orchestrrl.lab.simulated_engine.client import SimulatedEngine
from orchestrrl.lab.simulated_engine.scheduler import EngineShape
from orchestrrl.lab.simulated_engine.server import SimulatedOptions, SimulatedServer
from planner.cost.profile import Parallelism, ProfileSource
from planner.model import ConfigurationId

OPTIONS = SimulatedOptions(
    alpha_s=0.0184,
    beta_s=0.00081,
    gamma_s=4.1e-7,
    prefill_tokens_per_s=18_000,
    max_num_seqs=12,
    kv_capacity_tokens=65_536,
    max_model_len_tokens=8192,
)
SLOW = OPTIONS.model_copy(update={"alpha_s": 0.1, "prefill_tokens_per_s": 1500.0})


def wanted(budget_s: float = 300.0, **more: int) -> MeasurementInputs:
    return MeasurementInputs(
        ConfigurationId("tp2"), Parallelism(tp=2), 1.7, "command line", "2026-01-31", budget_s, **more
    )


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
async def engine(clock: VirtualClock) -> AsyncIterator[VirtualEngine]:
    engine = VirtualEngine(OPTIONS, clock)
    yield engine
    await engine.close()


async def measured(
    engine: VirtualEngine, clock: VirtualClock, asked: MeasurementInputs
) -> tuple[MeasuredProfile, list[tuple[int, int, str]]]:
    steps: list[tuple[int, int, str]] = []
    return await in_virtual_time(clock, measure(engine, asked, clock, lambda *step: steps.append(step))), steps


async def test_measurement_finds_the_engine_constants(engine: VirtualEngine, clock: VirtualClock) -> None:
    found, steps = await measured(engine, clock, wanted())
    profile = found.engine
    for sequences, kv_tokens in ((1, 100), (12, 400), (6, 20_000), (12, 60_000)):
        truth_s = OPTIONS.alpha_s + OPTIONS.beta_s * sequences + OPTIONS.gamma_s * kv_tokens
        assert profile.step.at(sequences, kv_tokens) == pytest.approx(truth_s, rel=0.02)
    affine = profile.configuration()
    assert affine.alpha_s == pytest.approx(OPTIONS.alpha_s, rel=0.03)
    assert affine.beta_s == pytest.approx(OPTIONS.beta_s, rel=0.1)
    assert affine.gamma_s == pytest.approx(OPTIONS.gamma_s, rel=0.05)
    assert profile.prefill_tokens_per_s == pytest.approx(18_000, rel=0.1)
    assert (profile.kv_capacity_tokens, profile.max_sequences, profile.switch_s) == (65_536, 12, 1.7)
    assert profile.provenance.source is ProfileSource.MEASURED
    assert profile.provenance.samples == len(found.samples) > 15
    assert profile.provenance.fit_error_mean is not None
    assert profile.provenance.fit_error_mean < 0.01
    assert steps[-1][0] == steps[-1][1]
    assert not found.skipped


class Spilling(SimulatedOptions):
    """An engine that stores the KV beyond its GPU memory in CPU memory."""

    spill_tokens: int
    spill_s_per_token: float

    @property
    def shape(self) -> EngineShape:
        spill = {"spill_capacity_tokens": self.spill_tokens, "spill_s_per_token": self.spill_s_per_token}
        return replace(super().shape, **spill)


@pytest.mark.parametrize(("spill_tokens", "seen_least"), [(20_000, 15_000), (65_536, 29_000), (10**6, 29_000)])
async def test_spill_cost_is_measured_if_the_engine_spills(
    clock: VirtualClock, spill_tokens: int, seen_least: int
) -> None:
    """Twelve sequences of 8,192 tokens need one and a half times its KV cache."""
    price_s = 5e-6
    engine = VirtualEngine(
        Spilling(**OPTIONS.model_dump(), spill_tokens=spill_tokens, spill_s_per_token=price_s), clock
    )
    found, _ = await measured(engine, clock, wanted())
    profile = found.engine
    assert profile.step.spill_s_per_token == pytest.approx(price_s, rel=0.05)
    assert seen_least <= profile.spill_capacity_tokens <= spill_tokens
    others = dict(profile.others)
    assert others["spill_s_per_token"].source is others["spill_capacity_tokens"].source is ProfileSource.MEASURED
    truth_s = OPTIONS.alpha_s + OPTIONS.beta_s * 10 + OPTIONS.gamma_s * 75_000 + price_s * (75_000 - 65_536)
    assert profile.step.at(10, 75_000, profile.kv_capacity_tokens) == pytest.approx(truth_s, rel=0.03)
    assert engine.runtime.running == engine.runtime.waiting == 0
    await engine.close()


async def test_engine_that_queues_requests_has_no_spill_cost(engine: VirtualEngine, clock: VirtualClock) -> None:
    found, _ = await measured(engine, clock, wanted())
    assert (found.engine.step.spill_s_per_token, found.engine.spill_capacity_tokens) == (0.0, 0)
    assert not [name for name, _ in found.engine.others if name.startswith("spill")]
    assert not found.skipped
    assert engine.runtime.running == engine.runtime.waiting == 0


@given(st.integers(64, 10**7), st.integers(1, 1024), st.integers(32, 131_072))
def test_overfilling_batches_exceed_the_cache_and_fit_the_engine(capacity: int, slots: int, longest: int) -> None:
    for sequences, context in overfills(capacity, slots, longest, 256):
        assert 1 <= sequences <= slots
        assert sequences * context >= int(1.15 * capacity)
        assert context + 256 <= longest


async def test_measurement_leaves_the_engine_idle_and_repeats_no_prompt(
    engine: VirtualEngine, clock: VirtualClock
) -> None:
    await measured(engine, clock, wanted(budget_s=60))
    assert engine.runtime.running == engine.runtime.waiting == 0
    long = [prompt for prompt in engine.prompts if len(prompt) > 1]
    assert len({prompt[:16] for prompt in long}) == len(long)


async def test_measurement_stays_within_the_budget(engine: VirtualEngine, clock: VirtualClock) -> None:
    began_s = clock.now_s()
    found, _ = await measured(engine, clock, wanted(budget_s=25))
    assert clock.now_s() - began_s < 27
    assert any(reason.endswith("not within the budget") for reason in found.skipped)
    assert found.engine.step.at(6, 20_000) == pytest.approx(0.0184 + 6 * 0.00081 + 20_000 * 4.1e-7, rel=0.05)


async def test_too_short_budget_is_an_error(engine: VirtualEngine, clock: VirtualClock) -> None:
    with pytest.raises(Permanent, match="raise --budget-s from 1 to about"):
        await measured(engine, clock, wanted(budget_s=1))
    assert engine.runtime.running == engine.runtime.waiting == 0


async def test_busy_engine_is_not_measured(engine: VirtualEngine, clock: VirtualClock) -> None:
    body = {"model": "simulated", "prompt": [1, 2, 3], "max_tokens": 5000, "ignore_eos": True}
    other = asyncio.ensure_future(
        anext(aiter(engine.generate(GenerationRequest("theirs", CompletionEndpoint.COMPLETIONS, body))))
    )
    await clock.advance(0.1)
    with pytest.raises(Permanent, match="is busy"):
        await measured(engine, clock, wanted())
    assert engine.started == ["theirs"]
    other.cancel()


async def test_all_missing_limits_are_reported_at_once(clock: VirtualClock) -> None:
    silent = VirtualEngine(
        OPTIONS, clock, EngineCapabilities("virtual", "1", ("simulated",), max_model_len_tokens=1024)
    )
    with pytest.raises(ProblemFaults, match="--max-sequences: is required"):
        await measured(silent, clock, wanted())
    found, _ = await measured(silent, clock, wanted(budget_s=60, max_sequences=4))
    assert found.engine.max_sequences == 4
    assert dict(found.engine.others)["max_sequences"].source is ProfileSource.GIVEN
    await silent.close()


async def test_cancelled_measurement_leaves_the_engine_idle(engine: VirtualEngine, clock: VirtualClock) -> None:
    task = asyncio.ensure_future(measure(engine, wanted(), clock))
    while engine.runtime.running < 12:
        await clock.advance(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await in_virtual_time(clock, task_of(task))
    assert engine.runtime.running == engine.runtime.waiting == 0


async def task_of(task: "asyncio.Task[MeasuredProfile]") -> MeasuredProfile:
    return await task


async def test_measurement_over_http_is_close() -> None:
    """The tolerance is large, since a busy host delays the reading of tokens."""
    options = OPTIONS.model_copy(update={"max_num_seqs": 4, "max_model_len_tokens": 4096, "speed": 2.0})
    async with SimulatedServer(options) as server:
        engine = SimulatedEngine(server.url)
        found = await measure(engine, wanted(budget_s=60), WallClock())
        metrics = await engine.metrics()
        await engine.close()
    assert metrics.running == metrics.waiting == 0
    for sequences, kv_tokens in ((1, 1000), (4, 10_000)):
        truth_s = (options.alpha_s + options.beta_s * sequences + options.gamma_s * kv_tokens) / options.speed
        assert found.engine.step.at(sequences, kv_tokens) == pytest.approx(truth_s, rel=0.3)


@given(
    st.integers(min_value=1, max_value=2048),
    st.integers(min_value=64, max_value=5_000_000),
    st.integers(min_value=64, max_value=200_000),
)
def test_every_grid_point_fits(sequences: int, capacity_tokens: int, longest: int) -> None:
    limits = EngineCapacity("m", sequences, capacity_tokens, min(longest, capacity_tokens))
    points = grid(limits)
    assert len(set(points)) == len(points)
    for point in points:
        assert 1 <= point.sequences <= sequences
        assert 1 <= point.context_tokens < limits.max_model_len_tokens
        assert point.sequences * point.context_tokens <= KV_FILL * capacity_tokens


def test_step_time_is_the_slope_while_all_streams_ran() -> None:
    from orchestrrl.engines.profiles.measure import GridPoint

    early = [(0.01 * n, n) for n in range(1, 60)]  # alone and faster at first: not counted
    both = [(0.6 + 0.02 * n, 59 + n) for n in range(40)]
    late = [(0.6 + 0.02 * n, 1 + n) for n in range(40)]
    sample = sample_of(GridPoint(2, 100), [[*early, *both], late])
    assert sample is not None
    assert sample.step_s == pytest.approx(0.02)
    assert sample.kv_tokens == pytest.approx(200 + 59 + 39 / 2 + 1 + 39 / 2, abs=2)
    assert sample_of(GridPoint(2, 100), [early, late]) is None


async def test_short_budget_on_a_slow_engine_gives_a_profile(clock: VirtualClock) -> None:
    """No large point uses the time of the others."""
    made = {"max_num_seqs": 256, "kv_capacity_tokens": 262_144, "max_model_len_tokens": 32_768}
    engine = VirtualEngine(SLOW.model_copy(update=made), clock)
    found, _ = await measured(engine, clock, wanted(budget_s=20))
    await engine.close()
    assert len(found.samples) >= 5
    assert found.engine.step.at(4, 200) == pytest.approx(0.1 + 4 * 0.00081, rel=0.05)


async def test_too_short_budget_error_suggests_a_sufficient_one(clock: VirtualClock) -> None:
    engine = VirtualEngine(SLOW, clock)
    with pytest.raises(Permanent, match=r"raise --budget-s from 2 to about \d+") as caught:
        await measured(engine, clock, wanted(budget_s=2))
    await engine.close()
    enough_s = float(str(caught.value).partition("about ")[2].partition(";")[0])
    engine = VirtualEngine(SLOW, clock)
    assert (await measured(engine, clock, wanted(budget_s=enough_s)))[0].samples
    await engine.close()
