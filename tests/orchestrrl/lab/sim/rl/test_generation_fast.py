"""Tests of the fast loop against the full simulation with agents, gateway and journal."""

import pytest

from orchestrrl.lab.sim.rl.generation_fast import run_fast
from orchestrrl.lab.sim.run import ControlledRun, steps_of
from planner.model import ConfigurationId
from tests.orchestrrl.lab.sim.gen_scenarios import kinds, scenario


def of(arm: str, initial: str) -> ControlledRun:
    small = scenario()
    return ControlledRun(small, kinds(small), ConfigurationId(initial), arm, 1, steps_of(small, 1))


@pytest.mark.parametrize("arm", ["planning", "balancing", "both", "oracle"])
@pytest.mark.parametrize("initial", ["narrow", "wide"])
def test_fast_loop_agrees_with_the_full_simulation(arm: str, initial: str) -> None:
    run = of(arm, initial)
    whole = run.run(lambda _label, _done, _total: None)
    (quick,) = run_fast(run)
    assert quick.makespan_s == pytest.approx(whole.makespan_s[0], rel=0.05)
    assert quick.output_tokens == whole.output_tokens
    assert quick.engines_started == whole.redeployments


def test_fast_loop_is_complete_and_deterministic() -> None:
    run = of("both", "narrow")
    (once,), (again,) = run_fast(run), run_fast(run)
    assert once == again
    assert len(once.finish_s) == len(run.steps[0])
    assert once.output_tokens == sum(request.output_tokens for request in run.steps[0])
