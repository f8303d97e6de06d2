"""Tests of priors: the model and GPU that an engine's facts map to, and the validity of every prediction."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.daemon.priors import PREFIX, AssumedProfile, assumed_of, similar_model
from orchestrrl.engines.base import EngineCapabilities
from orchestrrl.engines.serving import ServingFacts
from planner.cost.engines import ENGINES
from planner.cost.hardware import GPUS, UnknownGpu, gpu_of_product
from planner.cost.models import MODELS, Model
from planner.cost.predict import predict
from planner.cost.profile import EngineProfile
from planner.cost.roofline import Precision
from planner.model import EngineId, Parallelism

H100 = "NVIDIA H100 80GB HBM3"
E0 = EngineId("e0")


def assumed(facts: ServingFacts, engine: EngineId = E0) -> AssumedProfile:
    return assumed_of(engine, EngineCapabilities("vllm", "1", ("served",), serving=facts))


@pytest.mark.parametrize(
    ("product", "gpu"),
    [
        (H100, "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H20-3e", "h20"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("h800", "h800"),
    ],
)
def test_gpus_are_found_in_product_names(product: str, gpu: str) -> None:
    assert gpu_of_product(product).name == gpu


@pytest.mark.parametrize("product", ["NVIDIA GH200 480GB", "NVIDIA L40S", "Tesla V100-SXM2-16GB", "H1000", ""])
def test_unknown_product_name_is_no_known_gpu(product: str) -> None:
    with pytest.raises(UnknownGpu):
        gpu_of_product(product)


@pytest.mark.parametrize(
    ("model", "facts", "message"),
    [
        ("Qwen/Qwen2.5-14B-Instruct", {"tp": 2}, "qwen2.5-14b on H100, TP=2"),
        ("Qwen/Qwen2.5-14B-Instruct", {}, "qwen2.5-14b on H100, TP=1 assumed"),
        ("meta-llama/Llama-3.3-70B-Instruct", {}, "like llama-3.1-70b (by its name) on H100, TP=4 assumed"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", {"tp": 1}, "like qwen2.5-14b (by its name) on H100, TP=1"),
        ("Qwen/Qwen3-30B-A3B", {"tp": 2, "dp": 2, "ep": True}, "qwen3-30b-a3b on H100, TP=2 DP=2 EP=4"),
        ("/data/mine", {"tp": 1, "sizes": MODELS["qwen3-8b"]}, "qwen3-8b (sizes of its config.json) on H100, TP=1"),
    ],
)
def test_prior_describes_what_was_predicted(model: str, facts: dict[str, object], message: str) -> None:
    found = assumed(replace(ServingFacts(model=model, gpu=H100), **facts))  # type: ignore[arg-type]
    assert (found.prior, found.unknown) == (message, "")


def test_prior_is_the_cost_models_prediction() -> None:
    found = assumed(ServingFacts(model="Qwen/Qwen2.5-14B", gpu=H100, tp=2))
    profile = predict(MODELS["qwen2.5-14b"], GPUS["h100"], Parallelism(tp=2), ENGINES["vllm"])
    assert found.profile == replace(profile, id=found.profile.id)
    quantised = assumed(ServingFacts(model="Qwen/Qwen2.5-14B", gpu=H100, tp=2, weight_bits=8.0))
    bits = Precision(8.0, 8.0, 16.0)
    profile = predict(MODELS["qwen2.5-14b"], GPUS["h100"], Parallelism(tp=2), ENGINES["vllm"], bits)
    assert quantised.profile == replace(profile, id=quantised.profile.id)


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (ServingFacts(), "the engine does not report its GPU"),
        (ServingFacts(model="Qwen/Qwen2.5-14B", gpu_detail="the engine runs on CPUs"), "the engine runs on CPUs"),
        (
            ServingFacts(model="Qwen/Qwen2.5-14B", gpu="NVIDIA L40S"),
            "GPU NVIDIA L40S of the engine is not in the cost model",
        ),
        (ServingFacts(model="a/mixtral-8x7b", gpu=H100), "the engine's model is unknown: a/mixtral-8x7b"),
        (ServingFacts(gpu=H100), "the engine does not report its model"),
        (ServingFacts(model="qwen2.5-14b", gpu=H100, pp=2), "PP must be 1"),
        (ServingFacts(model="llama-3.1-70b", gpu=H100, tp=1), "does not fit into the memory of GPU H100 with TP=1"),
    ],
)
def test_missing_facts_lead_to_the_typical_shape_with_the_reason(facts: ServingFacts, why: str) -> None:
    found = assumed(facts)
    assert found.prior == ""
    assert why in found.unknown


def test_engines_with_equal_facts_share_a_configuration() -> None:
    cpu = ServingFacts(model="/models/tiny", gpu_detail="the engine runs on CPUs", device="cpu")
    assert assumed(cpu).profile.id == assumed(cpu, EngineId("e1")).profile.id
    assert assumed(cpu).profile.id != assumed(replace(cpu, tp=2)).profile.id
    assert assumed(ServingFacts()).profile.id != assumed(ServingFacts(), EngineId("e1")).profile.id


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("mistralai/Mistral-7B-v0.3", "qwen2.5-7b"),
        ("x/Qwen2.5-Coder-32B-Instruct-AWQ", "qwen2.5-32b"),
        ("google/gemma-2-9b-it", "qwen3-8b"),
        ("Qwen/Qwen2.5-1.5B", None),
        ("mistralai/Mixtral-8x7B", None),
        ("some/model", None),
        ("x/foo-0b", None),
        (f"x/foo-{'9' * 400}b", None),
        ("", None),
    ],
)
def test_similar_models_are_found_by_size_and_family(name: str, model: str | None) -> None:
    found = similar_model(name)
    assert (found.name if found else None) == model


SIZE = st.integers(1, 1 << 16)
models = st.builds(
    Model,
    name=st.sampled_from(["a", "b"]),
    layers=st.integers(1, 256),
    hidden=SIZE,
    q_heads=st.integers(1, 256),
    kv_heads=st.integers(1, 256),
    head_dim=st.integers(1, 512),
    ffn=st.integers(0, 1 << 17),
    vocab=st.integers(1, 1 << 20),
    experts=st.sampled_from([0, 8, 128]),
    experts_per_token=st.integers(1, 8),
    expert_ffn=st.integers(0, 1 << 14),
    tied_embeddings=st.booleans(),
    weight_bits=st.sampled_from([4.5, 8.0, 16.0, 32.0]),
)
facts_of_engines = st.builds(
    ServingFacts,
    model=st.sampled_from(["", "qwen2.5-14b", "x/foo-7b", "qwen3-30b-a3b", "unknown"]) | st.text(max_size=20),
    sizes=st.none() | models,
    weight_bits=st.none() | st.floats(0.5, 64),
    kv_bits=st.none() | st.sampled_from([8.0, 16.0]),
    tp=st.none() | st.integers(1, 1 << 16),
    pp=st.none() | st.integers(1, 3),
    dp=st.none() | st.integers(1, 64),
    ep=st.none() | st.booleans(),
    gpu=st.sampled_from(["", H100, "NVIDIA B200", "NVIDIA A100-SXM4-80GB", "NVIDIA L40S"]),
)


def step_times(profile: EngineProfile) -> list[float]:
    sequences = [1, 2, 7, 64, 500, profile.max_sequences, 2 * profile.max_sequences]
    return [profile.step.at(count, 1000 * count) for count in sorted(sequences)]


@given(facts_of_engines)
def test_step_times_are_finite_positive_and_monotone_for_any_facts(facts: ServingFacts) -> None:
    found = assumed(facts)
    times = step_times(found.profile)
    assert all(math.isfinite(seconds) and seconds > 0 for seconds in times)
    assert all(later >= sooner for sooner, later in pairwise(times))
    assert 0 < found.profile.prefill_tokens_per_s < math.inf
    assert bool(found.prior) != bool(found.unknown)
    assert found.profile.id.startswith(PREFIX)
    line = found.profile.configuration()  # as planner and balancer use it
    assert line.step_s(1, 0) > 0


@given(facts_of_engines, facts_of_engines)
def test_each_id_stands_for_one_prediction(first: ServingFacts, second: ServingFacts) -> None:
    one, other = assumed(first), assumed(second)
    if one.profile.id == other.profile.id:
        assert one.profile == other.profile
