"""What simulating a large generation step costs, the real control plane in the loop."""

from orchestrrl.bench.figure import Figure, side_by_side
from orchestrrl.sim.controlled import ControlledRun
from orchestrrl.sim.run import steps_of, usable_kinds
from orchestrrl.sim.scenario import Scenario, load_scenario

SCENARIO, SEED, ARM, INITIAL = "scale", 1, "both", "tp2"
AIM_S = 30.0


def sim_step() -> list[Figure]:
    """A step of the size of the paper's figure 20, against one of half that size."""
    whole, half = (_run(_shrunk(load_scenario(SCENARIO), divisor)) for divisor in (1, 2))
    whole_s, half_s = side_by_side(lambda: whole.run(lambda *_: None), lambda: half.run(lambda *_: None), repetitions=1)
    gpus, requests = whole.scenario.gpus, len(whole.steps[0])
    note = f"{requests:,} requests on {gpus:,} GPUs, planning and balancing; the aim is {AIM_S:g} s"
    return [Figure("sim_step", whole_s, "s", "half the fleet, half the requests", half_s, note)]


def _shrunk(scenario: Scenario, divisor: int) -> Scenario:
    workload = scenario.workload.model_copy(update={"prompts": scenario.workload.prompts // divisor})
    return scenario.model_copy(update={"gpus": scenario.gpus // divisor, "workload": workload})


def _run(scenario: Scenario) -> ControlledRun:
    kinds = usable_kinds(scenario)
    initial = next(name for name in kinds if name == INITIAL)
    return ControlledRun(scenario, kinds, initial, ARM, SEED, steps_of(scenario, SEED))
