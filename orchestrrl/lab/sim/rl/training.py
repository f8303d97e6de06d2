"""A training step of RL: forward passes for log-probabilities, then optimiser steps on shares of the samples, each with
an exchange of gradients. Pure.

As veRL and NeMo-RL train with GRPO: log-probabilities of the answers are worked out again under the policy as it is
before the step, for the engine's own differ, and under a reference model where there is a KL term.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from orchestrrl.lab.sim.net.fabrics.base import SimulatedFabric
from orchestrrl.lab.sim.net.model import GpuFlows, Servers
from orchestrrl.lab.sim.net.timing import tier_bytes
from orchestrrl.lab.sim.rl.model import TrainStage
from orchestrrl.lab.sim.train.constants import MEGATRON, TrainConstants
from orchestrrl.lab.sim.train.flops import forward_flops, step_flops
from orchestrrl.lab.sim.train.model import TrainingIteration, TrainJob
from orchestrrl.lab.sim.train.periods import periods_of
from orchestrrl.lab.sim.train.traffic import FORWARD_BACKWARD, GroupCollective, forward_times, traffic

LOG_PROBS = "log probs"  # of a stage's parts


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a training step does with its samples: passes over all of them for log-probabilities, then `epochs` times
    `updates` optimiser steps, each on as many of them."""

    log_prob_passes: int = 1
    updates: int = 1
    epochs: int = 1

    def __post_init__(self) -> None:
        for name, least in (("log_prob_passes", 0), ("updates", 1), ("epochs", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be >= {least}, got {getattr(self, name)}")

    def shares(self, samples: int) -> tuple[tuple[int, int], ...]:
        """(samples of an optimiser step, such steps): as even as they can be, the larger ones first. Fewer samples than
        updates make a step each."""
        updates = min(self.updates, samples)
        each, more = divmod(samples, updates)
        found = ((each + 1, more * self.epochs), (each, (updates - more) * self.epochs))
        return tuple((size, times) for size, times in found if times)


def training_stage(
    job: TrainJob, recipe: Recipe, update: Callable[[TrainJob], TrainingIteration], forward_s: float
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


def model_flops(job: TrainJob, recipe: Recipe) -> float:
    """Operations that the model asks for, those of its forward passes among them."""
    passes = recipe.log_prob_passes * job.sequences * forward_flops(job.model, job.tokens, job.square_tokens)
    return passes + recipe.epochs * step_flops(job.model, job.sequences, job.tokens, job.square_tokens)


def training_bytes(
    job: TrainJob, recipe: Recipe, fabric: SimulatedFabric, constants: TrainConstants = MEGATRON
) -> Mapping[str, float]:
    """By tier, over its links: what stays in a server goes over NVLink."""
    found: dict[str, float] = {}
    for share, exchanges, often in _sent(job, recipe, fabric.servers, constants):
        passes, gradients = (fabric.network(period) for period in periods_of(share, exchanges))
        for kind, times in often.items():
            network = passes if kind in FORWARD_BACKWARD else gradients
            for tier, size in tier_bytes(network, exchanges[kind].transfer.flows).items():
                found[tier.value] = found.get(tier.value, 0.0) + times * size
    return found


def training_flows(job: TrainJob, recipe: Recipe, servers: Servers, constants: TrainConstants = MEGATRON) -> GpuFlows:
    """Of a training step, those of groups that span servers."""
    return GpuFlows.joined(
        [
            exchanges[kind].transfer.flows.times(times)
            for _, exchanges, often in _sent(job, recipe, servers, constants)
            for kind, times in often.items()
            if exchanges[kind].crosses
        ]
    )


Sent = tuple[TrainJob, Mapping[str, GroupCollective], Mapping[str, float]]


def _sent(job: TrainJob, recipe: Recipe, servers: Servers, constants: TrainConstants) -> Iterator[Sent]:
    """Of optimiser steps that are alike, then of the passes before them: exchanges by kind, and how often each."""
    for size, times in recipe.shares(job.sequences):
        share = replace(job, sequences=size)
        exchanges = traffic(share, servers, constants)
        yield share, exchanges, {kind: times * each.times for kind, each in exchanges.items()}
    if recipe.log_prob_passes:
        exchanges = traffic(job, servers, constants)
        forward = {kind: exchanges[kind] for kind in FORWARD_BACKWARD if kind in exchanges}
        often = {kind: recipe.log_prob_passes * forward_times(job, kind, each) for kind, each in forward.items()}
        yield job, exchanges, often
