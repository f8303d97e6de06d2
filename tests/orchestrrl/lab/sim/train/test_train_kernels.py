"""Tests of kernel times against closed forms and published measurements."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.lab.sim.train.compute import Kernels
from orchestrrl.lab.sim.train.model import MEGATRON, TrainConstants
from planner.cost.hardware import gpu_named

H100 = Kernels(gpu_named("h100"), MEGATRON)


def tflops(m: int, n: int, k: int, groups: int = 1) -> float:
    return 2 * m * n * k * groups / H100.gemm_s(m, n, k, groups=groups) / 1e12


def test_full_wave_runs_at_the_efficiency() -> None:
    """The product has 132 tiles of 128 by 256 for 132 multiprocessors."""
    seconds = 2 * 132 * 128 * 256 * 8192 / (989.5e12 * MEGATRON.gemm_efficiency)
    assert H100.gemm_s(12 * 128, 11 * 256, 8192) == pytest.approx(seconds + MEGATRON.kernel_s)


def test_one_more_tile_needs_another_wave() -> None:
    full, more = (H100.gemm_s(rows * 128, 256, 65536) - MEGATRON.kernel_s for rows in (132, 133))
    assert 1.2 * full < more <= 2.0 * full


def test_thin_product_is_bound_by_memory() -> None:
    moved = 2.0 * (16 * 4096 + 4096 * 4096 + 16 * 4096)
    assert H100.gemm_s(16, 4096, 4096) >= moved / (3.35e12 * MEGATRON.hbm_efficiency)


# SemiAnalysis, "MI300X vs H100 vs H200 Benchmark Part 1: Training": about 720 TFLOPS over these, (m, n, k).
LLAMA_70B = [(16384, 1280, 8192), (16384, 8192, 1024), (16384, 7168, 8192), (16384, 8192, 3584), (8192, 8192, 8192)]


def test_training_shapes_match_measurements() -> None:
    assert sum(tflops(*shape) for shape in LLAMA_70B) / len(LLAMA_70B) == pytest.approx(720, rel=0.03)


# openxla/xla, service/gpu/model/matmul_interpolator_data.h, sm_90, bf16: (m, n, k, batch), TFLOPS.
XLA = [
    ((4096, 2048, 2048, 1), 716, 0.1),
    ((2048, 4096, 4096, 1), 754, 0.1),
    ((2048, 2048, 4096, 1), 738, 0.12),
    ((4096, 4096, 1024, 4), 726, 0.1),
    ((1024, 4096, 4096, 4), 774, 0.12),
    ((4096, 2048, 1024, 1), 593, 0.1),
    ((512, 4096, 2048, 1), 522, 0.1),
    ((256, 2048, 2048, 1), 216, 0.1),
    ((256, 512, 4096, 4), 286, 0.1),
    ((2048, 512, 4096, 1), 451, 0.33),
    ((1024, 1024, 1024, 1), 236, 0.33),
    ((2048, 2048, 512, 1), 345, 0.33),
]


@pytest.mark.parametrize(("shape", "measured", "within"), XLA)
def test_smaller_products_match_measurements(shape: tuple[int, int, int, int], measured: float, within: float) -> None:
    assert tflops(*shape) == pytest.approx(measured, rel=within)


# FlashAttention-3 (arXiv 2407.08608), cuDNN, head size 128: tokens, TFLOPS forward with a causal mask.
@pytest.mark.parametrize(("tokens", "measured"), [(512, 315), (1024, 410), (2048, 484), (4096, 518), (16384, 539)])
def test_attention_matches_measurements(tokens: int, measured: float) -> None:
    flops = 4.0 * 16384 * tokens / 2 * 2048  # 16k tokens and 16 heads, as in that paper's measurements
    seconds = H100.attention_s(flops, tokens) - MEGATRON.kernel_s
    assert flops / seconds / 1e12 == pytest.approx(measured, rel=0.08)


@given(st.integers(1, 20000), st.integers(1, 20000), st.integers(1, 20000))
def test_no_product_exceeds_the_efficiency(m: int, n: int, k: int) -> None:
    assert tflops(m, n, k) <= 989.5 * MEGATRON.gemm_efficiency * (1 + 1e-9)


def test_invalid_constants_are_reported_together() -> None:
    with pytest.raises(ValueError, match=r"(?s)hbm_efficiency.*greater than 0.*tp_hidden_share.*less than"):
        TrainConstants(tp_hidden_share=2, hbm_efficiency=0)
