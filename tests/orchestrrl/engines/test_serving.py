"""Parsing of a model's config.json, of dtypes and of GPU listings, including malformed ones."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.engines.serving import (
    MOST_SIZE,
    ServingFacts,
    gpu_of,
    kv_bits,
    listed_gpus,
    model_from_config,
    named,
    weight_bits,
)
from orchestrrl.engines.vllm_info import read_server_info
from planner.cost.models import MODELS, Model

QWEN = {
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_attention_heads": 40,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
    "vocab_size": 152064,
}
QWEN_MOE = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
}
SERVER_INFO = {
    "vllm_config": {
        "model_config": {"model": "Qwen/Qwen2.5-14B", "dtype": "torch.bfloat16", "quantization": None},
        "cache_config": {"cache_dtype": "fp8_e4m3"},
        "parallel_config": {"tensor_parallel_size": 2, "data_parallel_size": 1, "enable_expert_parallel": False},
        "scheduler_config": {"max_num_seqs": 8},
        "device_config": {"device": "cuda"},
    },
    "system_env": {"nvidia_gpu_models": "GPU 0: NVIDIA H100 80GB HBM3\nGPU 1: NVIDIA H100 80GB HBM3"},
}


def test_published_configurations_give_published_sizes() -> None:
    assert model_from_config("qwen2.5-14b", QWEN) == MODELS["qwen2.5-14b"]
    assert model_from_config("qwen3-30b-a3b", QWEN_MOE) == MODELS["qwen3-30b-a3b"]
    nested = {"architectures": ["some vision model"], "text_config": QWEN}
    assert model_from_config("qwen2.5-14b", nested) == MODELS["qwen2.5-14b"]


def test_quantised_checkpoints_have_fewer_bits() -> None:
    model = model_from_config("m", {**QWEN, "quantization_config": {"quant_method": "awq"}})
    assert model is not None
    assert model.weight_bits == 4.5


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": None},
        {"num_attention_heads": 0},
        {"num_hidden_layers": "many"},
        {"vocab_size": 1 << 40},
        {"num_experts": 8, "num_experts_per_tok": 9},
        {"num_experts": [8]},
        {"kv_lora_rank": 512},
    ],
)
def test_missing_sizes_give_no_model(changes: dict[str, Any]) -> None:
    assert model_from_config("m", {**QWEN, **changes}) is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(QWEN_MOE)), inner, max_size=9),
    max_leaves=20,
)


@given(st.dictionaries(st.sampled_from([*sorted({*QWEN, *QWEN_MOE}), "text_config"]), json_values) | json_values)
def test_any_document_gives_sizes_in_range_or_none(document: object) -> None:
    model = model_from_config("\ud800name", document)
    if model is not None:
        assert isinstance(model, Model)
        model.name.encode()
        sizes = (model.layers, model.hidden, model.q_heads, model.kv_heads, model.head_dim, model.ffn, model.vocab)
        assert all(0 <= size <= MOST_SIZE for size in sizes)


@pytest.mark.parametrize(
    ("dtype", "quantization", "bits"),
    [
        ("torch.bfloat16", None, 16.0),
        ("float32", "", 32.0),
        ("torch.bfloat16", "fp8", 8.0),
        ("auto", "compressed-tensors-w4a16", 4.5),
        ("bfloat16", "unheard-of", None),
        (None, None, None),
    ],
)
def test_bits_of_weights(dtype: str | None, quantization: str | None, bits: float | None) -> None:
    assert weight_bits(dtype, quantization) == bits


def test_bits_of_kv() -> None:
    assert [kv_bits(name) for name in ("auto", "bfloat16", "fp8_e5m2", "", None)] == [16.0, 16.0, 8.0, None, None]


def test_mixed_gpus_have_a_reason_instead_of_a_name() -> None:
    listing = "GPU 0: NVIDIA H200 (UUID: GPU-1234)\nGPU 1: NVIDIA H200 (UUID: GPU-5678)"
    assert gpu_of(listed_gpus(listing)) == ("NVIDIA H200", "")
    assert gpu_of(["NVIDIA H200", "NVIDIA L40S"]) == (
        "",
        "the engine's host has GPUs of several kinds: NVIDIA H200, NVIDIA L40S",
    )
    assert gpu_of(listed_gpus(None)) == ("", "the engine's host reports no GPU")


def test_vllm_server_info_has_model_layout_and_gpu() -> None:
    assert read_server_info(SERVER_INFO).serving == ServingFacts(
        model="Qwen/Qwen2.5-14B",
        weight_bits=16.0,
        kv_bits=8.0,
        tp=2,
        dp=1,
        ep=False,
        device="cuda",
        gpu="NVIDIA H100 80GB HBM3",
    )


def test_cpu_server_has_no_gpu() -> None:
    info = {**SERVER_INFO, "vllm_config": {**SERVER_INFO["vllm_config"], "device_config": {"device": "cpu"}}}
    serving = read_server_info(info).serving
    assert (serving.gpu, serving.gpu_detail) == ("", "the engine runs on CPUs")


@given(json_values, st.dictionaries(st.sampled_from(["nvidia_gpu_models", "x"]), json_values) | json_values)
def test_malformed_sections_of_server_info_leave_facts_unknown(section: object, system: object) -> None:
    names = ("model_config", "cache_config", "device_config")
    config = {
        **dict.fromkeys(names, section if isinstance(section, dict) else {}),
        "scheduler_config": {"max_num_seqs": 8},
    }
    serving = read_server_info({"vllm_config": config, "system_env": system}).serving
    assert serving.tp is None
    serving.model.encode()


def test_names_are_valid_unicode_of_limited_length() -> None:
    assert named("a\ud800b") == "a?b"
    assert named(7) == ""
    assert len(named("x" * 10_000)) < 1000
