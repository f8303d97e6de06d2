"""Compute the stages of a scenario on one fabric, for each set of network failures. Each result is computed once.

The traffic of training is assumed not to interfere with that of generation, because the two stages use separate servers
or alternate. Weight sync shares links with both stages if they continue during the sync. Weights are sent to the fleet
of the tuned static baseline. A failed engine, or a failed server that generates, reduces the generation speed by its
fraction of the generating GPUs. A failed server that trains is replaced (see faults.py).

Some fabrics are built for one job. TopoOpt's topology is computed from the job's expected traffic in a step and then
fixed (section 4 of the TopoOpt paper, NSDI 2023). The traffic consists of the collectives of optimiser steps, engines'
exchanges between servers, and weight sync.

The engines of a scenario, with their curves on a fabric, can be written as a daemon's configuration.
"""

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from orchestrrl.core.documents import dump_yaml
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.daemon.configuration import parse_config
from orchestrrl.engines.profiles.store import as_text
from orchestrrl.lab.sim.net.fabrics.base import NOTHING, FabricStage, SimulatedFabric, SimulatedFailures
from orchestrrl.lab.sim.net.fabrics.registry import options_of
from orchestrrl.lab.sim.net.model import GpuFlows
from orchestrrl.lab.sim.rl.faults import ClusterFaultSchedule, FaultyPart, stretched_s, with_lost_work_s
from orchestrrl.lab.sim.rl.generation import EnginesOnFabric, generation_stages
from orchestrrl.lab.sim.rl.generation_fleet import (
    Hardware,
    UniformFleet,
    deployed,
    leaves_servers,
    token_flows,
)
from orchestrrl.lab.sim.rl.loop import GenTime, SampleBatch, SyncTime
from orchestrrl.lab.sim.rl.model import GenStage, SyncStage, TrainStage
from orchestrrl.lab.sim.rl.scenario import ClusterFabricSection, ClusterScenario
from orchestrrl.lab.sim.rl.training import training_stage
from orchestrrl.lab.sim.rl.weight_sync import Beside, generation_beside, steps_of, sync_stage, training_beside
from orchestrrl.lab.sim.rl.weight_sync_shards import shards_of, site_of
from orchestrrl.lab.sim.train.iteration import forward_s, iteration
from orchestrrl.lab.sim.train.model import MEGATRON, TrainConstants, TrainingIteration, TrainJob
from orchestrrl.lab.sim.train.traffic import periods
from orchestrrl.lab.sim.workload import mean_tokens
from planner.cost.profile import EngineProfile


def fabric_for(
    scenario: ClusterScenario, section: ClusterFabricSection, constants: TrainConstants = MEGATRON
) -> SimulatedFabric:
    """Return the section's fabric. If the fabric's kind has the option `demand`, the fabric is built for the scenario's
    job. Raises ImpossibleSite with all faults of the section's options."""
    plain = scenario.fabric(section)
    if "demand" not in options_of(section.kind):
        return plain
    return scenario.fabric(section, demand=job_demand(scenario, plain, constants))


def job_demand(scenario: ClusterScenario, plain: SimulatedFabric, constants: TrainConstants = MEGATRON) -> GpuFlows:
    """Return the traffic of one step of the job. `plain` is the same fabric built without a demand. The weight sync in
    this traffic is planned on `plain`."""
    cluster, servers, tokens = scenario.cluster, scenario.servers, mean_tokens(scenario.generation.workload)
    job = scenario.train_job(scenario.loop.batch_samples or scenario.samples, tokens, constants=constants)
    parts = [
        period.demand.times(times)
        for size, times in scenario.training.shares(job.sequences)
        for period in periods(replace(job, sequences=size), servers)
    ]
    # The last layout that fits is used: the tuned layout is known only once the fabric is built.
    fleets = (deployed(each, cluster.generating, servers, plain.pods) for each in reversed(scenario.engine_layouts))
    if fleet := next((each for each in fleets if len(each)), None):
        shards = shards_of(job, fleet, servers.gpus_per_server)
        steps = steps_of(scenario.weight_sync.scheme, shards, site_of(plain.network(None)), servers)
        parts += [step.flows for step in steps]
        if leaves_servers(fleet, servers):
            parts.append(token_flows(fleet, scenario.model_value, servers).times(scenario.samples * tokens))
    return GpuFlows.joined(parts)


Made = TypeVar("Made")

TUNED = "verl_to"  # the arm of the static baseline with the shortest steps


@dataclass
class FabricStages:
    """The stages of a scenario on one fabric, computed once and shared by all arms and seeds."""

    scenario: ClusterScenario
    section: ClusterFabricSection
    constants: TrainConstants = MEGATRON
    _made: dict[Hashable, Any] = field(default_factory=dict)  # results by function and arguments

    @cached_property
    def fabric(self) -> SimulatedFabric:
        return fabric_for(self.scenario, self.section, self.constants)

    def without(self, failed: SimulatedFailures) -> SimulatedFabric:
        return self.fabric.without(failed) if failed != NOTHING else self.fabric

    def _once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        if key not in self._made:
            self._made[key] = make()
        made: Made = self._made[key]
        return made

    def ready(self, failed: SimulatedFailures) -> EnginesOnFabric:
        scenario = self.scenario

        def make() -> EnginesOnFabric:
            hardware = Hardware(scenario.model_value, scenario.gpu_value, scenario.engine_value)
            where, fabric = scenario.cluster.generating, self.without(failed)
            return EnginesOnFabric(
                scenario.generation, hardware, where, fabric, scenario.engine_layouts, scenario.daemon
            )

        return self._once(("ready", failed), make)

    def gen(self, failed: SimulatedFailures, arm: str, seed: int) -> tuple[GenStage, ...]:
        """Return the generation stage of each step. Raises ValueError if no path connects the GPUs of an engine."""
        key, steps = ("gen", failed, arm, seed), self.scenario.loop.steps
        return self._once(key, lambda: generation_stages(self.ready(failed), arm, seed, steps))

    def train(self, failed: SimulatedFailures, job: TrainJob) -> TrainingIteration:
        """Return the simulated optimiser step on the samples of `job`."""
        key = ("train", failed, job)
        return self._once(key, lambda: iteration(job, self.without(failed)))

    def training(self, failed: SimulatedFailures, job: TrainJob) -> TrainStage:
        """Return a training step on the job's samples: log-probability passes, then optimiser steps."""
        recipe = self.scenario.training

        def make() -> TrainStage:
            passes_s = forward_s(job, self.without(failed)) if recipe.log_prob_passes else 0.0
            return training_stage(job, recipe, lambda share: self.train(failed, share), passes_s)

        return self._once(("training", failed, job), make)

    def sync(
        self, failed: SimulatedFailures, fleet: UniformFleet, job: TrainJob, beside: tuple[Beside, ...] = ()
    ) -> SyncStage:
        part, key = self.scenario.weight_sync, ("sync", failed, fleet.parallelism, job, beside)
        return self._once(key, lambda: sync_stage(job, fleet, self.without(failed), part.scheme, beside=beside))

    def training_sends(self, job: TrainJob) -> Beside:
        """Return the mean traffic of training, in bytes per second."""
        seconds = self.training(NOTHING, job).seconds
        recipe, servers = self.scenario.training, self.fabric.servers
        return self._once(("beside", job), lambda: training_beside(job, recipe, seconds, servers))

    def generation_sends(self, fleet: UniformFleet, tokens_per_s: float) -> Beside:
        """Return the traffic that the engines of `fleet` send on average, in bytes per second, if they process
        `tokens_per_s` together."""
        key, model = ("beside", fleet.parallelism, tokens_per_s), self.scenario.model_value
        return self._once(key, lambda: generation_beside(fleet, model, tokens_per_s, self.fabric.servers))

    def tuned(self, seed: int) -> EngineProfile:
        """Return the profile of the engines of the tuned static baseline."""
        (name,) = self.gen(NOTHING, TUNED, seed)[0].phases_s
        return next(each for each in self.ready(NOTHING).profile.configurations if str(each.id) == name)


@dataclass
class ArmTimes:
    """The durations of the loop's stages for one arm and seed, including the effects of faults. The class implements
    loop.Times."""

    stages: FabricStages
    arm: str
    seed: int

    @cached_property
    def healthy(self) -> tuple[GenStage, ...]:
        return self.stages.gen(NOTHING, self.arm, self.seed)

    @cached_property
    def batches(self) -> list[SampleBatch]:
        """The number of samples begun and finished in each step. The two numbers differ for arms that end steps
        early."""
        return [SampleBatch(self.stages.scenario.samples, each.samples) for each in self.healthy]

    @cached_property
    def tokens(self) -> float:
        """The mean number of tokens of a sample (prompt and answer) over all steps."""
        return fmean(each.sample_tokens for each in self.healthy)

    @cached_property
    def length_cv(self) -> float:
        """The coefficient of variation of the samples' lengths over all steps."""
        squares = fmean(each.sample_square_tokens for each in self.healthy)
        return math.sqrt(max(0.0, squares / self.tokens**2 - 1))

    @cached_property
    def fleet(self) -> UniformFleet:
        """The fleet to which weights are sent, which is that of the tuned static baseline."""
        fabric, where = self.stages.fabric, self.stages.scenario.cluster.generating
        return deployed(self.stages.tuned(self.seed).parallelism, where, fabric.servers, fabric.pods)

    def job(self, samples: int) -> TrainJob:
        return self.stages.scenario.train_job(samples, self.tokens, self.length_cv, self.stages.constants)

    def gen(self, step: int, begin_s: float) -> GenTime:
        seconds = stretched_s(self._schedule, begin_s, lambda now_s: self._gen_s(step, now_s))
        if self.stages.scenario.loop.batch_samples is None:
            return GenTime(seconds)
        longer = seconds / self.healthy[step].seconds
        return GenTime(seconds, tuple(at_s * longer for at_s in self.healthy[step].finish_s))

    def train(self, step: int, samples: int, begin_s: float) -> float:
        scenario = self.stages.scenario
        servers = range(scenario.cluster.train_gpus // scenario.cluster.gpus_per_server)

        def seconds(now_s: float) -> float:
            failed = self._schedule.network(now_s)
            return _or_never(failed, lambda: self.stages.training(failed, self.job(samples)).seconds)

        return with_lost_work_s(self._schedule, begin_s, seconds, servers, scenario.training.recovery_s)

    def sync(self, version: int, begin_s: float, beside: tuple[FabricStage, ...]) -> SyncTime:
        """Return the duration of a sync and the delays of the concurrent stages `beside`. Failures lengthen the sync,
        and the delays grow in proportion to the sync's duration."""

        def seconds(now_s: float) -> float:
            failed = self._schedule.network(now_s)
            return _or_never(failed, lambda: self.sync_stage(failed, beside).seconds)

        elapsed_s, whole = stretched_s(self._schedule, begin_s, seconds), self.sync_stage(NOTHING, beside)
        return SyncTime(
            elapsed_s, {stage: elapsed_s / whole.seconds * each_s for stage, each_s in whole.held_s.items()}
        )

    def sync_stage(self, failed: SimulatedFailures, beside: tuple[FabricStage, ...] = ()) -> SyncStage:
        """Return a sync that shares links with the traffic of the concurrent stages `beside`. If `beside` is empty, the
        sync runs alone."""
        job = self.job(self.batches[-1].finished)
        return self.stages.sync(failed, self.fleet, job, tuple(self._sends(stage, job) for stage in beside))

    def _sends(self, stage: FabricStage, job: TrainJob) -> Beside:
        if stage is FabricStage.TRAIN:
            return self.stages.training_sends(job)
        last = self.healthy[-1]
        return self.stages.generation_sends(self.fleet, last.samples * last.sample_tokens / last.seconds)

    @property
    def _schedule(self) -> ClusterFaultSchedule:
        return self.stages.scenario.schedule

    def _gen_s(self, step: int, now_s: float) -> float:
        left = 1.0 - self._failed_fraction(now_s)
        if left <= 0:
            return math.inf
        failed = self._schedule.network(now_s)
        return _or_never(failed, lambda: self.stages.gen(failed, self.arm, self.seed)[step].seconds / left)

    def _failed_fraction(self, now_s: float) -> float:
        """Return the fraction of the generating GPUs that have failed at `now_s`."""
        cluster, size = self.stages.scenario.cluster, self.stages.scenario.cluster.gpus_per_server
        gpus: set[int] = set()
        for fault in self._schedule.holding(now_s, FaultyPart.SERVER):
            gpus.update(gpu for server in fault.of for gpu in range(server * size, (server + 1) * size))
        for fault in self._schedule.holding(now_s, FaultyPart.ENGINE):
            gpus.update(int(gpu) for engine in fault.of if engine < len(self.fleet) for gpu in self.fleet.gpus[engine])
        return sum(gpu in cluster.generating for gpu in gpus) / len(cluster.generating)


def _or_never(failed: SimulatedFailures, seconds: Callable[[], float]) -> float:
    """Return `seconds()`, or inf if failures disconnect GPUs. Raises ValueError if GPUs are disconnected without
    failures."""
    try:
        return seconds()
    except ValueError:
        if failed == NOTHING:
            raise
        return math.inf


def lane_of(scenario: ClusterScenario, part: FaultyPart, number: int) -> FabricStage:
    """Return the stage in whose lane of the time line the failure of component `number` is shown. Engines, and NICs and
    servers that generate, belong to generation. All other components belong to training."""
    cluster = scenario.cluster
    per = {
        FaultyPart.NIC: cluster.gpus_per_server // cluster.nics_per_server,
        FaultyPart.SERVER: cluster.gpus_per_server,
    }.get(part)
    if part is FaultyPart.ENGINE or (per is not None and number * per >= cluster.generating.start):
        return FabricStage.GEN
    return FabricStage.TRAIN


def write_daemon(scenario: ClusterScenario, fabric: str | None, path: Path) -> list[Path]:
    """Write a daemon's configuration for the scenario's engines to `path`, and the engine profile that it names to the
    same folder. `fabric` is the title of a fabric; None means the first fabric. Return the paths of both files. Raises
    ProblemFaults if the title is unknown, no engine configuration fits, or a file cannot be written."""
    titles = [each.title for each in scenario.fabrics]
    if fabric is not None and fabric not in titles:
        raise ProblemFaults([f"--fabric: must be one of {', '.join(titles)}, got {fabric!r}"])
    section = scenario.fabrics[titles.index(fabric) if fabric is not None else 0]
    try:
        profile = FabricStages(scenario, section).ready(SimulatedFailures()).profile
    except ValueError as error:
        raise ProblemFaults([f"generation: {error}"]) from None
    beside = path.with_suffix(".profile.yaml")
    fleet: dict[str, Any] = {
        "gpus": {"count": len(scenario.cluster.generating), "per_node": scenario.cluster.gpus_per_server},
        "profile": beside.name,
    }
    if scenario.generation.kv_transfer:
        fleet["kv_transfer"] = {
            "inter_node_gbps_per_gpu": scenario.cluster.nic_gbps
            * scenario.cluster.nics_per_server
            / scenario.cluster.gpus_per_server,
            "intra_node_gbps_per_gpu": scenario.servers.nvlink_bytes_per_s * 8e-9,
        }
    text = dump_yaml({**scenario.daemon, "fleet": fleet})
    parse_config(text, profile=profile)
    head = f"# From the scenario {scenario.name!r}.\n# Add fleet.launch, the commands that start engines.\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(as_text(profile), encoding="utf-8")
        path.write_text(head + text, encoding="utf-8")
    except OSError as error:
        raise ProblemFaults([f"--out: {error.strerror}, got {str(path)!r}"]) from None
    return [path, beside]
