"""An iteration as one rank sees it: its collectives over the network, and the windows between them. Pure."""

from collections.abc import Mapping

import numpy as np

from orchestrrl.lab.sim.net.model import Floats
from orchestrrl.lab.sim.train.circuits import Taken
from orchestrrl.lab.sim.train.model import CollectiveBoundary, OverlapWindow
from orchestrrl.lab.sim.train.passes import Pass
from orchestrrl.lab.sim.train.pipeline import PipelineOp
from orchestrrl.lab.sim.train.stages import StageLoad

Sent = tuple[str, float, float]  # group, from, to


def boundaries(
    given: StageLoad, taken: Taken, rank: int, bytes_of: Mapping[str, float]
) -> tuple[CollectiveBoundary, ...]:
    """Of a rank of the pipeline, ascending by their begin. `bytes_of`: what it gives in one of each kind."""
    sent = [each for op in taken.schedule.ops[rank] for each in _of_op(given, taken, op)]
    found = [CollectiveBoundary(group, begin_s, end_s, bytes_of.get(group, 0.0)) for group, begin_s, end_s in sent]
    if "dp" in given.crossing:
        begin_s, end_s = taken.reduced.begin_s[rank] + taken.shift_s, taken.reduced.end_s[rank] + taken.shift_s
        found += [
            CollectiveBoundary("dp", 0.0, taken.gather_s, bytes_of.get("dp_gather", 0.0)),
            CollectiveBoundary("dp", begin_s, end_s, bytes_of.get("dp_reduce", 0.0)),
        ]
    return tuple(sorted((each for each in found if each.end_s > each.begin_s), key=lambda each: each.begin_s))


def _of_op(given: StageLoad, taken: Taken, op: PipelineOp) -> list[Sent]:
    side = int(op.backward)
    begin_s = float(taken.schedule.begin_s[side, op.stage, op.micro]) + taken.shift_s
    end_s = float(taken.schedule.end_s[side, op.stage, op.micro]) + taken.shift_s
    found: list[Sent] = []
    if "pp" in given.crossing:
        send_s, last = given.stages.send_s, given.job.layout.stages - 1
        if op.stage < last if op.backward else op.stage > 0:
            found.append(("pp", *_arrived(taken, op, begin_s, send_s)))
        if op.stage > 0 if op.backward else op.stage < last:
            found.append(("pp", end_s, end_s + send_s))
    each = given.passes.backward if op.backward else given.passes.forward
    layers = given.job.stage_layers[op.stage]
    # A first forward pass that waits for its parameters has its layers at its end.
    first_s = begin_s + (given.head_s(op) if op.backward else end_s - begin_s - given.op_s(op))
    starts_s = (first_s + each.seconds * np.arange(layers)).tolist()
    for group, from_s, to_s in _offsets(given, each):
        found += [(group, at_s + from_s, at_s + to_s) for at_s in starts_s]
    return found


def _arrived(taken: Taken, op: PipelineOp, begin_s: float, send_s: float) -> tuple[float, float]:
    sender = op.stage + 1 if op.backward else op.stage - 1
    left_s = float(taken.schedule.end_s[int(op.backward), sender, op.micro]) + taken.shift_s
    return left_s, left_s + send_s


def _offsets(given: StageLoad, each: Pass) -> list[Sent]:
    """Of one layer's collectives over the network, from its begin."""
    found, at_s = [], 0.0
    for segment in each.segments:
        if given.sends(segment):
            found.append((segment.group, at_s, at_s + segment.sends_s))
        at_s += segment.seconds
    return found


def windows(found: tuple[CollectiveBoundary, ...], least_s: float = 1e-9) -> tuple[OverlapWindow, ...]:
    """Between collectives, where none is under way."""
    if len(found) < 2:
        return ()
    begin_s = np.array([each.begin_s for each in found])
    end_s: Floats = np.array([each.end_s for each in found])
    until_s = np.maximum.accumulate(end_s)
    fresh = np.concatenate([[True], end_s[1:] > until_s[:-1]])
    latest = np.maximum.accumulate(np.where(fresh, np.arange(len(found)), 0))  # whose end `until_s` is
    gaps = np.flatnonzero(begin_s[1:] > until_s[:-1] + least_s)
    rows = zip(until_s[gaps].tolist(), begin_s[gaps + 1].tolist(), latest[gaps].tolist(), gaps.tolist(), strict=True)
    return tuple(
        OverlapWindow(from_s, to_s, found[last].group, found[gap + 1].group) for from_s, to_s, last, gap in rows
    )
