"""Tests of the paper's scenarios: their curves have the shape that the paper describes (its figures 9 to 11)."""

from pathlib import Path

import pytest

from orchestrrl.lab.sim.run import ScenarioOutcome, run_scenario
from orchestrrl.lab.sim.scenario import GenerationScenario, load_scenario

SCENARIOS = sorted(Path(__file__).with_name("scenarios").glob("*.yaml"))


def smaller(scenario: GenerationScenario) -> GenerationScenario:
    """Return the scenario with one step, no warm-up, and a small search budget."""
    workload = scenario.workload.model_copy(update={"steps": 1, "warmup_steps": 0})
    slow = {**scenario.daemon["slow"], "work_budget": 100, "scenarios": 2}
    return scenario.model_copy(update={"workload": workload, "daemon": {**scenario.daemon, "slow": slow}})


def ran(path: Path, *arms: str) -> ScenarioOutcome:
    return run_scenario(smaller(load_scenario(str(path))), arms, [1], lambda *_: None)


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_static_baselines_have_the_papers_order(path: Path) -> None:
    outcome = ran(path, "verl_to", "verl_lo", "partial_rollout", "packed_known")
    tuned, widest, partial, packed = outcome.arms
    assert widest.configuration == "tp8"
    assert tuned.makespan_s <= widest.makespan_s
    # Cutting the tail off delivers more samples per second, at the price of staleness.
    assert (outcome.gain(partial) or 0) > 1.05
    assert packed.makespan_s <= tuned.makespan_s
    # The widest fleet is slower in the dense phase: it has more requests left when half of the tuned fleet's are done.
    half = len(tuned.seeds[0].remaining) // 2
    at_s = tuned.seeds[0].remaining[half][0]
    left = [count for when_s, count in widest.seeds[0].remaining if when_s <= at_s][-1]
    assert tuned.configuration == "tp8" or left >= tuned.seeds[0].remaining[half][1]


@pytest.mark.parametrize("path", SCENARIOS[:1], ids=lambda path: path.stem)
def test_orchestrrl_arms_are_no_slower_than_the_tuned_baseline(path: Path) -> None:
    outcome = ran(path, "verl_to", "balancing_paper", "both")
    _, balancing, both = outcome.arms
    assert (outcome.gain(balancing) or 0) > 0.98
    assert (outcome.gain(both) or 0) > 0.98
