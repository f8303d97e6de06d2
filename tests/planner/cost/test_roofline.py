"""Tests of the roofline: it is monotonic as hardware is, and matches hand calculations without overheads."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.engine_constants import BACKENDS, UnknownBackend, constants_of, flat_priors, prior_values
from planner.cost.fitted import FITTED
from planner.cost.hardware import GPUS, GpuModel, UnknownGpu, gpu_named
from planner.cost.models import MODELS, Model, UnknownModel, model_named
from planner.cost.profile import Parallelism
from planner.cost.roofline import (
    ClosedLoop,
    Precision,
    all_reduce_s_per_byte,
    decode_s,
    kv_bytes_per_gpu,
    kv_capacity_tokens,
    kv_s_per_token,
    prefill_s,
    running_sequences,
    tpot_s,
    weight_bytes_per_gpu,
    work_of,
)

CONSTANTS = constants_of(FITTED[""], "vllm")
models = st.sampled_from(sorted(MODELS)).map(model_named)
dense_models = models.filter(lambda model: not model.moe)
gpus = st.sampled_from(sorted(GPUS)).map(gpu_named)
tps = st.sampled_from([1, 2, 4, 8])
batches = st.integers(1, 2048).map(float)
precisions = st.sampled_from([Precision(), Precision(8.0, 8.0), Precision(8.0, 8.0, 8.0)])
backends = st.sampled_from(BACKENDS)


@given(models, gpus, tps, precisions, batches, batches)
def test_more_sequences_never_take_less(
    model: Model, gpu: GpuModel, tp: int, precision: Precision, one: float, other: float
) -> None:
    fewer, more = sorted((one, other))
    layout = Parallelism(tp=tp, ep=tp if model.moe else 1)
    times = [float(decode_s(work_of(model, gpu, layout, precision, batch), CONSTANTS)) for batch in (fewer, more)]
    assert times[0] <= times[1] * (1 + 1e-12)
    assert times[0] > 0


@given(models, gpus, precisions)
def test_wider_tp_reads_fewer_weights_and_less_kv(model: Model, gpu: GpuModel, precision: Precision) -> None:
    works = [work_of(model, gpu, Parallelism(tp=tp), precision, 1.0) for tp in (1, 2, 4, 8)]
    weights_s = [float(work.dense_read_s) for work in works]
    assert weights_s == pytest.approx([weights_s[0] / tp for tp in (1, 2, 4, 8)])
    kv_s = [float(kv_s_per_token(work, CONSTANTS)) for work in works]
    assert kv_s == sorted(kv_s, reverse=True)
    assert [float(work.link_s) for work in works] == sorted(float(work.link_s) for work in works)


@given(models, gpus, tps, precisions, batches, st.integers(1, 32768), st.integers(1, 32768))
def test_more_kv_is_slower(
    model: Model, gpu: GpuModel, tp: int, precision: Precision, batch: float, one: int, other: int
) -> None:
    shorter, longer = sorted((one, other))
    work = work_of(model, gpu, Parallelism(tp=tp), precision, batch)
    times = [float(tpot_s(work, CONSTANTS, context, 100.0, 1000.0)) for context in (shorter, longer)]
    assert (times[0] < times[1]) == (shorter < longer)


@given(models, gpus, tps, batches, st.integers(1, 8192), st.integers(1, 8192))
def test_longer_prompts_disturb_more(model: Model, gpu: GpuModel, tp: int, batch: float, one: int, other: int) -> None:
    shorter, longer = sorted((one, other))
    work = work_of(model, gpu, Parallelism(tp=tp), Precision(), batch)
    times = [float(tpot_s(work, CONSTANTS, 1000.0, prompt, 500.0)) for prompt in (shorter, longer)]
    assert times[0] <= times[1]
    assert float(prefill_s(work, CONSTANTS, longer)) >= float(prefill_s(work, CONSTANTS, shorter))


@given(models, gpus)
def test_more_gpus_hold_more_tokens(model: Model, gpu: GpuModel) -> None:
    capacities = [kv_capacity_tokens(model, gpu, Parallelism(tp=tp), Precision()) for tp in (1, 2, 4, 8)]
    assert capacities == sorted(capacities)


@given(models, tps, precisions)
def test_gpus_together_hold_all_weights(model: Model, tp: int, precision: Precision) -> None:
    """The GPUs together hold every parameter for any split, with both embeddings in 16 bits."""
    held = tp * weight_bytes_per_gpu(model, Parallelism(tp=tp), precision)
    embeddings = model.head_params * (1 if model.tied_embeddings else 2)
    dense = model.layers * (model.attention_params + model.dense_ffn_params)
    experts = model.params - embeddings - dense
    expected = embeddings * 2 + dense * precision.weight_bits / 8 + experts * precision.expert_bits / 8
    assert held == pytest.approx(expected)


def test_without_overheads_a_decode_is_reading_the_weights() -> None:
    """The model has 70 billion parameters of 2 bytes, minus the embedding, on four GPUs of 3.35 TB/s."""
    free = dict.fromkeys(prior_values(), 0.0) | {
        name: 1.0 for name in prior_values() if name.endswith(("efficiency", "exponent"))
    }
    model, gpu = model_named("llama-3.1-70b"), gpu_named("h100")
    work = work_of(model, gpu, Parallelism(tp=4), Precision(), 1.0)
    read_s = (model.params - model.head_params) * 2 / 4 / 3.35e12
    step_s = float(decode_s(work, constants_of(free, "trtllm")))
    # One sequence takes almost no compute, and sends 2 x 80 x 8192 x 2 bytes x 2 x 3/4 over NVLink.
    assert step_s == pytest.approx(read_s + 2 * 80 * 8192 * 2 * 1.5 / 450e9, rel=1e-3)


def test_uniform_router_visits_the_expected_number_of_experts() -> None:
    """The count is compared with random draws: 64 tokens, each with 8 of 128 experts."""
    model, gpu = model_named("qwen3-235b-a22b"), gpu_named("h200")
    values = FITTED[""] | {"routing_exponent": 1.0, "hbm_efficiency": 1.0}
    free = values | {name: 0.0 for name in values if name.endswith("_s")}
    constants = constants_of(free | {"gemm_efficiency": 1e9, "kv_efficiency": 1.0, "link_efficiency": 1e9}, "trtllm")
    work = work_of(model, gpu, Parallelism(tp=8), Precision(8.0, 8.0), 64.0)
    visited = (float(decode_s(work, constants)) - float(work.dense_read_s)) / float(work.expert_read_s)
    rng = np.random.default_rng(1)
    drawn = np.mean([len({e for _ in range(64) for e in rng.choice(128, 8, replace=False)}) for _ in range(50)])
    assert visited == pytest.approx(drawn, rel=0.01)


def test_an_all_reduce_beyond_the_node_waits_for_the_network() -> None:
    gpu = gpu_named("h800")
    assert all_reduce_s_per_byte(gpu, 1) == 0
    assert all_reduce_s_per_byte(gpu, 8) == pytest.approx(2 * 7 / 8 / 200e9)
    assert all_reduce_s_per_byte(gpu, 16) == pytest.approx(2 * 7 / 8 / 200e9 + 2 / 2 / 8 / 25e9)


def test_kv_heads_are_repeated_rather_than_cut() -> None:
    model = model_named("qwen3-235b-a22b")  # 4 KV heads
    assert kv_bytes_per_gpu(model, 8, Precision()) == kv_bytes_per_gpu(model, 4, Precision())
    assert kv_bytes_per_gpu(model, 2, Precision()) == 2 * kv_bytes_per_gpu(model, 4, Precision())


def test_the_kv_cache_limits_how_many_run() -> None:
    assert running_sequences(ClosedLoop(100, 1000, 1000), 15_000) == 10
    assert running_sequences(ClosedLoop(8, 1000, 1000), 15_000) == 8
    assert running_sequences(ClosedLoop(100, 1000, 1000), 10) == 1


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("qwen2.5-14b", 14.7, 14.0),
        ("qwen2-57b-a14b", 57.41, 13.7),
        ("qwen3-235b-a22b", 235, 21.5),
        ("qwen2.5-72b", 72.7, 71.5),
    ],
)
def test_parameters_match_published_counts(name: str, billions: float, active: float) -> None:
    assert model_named(name).params / 1e9 == pytest.approx(billions, rel=0.01)
    assert model_named(name).active_params / 1e9 == pytest.approx(active, rel=0.01)


def test_formats_without_tensor_cores_run_at_16_bits() -> None:
    hopper, ampere, blackwell = (gpu_named(name) for name in ("h100", "a100", "b200"))
    assert [hopper.flops_per_s(bits) for bits in (16, 8, 4.5)] == [989.5e12, 1979e12, 989.5e12]
    assert [ampere.flops_per_s(bits) for bits in (16, 8, 4.5)] == [312e12] * 3
    assert [blackwell.flops_per_s(bits) for bits in (16, 8, 4.25)] == [2250e12, 4500e12, 9000e12]


def test_names_of_checkpoints_and_systems_are_understood() -> None:
    assert model_named("nvidia/Llama-3.1-8B-Instruct-FP8").name == "llama-3.1-8b"
    assert model_named("Qwen/Qwen3-235B-A22B-FP8").name == "qwen3-235b-a22b"
    assert gpu_named("h100_sxm") is gpu_named("H100")


@pytest.mark.parametrize(
    ("look_up", "error"),
    [
        (model_named, UnknownModel),
        (gpu_named, UnknownGpu),
        (lambda name: constants_of(prior_values(), name), UnknownBackend),
    ],
)
def test_an_unknown_name_lists_the_known_ones(look_up: object, error: type[ValueError]) -> None:
    with pytest.raises(error, match=r"unknown .* 'nonsense'; known .*: "):
        look_up("nonsense")  # type: ignore[operator]


def test_every_set_of_fitted_constants_is_complete_and_plausible() -> None:
    for values in FITTED.values():
        assert values.keys() == flat_priors().keys()
        for name, prior in flat_priors().items():
            assert abs(np.log(values[name] / prior.value)) < 4 * prior.spread, name
            if name.endswith("efficiency"):
                assert 0 < values[name] <= 1
