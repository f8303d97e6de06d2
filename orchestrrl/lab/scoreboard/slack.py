"""Figure 5: the windows between collectives in generation, in training and between weight syncs."""

from statistics import median

from orchestrrl.lab.scoreboard import constants as given
from orchestrrl.lab.scoreboard.cases import measured
from orchestrrl.lab.scoreboard.generation import section_2
from orchestrrl.lab.scoreboard.model import ScoreboardRow
from orchestrrl.lab.scoreboard.rows import beyond, compared
from orchestrrl.lab.sim.net.fabrics.base import SimulatedFailures

COLLECTIVES_OF_A_LAYER = 2  # of TP, in a decode iteration


def slack(quick: bool) -> list[ScoreboardRow]:
    """Section 2's job: Qwen2.5-14B on 72 GPUs."""
    _, gen_gpus = given.WORKLOAD_GPUS.value
    stages = section_2(given.BATCH.value // given.SAMPLES.value, given.MAX_TOKENS.value[0])
    found = measured(stages)
    (engine,) = stages.ready(SimulatedFailures()).profile.configurations
    alive = given.BATCH.value / (gen_gpus // 8) / 2  # half of the batch left, the median moment
    iteration_s = engine.step.at(alive, alive * given.LENGTH_MEDIAN.value)
    gen_s = iteration_s / (COLLECTIVES_OF_A_LAYER * stages.scenario.model_value.layers)
    windows_s = [each.length_s for each in found.train.update.windows]
    idle_s = found.gen.seconds - found.sync.seconds
    why = "between sends of the pipeline and of gradients alone: TP stays within a server, and meets no circuit"
    most = beyond("the longest window of an optimiser step", max(windows_s), "s", figure="Figure 5")
    return [
        compared("Figure 5", "TP in generation: median slack", "slack.gen_tp_median_s", gen_s, unit="s"),
        compared("Figure 5", "training: median window", "slack.train_window_s", median(windows_s), why, "s"),
        most,
        compared("Figure 5", "between two weight syncs", "slack.weight_sync_idle_s", idle_s, unit="s"),
    ]
