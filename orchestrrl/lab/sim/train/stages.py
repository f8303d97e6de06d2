"""A job on one network: each stage's passes of a micro-batch, and the pipeline's schedule of them. Pure.

A pass is compute and what of its collectives is not hidden, in the order in which a rank sees them. Tensor
parallelism's collectives and the experts' all-to-all are waited for, less the share that is hidden, of the former in
the backward pass alone; the ring of context parallelism goes on beside attention, and is waited for where it takes
longer than the ring's share of it. Parameters are gathered before the schedule, gradients reduced behind it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from orchestrrl.lab.sim.net.model import Floats
from orchestrrl.lab.sim.train.compute import Compute, LayerPass, stage_parameters
from orchestrrl.lab.sim.train.model import TrainConstants, TrainJob
from orchestrrl.lab.sim.train.pipeline import PipelineOp, PipelineSchedule, Stages, order, run

WAITS = ("tp", "cp", "ep")


@dataclass(frozen=True, slots=True)
class PassSegment:
    """Of a layer's pass: compute, a collective that is waited for, or one that goes on beside compute."""

    seconds: float  # that the layer takes for it
    group: str = ""  # empty: compute alone
    sends_s: float = 0.0  # that the collective is under way, from the segment's begin
    computes_s: float = 0.0  # of `seconds`

    @property
    def waits_s(self) -> float:
        return self.seconds - self.computes_s


@dataclass(frozen=True, slots=True)
class Pass:
    """Of one layer."""

    segments: tuple[PassSegment, ...]

    @property
    def seconds(self) -> float:
        return sum(each.seconds for each in self.segments)

    def waits_s(self, group: str) -> float:
        return sum(each.waits_s for each in self.segments if each.group == group)


@dataclass(frozen=True, slots=True)
class Passes:
    forward: Pass
    backward: Pass


def passes_of(job: TrainJob, compute: Compute, once_s: Mapping[str, float], constants: TrainConstants) -> Passes:
    """`once_s`: of each kind of collective, on the network as it is then."""
    forward = _pass(job, compute.forward, once_s, 0.0, constants.ep_hidden_share, ring_laps=1)
    hidden = constants.tp_hidden_share, constants.ep_hidden_share
    backward = _pass(job, compute.backward, once_s, *hidden, ring_laps=2)[::-1]
    if job.recompute:
        backward = (*forward, *backward)
    return Passes(Pass(forward), Pass(backward))


def _pass(
    job: TrainJob, layer: LayerPass, once_s: Mapping[str, float], tp_hidden: float, ep_hidden: float, *, ring_laps: int
) -> tuple[PassSegment, ...]:
    tensor = _waited("tp", once_s.get("tp", 0.0), tp_hidden)
    experts = _waited("ep", once_s.get("ep", 0.0), ep_hidden)
    dense = (tensor, tensor) if job.model.ffn else ()
    found = (
        tensor,
        _computed(layer.before_s),
        _beside(layer.attention_s, ring_laps * once_s.get("cp", 0.0), job.layout.cp),
        tensor,
        *dense[:1],
        _computed(layer.between_s),
        *dense[1:],
        experts,
        _computed(layer.experts_s),
        experts,
        _computed(layer.after_s),
    )
    return tuple(each for each in found if each.seconds > 0 or each.sends_s > 0)


def _computed(seconds: float) -> PassSegment:
    return PassSegment(seconds, computes_s=seconds)


def _waited(group: str, seconds: float, hidden_share: float) -> PassSegment:
    """What is hidden goes on beside the compute that follows."""
    return PassSegment(seconds * (1 - hidden_share), group, sends_s=seconds)


def _beside(attention_s: float, ring_s: float, cp: int) -> PassSegment:
    """The block that a rank holds itself is attended to while the first one comes, and the last one after all came."""
    if ring_s <= 0:
        return _computed(attention_s)
    waits_s = max(0.0, ring_s - attention_s * (cp - 1) / cp)
    return PassSegment(attention_s + waits_s, "cp", sends_s=ring_s, computes_s=attention_s)


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
    job: TrainJob, compute: Compute, once_s: Mapping[str, float], crossing: frozenset[str], constants: TrainConstants
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
