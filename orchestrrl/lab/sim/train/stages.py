"""A job on one network: each stage's passes of a micro-batch, and the pipeline's schedule of them. Pure.

A pass is compute and what of its collectives is not hidden, in the order in which a rank sees them. Tensor
parallelism's collectives and the experts' all-to-all are waited for, less the share that is hidden, of the former in
the backward pass alone; the ring of context parallelism goes on beside attention, and is waited for where it takes
longer than the ring's share of it. Parameters are gathered before the schedule, gradients reduced behind it.

The schedule is 1F1B, plain or interleaved, as Megatron has it. Stages are numbered along the pipeline; with
interleaving, rank r of p holds stages r, r + p, r + 2p, and so on.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from orchestrrl.lab.sim.net.model import Floats
from orchestrrl.lab.sim.train.compute import PassCompute, compute_of, stage_parameters
from orchestrrl.lab.sim.train.model import TrainJob

FORWARD, BACKWARD = 0, 1  # sides of what is [2, ...]


class PipelineOp(NamedTuple):
    """A micro-batch's pass through a stage: an index into tables [2, stage, micro]."""

    side: int
    stage: int
    micro: int

    def sender(self, stages: int) -> "PipelineOp | None":
        """Return the pass of another stage that it gets its input from."""
        stage = self.stage - 1 if self.side == FORWARD else self.stage + 1
        return self._replace(stage=stage) if 0 <= stage < stages else None

    def sends_on(self, stages: int) -> bool:
        """Return whether another stage gets its result."""
        return self.stage < stages - 1 if self.side == FORWARD else self.stage > 0


@dataclass(frozen=True, slots=True)
class Stages:
    """Seconds of each stage for a micro-batch. `gathered_s`: before that, a stage's first forward does not end.
    `send_s` passes between a stage's end and the next one's begin; a rank that `blocks` waits for what it sends."""

    pass_s: Floats  # [2, stage]
    send_s: float = 0.0
    blocks: bool = True
    gathered_s: Floats | None = None  # [stage]


@dataclass(frozen=True, slots=True)
class PipelineSchedule:
    ops: tuple[tuple[PipelineOp, ...], ...]  # [rank]
    begin_s: Floats  # [2, stage, micro], 0 where there is none
    end_s: Floats

    @property
    def seconds(self) -> float:
        return float(self.end_s.max())

    def span_s(self, op: PipelineOp) -> tuple[float, float]:
        """Return its begin and its end."""
        return float(self.begin_s[op]), float(self.end_s[op])


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
    return tuple(_of_rank(rank, ranks, chunks, turns) for rank in range(ranks))


def forward_only(ops: tuple[tuple[PipelineOp, ...], ...]) -> tuple[tuple[PipelineOp, ...], ...]:
    """[rank] without backward passes, in the same turns."""
    return tuple(tuple(op for op in of_rank if op.side == FORWARD) for of_rank in ops)


def _of_rank(rank: int, ranks: int, chunks: int, turns: list[tuple[int, int]]) -> tuple[PipelineOp, ...]:
    forward = [PipelineOp(FORWARD, chunk * ranks + rank, micro) for chunk, micro in turns]
    backward = [PipelineOp(BACKWARD, (chunks - 1 - chunk) * ranks + rank, micro) for chunk, micro in turns]
    ahead = ranks - rank - 1
    if chunks > 1:
        ahead = 2 * ahead + (chunks - 1) * ranks
    ahead = min(ahead, len(turns))
    mixed = [op for pair in zip(forward[ahead:], backward, strict=False) for op in pair]
    return (*forward[:ahead], *mixed, *backward[len(turns) - ahead :])


def run(ops: tuple[tuple[PipelineOp, ...], ...], stages: Stages, micro_batches: int) -> PipelineSchedule:
    """Each rank takes its ops in turn, each once what it needs has arrived."""
    count = stages.pass_s.shape[1]
    begin_s, end_s = (np.full((2, count, micro_batches), np.nan) for _ in (FORWARD, BACKWARD))
    pending, free_s = [deque(each) for each in ops], [0.0] * len(ops)
    while left := sum(map(len, pending)):
        for rank, todo in enumerate(pending):
            while todo and not math.isnan(arrival_s := _arrival_s(todo[0], end_s, stages.send_s)):
                op = todo.popleft()
                begin_s[op] = max(free_s[rank], arrival_s)
                end_s[op] = _end_s(op, begin_s[op], stages)
                free_s[rank] = end_s[op] + (stages.send_s if stages.blocks and op.sends_on(count) else 0.0)
        if sum(map(len, pending)) == left:
            raise ValueError("the schedule waits for itself")
    return PipelineSchedule(ops, np.nan_to_num(begin_s, posinf=math.inf), np.nan_to_num(end_s, posinf=math.inf))


def _arrival_s(op: PipelineOp, end_s: Floats, send_s: float) -> float:
    """When what it computes from is there; nan: not known yet."""
    if sender := op.sender(end_s.shape[1]):
        return float(end_s[sender]) + send_s
    return float(end_s[FORWARD, op.stage, op.micro]) if op.side == BACKWARD else 0.0


def _end_s(op: PipelineOp, begin_s: float, stages: Stages) -> float:
    end_s = begin_s + float(stages.pass_s[op.side, op.stage])
    if stages.gathered_s is not None and op.side == FORWARD and op.micro == 0:
        return max(end_s, float(stages.gathered_s[op.stage]))
    return end_s


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


def passes_of(
    job: TrainJob, compute: tuple[PassCompute, PassCompute], once_s: Mapping[str, float]
) -> tuple[Pass, Pass]:
    """Return the forward and the backward pass. `once_s`: of each kind of collective, on the network as it is then."""
    forward = _pass(job, compute[FORWARD], once_s, tp_hidden=0.0, ring_laps=1)
    backward = _pass(job, compute[BACKWARD], once_s, tp_hidden=job.constants.tp_hidden_share, ring_laps=2)[::-1]
    if job.recompute:
        backward = (*forward, *backward)
    return Pass(forward), Pass(backward)


def _pass(
    job: TrainJob, layer: PassCompute, once_s: Mapping[str, float], *, tp_hidden: float, ring_laps: int
) -> tuple[PassSegment, ...]:
    tensor = _waited("tp", once_s.get("tp", 0.0), tp_hidden)
    experts = _waited("ep", once_s.get("ep", 0.0), job.constants.ep_hidden_share)
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
    passes: tuple[Pass, Pass]  # forward, backward
    stages: Stages
    ops: tuple[tuple[PipelineOp, ...], ...]  # [rank]
    crossing: frozenset[str]

    def schedule(self, gather_s: float = 0.0) -> PipelineSchedule:
        """`gather_s`: parameters of every rank are gathered from the beginning on, beside the first forward pass."""
        if not gather_s:
            return run(self.ops, self.stages, self.job.micro_batches)
        layout = self.job.layout
        chunk = np.arange(layout.stages) // layout.pp + 1
        gathered_s = gather_s * chunk / layout.vpp + self.stages.pass_s[FORWARD] / self.buckets
        return run(self.ops, replace(self.stages, gathered_s=gathered_s), self.job.micro_batches)

    def sends(self, segment: PassSegment) -> bool:
        """Over the network."""
        return segment.sends_s > 0 and segment.group in self.crossing

    @property
    def buckets(self) -> int:
        """In which a stage's gradients and parameters are sent."""
        size = max(self.job.constants.bucket_parameters, 1e6 * self.job.layout.dp)
        return max(1, round(sum(stage_parameters(self.job)) / self.job.layout.vpp / size))

    def op_s(self, op: PipelineOp) -> float:
        return float(self.stages.pass_s[op.side, op.stage])

    def sends_share(self, op: PipelineOp) -> float:
        """Of an op's time in which its collectives are on the network."""
        sends_s = sum(segment.sends_s for segment in self.passes[op.side].segments if self.sends(segment))
        return min(1.0, sends_s * self.job.stage_layers[op.stage] / self.op_s(op))


def loaded(job: TrainJob, once_s: Mapping[str, float], crossing: frozenset[str]) -> StageLoad:
    """`once_s`: of each kind of collective of forward and backward."""
    compute = compute_of(job)
    passes = passes_of(job, compute, once_s)
    pass_s = np.outer([each.seconds for each in passes], job.stage_layers)
    pass_s[:, -1] += [each.head_s for each in compute]
    # Megatron overlaps point-to-point messages where stages are interleaved.
    stages = Stages(pass_s, send_s=once_s.get("pp", 0.0), blocks=job.layout.vpp == 1)
    return StageLoad(job, passes, stages, order(job.layout.pp, job.micro_batches, job.layout.vpp), crossing)
