"""Tests of training iterations: closed forms, invariants, and large layouts."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrrl.lab.sim.net.collectives import all_gather, reduce_scatter
from orchestrrl.lab.sim.net.fabrics.registry import build
from orchestrrl.lab.sim.net.fluid import seconds
from orchestrrl.lab.sim.net.model import Servers
from orchestrrl.lab.sim.train.compute import Kernels, compute_of, optimizer_s, stage_parameters, step_flops
from orchestrrl.lab.sim.train.iteration import forward_s, iteration
from orchestrrl.lab.sim.train.model import MEGATRON, TrainingIteration, TrainJob, TrainLayout
from orchestrrl.lab.sim.train.traffic import groups
from planner.cost.hardware import gpu_named
from planner.cost.models import Model, model_named
from tests.orchestrrl.lab.sim.train.train_builders import DENSE, MOE, job, star, static

TWO = Servers(2)
layouts = st.sampled_from(
    [
        (DENSE, TrainLayout(dp=16)),
        (DENSE, TrainLayout(tp=4, dp=4)),
        (DENSE, TrainLayout(tp=2, pp=4, dp=2)),
        (DENSE, TrainLayout(tp=2, pp=4, dp=2, vpp=2)),
        (DENSE, TrainLayout(tp=4, cp=4)),
        (DENSE, TrainLayout(tp=2, cp=2, pp=2, dp=2)),
        (MOE, TrainLayout(dp=16, ep=16)),
        (MOE, TrainLayout(tp=2, dp=4, pp=2, ep=8)),
        (MOE, TrainLayout(tp=2, cp=2, dp=2, pp=2, ep=4)),
    ]
)


def on(servers: Servers, of: TrainJob, **changes: object) -> TrainingIteration:
    return iteration(replace(of, constants=replace(MEGATRON, **changes)), static(servers))


def kernels(of: TrainJob) -> Kernels:
    return Kernels(of.gpu, of.constants)


def micro_s(of: TrainJob) -> tuple[float, float]:
    """Return the forward and backward seconds of a micro-batch on one GPU with all layers."""
    forward_s, backward_s = (of.model.layers * each.layer_s + each.head_s for each in compute_of(of))
    return forward_s, backward_s


def test_single_gpu_iteration_is_compute_and_optimizer() -> None:
    of = job(TrainLayout())
    found = on(Servers(1), of)
    assert found.seconds == pytest.approx(64 * sum(micro_s(of)) + optimizer_s(of))
    assert {name for name, each_s in found.parts_s.items() if each_s} == {"compute", "optimizer"}
    assert found.mfu == pytest.approx(step_flops(DENSE, 64, 4096) / found.seconds / of.gpu.bf16_flops)


def test_compute_time_is_operations_over_efficiency() -> None:
    """Shapes fill their waves, and memory and kernel starts cost nothing."""
    wide = Model("wide", 1, 8192, 64, 64, 128, 16896, 132 * 256)
    free = replace(MEGATRON, kernel_s=0.0, hbm_efficiency=1e6, attention_half_tokens=0.0)
    of = job(TrainLayout(), model=wide, tokens=132 * 128, sequences=1)
    compute = compute_of(replace(of, constants=free))
    products = 6 * wide.active_params * 132 * 128 / (of.gpu.bf16_flops * free.gemm_efficiency)
    scores = 4 * 64 * 128 * (132 * 128) ** 2 / 2 / of.gpu.bf16_flops
    attention_s = scores / free.attention_forward_efficiency + 2.5 * scores / free.attention_backward_efficiency
    total_s = sum(each.layer_s + each.head_s for each in compute)
    assert total_s == pytest.approx(products + attention_s, rel=0.03)  # partial waves


def test_recomputation_adds_a_forward_pass_of_the_layers() -> None:
    plain, again = (on(Servers(1), job(TrainLayout(), recompute=each)) for each in (False, True))
    layers_s = 64 * 8 * compute_of(job(TrainLayout()))[0].layer_s
    assert again.parts_s["compute"] - plain.parts_s["compute"] == pytest.approx(layers_s)


def gradients_s(of: TrainJob) -> tuple[float, float]:
    """Return the seconds to reduce and to gather a dense model over its data-parallel groups."""
    members, parameters = groups(of, "dp_cp"), stage_parameters(of)[0]
    size = members.shape[1]
    moved = [
        reduce_scatter(members, 4 * parameters / size, TWO),
        all_gather(members, 2 * parameters / size, TWO),
    ]
    reduce_s, gather_s = (seconds(star(TWO), each) for each in moved)
    return reduce_s, gather_s


def test_gradient_reduction_is_hidden_except_for_one_bucket() -> None:
    of = job(TrainLayout(tp=8, dp=2), tokens=65536)  # long passes
    buckets = 4
    found = on(TWO, of, bucket_parameters=stage_parameters(of)[0] / buckets)
    assert found.parts_s["dp"] == pytest.approx(gradients_s(of)[0] / buckets, rel=0.01)


def test_gradients_of_one_bucket_are_fully_exposed() -> None:
    """A single bucket is complete only when the pass ends, so that its reduction is fully exposed. The first forward
    pass ends after the parameters have arrived."""
    of = job(TrainLayout(tp=8, dp=2), tokens=512)
    found = on(TWO, of, bucket_parameters=1e12)
    assert found.parts_s["dp"] == pytest.approx(sum(gradients_s(of)))


def test_context_ring_is_hidden_by_attention() -> None:
    long, short = (on(TWO, job(TrainLayout(tp=8, cp=2), tokens=each)).parts_s["cp"] for each in (262144, 1024))
    assert long == 0.0
    assert short > 0.0


def test_hidden_share_reduces_the_experts_exchange() -> None:
    of = job(TrainLayout(tp=2, dp=8, ep=16), model=MOE)
    all_s, half_s = (on(TWO, of, ep_hidden_share=each).parts_s["ep"] for each in (0.0, 0.5))
    assert half_s == pytest.approx(all_s / 2)


@pytest.mark.parametrize(("recompute", "left"), [(False, 3 / 4), (True, 5 / 6)])
def test_tensor_parallelism_is_hidden_only_in_the_backward_pass(recompute: bool, left: float) -> None:
    """Collectives are hidden by the product for weight gradients, which forward and recomputed passes do not have."""
    of, constants = job(TrainLayout(tp=8), recompute=recompute), replace(MEGATRON, tp_hidden_share=0.5)
    all_s, half_s = (on(TWO, of, tp_hidden_share=each).parts_s["tp"] for each in (0.0, 0.5))
    assert half_s == pytest.approx(all_s * left)
    assert forward_s(replace(of, constants=constants), static(TWO)) == forward_s(of, static(TWO))


def test_hidden_collectives_still_use_the_network() -> None:
    of = job(TrainLayout(tp=2, dp=8, ep=16), model=MOE, sequences=16)
    waited, hidden = (on(TWO, of, ep_hidden_share=each) for each in (0.0, 1.0))
    spans = [
        [each.end_s - each.begin_s for each in found.boundaries if each.group == "ep"] for found in (waited, hidden)
    ]
    assert spans[1] == pytest.approx(spans[0])
    assert hidden.parts_s["ep"] == 0.0


@given(layouts, st.sampled_from([8, 16, 48]), st.sampled_from([512, 4096]), st.booleans())
def test_iteration_invariants(
    model_layout: tuple[Model, TrainLayout], sequences: int, tokens: float, recompute: bool
) -> None:
    model, layout = model_layout
    of = job(layout, model=model, sequences=sequences, tokens=tokens, recompute=recompute)
    found = on(TWO, of)
    assert math.fsum(found.parts_s.values()) == found.seconds
    assert min(found.parts_s.values()) >= 0.0
    assert 0.0 < found.mfu < MEGATRON.gemm_efficiency
    last_s = 0.0
    for each in found.boundaries:
        assert 0.0 <= each.begin_s < each.end_s <= found.seconds * (1 + 1e-9)
        assert each.begin_s >= last_s
        last_s = each.begin_s
    for window in found.windows:
        assert window.length_s > 0
        assert not any(
            each.begin_s < window.end_s - 1e-12 and each.end_s > window.begin_s + 1e-12 for each in found.boundaries
        )


@given(layouts, st.sampled_from([50.0, 100.0, 200.0, 400.0]), st.floats(1.0, 4.0))
@settings(max_examples=20)
def test_a_faster_network_is_never_slower(
    model_layout: tuple[Model, TrainLayout], nic_gbps: float, times: float
) -> None:
    model, layout = model_layout
    of = job(layout, model=model, sequences=16)
    slow, fast = (on(Servers(2, nic_gbps=each), of) for each in (nic_gbps, nic_gbps * times))
    assert fast.seconds <= slow.seconds * (1 + 2e-3)  # the network's own tolerance


@given(st.sampled_from([1, 2, 4]), st.sampled_from([2, 4, 8]), st.integers(2, 5))
@settings(max_examples=20)
def test_more_micro_batches_reduce_the_bubble(dp: int, pp: int, times: int) -> None:
    few, many = (on(Servers(4), job(TrainLayout(dp=dp, pp=pp), sequences=each)) for each in (8 * dp, 8 * dp * times))
    assert many.parts_s["bubble"] / many.seconds < few.parts_s["bubble"] / few.seconds


@given(layouts)
@settings(max_examples=10)
def test_iteration_is_deterministic(model_layout: tuple[Model, TrainLayout]) -> None:
    model, layout = model_layout
    of = job(layout, model=model, sequences=16)
    assert on(TWO, of) == on(TWO, of)


def test_forward_time_is_the_forward_passes() -> None:
    one = job(TrainLayout())
    assert forward_s(one, static(Servers(1))) == pytest.approx(64 * micro_s(one)[0])


@given(layouts)
@settings(max_examples=20)
def test_forward_passes_are_a_fraction_of_an_iteration(model_layout: tuple[Model, TrainLayout]) -> None:
    """The head is small here: with a large head, interleaved stages of one layer are too uneven."""
    model, layout = model_layout
    of = job(layout, model=replace(model, vocab=4000))
    assert 0.2 < forward_s(of, static(TWO)) / on(TWO, of).seconds < 0.5


# Layouts of appendix C of the OrchestrRL paper (arXiv 2601.01209), at the scale of its figure 17.
LARGE = [
    ("qwen2.5-72b", TrainLayout(tp=8, pp=2, cp=3, dp=42)),
    ("qwen2-57b-a14b", TrainLayout(tp=4, dp=512, ep=16)),
    ("qwen3-235b-a22b", TrainLayout(tp=4, pp=4, dp=128, ep=32)),
]


@pytest.mark.parametrize(("name", "layout"), LARGE)
def test_per_gpu_speed_at_two_thousand_gpus(name: str, layout: TrainLayout) -> None:
    """Each GPU is as fast as in the smallest fleet of the same layout, except for the cost of data parallelism."""
    small, large = (
        iteration(
            TrainJob(model_named(name), gpu_named("h800"), replace(layout, dp=dp), 16 * dp, 8192),
            build("rail_optimized", Servers(256)),
        )
        for dp in (max(2, layout.ep // layout.tp), layout.dp)
    )
    assert math.fsum(large.parts_s.values()) == large.seconds
    assert large.parts_s["compute"] == pytest.approx(small.parts_s["compute"])
    assert small.mfu * 0.85 < large.mfu <= small.mfu * 1.01
