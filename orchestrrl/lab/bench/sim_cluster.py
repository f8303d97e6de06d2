"""What simulating a whole RL cluster costs: training, generation under planner and balancer, and weight sync."""

import time

from orchestrrl.lab.bench.figure import Figure
from orchestrrl.lab.sim.rl.run import run_arm
from orchestrrl.lab.sim.rl.scenario import ClusterScenario
from orchestrrl.lab.sim.rl.scenario_file import load_cluster_scenario
from orchestrrl.lab.sim.rl.stages import FabricStages

SCENARIOS = ("cluster64", "cluster512", "cluster2048")
FABRIC, ARM, SEED = "rfabric", "both", 1


def sim_cluster() -> list[Figure]:
    """The built-in scenarios; the first is run once more before, so that compiled code is loaded."""
    scenarios = [load_cluster_scenario(name) for name in SCENARIOS]
    _seconds(scenarios[0])
    return [_figure(scenario) for scenario in scenarios]


def _figure(scenario: ClusterScenario) -> Figure:
    wall_s, simulated_s = _seconds(scenario)
    gpus = scenario.cluster.gpus
    gpu_s = gpus * simulated_s
    note = (
        f"{gpu_s / wall_s:,.0f} simulated GPU-seconds for a second of wall time: {scenario.loop.steps} steps of"
        f" {scenario.samples:,} samples on {FABRIC}, arm {ARM}"
    )
    return Figure(f"sim_cluster_{gpus}_gpus", wall_s, "s", "GPU-seconds that are simulated", gpu_s, note)


def _seconds(scenario: ClusterScenario) -> tuple[float, float]:
    """Wall, and simulated."""
    section = next(each for each in scenario.fabrics if each.kind == FABRIC)
    began_s = time.perf_counter()
    result = run_arm(FabricStages(scenario, section), ARM, SEED)
    return time.perf_counter() - began_s, result.run.seconds
