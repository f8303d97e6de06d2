"""What a scenario's job is expected to send in a step, for fabrics that are built for one job. Pure.

TopoOpt's topology is worked out from the job's traffic and stays as it is (section 4 of the TopoOpt paper, NSDI 2023):
collectives of its optimiser steps, engines' exchanges where they span servers, weights on their way.
"""

from dataclasses import replace

from orchestrrl.lab.sim.net.fabrics.base import SimulatedFabric
from orchestrrl.lab.sim.net.fabrics.registry import options_of
from orchestrrl.lab.sim.net.model import GpuFlows
from orchestrrl.lab.sim.rl.generation_fleet import GenGpus, UniformFleet, deployed, leaves_servers, token_flows
from orchestrrl.lab.sim.rl.scenario import ClusterFabricSection, ClusterScenario
from orchestrrl.lab.sim.rl.weight_sync import steps_of
from orchestrrl.lab.sim.rl.weight_sync_shards import shards_of, site_of
from orchestrrl.lab.sim.train.model import MEGATRON, TrainConstants, TrainJob
from orchestrrl.lab.sim.train.traffic import periods
from orchestrrl.lab.sim.workload import mean_tokens


def fabric_for(
    scenario: ClusterScenario, section: ClusterFabricSection, constants: TrainConstants = MEGATRON
) -> SimulatedFabric:
    """The section's, made for the scenario's job where its kind is. Raises Impossible with all that is wrong with its
    options."""
    plain = scenario.fabric(section)
    if "demand" not in options_of(section.kind):
        return plain
    return scenario.fabric(section, demand=job_demand(scenario, plain, constants))


def job_demand(scenario: ClusterScenario, plain: SimulatedFabric, constants: TrainConstants = MEGATRON) -> GpuFlows:
    """Of one step. `plain`: the fabric as it would be without, for the sync's plan."""
    job, fleet = _job(scenario), _fleet(scenario, plain)
    parts = _training(scenario, job, constants)
    if fleet is not None:
        parts += [_weights(scenario, job, fleet, plain), _exchanges(scenario, fleet)]
    return GpuFlows.joined(parts)


def _job(scenario: ClusterScenario) -> TrainJob:
    return scenario.train_job(
        scenario.loop.batch_samples or scenario.samples, mean_tokens(scenario.generation.workload)
    )


def _training(scenario: ClusterScenario, job: TrainJob, constants: TrainConstants) -> list[GpuFlows]:
    """All optimiser steps of a training step."""
    return [
        period.demand.times(times)
        for size, times in scenario.recipe.shares(job.sequences)
        for period in periods(replace(job, sequences=size), scenario.servers, constants=constants)
    ]


def _fleet(scenario: ClusterScenario, plain: SimulatedFabric) -> UniformFleet | None:
    """Of the last layout that there is room for: which of them will run is known once the fabric is."""
    cluster = scenario.cluster
    where = GenGpus(cluster.first_generating, cluster.generating)
    for parallelism in reversed(scenario.engine_layouts):
        fleet = deployed(parallelism, where, scenario.servers, plain.pods)
        if len(fleet):
            return fleet
    return None


def _exchanges(scenario: ClusterScenario, fleet: UniformFleet) -> GpuFlows:
    """Of engines that span servers, for all tokens of a step."""
    if not leaves_servers(fleet, scenario.servers):
        return GpuFlows.none()
    tokens = scenario.samples * mean_tokens(scenario.generation.workload)
    return token_flows(fleet, scenario.model_value, scenario.servers).times(tokens)


def _weights(scenario: ClusterScenario, job: TrainJob, fleet: UniformFleet, plain: SimulatedFabric) -> GpuFlows:
    servers = scenario.servers
    shards = shards_of(job, [fleet], servers.gpus_per_server)
    steps = steps_of(scenario.weight_sync.scheme, shards, site_of(plain.network(None)), servers)
    return GpuFlows.joined([step.flows for step in steps])
