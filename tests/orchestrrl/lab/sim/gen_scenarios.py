"""Builders of small generation scenarios for tests."""

from typing import Any

from orchestrrl.lab.sim.engines import EngineKind, kinds_of
from orchestrrl.lab.sim.scenario import GenerationScenario, parse_scenario
from planner.model import ConfigurationId

TEXT = """
name: small
seeds: [1]
gpus: 8
gpus_per_node: 4
workload:
  prompts: 8
  samples: 4
  prompt_tokens: [16, 64]
  max_tokens: 2000
  lengths: {kind: lognormal, median_tokens: 300, sigma: 1.0}
  correlation: 0.5
engines:
  configurations:
    - {id: narrow, gpus: 1, alpha_s: 0.02, beta_s: 1.0e-4, gamma_s: 1.0e-7, kv_capacity_tokens: 8192, max_sequences: 16,
       prefill_tokens_per_s: 9000, switch_s: 1.0}
    - {id: wide, gpus: 4, alpha_s: 0.012, beta_s: 1.0e-4, gamma_s: 2.5e-8, kv_capacity_tokens: 40960, max_sequences: 64,
       prefill_tokens_per_s: 36000, switch_s: 2.0}
daemon:
  mode: act
  slow: {interval_s: 10.0, epsilon_s: 1.0, cooldown_s: 5.0, max_output_tokens: 2000, work_budget: 100}
"""


def scenario(**changes: Any) -> GenerationScenario:
    return parse_scenario(TEXT).model_copy(update=changes)


def kinds(of: GenerationScenario) -> dict[ConfigurationId, EngineKind]:
    return kinds_of(of)
