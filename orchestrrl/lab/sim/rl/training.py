"""A training step of RL, and the answers that reach it: log-probabilities first, then optimiser steps. Pure.

As veRL and NeMo-RL train with GRPO: log-probabilities of the answers are computed again under the policy as it is
before the step, for the engine's own differ, and under a reference model where there is a KL term. Each optimiser step
has its share of the samples and its own exchange of gradients.

Answers go to the trainer as soon as each is there (table 1 of the OrchestrRL paper: RS): a token's id and its
log-probability, once for each sample; what the ranks of a replica pass on to each other is left out. They are counted,
and take no time of the loop: answers go while others are generated.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from orchestrrl.lab.sim.net.fabrics.base import SimulatedFabric
from orchestrrl.lab.sim.net.fluid import TierBytes, finish_s, summed, tier_bytes
from orchestrrl.lab.sim.net.model import GpuFlows, Servers
from orchestrrl.lab.sim.rl.model import TrainStage
from orchestrrl.lab.sim.rl.scenario import TrainingSection
from orchestrrl.lab.sim.train.compute import forward_flops, step_flops
from orchestrrl.lab.sim.train.model import TrainingIteration, TrainJob
from orchestrrl.lab.sim.train.traffic import FORWARD_BACKWARD, GroupCollective, forward_times, periods_of, traffic

LOG_PROBS = "log probs"  # of a stage's parts


def training_stage(
    job: TrainJob, recipe: TrainingSection, update: Callable[[TrainJob], TrainingIteration], forward_s: float
) -> TrainStage:
    """On the samples of `job`. `update`: an optimiser step on a share of them; `forward_s`: a pass over all."""
    steps = [(times, update(replace(job, sequences=size))) for size, times in recipe.shares(job.sequences)]
    parts_s = {LOG_PROBS: recipe.log_prob_passes * forward_s}
    for times, step in steps:
        for name, each_s in step.parts_s.items():
            parts_s[name] = parts_s.get(name, 0.0) + times * each_s
    seconds = math.fsum(parts_s.values())
    return TrainStage(
        seconds=seconds,
        mfu=model_flops(job, recipe) / (job.layout.gpus * seconds * job.gpu.bf16_flops),
        parts_s=parts_s,
        updates=sum(times for times, _ in steps),
        update=steps[0][1],
    )


def model_flops(job: TrainJob, recipe: TrainingSection) -> float:
    """Operations that the model asks for, those of its forward passes among them."""
    passes = recipe.log_prob_passes * job.sequences * forward_flops(job.model, job.tokens, job.square_tokens)
    return passes + recipe.epochs * step_flops(job.model, job.sequences, job.tokens, job.square_tokens)


def training_bytes(job: TrainJob, recipe: TrainingSection, fabric: SimulatedFabric) -> Mapping[str, float]:
    """By tier, over its links: what stays in a server goes over NVLink."""
    found = []
    for share, exchanges, often in _sent(job, recipe, fabric.servers):
        passes, gradients = (fabric.network(period) for period in periods_of(share, exchanges))
        for kind, times in often.items():
            network = passes if kind in FORWARD_BACKWARD else gradients
            sizes = tier_bytes(network, exchanges[kind].transfer.flows)
            found.append({tier: times * size for tier, size in sizes.items()})
    return summed(found)


def training_flows(job: TrainJob, recipe: TrainingSection, servers: Servers) -> GpuFlows:
    """Of a training step, those of groups that span servers."""
    return GpuFlows.joined(
        [
            exchanges[kind].transfer.flows.times(times)
            for _, exchanges, often in _sent(job, recipe, servers)
            for kind, times in often.items()
            if exchanges[kind].crosses
        ]
    )


Sent = tuple[TrainJob, Mapping[str, GroupCollective], Mapping[str, float]]


def _sent(job: TrainJob, recipe: TrainingSection, servers: Servers) -> Iterator[Sent]:
    """Of optimiser steps that are alike, then of the passes before them: exchanges by kind, and how often each."""
    for size, times in recipe.shares(job.sequences):
        share = replace(job, sequences=size)
        exchanges = traffic(share, servers)
        yield share, exchanges, {kind: times * each.times for kind, each in exchanges.items()}
    if recipe.log_prob_passes:
        exchanges = traffic(job, servers)
        forward = {kind: exchanges[kind] for kind in FORWARD_BACKWARD if kind in exchanges}
        often = {kind: recipe.log_prob_passes * forward_times(job, kind, each) for kind, each in forward.items()}
        yield job, exchanges, often


RESPONSE_STREAM = "response_stream"  # among the stages of RlRun.tier_bytes
TOKEN_BYTES = 8.0 + 4.0  # an id of 64 bits, as tensors of token ids have it, and a log-probability of 32


@dataclass(frozen=True, slots=True)
class ResponseStream:
    """Of a generation step. `seconds`: of the network, were all of it sent at once."""

    bytes: float
    seconds: float
    tier_bytes: TierBytes


def response_stream(job: TrainJob, where: range, fabric: SimulatedFabric) -> ResponseStream:
    """Of all samples of `job`, prompt and answer, dealt over the GPUs of either side in turn: from those that generate,
    `where`."""
    total = job.sequences * job.tokens * TOKEN_BYTES
    turns = np.arange(max(len(where), job.layout.gpus))
    src, dst = where.start + turns % len(where), job.first_gpu + turns % job.layout.gpus
    apart = src != dst
    flows = GpuFlows(src[apart], dst[apart], np.full(int(apart.sum()), total / len(turns)))
    if not len(flows):
        return ResponseStream(total, 0.0, {})
    network = fabric.network(None)
    seconds = float(finish_s(network, flows, network.routes(flows)).max())
    return ResponseStream(total, seconds, tier_bytes(network, flows))
