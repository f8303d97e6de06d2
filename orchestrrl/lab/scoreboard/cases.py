"""Build the clusters of sections 6 and 7 of the OrchestrRL paper as scenarios, and measure their stages on a fabric.

Unlike in `orchestrrl sim run`, computation hides a part of the tensor-parallel communication.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestrrl.lab.scoreboard import constants as given
from orchestrrl.lab.sim.cost import network_cost_usd
from orchestrrl.lab.sim.net.fabrics.base import FabricStage, SimulatedFailures
from orchestrrl.lab.sim.rl.loop import FixedTimes, SampleBatch, SyncTime, run_loop
from orchestrrl.lab.sim.rl.model import GenStage, SyncStage, TrainStage
from orchestrrl.lab.sim.rl.scenario import ClusterFabricSection, ClusterScenario, scenario_of
from orchestrrl.lab.sim.rl.stages import ArmTimes, FabricStages
from orchestrrl.lab.sim.train.model import MEGATRON, TrainJob

NAMES = {
    "fat_tree": "fat tree",
    "oversubscribed": "3:1 fat tree",
    "rail_optimized": "rail-optimised",
    "topoopt": "TopoOpt",
    "mixnet": "MixNet",
    "rfabric": "RFabric",
    "lone": "fat tree with one server and three uplinks per ToR",
}
FABRICS = tuple(NAMES)[:-1]
# A ToR with this many ports has 8 downwards, to one server's NICs, and 3 upwards: no two servers share a ToR.
LONE_RADIX = 11


def training_of(text: str) -> dict[str, Any]:
    """Parse the text of a training section, such as `tp8 pp2`, into its options. A name without a number enables the
    option of that name."""
    names = {word.rstrip("0123456789"): word for word in text.split()}
    return {name: int(word[len(name) :]) if word != name else True for name, word in names.items()}


_MODELS = {
    "qwen2.5-14b": ("Qwen2.5-14B", given.TRAIN_14B),
    "qwen2.5-32b": ("Qwen2.5-32B", given.TRAIN_32B),
    "qwen2-57b-a14b": ("Qwen2-57B-A14B", given.TRAIN_57B),
    "qwen2.5-72b": ("Qwen2.5-72B", given.TRAIN_72B),
    "qwen3-235b-a22b": ("Qwen3-235B-A22B", given.TRAIN_235B),
}
TITLES = {name: title for name, (title, _) in _MODELS.items()}
TRAINING = {name: training_of(training.value) for name, (_, training) in _MODELS.items()}
# The number of training GPUs is a multiple of this: a replica, or the ranks over which experts are spread.
UNITS = {"qwen2-57b-a14b": 16, "qwen2.5-72b": 48, "qwen3-235b-a22b": 32}
LOOPED = 8  # steps of the simulated loop, whose second half is steady


@dataclass(frozen=True)
class Case:
    """A model on a cluster of the paper, with its workload."""

    model: str
    train_gpus: int
    gen_gpus: int
    prompts: int
    max_tokens: int
    layouts: tuple[str, ...]
    nic_gbps: float = given.NIC_GBPS.value
    steps: int = 1  # generation steps; the forecast learns in the first ones
    fast_interval_s: float = given.FAST_INTERVAL_S.value
    kv_transfer: bool = True
    initial: str | None = None
    admission: bool = True  # otherwise engines change at any gain
    updates: int = 1  # optimiser steps per step

    @property
    def gpus(self) -> int:
        return self.train_gpus + self.gen_gpus

    def scenario(self, fabrics: Sequence[str] = FABRICS) -> ClusterScenario:
        return scenario_of(
            {
                "name": f"{TITLES[self.model]} on {self.gpus} GPUs",
                "seeds": [1],
                "model": self.model,
                "gpu": given.GPU.value,
                "cluster": {"train_gpus": self.train_gpus, "gen_gpus": self.gen_gpus, "nic_gbps": self.nic_gbps},
                "fabrics": list(fabrics),
                "training": self._training(),
                "generation": self._generation(),
                "weight_sync": {"scheme": "tree", "holds": "engines"},
                "loop": {"mode": "one_step_async", "steps": self.steps, "warmup_steps": 0},
                "daemon": self._daemon(),
            }
        )

    def _training(self) -> dict[str, Any]:
        passes = given.LOG_PROB_PASSES.value
        return {**TRAINING[self.model], "log_prob_passes": passes, "updates": self.updates}

    def _generation(self) -> dict[str, Any]:
        return {
            "engine": "paper",
            "layouts": list(self.layouts),
            "initial": self.initial,
            "kv_transfer": self.kv_transfer,
            "arms": ["verl_to"],
            "workload": {
                "prompts": self.prompts,
                "samples": given.SAMPLES.value,
                "prompt_tokens": list(given.PROMPT_TOKENS.value),
                "max_tokens": self.max_tokens,
                "lengths": {
                    "kind": "lognormal",
                    "median_tokens": given.LENGTH_MEDIAN.value,
                    "sigma": given.LENGTH_SIGMA.value,
                },
                "correlation": given.CORRELATION.value,
            },
        }

    def _daemon(self) -> dict[str, Any]:
        slow_s = given.SLOW_INTERVAL_S.value
        admission = (
            {"epsilon_s": 5.0, "cooldown_s": 2 * slow_s} if self.admission else {"epsilon_s": 0.0, "cooldown_s": 0.0}
        )
        return {
            "mode": "act",
            "fast": {"interval_s": self.fast_interval_s, "stale_after_s": 20.0, "theta": 0.0001},
            "slow": {"interval_s": slow_s, "stale_after_s": 20.0, **admission, "max_output_tokens": self.max_tokens},
        }


TRAIN_CONSTANTS = replace(MEGATRON, tp_hidden_share=given.TP_HIDDEN.value)


@dataclass(frozen=True, slots=True)
class SteadyStep:
    """The stages of a step in the steady state, the throughput of the one-step asynchronous loop, and the cost of the
    network in US dollars."""

    gen: GenStage
    train: TrainStage
    sync: SyncStage
    job: TrainJob
    samples_per_s: float
    network_usd: float


def stages_of(scenario: ClusterScenario, kind: str, **options: object) -> FabricStages:
    """Return the stages of a scenario on a fabric of the given `kind`, one of NAMES. `options` are options of the
    fabric."""
    if kind == "lone":
        kind, options = "oversubscribed", {"radix": LONE_RADIX}
    return FabricStages(scenario, ClusterFabricSection(kind=kind, options=dict(options)), TRAIN_CONSTANTS)


def measured(stages: FabricStages, arm: str = "verl_to", seed: int = 1) -> SteadyStep:
    """Return the steady step of a loop that repeats the scenario's last generation step. Each step finishes as many
    samples as it begins, even if the original step finished more (partial rollout also finishes samples of the previous
    step)."""
    times = ArmTimes(stages, arm, seed)
    gen, sync = times.healthy[-1], times.sync_stage(SimulatedFailures())
    job = times.job(gen.samples)
    train = stages.training(SimulatedFailures(), job)
    rate = _samples_per_s(stages.scenario, gen, train, sync, times.sync)
    return SteadyStep(gen, train, sync, job, rate, network_usd(stages))


def retrained(found: SteadyStep, stages: FabricStages) -> SteadyStep:
    """Return `found` with its training stage replaced by that of `stages`, which may have a different number of GPUs or
    of optimiser steps. The generation and sync stages are unchanged. The sync is assumed to run alone on the network.
    """
    job = replace(found.job, layout=stages.scenario.train_layout)
    train = stages.training(SimulatedFailures(), job)
    rate = _samples_per_s(stages.scenario, found.gen, train, found.sync)
    return SteadyStep(found.gen, train, found.sync, job, rate, network_usd(stages))


Syncing = Callable[[int, float, tuple[FabricStage, ...]], SyncTime]  # version, begin, concurrent stages


@dataclass(frozen=True, slots=True)
class _Beside(FixedTimes):
    """Stage times that are fixed, except that the time of a sync depends on the concurrent stages."""

    syncing: Syncing

    def sync(self, version: int, begin_s: float, beside: tuple[FabricStage, ...]) -> SyncTime:
        return self.syncing(version, begin_s, beside)


def _samples_per_s(
    scenario: ClusterScenario, gen: GenStage, train: TrainStage, sync: SyncStage, syncing: Syncing | None = None
) -> float:
    """Return the steady throughput in samples per second. If `syncing` is None, the time of a sync does not depend on
    concurrent stages."""
    alike = [gen.seconds] * LOOPED, [train.seconds] * LOOPED, [sync.seconds] * LOOPED
    steady = FixedTimes(*alike) if syncing is None else _Beside(*alike, syncing)
    batches = [SampleBatch(gen.samples, gen.samples)] * LOOPED
    return run_loop(scenario.rules(), batches, steady, warmup_steps=LOOPED // 2).samples_per_s


def network_usd(stages: FabricStages) -> float:
    return sum(network_cost_usd(stages.fabric.inventory(), stages.scenario.servers.nic_gbps).values())


def at_scale(model: str, train_gpus: int, gpus: int, layouts: tuple[str, ...]) -> Case:
    """Return a case of the paper's section 7. The number of requests is proportional to the number of generation
    GPUs."""
    generating = gpus - train_gpus
    prompts = generating * given.REQUESTS_PER_GPU.value // given.SAMPLES.value
    return Case(model, train_gpus, generating, prompts, given.MAX_TOKENS_AT_SCALE.value, layouts, fast_interval_s=5.0)


def balanced(model: str, gpus: int, layouts: tuple[str, ...]) -> Case:
    """Return a case that divides the GPUs so that training and generation take about the same time on a fat tree."""
    unit = UNITS[model]
    pilot = at_scale(model, max(unit, round(gpus * given.PILOT_SHARE.value / unit) * unit), gpus, layouts)
    found = measured(stages_of(pilot.scenario(), "fat_tree"))
    train_s_alike = found.train.seconds * pilot.train_gpus / pilot.gen_gpus  # with equal numbers of GPUs
    wanted = gpus / (1 + found.gen.seconds / train_s_alike)
    return at_scale(model, max(unit, round(wanted / unit) * unit), gpus, layouts)
