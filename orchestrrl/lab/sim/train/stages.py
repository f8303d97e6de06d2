"""A job on one network: each stage's passes of a micro-batch, and the pipeline's schedule of them. Pure.

A pass is compute and what of its collectives is not hidden, in the order in which a rank sees them. Tensor
parallelism's collectives and the experts' all-to-all are waited for, less the share that is hidden, of the former in
the backward pass alone; the ring of context parallelism goes on beside attention, and is waited for where it takes
longer than the ring's share of it. Parameters are gathered before the schedule, gradients reduced behind it.

The schedule is 1F1B, plain or interleaved, as Megatron has it. Stages are numbered along the pipeline; with
interleaving, rank r of p holds stages r, r + p, r + 2p, and so on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from orchestrrl.lab.sim.net.model import Floats
from orchestrrl.lab.sim.train.compute import Compute, LayerPass, compute_of, stage_parameters
from orchestrrl.lab.sim.train.model import TrainJob

Key = tuple[int, int, int]  # backward or not, stage, micro-batch


@dataclass(frozen=True, slots=True)
class PipelineOp:
    stage: int
    micro: int
    backward: bool

    @property
    def key(self) -> Key:
        return int(self.backward), self.stage, self.micro


@dataclass(frozen=True, slots=True)
class Stages:
    """Seconds of each stage for a micro-batch. `gathered_s`: before that, a stage's first forward does not end.
    `send_s` passes between a stage's end and the next one's begin; a rank that `blocks` waits for what it sends."""

    forward_s: Floats  # [stage]
    backward_s: Floats  # [stage]
    send_s: float = 0.0
    blocks: bool = True
    gathered_s: Floats | None = None  # [stage]


@dataclass(frozen=True, slots=True)
class PipelineSchedule:
    ops: tuple[tuple[PipelineOp, ...], ...]  # [rank]
    begin_s: Floats  # [2, stage, micro]: forward, backward
    end_s: Floats

    @property
    def seconds(self) -> float:
        return float(self.end_s.max())


def order(ranks: int, micro_batches: int, chunks: int = 1) -> tuple[tuple[PipelineOp, ...], ...]:
    """[rank] what it computes in turn (Narayanan et al., arXiv 2104.04473, sections 2.2.1 and 2.2.2)."""
    if chunks > 1 and micro_batches % ranks:
        raise ValueError(f"interleaved, micro-batches must be a multiple of {ranks} ranks, got {micro_batches}")
    turns = [
        (chunk, micro)
        for first in range(0, micro_batches, ranks)
        for chunk in range(chunks)
        for micro in range(first, min(first + ranks, micro_batches))
    ]
    if chunks == 1:
        turns = [(0, micro) for micro in range(micro_batches)]
    return tuple(_of_rank(rank, ranks, chunks, turns) for rank in range(ranks))


def forward_only(ops: tuple[tuple[PipelineOp, ...], ...]) -> tuple[tuple[PipelineOp, ...], ...]:
    """[rank] without backward passes, in the same turns."""
    return tuple(tuple(op for op in of_rank if not op.backward) for of_rank in ops)


def _of_rank(rank: int, ranks: int, chunks: int, turns: list[tuple[int, int]]) -> tuple[PipelineOp, ...]:
    forward = [PipelineOp(chunk * ranks + rank, micro, backward=False) for chunk, micro in turns]
    backward = [PipelineOp((chunks - 1 - chunk) * ranks + rank, micro, backward=True) for chunk, micro in turns]
    ahead = ranks - rank - 1
    if chunks > 1:
        ahead = 2 * ahead + (chunks - 1) * ranks
    ahead = min(ahead, len(turns))
    mixed = [op for pair in zip(forward[ahead:], backward, strict=False) for op in pair]
    return (*forward[:ahead], *mixed, *backward[len(turns) - ahead :])


def run(ops: tuple[tuple[PipelineOp, ...], ...], stages: Stages, micro_batches: int) -> PipelineSchedule:
    """Each rank takes its ops in turn, each once what it needs has arrived."""
    count = len(stages.forward_s)
    begins: dict[Key, float] = {}
    ends: dict[Key, float] = {}
    turn, free_s = [0] * len(ops), [0.0] * len(ops)
    while len(ends) < sum(map(len, ops)):
        before = len(ends)
        for rank, todo in enumerate(ops):
            while turn[rank] < len(todo):
                op = todo[turn[rank]]
                arrival_s = _arrival_s(op, ends, stages, count)
                if arrival_s is None:
                    break
                begins[op.key] = max(free_s[rank], arrival_s)
                ends[op.key] = _end_s(op, begins[op.key], stages)
                free_s[rank] = ends[op.key] + (stages.send_s if stages.blocks and _sends(op, count) else 0.0)
                turn[rank] += 1
        if len(ends) == before:
            raise ValueError("the schedule waits for itself")
    return PipelineSchedule(ops, _table(begins, count, micro_batches), _table(ends, count, micro_batches))


def _table(of: dict[Key, float], stages: int, micro_batches: int) -> Floats:
    """[2, stage, micro], 0 where there is none."""
    found = np.zeros((2, stages, micro_batches))
    at = np.array(list(of), np.int64)
    found[at[:, 0], at[:, 1], at[:, 2]] = list(of.values())
    return found


def _end_s(op: PipelineOp, begin_s: float, stages: Stages) -> float:
    if op.backward:
        return begin_s + float(stages.backward_s[op.stage])
    end_s = begin_s + float(stages.forward_s[op.stage])
    if stages.gathered_s is not None and op.micro == 0:
        return max(end_s, float(stages.gathered_s[op.stage]))
    return end_s


def _sends(op: PipelineOp, count: int) -> bool:
    return op.stage > 0 if op.backward else op.stage < count - 1


def _arrival_s(op: PipelineOp, ends: dict[Key, float], stages: Stages, count: int) -> float | None:
    """When what it computes from is there; None: not known yet."""
    if not op.backward:
        if op.stage == 0:
            return 0.0
        end = ends.get((0, op.stage - 1, op.micro))
        return None if end is None else end + stages.send_s
    if op.stage == count - 1:
        return ends.get((0, op.stage, op.micro))
    end = ends.get((1, op.stage + 1, op.micro))
    return None if end is None else end + stages.send_s


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


def passes_of(job: TrainJob, compute: Compute, once_s: Mapping[str, float]) -> Passes:
    """`once_s`: of each kind of collective, on the network as it is then."""
    forward = _pass(job, compute.forward, once_s, 0.0, job.constants.ep_hidden_share, ring_laps=1)
    hidden = job.constants.tp_hidden_share, job.constants.ep_hidden_share
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
        size = max(self.job.constants.bucket_parameters, 1e6 * self.job.layout.dp)
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


def loaded(job: TrainJob, once_s: Mapping[str, float], crossing: frozenset[str]) -> StageLoad:
    """`once_s`: of each kind of collective of forward and backward."""
    compute = compute_of(job)
    passes = passes_of(job, compute, once_s)
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
    return StageLoad(job, compute, passes, stages, ops, crossing)


def without_network(given: StageLoad) -> Floats:
    """[rank] seconds that it computes and waits for collectives of its own passes."""
    pp, micro = given.job.layout.pp, given.job.micro_batches
    each = given.stages.forward_s + given.stages.backward_s
    return np.array([micro * each[rank::pp].sum() for rank in range(pp)])
