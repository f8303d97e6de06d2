"""Tests of the times at which a rank sends: messages of passes, gradients, and circuits for gradients."""

from dataclasses import replace

import pytest

from orchestrrl.lab.sim.net.fluid import seconds
from orchestrrl.lab.sim.net.model import Servers
from orchestrrl.lab.sim.train.iteration import (
    Gradients,
    boundaries,
    forward_s,
    gradients,
    last_sent_s,
    on_fabric,
    reduced,
    shortest,
    windows,
)
from orchestrrl.lab.sim.train.model import MEGATRON, CollectiveBoundary, OverlapWindow, TrainJob, TrainLayout
from orchestrrl.lab.sim.train.stages import BACKWARD, FORWARD, PipelineOp, StageLoad, run
from orchestrrl.lab.sim.train.traffic import traffic
from tests.orchestrrl.lab.sim.train.train_builders import MOE, job, star, static

FOUR = Servers(4)


def given(of: TrainJob, **changes: object) -> StageLoad:
    constants = replace(MEGATRON, **changes)  # type: ignore[arg-type]
    of = replace(of, constants=constants)
    return on_fabric(of, static(FOUR), traffic(of, FOUR))[0]


def experts(**changes: object) -> StageLoad:
    """Return a load with one micro-batch per rank, whose all-to-all crosses servers."""
    return given(job(TrainLayout(tp=8, dp=4, ep=16), model=MOE, sequences=4), **changes)


def pipelined() -> StageLoad:
    return given(job(TrainLayout(tp=8, dp=2, pp=2), sequences=8))


def test_gradients_begin_with_the_first_bucket() -> None:
    of = experts(bucket_parameters=1e6)
    assert of.buckets > 4
    (op,) = (op for op in of.schedule().ops[0] if op.side == BACKWARD)
    begin_s, end_s = of.schedule().span_s(op)
    ((first_s, _),) = reduced(of, of.schedule(), 1.0)
    assert first_s == pytest.approx(begin_s + (end_s - begin_s) / of.buckets)


def test_gradients_wait_while_the_pass_sends() -> None:
    of = experts(bucket_parameters=1e6)
    (op,) = (op for op in of.schedule().ops[0] if op.side == BACKWARD)
    passes_s = of.op_s(op) * (1 - 1 / of.buckets)  # the time in which gradients are ready to be sent
    share = of.sends_share(op)
    assert 0.1 < share < 0.9
    alone = replace(of, crossing=frozenset({"dp"}))
    ((_, busy),), ((_, free),) = (reduced(each, of.schedule(), 1.0) for each in (of, alone))
    assert busy - free == pytest.approx(share * passes_s)


def test_last_sent_time_is_the_last_boundary() -> None:
    for of in (experts(), pipelined()):
        kept = Gradients(1e-3, 1e-3)
        taken = shortest(of, kept, None, 0.0, 0.0)
        sent = [each for rank in range(of.job.layout.pp) for each in boundaries(of, taken, rank)]
        last_s = max(each.end_s for each in sent if each.group != "dp")
        assert last_sent_s(of, taken.schedule) == pytest.approx(last_s)


@pytest.mark.parametrize("reconfigures_s", [0.01, 1.0])
def test_gradients_wait_for_changed_circuits(reconfigures_s: float) -> None:
    of, kept, changed = pipelined(), Gradients(100.0, 1e-3), Gradients(0.1, 50.0)
    taken = shortest(of, kept, changed, 0.0, reconfigures_s)
    assert taken.gather_s == kept.gather_s  # on the restored circuits
    ready_s = last_sent_s(of, taken.schedule) + reconfigures_s
    assert min(begin_s for begin_s, _ in taken.reduced) >= ready_s
    assert min(end_s for _, end_s in taken.reduced) >= ready_s


def test_circuits_are_restored_during_the_optimizer_step() -> None:
    of, kept, changed = pipelined(), Gradients(100.0, 1e-3), Gradients(0.1, 50.0)
    none, half, twice = (shortest(of, kept, changed, each, 1.0) for each in (0.0, 0.5, 2.0))
    assert none.seconds == half.seconds == none.shift_s + max(end_s for _, end_s in none.reduced) + 1.0
    assert twice.seconds == pytest.approx(none.seconds + 1.0)


def test_messages_block_without_interleaving() -> None:
    layout = TrainLayout(tp=8, dp=2, pp=2)
    assert [given(job(replace(layout, vpp=each))).stages.blocks for each in (1, 2)] == [True, False]


def test_expert_gradients_follow_dense_gradients() -> None:
    of = job(TrainLayout(tp=8, dp=4, ep=16), model=MOE)
    layout = replace(of.layout, ep=8)  # each expert is on two servers
    found = traffic(replace(of, layout=layout), FOUR)
    kinds = ("dp_reduce", "dp_gather", "expert_reduce", "expert_gather")
    each_s = {kind: seconds(star(FOUR), found[kind].transfer) for kind in kinds}
    expected = Gradients(each_s["dp_reduce"] + each_s["expert_reduce"], each_s["dp_gather"] + each_s["expert_gather"])
    assert gradients(star(FOUR), found) == expected


def test_message_times_match_at_sender_and_receiver() -> None:
    of = pipelined()
    taken = shortest(of, Gradients(1e-3, 1e-3), None, 0.0, 0.0)
    one, other = (
        [(each.begin_s, each.end_s) for each in boundaries(of, taken, rank) if each.group == "pp"] for rank in (0, 1)
    )
    assert sorted(one) == sorted(other)
    assert len(one) == 2 * of.job.micro_batches
    assert [end_s - begin_s for begin_s, end_s in one] == pytest.approx([of.stages.send_s] * len(one))


def test_backward_layers_run_after_the_head() -> None:
    of = experts()
    taken = shortest(of, Gradients(0.0, 0.0), None, 0.0, 0.0)
    (op,) = (op for op in taken.schedule.ops[0] if op.side == BACKWARD)
    _, end_s = taken.schedule.span_s(op)
    sent = [each for each in boundaries(of, taken, 0) if each.group == "ep"]
    segments = of.passes[BACKWARD].segments
    last = max(place for place, each in enumerate(segments) if each.group == "ep")
    after_s = sum(each.seconds for each in segments[last + 1 :])
    assert max(each.end_s for each in sent) == pytest.approx(end_s - after_s)
    assert len(sent) == 2 * 2 * of.job.model.layers


@pytest.mark.parametrize(("tp", "pp", "sequences"), [(8, 2, 8), (8, 4, 3), (4, 8, 12)])
def test_forward_passes_match_a_forward_pipeline(tp: int, pp: int, sequences: int) -> None:
    of = given(job(TrainLayout(tp=tp, pp=pp), sequences=sequences))
    ops = tuple(tuple(PipelineOp(FORWARD, rank, micro) for micro in range(sequences)) for rank in range(pp))
    assert of.stages.send_s > 0
    assert forward_s(of.job, static(FOUR)) == pytest.approx(run(ops, of.stages, sequences).end_s[0].max())


def test_interleaving_shortens_forward_passes() -> None:
    plain, interleaved = (job(TrainLayout(tp=8, pp=4, vpp=each), sequences=4, tokens=65536) for each in (1, 2))
    assert forward_s(interleaved, static(FOUR)) < 0.9 * forward_s(plain, static(FOUR))


def test_windows_begin_after_the_last_overlapping_collective() -> None:
    """The longer of two overlapping collectives bounds the window, although it began first."""
    found = (
        CollectiveBoundary("dp", 0.0, 4.0),
        CollectiveBoundary("ep", 1.0, 2.0),
        CollectiveBoundary("pp", 3.0, 4.0),
        CollectiveBoundary("ep", 6.0, 7.0),
        CollectiveBoundary("pp", 7.0, 8.0),
    )
    assert windows(found) == (OverlapWindow(4.0, 6.0, "dp", "ep"),)
    assert windows(found[:1]) == ()
