"""When gradients are sent, and which circuits they take: each rule by itself."""

from dataclasses import replace

import pytest

from orchestrrl.sim.net.model import Servers
from orchestrrl.sim.train.circuits import Course, Gradients, last_sent_s, shortest
from orchestrrl.sim.train.constants import MEGATRON
from orchestrrl.sim.train.gradients import reduced
from orchestrrl.sim.train.model import TrainJob, TrainLayout
from orchestrrl.sim.train.networks import on_fabric
from orchestrrl.sim.train.stages import Loaded
from orchestrrl.sim.train.timeline import boundaries
from orchestrrl.sim.train.traffic import traffic
from tests.sim.train.train_builders import MOE, job, static

FOUR = Servers(4)


def given(of: TrainJob, **changes: object) -> Loaded:
    constants = replace(MEGATRON, **changes)  # type: ignore[arg-type]
    return on_fabric(of, static(FOUR), traffic(of, FOUR, constants), constants).given


def experts(**changes: object) -> Loaded:
    """One pass is forward and backward; its all-to-all goes between servers."""
    return given(job(TrainLayout(tp=8, dp=4, ep=16), model=MOE, sequences=4), **changes)


def pipelined() -> Loaded:
    return given(job(TrainLayout(tp=8, dp=2, pp=2), sequences=8))


def test_gradients_begin_with_the_first_bucket() -> None:
    of = experts(bucket_parameters=1e6)
    assert of.buckets > 4
    (op,) = (op for op in of.schedule().ops[0] if op.backward)
    begin_s, end_s = (each[1, op.stage, op.micro] for each in (of.schedule().begin_s, of.schedule().end_s))
    found = reduced(of, of.schedule(), 1.0)
    assert found.begin_s == pytest.approx([begin_s + (end_s - begin_s) / of.buckets])


def test_gradients_wait_while_the_pass_sends_for_itself() -> None:
    of = experts(bucket_parameters=1e6)
    (op,) = (op for op in of.schedule().ops[0] if op.backward)
    passes_s = of.op_s(op) * (1 - 1 / of.buckets)  # in which there are gradients to send
    share = of.sends_share(op)
    assert 0.1 < share < 0.9
    busy, free = (reduced(each, of.schedule(), 1.0).seconds for each in (of, replace(of, crossing=frozenset({"dp"}))))
    assert busy - free == pytest.approx(share * passes_s)


def test_nothing_is_sent_after_what_is_taken_for_last() -> None:
    for of in (experts(), pipelined()):
        kept = Gradients(1e-3, 1e-3)
        taken = shortest(of, kept, None, 0.0, 0.0)
        sent = [each for rank in range(of.job.layout.pp) for each in boundaries(of, taken, rank, {})]
        last_s = max(each.end_s for each in sent if each.group != "dp")
        assert last_sent_s(of, taken.schedule) == pytest.approx(last_s)


@pytest.mark.parametrize("reconfigures_s", [0.01, 1.0])
def test_circuits_for_gradients_are_there_once_they_have_changed(reconfigures_s: float) -> None:
    of, kept, changed = pipelined(), Gradients(100.0, 1e-3), Gradients(0.1, 50.0)
    taken = shortest(of, kept, changed, 0.0, reconfigures_s)
    assert taken.course is Course.REDUCE
    ready_s = last_sent_s(of, taken.schedule) + reconfigures_s
    assert min(taken.reduced.begin_s) >= ready_s
    assert min(taken.reduced.end_s) >= ready_s


def test_circuits_go_back_while_the_optimizer_steps() -> None:
    of, kept, changed = pipelined(), Gradients(100.0, 1e-3), Gradients(0.1, 50.0)
    none, half, twice = (shortest(of, kept, changed, each, 1.0) for each in (0.0, 0.5, 2.0))
    assert none.seconds == half.seconds == none.shift_s + none.reduced.seconds + 1.0
    assert twice.seconds == pytest.approx(none.seconds + 1.0)
