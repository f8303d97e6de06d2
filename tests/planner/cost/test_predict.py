"""Tests of predicted profiles: the trade-offs of layouts, layouts that do not fit, and the candidates of a phase."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.engines import ENGINES, UnknownEngine, engine_named
from planner.cost.hardware import GPUS, GpuModel, gpu_named
from planner.cost.models import MODELS, Model, model_named
from planner.cost.paper import paper_engine
from planner.cost.predict import DoesNotFit, identifier, move_costs, predict, predict_profile
from planner.cost.profile import Parallelism, ProfileSource
from planner.cost.roofline import Precision
from planner.solver.layouts import StepPhase, biased, bulk_cost, candidates, layouts, phase_of, tail_cost

VLLM = engine_named("vllm")
H800 = gpu_named("h800")
DENSE = model_named("qwen2.5-14b")
EXPERTS = model_named("qwen3-235b-a22b")


@given(
    st.sampled_from(sorted(MODELS)).map(model_named),
    st.sampled_from(sorted(GPUS)).map(gpu_named),
    st.sampled_from(sorted(ENGINES)).map(engine_named),
    st.sampled_from([8, 16, 40]),
)
def test_every_candidate_is_a_valid_configuration(model: Model, gpu: GpuModel, engine: object, gpus_count: int) -> None:
    for profile in candidates(model, gpu, gpus_count, 8, engine):  # type: ignore[arg-type]
        assert 1 <= profile.parallelism.gpus <= gpus_count
        assert profile.parallelism.gpus <= 8 or profile.parallelism.gpus % 8 == 0
        ys = profile.step.base_s.ys
        assert all(fewer <= more for fewer, more in pairwise(ys))
        configuration = profile.configuration()  # validates itself
        assert configuration.gpus == profile.parallelism.gpus
        assert profile.provenance.source is ProfileSource.ROOFLINE
        assert profile.provenance.fit_error_mean is not None


def test_wide_engines_step_faster_and_narrow_ones_serve_more_per_gpu() -> None:
    profiles = [predict(DENSE, H800, Parallelism(tp=tp), VLLM) for tp in (1, 2, 4, 8)]
    alone = [profile.step.at(1, 8000) for profile in profiles]
    assert alone == sorted(alone, reverse=True)
    each_gpu = [profile.step.at(256 * profile.parallelism.gpus, 0) for profile in profiles]
    assert each_gpu == sorted(each_gpu)


def test_step_time_of_experts_bends_with_the_batch() -> None:
    """The step time with experts grows far more from 1 to 64 sequences than a dense model's, and then flattens."""
    base_s = predict(EXPERTS, H800, Parallelism(tp=8, ep=8), VLLM).step.base_s
    slopes = [(base_s.at(high) - base_s.at(low)) / (high - low) for low, high in ((1, 16), (16, 64), (64, 256))]
    assert slopes == sorted(slopes, reverse=True)
    assert slopes[0] > 3 * slopes[-1]


def test_data_parallel_attention_holds_more_kv_and_pays_in_latency() -> None:
    tensor = predict(EXPERTS, H800, Parallelism(tp=16, ep=16), VLLM)
    data = predict(EXPERTS, H800, Parallelism(tp=1, dp=16, ep=16), VLLM)
    assert data.kv_capacity_tokens > 2 * tensor.kv_capacity_tokens
    assert data.step.base_s.at(512) < tensor.step.base_s.at(512)
    assert tail_cost(data) > tail_cost(tensor)


def test_afd_overlaps_large_batches_and_is_poor_in_the_tail() -> None:
    """Section 4.1: micro-batches hide transfers in large batches, but not in the tail."""
    afd = Parallelism(attention_gpus=24, ffn_gpus=16, micro_batches=3)
    overlapped = predict(EXPERTS, H800, afd, VLLM)
    one_by_one = predict(EXPERTS, H800, Parallelism(attention_gpus=24, ffn_gpus=16, micro_batches=1), VLLM)
    tensor = predict(EXPERTS, H800, Parallelism(tp=8), VLLM)
    assert bulk_cost(overlapped) < bulk_cost(tensor)
    assert tail_cost(overlapped) > 1.3 * tail_cost(tensor)
    assert overlapped.step.base_s.at(1) == pytest.approx(one_by_one.step.base_s.at(1), rel=0.01)
    assert overlapped.id == "afd24+16x3"


def test_layouts_that_do_not_fit_raise_or_are_left_out() -> None:
    with pytest.raises(DoesNotFit, match="model qwen3-235b-a22b does not fit on GPU h800 with parallelism tp1"):
        predict(EXPERTS, H800, Parallelism(), VLLM)
    with pytest.raises(DoesNotFit):
        predict(EXPERTS, H800, Parallelism(attention_gpus=8, ffn_gpus=1), VLLM)
    profile = predict_profile(EXPERTS, H800, [Parallelism(), Parallelism(tp=8)], VLLM)
    assert [configuration.id for configuration in profile.configurations] == ["tp8"]


def test_only_engines_with_spilling_spill_at_the_cost_of_the_bus() -> None:
    assert predict(DENSE, H800, Parallelism(tp=2), VLLM, cpu_kv_bytes_per_gpu=64e9).spill_capacity_tokens == 0
    spilling = predict(DENSE, H800, Parallelism(tp=2), paper_engine(DENSE), cpu_kv_bytes_per_gpu=64e9)
    assert spilling.spill_capacity_tokens == int(2 * 64e9 / DENSE.kv_bytes_per_token())
    assert spilling.step.spill_s_per_token == pytest.approx(DENSE.kv_bytes_per_token() / 2 / H800.pcie_bytes_per_s)


def test_eight_bit_weights_hold_more_tokens_and_are_faster() -> None:
    wide = predict(DENSE, H800, Parallelism(tp=1), VLLM)
    narrow = predict(DENSE, H800, Parallelism(tp=1), VLLM, Precision(8.0, 8.0, 8.0))
    assert narrow.kv_capacity_tokens > 2 * wide.kv_capacity_tokens
    assert narrow.step.kv_s_per_token == pytest.approx(wide.step.kv_s_per_token / 2)
    assert narrow.step.base_s.at(1) < wide.step.base_s.at(1)


def test_recomputing_wins_for_small_caches_and_transfer_for_large_ones() -> None:
    """Appendix A: Qwen2.5-32B, one NIC of 200 Gbps against a prefill with TP=8."""
    moves = move_costs(model_named("qwen2.5-32b"), H800, VLLM)
    small, large = 64, 128 * 1024
    assert moves.kv_bytes_per_token == 262144
    assert moves.recompute_s.at(large) > moves.transfer_s.at(large * moves.kv_bytes_per_token)
    more_nics = move_costs(model_named("qwen2.5-32b"), H800, VLLM, nics=8)
    assert more_nics.transfer_s.at(1e9) < moves.transfer_s.at(1e9) / 5
    assert moves.recompute_s.at(small) < moves.recompute_s.at(large)


def test_layouts_stay_inside_a_node_or_take_whole_ones() -> None:
    assert [identifier(layout) for layout in layouts(DENSE, 64, 8)] == ["tp1", "tp2", "tp4", "tp8"]  # 40 heads
    names = [identifier(layout) for layout in layouts(EXPERTS, 40, 8)]
    assert {"tp8", "tp16", "tp8ep8", "tp1dp16ep16", "afd24+16x3"} <= set(names)
    assert all(layout.gpus <= 8 or layout.gpus % 8 == 0 for layout in layouts(EXPERTS, 40, 8))


def test_data_parallel_attention_needs_no_split_heads() -> None:
    """TP ends at 4 with 28 heads, but 64 experts can be spread over all GPUs."""
    names = {identifier(layout) for layout in layouts(model_named("qwen2-57b-a14b"), 64, 8)}
    assert {"tp4", "tp4ep4", "tp1dp8ep8", "tp1dp32ep32"} <= names
    assert not names & {"tp8", "tp8ep8"}


def test_candidates_depend_on_the_phase() -> None:
    bulk, tail = (candidates(model_named("qwen2.5-72b"), H800, 64, 8, VLLM, phase) for phase in StepPhase)
    assert "tp4" in [profile.id for profile in bulk]
    assert max(profile.parallelism.gpus for profile in tail) > max(profile.parallelism.gpus for profile in bulk)
    everything = candidates(EXPERTS, H800, 64, 8, VLLM)
    assert sum(profile.parallelism.afd for profile in everything) == 2
    for phase, cost in ((StepPhase.BULK, bulk_cost), (StepPhase.TAIL, tail_cost)):
        left = biased(everything, phase)
        assert min(everything, key=cost) in left
        assert min(everything, key=lambda profile: profile.parallelism.gpus) in left
    assert biased([], StepPhase.BULK) == []


def test_few_sequences_on_many_gpus_are_a_tail() -> None:
    assert phase_of(512, 8) is StepPhase.BULK
    assert phase_of(15, 8) is StepPhase.TAIL


def test_start_times_have_provenance_given() -> None:
    """The cold start is a rule of thumb and the paper gives its own start time; the roofline predicts neither."""
    for engine, source in ((VLLM, "rule of thumb"), (paper_engine(DENSE), "figure 11")):
        ((figure, provenance),) = predict(DENSE, H800, Parallelism(), engine).others
        assert (figure, provenance.source) == ("switch_s", ProfileSource.GIVEN)
        assert source in provenance.detail


def test_an_unknown_engine_lists_the_known_ones() -> None:
    with pytest.raises(UnknownEngine, match="known engines: sglang, trtllm, vllm"):
        engine_named("nonsense")


def test_pipeline_stages_have_a_name_and_gpus_but_no_predicted_times() -> None:
    staged = Parallelism(tp=2, pp=4)
    assert (identifier(staged), staged.gpus) == ("tp2pp4", 8)
    with pytest.raises(ValueError, match=r"pp must be 1, .* got 4"):
        predict(EXPERTS, H800, staged, VLLM)
