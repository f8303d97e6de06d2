"""Tests of process groups in Megatron's rank order, and of the demand of periods."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.lab.sim.net.model import Servers
from orchestrrl.lab.sim.train.model import TrainJob, TrainLayout
from orchestrrl.lab.sim.train.traffic import crosses, groups, periods, traffic
from planner.cost.hardware import gpu_named
from planner.cost.models import model_named
from tests.orchestrrl.lab.sim.train.train_builders import DENSE, MOE, job

degrees = st.sampled_from([1, 2, 4])
layouts = st.builds(TrainLayout, tp=degrees, cp=degrees, dp=degrees, pp=degrees)


@given(layouts, st.sampled_from(["tp", "cp", "dp_cp", "pp", "ep", "expert_dp"]))
def test_every_rank_is_in_exactly_one_group(layout: TrainLayout, axis: str) -> None:
    assert sorted(groups(job(layout), axis).ravel()) == list(range(layout.gpus))


def test_groups_follow_rank_numbering() -> None:
    of = job(TrainLayout(tp=2, cp=2, dp=2, pp=2))
    assert groups(of, "tp")[:2].tolist() == [[0, 1], [2, 3]]
    assert groups(of, "cp")[:2].tolist() == [[0, 2], [1, 3]]
    assert groups(of, "dp_cp")[:2].tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert groups(of, "pp")[:2].tolist() == [[0, 8], [1, 9]]


def test_experts_are_on_consecutive_ranks_of_a_stage() -> None:
    of = job(TrainLayout(tp=2, dp=8, pp=2, ep=4), model=MOE)
    assert groups(of, "ep")[:2].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert groups(of, "expert_dp")[0].tolist() == [0, 4, 8, 12]


@given(layouts)
def test_tensor_parallel_groups_stay_on_a_server(layout: TrainLayout) -> None:
    assert not crosses(groups(job(layout), "tp"), Servers(8))


def test_gpu_numbers_begin_at_first_gpu() -> None:
    of = TrainJob(DENSE, gpu_named("h800"), TrainLayout(tp=2), 8, 1024, first_gpu=16)
    assert groups(of, "tp").tolist() == [[16, 17]]


def test_gradient_bytes_of_a_dense_model() -> None:
    """Each of n ranks in a ring sends (n - 1) / n of its gradients in 32 bits and of its parameters in 16."""
    of = job(TrainLayout(dp=2, tp=8))
    _, gradients = periods(of, Servers(2))
    expected = DENSE.params / 8 * (4 + 2) / 2 * 16
    assert gradients.demand.bytes.sum() == pytest.approx(expected, rel=0.02)  # plus the overhead of the protocol


def test_bytes_of_tokens_to_experts() -> None:
    """Each token is copied to each of its experts and back, forward and backward, in every layer."""
    of = job(TrainLayout(dp=16, ep=16), model=MOE, sequences=32, tokens=1000)
    passes, _ = periods(of, Servers(2))
    src, dst = (each // 8 for each in (passes.demand.src, passes.demand.dst))
    copies = 32 * 1000 * 2  # half of them go to the other server
    assert passes.demand.bytes[src != dst].sum() == pytest.approx(copies / 2 * 1024 * 2 * 4 * 8)


def test_traffic_inside_a_server_is_not_demand() -> None:
    passes, gradients = periods(job(TrainLayout(tp=4, dp=2)), Servers(1))
    assert len(passes.demand) == len(gradients.demand) == 0


def test_period_identity_depends_on_demand() -> None:
    """Longer sequences have more traffic in forward and backward, and the same gradients."""
    layout = TrainLayout(tp=8, cp=2)
    one, same, longer = (periods(job(layout, tokens=each), Servers(2)) for each in (4096, 4096, 8192))
    assert one == same
    assert [each.id for each in one] == [each.id for each in same]
    assert one[0] != longer[0]
    assert one[1] == longer[1] != one[0]


@given(st.integers(1, 64), st.integers(1, 4))
def test_pipeline_messages_are_one_per_micro_batch(sequences: int, micro_sequences: int) -> None:
    of = job(TrainLayout(tp=8, pp=2), sequences=sequences, micro_sequences=micro_sequences)
    found = traffic(of, Servers(2))["pp"]
    assert found.transfer.flows.bytes.tolist() == [micro_sequences * 4096 * 1024 * 2 / 8] * 8
    assert found.times == of.micro_batches


def test_invalid_layouts_are_rejected() -> None:
    with pytest.raises(ValueError, match="tp must divide the 8 heads of small, got 16"):
        job(TrainLayout(tp=16))
    with pytest.raises(ValueError, match=r"must be <= 8 \(small's layers\), got 16; ep must divide .*, got 2"):
        job(TrainLayout(dp=2, pp=16, ep=2))
    with pytest.raises(ValueError, match=r"vpp > 1 needs micro-batches in multiples of pp \(2\), got 63"):
        job(TrainLayout(pp=2, vpp=2), sequences=63)
    with pytest.raises(ValueError, match=r"GPUs 0\.\.15, there are 8"):
        periods(job(TrainLayout(dp=16)), Servers(1))


def test_stages_have_even_numbers_of_layers() -> None:
    of = TrainJob(model_named("qwen3-235b-a22b"), gpu_named("h800"), TrainLayout(pp=4), 8, 1024)
    assert of.stage_layers == (24, 24, 23, 23)
    assert np.sum(of.stage_layers) == 94
