"""Tests of the exposed time of a layer's pass, and of the number of collectives per rank."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.lab.sim.net.model import Servers
from orchestrrl.lab.sim.train.compute import Kernels, compute_of, optimizer_s, stage_parameters
from orchestrrl.lab.sim.train.model import MEGATRON, TrainJob, TrainLayout
from orchestrrl.lab.sim.train.stages import Pass, passes_of
from orchestrrl.lab.sim.train.traffic import traffic
from tests.orchestrrl.lab.sim.train.train_builders import DENSE, MOE, job


def passes(of: TrainJob, once_s: dict[str, float]) -> tuple[Pass, Pass]:
    return passes_of(of, compute_of(of), once_s)


@given(st.sampled_from([2, 4, 8]), st.floats(0.1, 10.0))
def test_ring_is_hidden_except_last_block_and_doubles_backward(cp: int, share: float) -> None:
    of = job(TrainLayout(cp=cp))
    forward_s, backward_s = (each.attention_s for each in compute_of(of))
    ring_s = share * forward_s
    forward, backward = passes(of, {"cp": ring_s})
    for each, sent_s, attention_s in ((forward, ring_s, forward_s), (backward, 2 * ring_s, backward_s)):
        (segment,) = (segment for segment in each.segments if segment.group == "cp")
        assert segment.sends_s == pytest.approx(sent_s)
        assert segment.waits_s == pytest.approx(max(0.0, sent_s - attention_s * (cp - 1) / cp))


@pytest.mark.parametrize(("model", "count"), [(DENSE, 4), (MOE, 2)])
def test_tensor_parallelism_sends_before_and_after_split_parts(model: object, count: int) -> None:
    of = job(TrainLayout(tp=8), model=model)  # type: ignore[arg-type]
    forward, backward = passes(of, {"tp": 1.0})
    assert forward.waits_s("tp") == backward.waits_s("tp") == count
    assert traffic(of, Servers(1))["tp"].times == 64 * 8 * 2 * count


@pytest.mark.parametrize(("recompute", "laps"), [(False, 3), (True, 4)])
def test_key_value_ring_traffic(recompute: bool, laps: int) -> None:
    """Keys and values circulate once forward; backward they circulate with their gradients."""
    found = traffic(job(TrainLayout(tp=2, cp=4), recompute=recompute), Servers(1))["cp"]
    assert found.times == 64 * 8 * laps
    assert found.transfer.flows.bytes.sum() == 8 * 3 * (4096 / 4) * 2 * (8 / 2 * 128) * 2


@pytest.mark.parametrize("layout", [TrainLayout(tp=2, dp=8, ep=16), TrainLayout(tp=2, cp=2, dp=4, ep=16)])
def test_expert_traffic_does_not_depend_on_other_parallelism(layout: TrainLayout) -> None:
    plain, split = (traffic(job(each, model=MOE), Servers(2))["ep"] for each in (TrainLayout(dp=16, ep=16), layout))
    sent = [each.transfer.flows.bytes.sum() * each.times for each in (plain, split)]
    assert sent[0] == pytest.approx(sent[1])


def test_optimizer_updates_a_shard_per_rank() -> None:
    """The shard does not depend on the spread of experts over ranks."""
    experts = MOE.layers * MOE.experts * MOE.expert_params
    dense = MOE.params - experts + MOE.layers * MOE.hidden * MOE.experts  # including routers
    for ep in (1, 4, 16):
        of = job(TrainLayout(dp=16, ep=ep), model=MOE)
        kernels = Kernels(of.gpu, MEGATRON)
        cleared = 4 * (dense + experts / ep)
        assert optimizer_s(of) == pytest.approx(kernels.moves_s((dense + experts) / 16 * 34 + cleared))


@pytest.mark.parametrize("tied", [False, True])
def test_stage_parameters_include_embedding_and_head(tied: bool) -> None:
    """Tied embeddings on one rank are a single matrix; otherwise the first and the last rank have one each."""
    model = replace(DENSE, tied_embeddings=tied)
    assert stage_parameters(job(TrainLayout(), model=model))[0] == model.params
    half = model.layers / 2 * (model.attention_params + model.dense_ffn_params)
    assert stage_parameters(job(TrainLayout(pp=2), model=model))[0] == half + model.head_params
