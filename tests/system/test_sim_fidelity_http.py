"""A generation step of the simulator against the same requests on simulated engines over HTTP: makespans agree within
10 %. docs/fidelity.md has the figures."""

import asyncio
from pathlib import Path
from statistics import median

import pytest
from http_step import HttpStep, Prompt, controlled, engines

from orchestrrl.lab.sim.engines import EngineKind, kinds_of
from orchestrrl.lab.sim.run import ControlledRun
from orchestrrl.lab.sim.scenario import GenerationScenario, parse_scenario
from orchestrrl.lab.sim.static import dealt, run_static
from orchestrrl.lab.sim.workload import SimRequest
from orchestrrl.lab.simulated_engine.options import SimulatedOptions
from orchestrrl.lab.simulated_engine.tokens import LengthModel, TokenModel
from planner.model import ConfigurationId, RequestId

WITHIN = 0.10
ENGINES, PROMPTS, SAMPLES, MAX_TOKENS, PROMPT_TOKENS = 4, 40, 4, 1200, 48
LENGTHS = LengthModel((0.0, 0.5, 0.9, 1.0), (40, 300, 700, MAX_TOKENS - 1), correlation=0.8)
ALPHA_S, BETA_S, GAMMA_S, PREFILL_TOKENS_PER_S = 0.02, 8e-4, 4e-7, 9000.0
SEATS, KV_TOKENS = 8, 16384
TEXT = f"""
name: over http
gpus: {ENGINES}
workload:
  prompts: {PROMPTS}
  samples: {SAMPLES}
  prompt_tokens: [{PROMPT_TOKENS}, {PROMPT_TOKENS}]
  max_tokens: {MAX_TOKENS}
  lengths: {{kind: lognormal, median_tokens: 300, sigma: 1.0}}
engines:
  configurations:
    - {{id: tp1, gpus: 1, alpha_s: {ALPHA_S}, beta_s: {BETA_S}, gamma_s: {GAMMA_S}, max_sequences: {SEATS},
       kv_capacity_tokens: {KV_TOKENS}, prefill_tokens_per_s: {PREFILL_TOKENS_PER_S}, switch_s: 10.0}}
daemon:
  slow: {{max_output_tokens: {MAX_TOKENS}}}
"""
OPTIONS = SimulatedOptions(
    alpha_s=ALPHA_S,
    beta_s=BETA_S,
    gamma_s=GAMMA_S,
    prefill_tokens_per_s=PREFILL_TOKENS_PER_S,
    max_num_seqs=SEATS,
    kv_capacity_tokens=KV_TOKENS,
    max_model_len_tokens=MAX_TOKENS + PROMPT_TOKENS,
    lengths=LENGTHS,
    tick_s=0.1,
)
KIND = ConfigurationId("tp1")


@pytest.fixture(scope="module")
def scenario() -> GenerationScenario:
    return parse_scenario(TEXT)


@pytest.fixture(scope="module")
def kind(scenario: GenerationScenario) -> EngineKind:
    return kinds_of(scenario)[KIND]


def prompts(pinned: bool) -> list[Prompt]:
    """Return prompts whose samples differ only in the last token. Their lengths are determined by the prompt."""
    made = []
    for prompt in range(PROMPTS):
        common = tuple((7 * prompt + 3 * place) % 256 for place in range(PROMPT_TOKENS - 1))
        for sample in range(SAMPLES):
            to = prompt % ENGINES if pinned else None
            ids = (*common, sample)
            made.append(Prompt(f"p{prompt:03d}-{sample}", f"p{prompt:03d}", ids, MAX_TOKENS, to))
    return made


def same_requests() -> list[SimRequest]:
    """Return the simulator's requests for these prompts."""
    model = TokenModel(OPTIONS.vocab_size, OPTIONS.lengths, OPTIONS.seed)
    requests = []
    for each in prompts(pinned=False):
        length = min(MAX_TOKENS, model.begin(each.prompt_ids).answer_tokens)
        place = int(each.group[1:])
        requests.append(SimRequest(RequestId(each.id), each.group, PROMPT_TOKENS, length, place, MAX_TOKENS))
    return requests


def check(over_http: HttpStep, simulated_s: float) -> None:
    assert over_http.tokens == {str(request.id): request.output_tokens for request in same_requests()}
    assert over_http.makespan_s == pytest.approx(simulated_s, rel=WITHIN)


async def test_static_fleet_matches_the_simulator(kind: EngineKind) -> None:
    simulated = run_static(kind, dealt(same_requests(), ENGINES))
    async with engines(OPTIONS, ENGINES) as harness:
        over_http = await harness.run_step(prompts(pinned=True))
    check(over_http, simulated.makespan_s)
    # Each response, by its position in the order of finishing.
    assert sorted(over_http.finish_s.values()) == pytest.approx(simulated.finish_s, rel=WITHIN, abs=1.0)


def test_moved_requests_match_the_simulator(scenario: GenerationScenario, kind: EngineKind, tmp_path: Path) -> None:
    """The real gateway, agent and daemon with its fast loop are compared with the arm `balancing`."""
    run = ControlledRun(scenario, {KIND: kind}, KIND, "balancing", 1, [same_requests()])
    simulated = run.run(lambda *_: None)

    async def step() -> HttpStep:
        async with controlled(OPTIONS, ENGINES, run.config(), scenario.control, tmp_path) as harness:
            return await harness.run_step(prompts(pinned=False))

    over_http = asyncio.run(step())
    assert simulated.moves > 0
    assert over_http.moves > 0
    check(over_http, simulated.makespan_s[0])
    half_done_s = median(at_s for at_s, _ in simulated.remaining[1:])
    assert median(over_http.finish_s.values()) == pytest.approx(half_done_s, rel=WITHIN)
