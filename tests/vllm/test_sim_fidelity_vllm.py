"""A simulated generation step compared with the same requests on real vLLM, with a profile measured there: makespans
differ by at most a tenth. See docs/fidelity.md for the figures."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import median

import aiohttp
import pytest

from orchestrrl.core.clock import WallClock
from orchestrrl.engines.profiles.measure import MeasurementInputs, measure
from orchestrrl.engines.vllm import VllmEngine
from orchestrrl.lab.sim.engines import EngineKind
from orchestrrl.lab.sim.static import run_static
from orchestrrl.lab.sim.workload import SimRequest
from orchestrrl.lab.testbed.engines import LocalEngine, start_vllm
from planner.cost.profile import EngineProfile, Parallelism
from planner.model import ConfigurationId, RequestId
from tests.vllm.conftest import VLLM_PLUGIN, VLLM_PYTHON

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WITHIN = 0.10
# If the machine's load changes between the measurement and the step, repeat both.
TRIES = 3
# Steps with requests for at least 32 tokens take 30 ms longer, so that other load matters little.
# The least number of tokens in a batch of a measurement.
SLOW_STEPS = "32:0.03"
SEATS = 4
# A short context, so that the measurement takes seconds. Blocks have 128 tokens.
ARGUMENTS = ("--max-model-len", "1024", "--num-gpu-blocks-override", "40", "--no-enable-prefix-caching")
BUDGET_S = 60.0
# Requests of all sizes: seats become free at different times and are filled in the given order.
OUTPUT_TOKENS = (60, 240, 90, 180, 48, 150, 300, 75, 210, 120, 60, 330)
PROMPT_TOKENS = 24


@pytest.fixture
async def server(tiny_model: Path, tmp_path: Path) -> AsyncIterator[LocalEngine]:
    started = await start_vllm(
        "fidelity",
        python=VLLM_PYTHON,
        model=tiny_model,
        log_dir=tmp_path,
        max_num_seqs=SEATS,
        arguments=(*ARGUMENTS, "--logits-processors", "slow_steps:SlowSteps"),
        environment={"PYTHONPATH": str(VLLM_PLUGIN), "ORCHESTRRL_TEST_SLOW_STEPS": SLOW_STEPS},
    )
    yield started
    await started.stop()


async def test_simulated_step_matches_vllm(server: LocalEngine, tiny_model: Path) -> None:
    for attempt in range(TRIES):
        profile = await profile_of(server)
        simulated = run_static(EngineKind(profile), [requests()])
        finish_s = await step_on(server, tiny_model.name)
        off = simulated.makespan_s / max(finish_s) - 1
        took = f"{max(finish_s):.2f} s, simulated {simulated.makespan_s:.2f} s, off {off:+.1%}"
        half = f"half done {median(finish_s):.2f} s, simulated {median(simulated.finish_s):.2f} s"
        print(f"try {attempt + 1}: {told(profile)}; {took}; {half}", flush=True)
        if abs(off) <= WITHIN:
            break
    assert simulated.makespan_s == pytest.approx(max(finish_s), rel=WITHIN)


async def profile_of(server: LocalEngine) -> EngineProfile:
    engine = VllmEngine(server.url, timeout_s=100)
    wanted = MeasurementInputs(
        ConfigurationId("tp1"), Parallelism(), 45.0, "command line", "2026-01-31", budget_s=BUDGET_S
    )
    try:
        return (await measure(engine, wanted, WallClock())).engine
    finally:
        await engine.close()


def requests() -> list[SimRequest]:
    return [
        SimRequest(RequestId(f"r{place:02d}"), f"p{place:02d}", PROMPT_TOKENS, tokens, place, tokens)
        for place, tokens in enumerate(OUTPUT_TOKENS)
    ]


async def step_on(server: LocalEngine, model: str) -> list[float]:
    """Send all requests at once, in order; return the seconds until each answer, ascending."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        began_s = time.monotonic()

        async def ask(request: SimRequest) -> float:
            prompt = [(11 * request.group_index + place) % 256 for place in range(request.prompt_tokens)]
            body = {"model": model, "prompt": prompt, "max_tokens": request.output_tokens, "ignore_eos": True}
            async with session.post(f"{server.url}/v1/completions", json=body) as response:
                answer = await response.json()
                assert response.status == 200, answer
            assert answer["usage"]["completion_tokens"] == request.output_tokens
            return time.monotonic() - began_s

        return sorted(await asyncio.gather(*(ask(request) for request in requests())))


def told(profile: EngineProfile) -> str:
    steps = ", ".join(f"{1e3 * profile.step.at(count, 0):.1f} ms at {count}" for count in (1, 4))
    return f"steps {steps}, fit within {profile.provenance.fit_error_mean:.1%} of {profile.provenance.samples} batches"
