"""Whole steps under a daemon without a configured fleet: engines report a model and a GPU, correctly or not."""

from dataclasses import replace
from pathlib import Path

from orchestrrl.daemon.configuration import parse_config
from orchestrrl.daemon.planning import Planning
from orchestrrl.engines.serving import ServingFacts
from orchestrrl.fleet.state import EngineFacts
from orchestrrl.lab.sim.engines import EngineKind, fleet_section, homogeneous, kinds_of
from orchestrrl.lab.sim.run import steps_of
from orchestrrl.lab.sim.scenario import GenerationScenario, parse_scenario
from orchestrrl.lab.sim.world import World
from planner.cost.engines import ENGINES
from planner.cost.hardware import GPUS
from planner.cost.models import MODELS
from planner.cost.predict import predict
from planner.model import FastPolicy, Parallelism

MODEL = "qwen2.5-14b"
ON_H200 = ServingFacts(model=f"Qwen/{MODEL}", tp=1, gpu="NVIDIA H200")
ON_A100 = replace(ON_H200, gpu="NVIDIA A100-SXM4-80GB")
UNKNOWN = ServingFacts(model="someone/their-own-model", gpu="NVIDIA L40S", tp=1)

# Engines hold fewer requests than they get, and answers are heavy-tailed: the placement of requests matters.
SCENARIO = """
name: implicit
gpus: 4
gpus_per_node: 4
workload: {prompts: 24, samples: 8, prompt_tokens: [64, 256], max_tokens: 6000, correlation: 0.6,
           lengths: {kind: lognormal, median_tokens: 700, sigma: 1.1}}
engines:
  configurations:
    - {id: tp1, gpus: 1, alpha_s: 0.02, beta_s: 1.0e-4, gamma_s: 1.0e-7, kv_capacity_tokens: 60000, max_sequences: 48,
       prefill_tokens_per_s: 9000, switch_s: 1.0}
daemon:
  mode: act
  slow: {interval_s: 10.0, max_output_tokens: 6000}
"""


def a100(kind: EngineKind, facts: ServingFacts) -> EngineKind:
    """Return a scenario of engines that really are MODEL on an A100, with the scenario's KV capacity. They report
    `facts`."""
    profile = predict(MODELS[MODEL], GPUS["a100"], Parallelism(), ENGINES["vllm"])
    room = {"kv_capacity_tokens": kind.profile.kv_capacity_tokens, "max_sequences": kind.profile.max_sequences}
    return replace(kind, profile=replace(profile, id=kind.id, switch_s=1.0, **room), serving=facts)


class ImplicitWorld(World):
    """A world whose daemon has no configuration of its engines, which report `facts`."""

    def __init__(self, scenario: GenerationScenario, journal: Path, facts: ServingFacts, policy: FastPolicy) -> None:
        reported = kinds_of(scenario)
        real = {id: a100(kind, facts) for id, kind in reported.items()}
        config = scenario.daemon_config(fleet_section(scenario, reported))
        config = config.model_copy(update={"fast": config.fast.model_copy(update={"policy": policy})})
        super().__init__(config, real, scenario, journal)
        bare = config.model_copy(update={"fleet": parse_config("").fleet})
        self.fleet.planning = self.control_plane.planning = Planning(bare, lambda *_: None, lambda: "2026-01-31")
        (name,) = real
        self.placements = homogeneous(real[name], scenario.gpus, scenario.gpus_per_node)
        self.deploy(name, self.placements)

    async def __aenter__(self) -> "ImplicitWorld":
        await super().__aenter__()
        for engine, gpus in self.placements.items():
            self.control_plane.fleet.state.add_engine(EngineFacts(engine, self.engines[engine].url, gpus=gpus))
        return self


async def step_of(
    journal: Path, facts: ServingFacts, policy: FastPolicy = FastPolicy.PACKING, seed: int = 1
) -> tuple[float, ImplicitWorld]:
    """Run a step; return its makespan and the world after it."""
    scenario = parse_scenario(SCENARIO)
    world = ImplicitWorld(scenario, journal, facts, policy)
    (requests,) = steps_of(scenario, seed)
    ids = list(world.placements)
    # As a router distributes them that keeps a prompt's samples together.
    dealt = [ids[place // scenario.workload.samples % len(ids)] for place in range(len(requests))]
    async with world:
        step = await world.run_step(requests, dealt)
    return max(step.finish_s) - step.started_s, world
