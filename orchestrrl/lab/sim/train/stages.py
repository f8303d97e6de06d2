"""Schedule a job on one network: the passes of a micro-batch through each stage, and their order in the pipeline. The
functions have no side effects.

A pass consists of compute and the exposed part of its collectives, in the order of execution. A rank waits for the part
of tensor parallelism's collectives and of the experts' all-to-all that is not hidden. Tensor parallelism's collectives
are hidden in the backward pass only. The ring of context parallelism runs concurrently with attention. A rank waits for
the ring if it takes longer than the attention that can hide it. Parameters are gathered during the first forward
passes. The reduction of gradients is not part of the schedule (see iteration.py).

The schedule is Megatron's 1F1B, plain or interleaved. Stages are numbered along the pipeline. With interleaving, rank r
of p holds stages r, r + p, r + 2p, and so on.
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

FORWARD, BACKWARD = 0, 1  # indices into arrays of shape [2, ...]


class PipelineOp(NamedTuple):
    """A micro-batch's pass through a stage. `side` is FORWARD or BACKWARD. The tuple can be used as an index into
    arrays of shape [2, stage, micro-batch]."""

    side: int
    stage: int
    micro: int

    def sender(self, stages: int) -> "PipelineOp | None":
        """Return the pass of another stage that provides the input of this pass, or None if no other stage provides
        it."""
        stage = self.stage - 1 if self.side == FORWARD else self.stage + 1
        return self._replace(stage=stage) if 0 <= stage < stages else None

    def sends_on(self, stages: int) -> bool:
        """Return whether another stage receives the result of this pass."""
        return self.stage < stages - 1 if self.side == FORWARD else self.stage > 0


@dataclass(frozen=True, slots=True)
class Stages:
    """The durations, in seconds, of each stage's passes of a micro-batch. `send_s` is the time from the end of a pass
    in one stage to the beginning of the pass in the next stage. If `blocks` is true, a rank is busy while it sends. A
    stage's first forward pass ends at `gathered_s` at the earliest."""

    pass_s: Floats  # [2, stage]
    send_s: float = 0.0
    blocks: bool = True
    gathered_s: Floats | None = None  # [stage]


@dataclass(frozen=True, slots=True)
class PipelineSchedule:
    ops: tuple[tuple[PipelineOp, ...], ...]  # [rank]
    begin_s: Floats  # [2, stage, micro], 0 without a pass
    end_s: Floats

    @property
    def seconds(self) -> float:
        return float(self.end_s.max())

    def span_s(self, op: PipelineOp) -> tuple[float, float]:
        """Return the begin and end times of a pass in seconds."""
        return float(self.begin_s[op]), float(self.end_s[op])


def order(ranks: int, micro_batches: int, chunks: int = 1) -> tuple[tuple[PipelineOp, ...], ...]:
    """Return each rank's passes in the order of execution (Narayanan et al., arXiv 2104.04473, sections 2.2.1 and
    2.2.2). `chunks` is the number of stages of each rank. Raises ValueError if stages are interleaved and the number of
    micro-batches is not a multiple of `ranks`."""
    if chunks > 1 and micro_batches % ranks:
        raise ValueError(f"interleaving needs a multiple of {ranks} micro-batches, got {micro_batches}")
    turns = [
        (chunk, micro)
        for first in range(0, micro_batches, ranks)
        for chunk in range(chunks)
        for micro in range(first, min(first + ranks, micro_batches))
    ]
    return tuple(_of_rank(rank, ranks, chunks, turns) for rank in range(ranks))


def forward_only(ops: tuple[tuple[PipelineOp, ...], ...]) -> tuple[tuple[PipelineOp, ...], ...]:
    """Return each rank's forward passes in the order of execution, for a schedule without backward passes."""
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
    """Return the schedule in which each rank runs its ops in the given order, each op as soon as its input has arrived.
    Raises ValueError if the given order has a deadlock."""
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
            raise ValueError("the order of passes has a deadlock: every rank waits for another")
    return PipelineSchedule(ops, np.nan_to_num(begin_s, posinf=math.inf), np.nan_to_num(end_s, posinf=math.inf))


def _arrival_s(op: PipelineOp, end_s: Floats, send_s: float) -> float:
    """Return the time at which the input of a pass arrives. Return nan if the pass that provides it is not scheduled
    yet."""
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
    """A part of a layer's pass: compute, a collective that blocks, or a collective that overlaps with compute."""

    seconds: float  # time of the segment
    group: str = ""  # group of the collective; empty: compute only
    sends_s: float = 0.0  # duration of the collective, from the segment's begin
    computes_s: float = 0.0  # compute time within `seconds`

    @property
    def waits_s(self) -> float:
        return self.seconds - self.computes_s


@dataclass(frozen=True, slots=True)
class Pass:
    """The forward or backward pass of one layer."""

    segments: tuple[PassSegment, ...]

    @property
    def seconds(self) -> float:
        return sum(each.seconds for each in self.segments)

    def waits_s(self, group: str) -> float:
        return sum(each.waits_s for each in self.segments if each.group == group)


def passes_of(
    job: TrainJob, compute: tuple[PassCompute, PassCompute], once_s: Mapping[str, float]
) -> tuple[Pass, Pass]:
    """Return the forward and the backward pass of a layer. With recomputation, the backward pass includes a forward
    pass. `once_s` contains the duration of each kind of collective in seconds."""
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
    """Return the segment of a collective whose hidden fraction overlaps with the compute that follows."""
    return PassSegment(seconds * (1 - hidden_share), group, sends_s=seconds)


def _beside(attention_s: float, ring_s: float, cp: int) -> PassSegment:
    """Return the segment of attention that overlaps with the ring of context parallelism. Attention to a rank's own
    block overlaps with the arrival of the first block. Attention to the last block begins after the ring has ended."""
    if ring_s <= 0:
        return _computed(attention_s)
    waits_s = max(0.0, ring_s - attention_s * (cp - 1) / cp)
    return PassSegment(attention_s + waits_s, "cp", sends_s=ring_s, computes_s=attention_s)


@dataclass(frozen=True, slots=True)
class StageLoad:
    """The passes and stages of a job on one network. `crossing` contains the kinds of collectives that cross servers.
    Only these collectives use circuits and delimit windows."""

    job: TrainJob
    passes: tuple[Pass, Pass]  # forward, backward
    stages: Stages
    ops: tuple[tuple[PipelineOp, ...], ...]  # [rank]
    crossing: frozenset[str]

    def schedule(self, gather_s: float = 0.0) -> PipelineSchedule:
        """Return the schedule of the passes. Gathering all parameters takes `gather_s` and overlaps with the first
        forward passes."""
        if not gather_s:
            return run(self.ops, self.stages, self.job.micro_batches)
        layout = self.job.layout
        chunk = np.arange(layout.stages) // layout.pp + 1
        gathered_s = gather_s * chunk / layout.vpp + self.stages.pass_s[FORWARD] / self.buckets
        return run(self.ops, replace(self.stages, gathered_s=gathered_s), self.job.micro_batches)

    def sends(self, segment: PassSegment) -> bool:
        """Return whether a segment contains a collective that is sent between servers."""
        return segment.sends_s > 0 and segment.group in self.crossing

    @property
    def buckets(self) -> int:
        """The number of buckets in which a stage's gradients and parameters are sent."""
        size = max(self.job.constants.bucket_parameters, 1e6 * self.job.layout.dp)
        return max(1, round(sum(stage_parameters(self.job)) / self.job.layout.vpp / size))

    def op_s(self, op: PipelineOp) -> float:
        return float(self.stages.pass_s[op.side, op.stage])

    def sends_share(self, op: PipelineOp) -> float:
        """Return the fraction of a pass's duration during which its collectives use the network between servers."""
        sends_s = sum(segment.sends_s for segment in self.passes[op.side].segments if self.sends(segment))
        return min(1.0, sends_s * self.job.stage_layers[op.stage] / self.op_s(op))


def loaded(job: TrainJob, once_s: Mapping[str, float], crossing: frozenset[str]) -> StageLoad:
    """Return the load of a job on a network. `once_s` contains the duration, in seconds, of each kind of collective in
    the forward and backward passes. `crossing` contains the kinds that cross servers."""
    compute = compute_of(job)
    passes = passes_of(job, compute, once_s)
    pass_s = np.outer([each.seconds for each in passes], job.stage_layers)
    pass_s[:, -1] += [each.head_s for each in compute]
    # Megatron overlaps point-to-point messages where stages are interleaved.
    stages = Stages(pass_s, send_s=once_s.get("pp", 0.0), blocks=job.layout.vpp == 1)
    return StageLoad(job, passes, stages, order(job.layout.pp, job.micro_batches, job.layout.vpp), crossing)
