"""The circuits of an iteration: those of forward and backward all the time, or others for its gradients. Pure.

Gradients are reduced bucket by bucket behind the last micro-batch's backward pass. The network carries one thing at a
time: while that pass sends for itself, gradients wait.

Circuits are changed in a window without collectives, and what the window does not cover is waited for; or they are
kept, and gradients take the way that there is. The shorter course is taken (section 5.3 of the OrchestrRL paper: a plan
is retained where the next window does not cover the change).
"""

from dataclasses import dataclass
from enum import StrEnum

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


class CircuitCourse(StrEnum):
    KEEP = "keep"  # one plan for the whole iteration
    REDUCE = "reduce"  # other circuits for gradients, back while the optimizer steps
    REDUCE_AND_GATHER = "reduce_and_gather"  # other circuits for gradients and parameters, back before the first pass


@dataclass(frozen=True, slots=True)
class Gradients:
    """Seconds of all of a rank's gradients, and parameters, on one network; infinite where there is no way."""

    reduce_s: float
    gather_s: float


@dataclass(frozen=True, slots=True)
class Taken:
    course: CircuitCourse
    seconds: float  # of the iteration
    schedule: PipelineSchedule
    reduced: GradientReduction
    gather_s: float
    shift_s: float  # before the first pass begins


def shortest(
    given: StageLoad, kept: Gradients, changed: Gradients | None, optimizer_s: float, reconfigures_s: float
) -> Taken:
    """`changed`: on the circuits for gradients; None: there are no others."""
    found = [_kept(given, kept, optimizer_s)]
    if changed is not None:
        found.append(_for_reduction(given, kept, changed, optimizer_s, reconfigures_s))
        found.append(_for_both(given, changed, optimizer_s, reconfigures_s))
    return min(found, key=lambda each: each.seconds)


def _passes(given: StageLoad, gather_s: float) -> tuple[PipelineSchedule, float]:
    """Return the schedule and the seconds before it begins, infinite where parameters have no way."""
    return (given.schedule(), gather_s) if gather_s == float("inf") else (given.schedule(gather_s), 0.0)


def _kept(given: StageLoad, kept: Gradients, optimizer_s: float) -> Taken:
    schedule, shift_s = _passes(given, kept.gather_s)
    done = reduced(given, schedule, kept.reduce_s)
    return Taken(CircuitCourse.KEEP, shift_s + done.seconds + optimizer_s, schedule, done, kept.gather_s, shift_s)


def _for_reduction(
    given: StageLoad, kept: Gradients, changed: Gradients, optimizer_s: float, reconfigures_s: float
) -> Taken:
    schedule, shift_s = _passes(given, kept.gather_s)
    from_s = last_sent_s(given, schedule) + reconfigures_s
    done = reduced(given, schedule, changed.reduce_s, from_s=from_s, alone=True)
    back_s = max(optimizer_s, reconfigures_s)
    return Taken(CircuitCourse.REDUCE, shift_s + done.seconds + back_s, schedule, done, kept.gather_s, shift_s)


def _for_both(given: StageLoad, changed: Gradients, optimizer_s: float, reconfigures_s: float) -> Taken:
    schedule = given.schedule()
    from_s = last_sent_s(given, schedule) + reconfigures_s
    done = reduced(given, schedule, changed.reduce_s, from_s=from_s, alone=True)
    shift_s = changed.gather_s + max(0.0, reconfigures_s - first_sent_s(given, schedule))
    seconds = shift_s + done.seconds + optimizer_s
    return Taken(CircuitCourse.REDUCE_AND_GATHER, seconds, schedule, done, changed.gather_s, shift_s)


def last_sent_s(given: StageLoad, schedule: PipelineSchedule) -> float:
    """When forward and backward send nothing any more, on any rank; 0: they never send."""
    found = 0.0
    for ops in schedule.ops:
        op = ops[-1]
        begin_s, end_s = float(schedule.begin_s[1, op.stage, op.micro]), float(schedule.end_s[1, op.stage, op.micro])
        if "pp" in given.crossing and given.job.layout.pp > 1:
            found = max(found, begin_s if op.stage == 0 else end_s + given.stages.send_s)
        behind_s = 0.0
        for segment in reversed(given.passes.backward.segments):
            behind_s += segment.seconds
            if given.sends(segment):
                found = max(found, min(end_s, end_s - behind_s + segment.sends_s))
                break
    return found


def first_sent_s(given: StageLoad, schedule: PipelineSchedule) -> float:
    """When forward and backward send for the first time, on any rank."""
    before_s = 0.0
    for segment in given.passes.forward.segments:
        if given.sends(segment):
            return before_s
        before_s += segment.seconds
    return float(schedule.end_s[0, 0, 0]) if "pp" in given.crossing else schedule.seconds
