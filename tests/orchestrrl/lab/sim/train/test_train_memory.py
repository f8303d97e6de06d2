"""Tests of training memory against counts by hand; published jobs must fit."""

from dataclasses import replace

import pytest

from orchestrrl.lab.sim.train.compute import MARGIN, fault_of, layer_bytes, memory_of
from orchestrrl.lab.sim.train.model import TrainJob, TrainLayout
from planner.cost.hardware import gpu_named
from planner.cost.models import Model, model_named
from tests.orchestrrl.lab.sim.train.test_train_published import LLAMA, LLAMAS, NARAYANAN
from tests.orchestrrl.lab.sim.train.train_builders import DENSE, MOE

H100, A100 = gpu_named("h100"), gpu_named("a100")


def job(layout: TrainLayout, model: Model = DENSE, sequences: int = 64, tokens: float = 1000.0) -> TrainJob:
    return TrainJob(model, H100, layout, sequences, tokens)


def test_state_bytes_match_the_distributed_optimizer() -> None:
    """Megatron Core's table has 18 bytes without and 6 + 12 / d bytes with the distributed optimizer."""
    assert memory_of(job(TrainLayout())).state_bytes == pytest.approx(18 * DENSE.params)
    assert memory_of(job(TrainLayout(dp=4))).state_bytes == pytest.approx(9 * DENSE.params)
    assert memory_of(job(TrainLayout(cp=2, dp=2))).state_bytes == pytest.approx(9 * DENSE.params)
    assert memory_of(job(TrainLayout(tp=2, dp=4))).state_bytes == pytest.approx(9 * DENSE.params / 2)


def test_expert_state_is_sharded_over_ranks_with_the_same_experts() -> None:
    """16 ranks with 8 sets of experts: two ranks share a shard."""
    experts = MOE.layers * MOE.experts * MOE.expert_params
    routers = MOE.layers * MOE.hidden * MOE.experts
    dense = MOE.params - experts + routers
    found = memory_of(job(TrainLayout(dp=16, ep=8), MOE)).state_bytes
    assert found == pytest.approx(dense * (6 + 12 / 16) + experts / 8 * (6 + 12 / 2))


def test_layer_keeps_activations_for_its_backward_pass() -> None:
    """Sizes: hidden 1024, 8 heads of 128 for queries and for keys and values, feed-forward 4096; 2 bytes each."""
    assert layer_bytes(job(TrainLayout())) == 1000 * 2 * (2 * 1024 + 4 * 1024 + 2 * 4096)
    assert layer_bytes(job(TrainLayout(tp=4))) == layer_bytes(job(TrainLayout())) / 4
    assert layer_bytes(job(TrainLayout(cp=2))) == layer_bytes(job(TrainLayout())) / 2
    assert layer_bytes(replace(job(TrainLayout()), micro_sequences=3)) == 3 * layer_bytes(job(TrainLayout()))


def test_pipeline_rank_holds_in_flight_micro_batches() -> None:
    """The first rank keeps one micro-batch of all layers; interleaved, (pp - 1) / (pp * vpp) more."""
    alone, piped, interleaved = (job(layout) for layout in (TrainLayout(), TrainLayout(pp=4), TrainLayout(pp=4, vpp=2)))
    assert memory_of(alone).activation_bytes == 8 * layer_bytes(alone)
    assert memory_of(piped).activation_bytes == 8 * layer_bytes(piped)
    assert memory_of(interleaved).activation_bytes == pytest.approx(8 * (1 + 3 / 8) * layer_bytes(interleaved))
    few = job(TrainLayout(pp=4), sequences=2)
    assert memory_of(few).activation_bytes == 2 * 2 * layer_bytes(few)


def test_recomputation_keeps_layer_inputs_and_one_layer() -> None:
    recomputed = replace(job(TrainLayout()), recompute=True)
    assert memory_of(recomputed).activation_bytes == 8 * 1000 * 1024 * 2 + layer_bytes(recomputed)


@pytest.mark.parametrize(("model", "layout", "batch"), [row[:3] for row in NARAYANAN])
def test_published_megatron_jobs_fit_a100(model: Model, layout: TrainLayout, batch: int) -> None:
    assert fault_of(TrainJob(model, A100, layout, batch, 2048, recompute=True)) is None


@pytest.mark.parametrize(("layout", "batch", "tokens"), [row[:3] for row in LLAMAS])
def test_published_llama_jobs_fit_h100(layout: TrainLayout, batch: int, tokens: float) -> None:
    found = TrainJob(LLAMA, H100, layout, batch, tokens)
    assert fault_of(found) is None
    assert memory_of(found).bytes > 0.5 * H100.hbm_bytes, "the estimate is at least half of the GPU's memory"


def test_memory_fault_suggests_changes() -> None:
    """72B at TP=4 has 18.2 billion parameters per GPU."""
    model = model_named("qwen2.5-72b")
    wide = job(TrainLayout(tp=4, dp=12), model)
    params = model.params / 4
    assert memory_of(wide).state_bytes == pytest.approx(7 * params)
    assert memory_of(wide).bytes > MARGIN * H100.hbm_bytes
    fault = fault_of(wide)
    assert fault is not None
    assert "127 for weights, gradients and optimizer" in fault
    assert fault.endswith("but h100 has 80: raise tp or pp")
    assert fault_of(job(TrainLayout(tp=8, pp=2, dp=3), model)) is None


def test_memory_fault_suggests_recomputation_for_long_sequences() -> None:
    model = model_named("qwen2.5-14b")
    long = job(TrainLayout(tp=4, dp=4), model, tokens=100_000.0)
    fault = fault_of(long)
    assert fault is not None
    assert fault.endswith("raise tp or pp or cp, or recompute")
    assert fault_of(replace(long, recompute=True)) is None
