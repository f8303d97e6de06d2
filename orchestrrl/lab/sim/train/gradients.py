"""When gradients are reduced: bucket by bucket behind the last micro-batch's backward pass. Pure.

The network carries one thing at a time: while that pass sends for itself, gradients wait.
"""

from dataclasses import dataclass

from orchestrrl.lab.sim.train.pipeline import PipelineOp, PipelineSchedule
from orchestrrl.lab.sim.train.stages import StageLoad


@dataclass(frozen=True, slots=True)
class GradientReduction:
    """[rank of the pipeline] from when to when."""

    begin_s: tuple[float, ...]
    end_s: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return max(self.end_s)


def reduced(
    given: StageLoad, schedule: PipelineSchedule, reduce_s: float, *, from_s: float = 0.0, alone: bool = False
) -> GradientReduction:
    """`reduce_s`: of all of a rank's gradients. Not before `from_s`. `alone`: passes send nothing meanwhile."""
    spans = [_of_rank(given, schedule, ops, reduce_s, from_s, alone) for ops in schedule.ops]
    return GradientReduction(tuple(begin for begin, _ in spans), tuple(end for _, end in spans))


def _of_rank(
    given: StageLoad,
    schedule: PipelineSchedule,
    ops: tuple[PipelineOp, ...],
    reduce_s: float,
    from_s: float,
    alone: bool,
) -> tuple[float, float]:
    done_s = float(schedule.end_s[1, ops[-1].stage, ops[-1].micro])
    if not reduce_s:
        return done_s, done_s
    if not given.constants.overlap_gradients:
        begin_s = max(done_s, from_s)
        return begin_s, begin_s + reduce_s
    last = {op.stage: op for op in ops if op.backward}
    share_s, at_s, first_s = reduce_s / len(last), from_s, None
    for op in last.values():
        begin_s, end_s = (float(each[1, op.stage, op.micro]) for each in (schedule.begin_s, schedule.end_s))
        at_s = max(at_s, begin_s + (end_s - begin_s) / given.buckets)  # the first bucket is complete
        first_s = at_s if first_s is None else first_s
        free = 1.0 if alone else 1.0 - given.sends_share(op)
        hidden_s = max(0.0, end_s - at_s) * free
        at_s = max(at_s, end_s) + max(share_s - hidden_s, share_s / given.buckets)  # the last one is not hidden
    return (done_s if first_s is None else first_s), at_s
