"""What training holds of a GPU's memory, counted by hand; and what others have trained is never refused."""

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


def test_state_is_six_bytes_of_a_parameter_and_twelve_over_data_parallel_ranks() -> None:
    """Megatron Core's table: 18 without, 6 + 12 / d with the distributed optimizer."""
    assert memory_of(job(TrainLayout())).state_bytes == pytest.approx(18 * DENSE.params)
    assert memory_of(job(TrainLayout(dp=4))).state_bytes == pytest.approx(9 * DENSE.params)
    assert memory_of(job(TrainLayout(cp=2, dp=2))).state_bytes == pytest.approx(9 * DENSE.params)
    assert memory_of(job(TrainLayout(tp=2, dp=4))).state_bytes == pytest.approx(9 * DENSE.params / 2)


def test_experts_are_divided_over_the_ranks_that_hold_the_same_ones() -> None:
    """16 ranks, 8 of them with different experts: 2 share a shard."""
    experts = MOE.layers * MOE.experts * MOE.expert_params
    routers = MOE.layers * MOE.hidden * MOE.experts
    dense = MOE.params - experts + routers
    found = memory_of(job(TrainLayout(dp=16, ep=8), MOE)).state_bytes
    assert found == pytest.approx(dense * (6 + 12 / 16) + experts / 8 * (6 + 12 / 2))


def test_a_layer_keeps_what_its_backward_pass_needs() -> None:
    """Hidden 1024, 8 heads of 128 and as many of keys and values, feed-forward 4096; 2 bytes each."""
    assert layer_bytes(job(TrainLayout())) == 1000 * 2 * (2 * 1024 + 4 * 1024 + 2 * 4096)
    assert layer_bytes(job(TrainLayout(tp=4))) == layer_bytes(job(TrainLayout())) / 4
    assert layer_bytes(job(TrainLayout(cp=2))) == layer_bytes(job(TrainLayout())) / 2
    assert layer_bytes(replace(job(TrainLayout()), micro_sequences=3)) == 3 * layer_bytes(job(TrainLayout()))


def test_a_pipeline_holds_as_many_micro_batches_as_it_has_ranks() -> None:
    """On its first rank a layer's worth for each of the model's; interleaved (pp - 1) / (pp * vpp) more."""
    alone, piped, interleaved = (job(layout) for layout in (TrainLayout(), TrainLayout(pp=4), TrainLayout(pp=4, vpp=2)))
    assert memory_of(alone).activation_bytes == 8 * layer_bytes(alone)
    assert memory_of(piped).activation_bytes == 8 * layer_bytes(piped)
    assert memory_of(interleaved).activation_bytes == pytest.approx(8 * (1 + 3 / 8) * layer_bytes(interleaved))
    few = job(TrainLayout(pp=4), sequences=2)
    assert memory_of(few).activation_bytes == 2 * 2 * layer_bytes(few)


def test_recomputed_only_inputs_of_layers_are_kept_and_one_layer() -> None:
    recomputed = replace(job(TrainLayout()), recompute=True)
    assert memory_of(recomputed).activation_bytes == 8 * 1000 * 1024 * 2 + layer_bytes(recomputed)


@pytest.mark.parametrize(("model", "layout", "batch"), [row[:3] for row in NARAYANAN])
def test_what_megatron_trained_on_a100_is_not_refused(model: Model, layout: TrainLayout, batch: int) -> None:
    assert fault_of(TrainJob(model, A100, layout, batch, 2048, recompute=True)) is None


@pytest.mark.parametrize(("layout", "batch", "tokens"), [row[:3] for row in LLAMAS])
def test_what_llama_was_trained_on_is_not_refused(layout: TrainLayout, batch: int, tokens: float) -> None:
    found = TrainJob(LLAMA, H100, layout, batch, tokens)
    assert fault_of(found) is None
    assert memory_of(found).bytes > 0.5 * H100.hbm_bytes, "nor does it have twice the memory that it needs"


def test_what_is_refused_is_told_with_what_to_change() -> None:
    """72B at TP=4: 18.2 billion parameters on each GPU."""
    model = model_named("qwen2.5-72b")
    wide = job(TrainLayout(tp=4, dp=12), model)
    params = model.params / 4
    assert memory_of(wide).state_bytes == pytest.approx(7 * params)
    assert memory_of(wide).bytes > MARGIN * H100.hbm_bytes
    told = fault_of(wide)
    assert told is not None
    assert "127 for weights, gradients and optimizer" in told
    assert told.endswith("and h100 has 80: raise tp or pp")
    assert fault_of(job(TrainLayout(tp=8, pp=2, dp=3), model)) is None


def test_long_sequences_are_told_to_recompute() -> None:
    model = model_named("qwen2.5-14b")
    long = job(TrainLayout(tp=4, dp=4), model, tokens=100_000.0)
    told = fault_of(long)
    assert told is not None
    assert told.endswith("raise tp or pp or cp, or recompute")
    assert fault_of(replace(long, recompute=True)) is None
