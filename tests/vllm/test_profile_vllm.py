"""Profile measurement of a real vLLM server: all figures must be plausible, and the server must stay healthy."""

import pytest

from orchestrrl.core.clock import WallClock
from orchestrrl.engines.profiles.measure import MeasurementInputs, measure
from orchestrrl.engines.profiles.store import as_text, parse_profile
from orchestrrl.engines.vllm import VllmEngine
from orchestrrl.lab.testbed.engines import LocalEngine
from planner.cost.profile import Parallelism, Profile
from planner.model import ConfigurationId


@pytest.mark.timeout(900)
async def test_real_engine_is_profiled(vllm_servers: tuple[LocalEngine, ...]) -> None:
    engine = VllmEngine(vllm_servers[0].url, timeout_s=100)
    wanted = MeasurementInputs(ConfigurationId("tp1"), Parallelism(), 45.0, "command line", "2026-01-31", budget_s=240)
    try:
        found = await measure(engine, wanted, WallClock())
        metrics = await engine.metrics()
    finally:
        await engine.close()
    assert metrics.running == metrics.waiting == 0
    profile = found.engine
    # The number of batches depends on the machine; with too few for a fit, the profile would be refused.
    assert profile.provenance.samples == len(found.samples) >= 3
    assert profile.max_sequences == 4
    assert profile.kv_capacity_tokens == metrics.kv_capacity_tokens
    assert 0 < profile.step.at(1, 0) <= profile.step.at(4, 10_000)
    assert profile.prefill_tokens_per_s > 0
    written = Profile(found.model, "cpu", found.engine_name, (profile,))
    assert parse_profile(as_text(written)) == written
