"""Simulate a training iteration on a fabric: its collectives with their begin and end times, the parts of its duration,
and the windows between collectives. The functions have no side effects.

Gradients are reduced bucket by bucket during the last micro-batch's backward pass. The network carries one collective
at a time: the reduction waits while the backward pass sends its own messages.

An iteration uses the faster of two alternatives. In the first, circuits change in a window without collectives, and the
iteration waits for the part of the change that the window does not cover. In the second, circuits are kept, and
gradients use the existing paths. In section 5.3 of the OrchestrRL paper, by contrast, a plan is retained whenever the
next window does not cover the change.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from orchestrrl.lab.sim.net.fabrics.base import SimulatedFabric
from orchestrrl.lab.sim.net.fluid import seconds
from orchestrrl.lab.sim.net.model import Floats, LinkNetwork
from orchestrrl.lab.sim.train.compute import optimizer_s, step_flops
from orchestrrl.lab.sim.train.model import CollectiveBoundary, OverlapWindow, TrainingIteration, TrainJob
from orchestrrl.lab.sim.train.stages import (
    BACKWARD,
    FORWARD,
    WAITS,
    PipelineOp,
    PipelineSchedule,
    StageLoad,
    forward_only,
    loaded,
    run,
)
from orchestrrl.lab.sim.train.traffic import FORWARD_BACKWARD, GroupCollective, periods_of, traffic

Span = tuple[float, float]  # begin and end in seconds


def reduced(
    given: StageLoad, schedule: PipelineSchedule, reduce_s: float, *, from_s: float = 0.0, alone: bool = False
) -> list[Span]:
    """Return the begin and end times of gradient reduction for each pipeline rank. `reduce_s` is the time to reduce all
    gradients of a rank. Reduction begins at `from_s` at the earliest. If `alone` is true, passes send no messages
    during the reduction."""
    found = []
    for ops in schedule.ops:
        last = {op.stage: op for op in ops if op.side == BACKWARD} if reduce_s else {}
        share_s, at_s, first_s = reduce_s / max(1, len(last)), from_s, None
        for op in last.values():
            begin_s, end_s = schedule.span_s(op)
            at_s = max(at_s, begin_s + (end_s - begin_s) / given.buckets)  # the first bucket is complete
            first_s = at_s if first_s is None else first_s
            free = 1.0 if alone else 1.0 - given.sends_share(op)
            hidden_s = max(0.0, end_s - at_s) * free
            at_s = max(at_s, end_s) + max(share_s - hidden_s, share_s / given.buckets)  # the last bucket is exposed
        done_s = schedule.span_s(ops[-1])[1]
        found.append((done_s, done_s) if first_s is None else (first_s, at_s))
    return found


@dataclass(frozen=True, slots=True)
class Gradients:
    """The times, in seconds, to reduce a rank's gradients and to gather its parameters on one network. The times are
    infinite if the network has no path between the ranks."""

    reduce_s: float
    gather_s: float


@dataclass(frozen=True, slots=True)
class Taken:
    """The alternative that an iteration uses: its schedule, and the times of its gradient and parameter traffic."""

    seconds: float  # of the iteration
    schedule: PipelineSchedule
    reduced: list[Span]  # [rank]
    gather_s: float
    shift_s: float  # before the first pass begins


def shortest(
    given: StageLoad, kept: Gradients, changed: Gradients | None, optimizer_s: float, reconfigures_s: float
) -> Taken:
    """Return the fastest alternative for an iteration. `kept` contains the gradient times on the circuits of the
    forward and backward passes. `changed` contains the gradient times on circuits that are set for gradients, or is
    None if these would be the same circuits."""

    def taken(
        schedule: PipelineSchedule, shift_s: float, gather_s: float, reduce_s: float, last_s: float, change: bool
    ) -> Taken:
        from_s = last_sent_s(given, schedule) + reconfigures_s if change else 0.0
        done = reduced(given, schedule, reduce_s, from_s=from_s, alone=change)
        return Taken(shift_s + max(end_s for _, end_s in done) + last_s, schedule, done, gather_s, shift_s)

    # Parameters are gathered during the first pass, which never ends if they have no path.
    has_way = math.isfinite(kept.gather_s)
    beside, shift_s = given.schedule(kept.gather_s if has_way else 0.0), 0.0 if has_way else math.inf
    found = [taken(beside, shift_s, kept.gather_s, kept.reduce_s, optimizer_s, change=False)]
    if changed is not None:
        # Circuits are set for gradients and restored during the optimizer step; or set for gradients and parameters,
        # and restored before the first pass sends.
        back_s = max(optimizer_s, reconfigures_s)
        found.append(taken(beside, shift_s, kept.gather_s, changed.reduce_s, back_s, change=True))
        after = given.schedule()
        begins_s = (from_s for ops in after.ops for _, from_s, _ in _sent(given, after, ops[0]))
        shift_s = changed.gather_s + max(0.0, reconfigures_s - min(begins_s, default=after.seconds))
        found.append(taken(after, shift_s, changed.gather_s, changed.reduce_s, optimizer_s, change=True))
    return min(found, key=lambda each: each.seconds)


def last_sent_s(given: StageLoad, schedule: PipelineSchedule) -> float:
    """Return the time at which the forward and backward passes of all ranks have finished sending. Return 0 if they
    never send."""
    return max((to_s for ops in schedule.ops for _, _, to_s in _sent(given, schedule, ops[-1])), default=0.0)


def on_fabric(
    job: TrainJob, fabric: SimulatedFabric, exchanges: Mapping[str, GroupCollective]
) -> tuple[StageLoad, Gradients, Gradients | None]:
    """Return three values: the load of the stages, the gradient times on the circuits of the forward and backward
    passes, and the gradient times on circuits set for gradients (None if these are the same circuits)."""
    passes_period, gradients_period = periods_of(job, exchanges)
    network = fabric.network(passes_period)
    each_s = once_s(network, exchanges, FORWARD_BACKWARD)
    crossing = frozenset(group_of(kind) for kind, each in exchanges.items() if each.crosses)
    given = loaded(job, each_s, crossing)
    changed = None
    if "dp" in given.crossing and fabric.changes(passes_period, gradients_period):
        changed = gradients(fabric.network(gradients_period), exchanges)
    return given, gradients(network, exchanges), changed


def group_of(kind: str) -> str:
    return "dp" if kind.endswith(("_reduce", "_gather")) else kind


def once_s(network: LinkNetwork, exchanges: Mapping[str, GroupCollective], kinds: Iterable[str]) -> dict[str, float]:
    """Return the duration, in seconds, of each kind of collective without concurrent collectives. A rank runs only one
    collective at a time."""
    return {kind: seconds(network, exchanges[kind].transfer) for kind in kinds if kind in exchanges}


def gradients(network: LinkNetwork, exchanges: Mapping[str, GroupCollective]) -> Gradients:
    """Return the times of the gradient traffic on a network. Dense and expert parameters are sent one after the other,
    because both use the same NICs. The times are infinite if the network has no path between the ranks."""
    try:
        each_s = once_s(network, exchanges, [kind for kind in exchanges if group_of(kind) == "dp"])
    except ValueError:  # circuits of another period may not connect all data-parallel ranks
        return Gradients(math.inf, math.inf)
    return Gradients(
        sum(each for kind, each in each_s.items() if kind.endswith("_reduce")),
        sum(each for kind, each in each_s.items() if kind.endswith("_gather")),
    )


LEAST_WINDOW_S = 1e-9
Sent = tuple[str, float, float]  # group, begin, end


def boundaries(given: StageLoad, taken: Taken, rank: int) -> tuple[CollectiveBoundary, ...]:
    """Return the collectives of a pipeline rank, ordered by the time at which they begin."""
    found = [
        CollectiveBoundary(group, from_s + taken.shift_s, to_s + taken.shift_s)
        for op in taken.schedule.ops[rank]
        for group, from_s, to_s in _sent(given, taken.schedule, op)
    ]
    if "dp" in given.crossing:
        begin_s, end_s = (each_s + taken.shift_s for each_s in taken.reduced[rank])
        found += [CollectiveBoundary("dp", 0.0, taken.gather_s), CollectiveBoundary("dp", begin_s, end_s)]
    return tuple(sorted((each for each in found if each.end_s > each.begin_s), key=lambda each: each.begin_s))


def _sent(given: StageLoad, schedule: PipelineSchedule, op: PipelineOp) -> list[Sent]:
    """Return the group, begin time and end time of each collective that one pass of a micro-batch through a stage uses,
    including the transfers of its input and its result."""
    end_s, send_s, stages = schedule.span_s(op)[1], given.stages.send_s, given.job.layout.stages
    found: list[Sent] = []
    if "pp" in given.crossing:
        if sender := op.sender(stages):
            left_s = schedule.span_s(sender)[1]
            found.append(("pp", left_s, left_s + send_s))
        if op.sends_on(stages):
            found.append(("pp", end_s, end_s + send_s))
    each, layers = given.passes[op.side], given.job.stage_layers[op.stage]
    # The head runs after the layers in a forward pass, and before them in a backward pass.
    first_s = end_s - (given.op_s(op) if op.side == FORWARD else layers * each.seconds)
    starts_s = (first_s + each.seconds * np.arange(layers)).tolist()
    at_s = 0.0
    for segment in each.segments:
        if given.sends(segment):
            found += [(segment.group, start_s + at_s, start_s + at_s + segment.sends_s) for start_s in starts_s]
        at_s += segment.seconds
    return found


def windows(found: tuple[CollectiveBoundary, ...]) -> tuple[OverlapWindow, ...]:
    """Return the time windows between collectives during which no collective runs."""
    if len(found) < 2:
        return ()
    begin_s = np.array([each.begin_s for each in found])
    end_s: Floats = np.array([each.end_s for each in found])
    until_s = np.maximum.accumulate(end_s)
    fresh = np.concatenate([[True], end_s[1:] > until_s[:-1]])
    latest = np.maximum.accumulate(np.where(fresh, np.arange(len(found)), 0))  # the collective that ends at `until_s`
    gaps = np.flatnonzero(begin_s[1:] > until_s[:-1] + LEAST_WINDOW_S)
    rows = zip(until_s[gaps].tolist(), begin_s[gaps + 1].tolist(), latest[gaps].tolist(), gaps.tolist(), strict=True)
    return tuple(
        OverlapWindow(from_s, to_s, found[last].group, found[gap + 1].group) for from_s, to_s, last, gap in rows
    )


def iteration(job: TrainJob, fabric: SimulatedFabric) -> TrainingIteration:
    """Simulate an iteration of `job` on a fabric. The fabric's network may differ between the iteration's communication
    periods. Raises ValueError if no path connects the GPUs of a group."""
    given, kept, changed = on_fabric(job, fabric, traffic(job, fabric.servers))
    step_s = optimizer_s(job)
    taken, free = (shortest(given, kept, changed, step_s, each) for each in (fabric.reconfigures_s, 0.0))
    if not math.isfinite(taken.seconds):
        raise ValueError(
            f"{fabric.name}: no path for the gradients of {job.model.name} on the circuits of either period"
        )
    # [rank] seconds of compute, and of waiting for collectives of the rank's own passes.
    busy_s = job.micro_batches * given.stages.pass_s.reshape(2, -1, job.layout.pp).sum(axis=(0, 1))
    rank = int(np.argmax(busy_s))
    parts = _parts(given, taken, free, step_s, rank, float(busy_s[rank]))
    total_s = math.fsum(parts.values())
    flops = step_flops(job.model, job.sequences, job.tokens, job.square_tokens)
    sent = boundaries(given, taken, rank)
    return TrainingIteration(
        seconds=total_s,
        mfu=flops / (job.layout.gpus * total_s) / job.gpu.bf16_flops,
        parts_s=parts,
        boundaries=sent,
        windows=windows(sent),
    )


def forward_s(job: TrainJob, fabric: SimulatedFabric) -> float:
    """Return the time, in seconds, of the batch's forward passes alone, as needed for log-probabilities."""
    given, _, _ = on_fabric(job, fabric, traffic(job, fabric.servers))
    return run(forward_only(given.ops), given.stages, job.micro_batches).seconds


def _parts(given: StageLoad, taken: Taken, free: Taken, step_s: float, rank: int, busy_s: float) -> dict[str, float]:
    """Return the parts of the iteration time of `rank`, the busiest pipeline rank, whose own passes take `busy_s`.
    `free` is the alternative that is fastest if circuits change instantly, and `step_s` is the time of the optimizer.
    The parts `pp`, `dp` and `circuits` are the times that are added by pipeline traffic, by gradient traffic and by
    circuit changes, respectively."""
    job = given.job
    micro, layers = job.micro_batches, sum(job.stage_layers[rank :: job.layout.pp])
    waits_s = {group: micro * layers * sum(each.waits_s(group) for each in given.passes) for group in WAITS}
    together_s = run(given.ops, replace(given.stages, send_s=0.0), micro).seconds
    sent_s = given.schedule().seconds if given.stages.send_s else together_s
    parts = {
        "compute": busy_s - sum(waits_s.values()),
        "bubble": together_s - busy_s,
        **waits_s,
        "pp": sent_s - together_s,
        "dp": free.seconds - step_s - sent_s,
        "optimizer": step_s,
        "circuits": taken.seconds - free.seconds,
    }
    return {name: max(0.0, each_s) for name, each_s in parts.items()}  # rounding may make a zero part negative
