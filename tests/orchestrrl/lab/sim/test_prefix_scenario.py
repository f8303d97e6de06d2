"""Tests of scenarios with prefix caching: a prompt whose samples share an engine is prefilled once."""

from orchestrrl.lab.sim.scenario import GenerationScenario, parse_scenario
from orchestrrl.lab.sim.static import dealt, run_static
from orchestrrl.lab.sim.workload import requests_of_step
from planner.model import ConfigurationId
from tests.orchestrrl.lab.sim.gen_scenarios import TEXT, kinds


def with_long_prompts(caching: bool) -> GenerationScenario:
    text = TEXT.replace("[16, 64]", "[512, 1024]").replace("engines:\n", f"engines:\n  prefix_caching: {caching}\n")
    return parse_scenario(text)


def test_prefix_caching_shortens_a_step() -> None:
    makespans_s = {}
    for caching in (False, True):
        scenario = with_long_prompts(caching)
        kind = kinds(scenario)[ConfigurationId("wide")]
        assert kind.shape.prefix_caching is caching
        requests = requests_of_step(scenario.workload, 1, 0)
        makespans_s[caching] = run_static(kind, dealt(requests, 2)).makespan_s
    assert makespans_s[True] < makespans_s[False]
