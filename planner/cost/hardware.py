"""GPUs as the cost model sees them: sizes and rates from data sheets, nothing measured. Pure.

Peak rates are dense (without sparsity). `nvlink_bytes_per_s` is what one GPU sends while it receives as much, half of
the figure that vendors quote for both ways together. Sources: NVIDIA's data sheets of each product; H800 and H20 also
in table 2 of the RollArt paper (arXiv 2512.22560).
"""

import re
from dataclasses import dataclass

GB = 1e9
TFLOPS = 1e12
INTER_NODE_LATENCY_S = 10e-6  # of a collective over RDMA, beyond what it takes over NVLink


@dataclass(frozen=True, slots=True)
class GpuModel:
    """One GPU of a node with its links. A peak of 0 means that the format has no tensor cores of its own there."""

    name: str
    hbm_bytes: float
    hbm_bytes_per_s: float
    bf16_flops: float  # per second, dense
    fp8_flops: float
    fp4_flops: float
    nvlink_bytes_per_s: float  # one way
    nic_bytes_per_s: float  # one way, this GPU's share of its node's
    pcie_bytes_per_s: float  # to CPU memory, one way
    per_node: int = 8
    inter_node_latency_s: float = INTER_NODE_LATENCY_S

    def __post_init__(self) -> None:
        for field in ("hbm_bytes", "hbm_bytes_per_s", "bf16_flops", "nvlink_bytes_per_s", "nic_bytes_per_s"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field} must be > 0, got {getattr(self, field)}")

    def multiplies(self, weight_bits: float) -> bool:
        """Whether it has tensor cores for weights and activations of that many bits, fewer than 16."""
        peak = self.fp4_flops if weight_bits < 8 else self.fp8_flops
        return weight_bits < 16 and peak > 0

    def flops_per_s(self, weight_bits: float) -> float:
        """Peak for weights of that many bits. What it cannot multiply as it is, is widened to 16 bits first."""
        if not self.multiplies(weight_bits):
            return self.bf16_flops
        return self.fp4_flops if weight_bits < 8 else self.fp8_flops


def _gpu(
    name: str,
    hbm_gb: float,
    hbm_tb_per_s: float,
    bf16_tflops: float,
    fp8_tflops: float,
    nvlink_gb_per_s: float,
    *,
    fp4_tflops: float = 0.0,
    nic_gbps: float = 400.0,
    pcie_gb_per_s: float = 55.0,
) -> GpuModel:
    return GpuModel(
        name=name,
        hbm_bytes=hbm_gb * GB,
        hbm_bytes_per_s=hbm_tb_per_s * 1e12,
        bf16_flops=bf16_tflops * TFLOPS,
        fp8_flops=fp8_tflops * TFLOPS,
        fp4_flops=fp4_tflops * TFLOPS,
        nvlink_bytes_per_s=nvlink_gb_per_s * GB,
        nic_bytes_per_s=nic_gbps * GB / 8,
        pcie_bytes_per_s=pcie_gb_per_s * GB,
    )


GPUS: dict[str, GpuModel] = {
    gpu.name: gpu
    for gpu in (
        _gpu("a100", 80, 2.039, 312, 0, 300, nic_gbps=200, pcie_gb_per_s=26),
        _gpu("h20", 96, 4.0, 148, 296, 450),
        _gpu("h100", 80, 3.35, 989.5, 1979, 450),
        _gpu("h200", 141, 4.8, 989.5, 1979, 450),
        _gpu("h800", 80, 3.35, 989.5, 1979, 200, nic_gbps=200),
        _gpu("b200", 180, 7.7, 2250, 4500, 900, fp4_tflops=9000),
        _gpu("b300", 268, 7.7, 2250, 4500, 900, fp4_tflops=13500, nic_gbps=800),
    )
}


class UnknownGpu(ValueError):
    """No constants for it; the message lists what is known."""


def gpu_of_product(name: str) -> GpuModel:
    """By a product name as drivers report it: `NVIDIA H100 80GB HBM3`, `NVIDIA A100-SXM4-80GB`. Raises UnknownGpu.

    The name must contain a known GPU's as a whole word: GH200 and H100 are different products.
    """
    for word in re.split(r"[^a-z0-9]+", name.lower()):
        if word in GPUS:
            return GPUS[word]
    raise UnknownGpu(f"unknown GPU {name!r}, known: {', '.join(sorted(GPUS))}")


def gpu_named(name: str) -> GpuModel:
    """By name, in any case, with or without the form factor that systems are listed under (`h100_sxm`)."""
    plain = name.strip().lower().replace("-", "_").removeprefix("nvidia_").split("_")[0]
    if plain not in GPUS:
        raise UnknownGpu(f"unknown GPU {name!r}, known: {', '.join(sorted(GPUS))}")
    return GPUS[plain]
