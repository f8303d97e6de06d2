"""When each stage computes each micro-batch: 1F1B, plain or interleaved, as Megatron schedules it. Pure.

Stages are numbered along the pipeline; with interleaving, rank r of p holds stages r, r + p, r + 2p, and so on.
"""

from dataclasses import dataclass

import numpy as np

from orchestrrl.lab.sim.net.model import Floats

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
