"""Simulate an RL training step (log-probabilities, then optimiser steps) and the stream of answers to the trainer. The
functions have no side effects.

The step follows GRPO in veRL and NeMo-RL. Log-probabilities of the answers are recomputed under the policy before the
optimiser steps, because the engine's log-probabilities differ from the trainer's. They are also computed under a
reference model if there is a KL term. Each optimiser step has its own fraction of the samples and its own exchange of
gradients.

Each answer is sent to the trainer once, as soon as it is complete (RS in table 1 of the OrchestrRL paper). The message
contains the id and the log-probability of each token. Forwarding between the ranks of a replica is not counted. The
bytes of the messages are counted, but sending takes no time in the loop, because an answer is sent while other answers
are generated.
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

LOG_PROBS = "log probs"  # key in TrainStage.parts_s


def training_stage(
    job: TrainJob, recipe: TrainingSection, update: Callable[[TrainJob], TrainingIteration], forward_s: float
) -> TrainStage:
    """Return a training step on the samples of `job`. `update` simulates an optimiser step on a part of the samples.
    `forward_s` is the time of a forward pass over all samples."""
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
    """Return the model FLOPs of a training step, including the log-probability passes."""
    passes = recipe.log_prob_passes * job.sequences * forward_flops(job.model, job.tokens, job.square_tokens)
    return passes + recipe.epochs * step_flops(job.model, job.sequences, job.tokens, job.square_tokens)


def training_bytes(job: TrainJob, recipe: TrainingSection, fabric: SimulatedFabric) -> Mapping[str, float]:
    """Return the number of bytes that a training step sends over the links of each tier, including NVLink inside
    servers."""
    found = []
    for share, exchanges, often in _sent(job, recipe, fabric.servers):
        passes, gradients = (fabric.network(period) for period in periods_of(share, exchanges))
        for kind, times in often.items():
            network = passes if kind in FORWARD_BACKWARD else gradients
            sizes = tier_bytes(network, exchanges[kind].transfer.flows)
            found.append({tier: times * size for tier, size in sizes.items()})
    return summed(found)


def training_flows(job: TrainJob, recipe: TrainingSection, servers: Servers) -> GpuFlows:
    """Return the flows that a training step sends in process groups that span servers."""
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
    """Yield tuples of a job, its collectives by kind, and the number of repetitions of each kind. There is one tuple
    for each group of equal optimiser steps, then one for the log-probability passes."""
    for size, times in recipe.shares(job.sequences):
        share = replace(job, sequences=size)
        exchanges = traffic(share, servers)
        yield share, exchanges, {kind: times * each.times for kind, each in exchanges.items()}
    if recipe.log_prob_passes:
        exchanges = traffic(job, servers)
        forward = {kind: exchanges[kind] for kind in FORWARD_BACKWARD if kind in exchanges}
        often = {kind: recipe.log_prob_passes * forward_times(job, kind, each) for kind, each in forward.items()}
        yield job, exchanges, often


RESPONSE_STREAM = "response_stream"  # key in RlRun.tier_bytes
TOKEN_BYTES = 8.0 + 4.0  # a 64-bit id, as in tensors of token ids, and a 32-bit log-probability


@dataclass(frozen=True, slots=True)
class ResponseStream:
    """The answers of a generation step as a stream to the trainer. `seconds` is the time that the network would need if
    all answers were sent at once."""

    bytes: float
    seconds: float
    tier_bytes: TierBytes


def response_stream(job: TrainJob, where: range, fabric: SimulatedFabric) -> ResponseStream:
    """Return the stream of all samples of `job` from the generating GPUs `where` to the trainer's GPUs. A sample is a
    prompt with its answer. Samples are assigned round-robin to the GPUs of both sides."""
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
