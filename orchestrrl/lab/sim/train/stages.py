"""A job on one network: what each stage takes, and its schedule with parameters gathered before and gradients reduced
behind. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from orchestrrl.lab.sim.net.model import Floats
from orchestrrl.lab.sim.train.compute import Compute, stage_parameters
from orchestrrl.lab.sim.train.constants import TrainConstants
from orchestrrl.lab.sim.train.model import TrainJob
from orchestrrl.lab.sim.train.passes import Passes, PassSegment, passes_of
from orchestrrl.lab.sim.train.pipeline import PipelineOp, PipelineSchedule, Stages, order, run


@dataclass(frozen=True, slots=True)
class StageLoad:
    """`crossing`: kinds of collectives that leave their server; only they take part in circuits and windows."""

    job: TrainJob
    constants: TrainConstants
    compute: Compute
    passes: Passes
    stages: Stages
    ops: tuple[tuple[PipelineOp, ...], ...]  # [rank]
    crossing: frozenset[str]

    def schedule(self, gather_s: float = 0.0) -> PipelineSchedule:
        """`gather_s`: parameters of every rank are gathered from the beginning on, beside the first forward pass."""
        if not gather_s:
            return run(self.ops, self.stages, self.job.micro_batches)
        layout = self.job.layout
        chunk = np.arange(layout.stages) // layout.pp + 1
        gathered_s = gather_s * chunk / layout.vpp + self.stages.forward_s / self.buckets
        return run(self.ops, replace(self.stages, gathered_s=gathered_s), self.job.micro_batches)

    def sends(self, segment: PassSegment) -> bool:
        """Over the network."""
        return segment.sends_s > 0 and segment.group in self.crossing

    @property
    def buckets(self) -> int:
        """In which a stage's gradients and parameters are sent."""
        size = max(self.constants.bucket_parameters, 1e6 * self.job.layout.dp)
        return max(1, round(sum(stage_parameters(self.job)) / self.job.layout.vpp / size))

    def head_s(self, op: PipelineOp) -> float:
        if op.stage < self.job.layout.stages - 1:
            return 0.0
        return self.compute.head_backward_s if op.backward else self.compute.head_forward_s

    def op_s(self, op: PipelineOp) -> float:
        return float((self.stages.backward_s if op.backward else self.stages.forward_s)[op.stage])

    def sends_share(self, op: PipelineOp) -> float:
        """Of an op's time in which its collectives are on the network."""
        each = self.passes.backward if op.backward else self.passes.forward
        sends_s = sum(segment.sends_s for segment in each.segments if self.sends(segment))
        return min(1.0, sends_s * self.job.stage_layers[op.stage] / self.op_s(op))


def loaded(
    job: TrainJob,
    compute: Compute,
    once_s: Mapping[str, float],
    crossing: frozenset[str],
    constants: TrainConstants,
) -> StageLoad:
    """`once_s`: of each kind of collective of forward and backward."""
    passes = passes_of(job, compute, once_s, constants)
    layers = np.array(job.stage_layers, np.float64)
    head = np.zeros(len(layers))
    head[-1] = 1.0
    stages = Stages(
        forward_s=layers * passes.forward.seconds + head * compute.head_forward_s,
        backward_s=layers * passes.backward.seconds + head * compute.head_backward_s,
        send_s=once_s.get("pp", 0.0),
        blocks=job.layout.vpp == 1,  # Megatron overlaps point-to-point messages where stages are interleaved
    )
    ops = order(job.layout.pp, job.micro_batches, job.layout.vpp)
    return StageLoad(job, constants, compute, passes, stages, ops, crossing)


def without_network(given: StageLoad) -> Floats:
    """[rank] seconds that it computes and waits for collectives of its own passes."""
    pp, micro = given.job.layout.pp, given.job.micro_batches
    each = given.stages.forward_s + given.stages.backward_s
    return np.array([micro * each[rank::pp].sum() for rank in range(pp)])
