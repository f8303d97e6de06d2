"""Answers on their way from the engines to the trainer, as soon as each is there (table 1 of the OrchestrRL paper: RS).

Little beside everything else: a token's id and its log-probability, once for each sample; what the ranks of a replica
hand on to each other is left out. It is counted, and takes no time of the loop: answers go while others are generated.
"""

from dataclasses import dataclass

import numpy as np

from orchestrrl.lab.sim.net.fabrics.base import SimulatedFabric
from orchestrrl.lab.sim.net.fluid import finish_routed_s
from orchestrrl.lab.sim.net.model import GpuFlows
from orchestrrl.lab.sim.net.problem import routes_of
from orchestrrl.lab.sim.net.timing import tier_bytes
from orchestrrl.lab.sim.rl.generation_bytes import TierBytes
from orchestrrl.lab.sim.rl.generation_fleet import GenGpus
from orchestrrl.lab.sim.train.model import TrainJob

RESPONSE_STREAM = "response_stream"  # among the stages of RlRun.tier_bytes
TOKEN_BYTES = 8.0 + 4.0  # an id of 64 bits, as tensors of token ids have it, and a log-probability of 32


@dataclass(frozen=True, slots=True)
class ResponseStream:
    """Of a generation step. `seconds`: of the network, were all of it sent at once."""

    bytes: float
    seconds: float
    tier_bytes: TierBytes


def response_stream(job: TrainJob, where: GenGpus, fabric: SimulatedFabric) -> ResponseStream:
    """Of all samples of `job`, prompt and answer, dealt over the GPUs of either side in turn."""
    total = job.sequences * job.tokens * TOKEN_BYTES
    turns = np.arange(max(where.count, job.layout.gpus))
    src, dst = where.first + turns % where.count, job.first_gpu + turns % job.layout.gpus
    apart = src != dst
    flows = GpuFlows(src[apart], dst[apart], np.full(int(apart.sum()), total / len(turns)))
    if not len(flows):
        return ResponseStream(total, 0.0, {})
    network = fabric.network(None)
    seconds = float(finish_routed_s(network, flows, routes_of(network, flows)).max())
    return ResponseStream(total, seconds, {tier.value: size for tier, size in tier_bytes(network, flows).items()})
