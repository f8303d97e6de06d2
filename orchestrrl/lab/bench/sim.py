"""What simulating a large generation step costs, the real control plane in the loop."""

import time

from orchestrrl.lab.bench.figure import Figure
from orchestrrl.lab.sim.controlled import ControlledRun
from orchestrrl.lab.sim.run import steps_of, usable_kinds
from orchestrrl.lab.sim.scenario import GenerationScenario, load_scenario

SCENARIO, SEED, ARM, INITIAL = "scale", 1, "both", "tp2"
AIM_S = 30.0


def sim_step() -> list[Figure]:
    """A step of the size of the paper's figure 20, against one of half that size."""
    whole, half, warm_up = (_run(_shrunk(load_scenario(SCENARIO), divisor)) for divisor in (1, 2, 64))
    _, half_s, whole_s = (_cpu_s(run) for run in (warm_up, half, whole))
    gpus, requests = whole.scenario.gpus, len(whole.steps[0])
    note = f"{requests:,} requests on {gpus:,} GPUs, planning and balancing; the aim is {AIM_S:g} s"
    return [Figure("sim_step", whole_s, "s", "half the fleet, half the requests", half_s, note)]


def _cpu_s(run: ControlledRun) -> float:
    started_s = time.process_time()
    run.run(lambda *_: None)
    return time.process_time() - started_s


def _shrunk(scenario: GenerationScenario, divisor: int) -> GenerationScenario:
    workload = scenario.workload.model_copy(update={"prompts": scenario.workload.prompts // divisor})
    return scenario.model_copy(update={"gpus": scenario.gpus // divisor, "workload": workload})


def _run(scenario: GenerationScenario) -> ControlledRun:
    kinds = usable_kinds(scenario)
    initial = next(name for name in kinds if name == INITIAL)
    return ControlledRun(scenario, kinds, initial, ARM, SEED, steps_of(scenario, SEED))
