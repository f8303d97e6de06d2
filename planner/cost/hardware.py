"""GPUs of the cost model: sizes and rates from data sheets, not from measurements.

Peak rates are dense (without sparsity). `nvlink_bytes_per_s` is the rate of one direction, half of the bidirectional
rate that vendors quote. The numbers are from NVIDIA's data sheet of each product. Those of H800 and H20 are also from
table 2 of the RollArt paper (arXiv 2512.22560).
"""

import re
from dataclasses import dataclass, field

GB = 1e9
TFLOPS = 1e12
INTER_NODE_LATENCY_S = 10e-6  # latency that RDMA adds to a collective, compared with NVLink


@dataclass(frozen=True, slots=True)
class GpuModel:
    """A GPU with its links. A peak rate of 0 means that the GPU has no tensor cores for that format."""

    name: str
    hbm_bytes: float
    hbm_bytes_per_s: float
    bf16_flops: float  # per second, dense
    fp8_flops: float
    fp4_flops: float
    nvlink_bytes_per_s: float  # one way
    nic_bytes_per_s: float  # one way, the GPU's share of its node's NICs
    pcie_bytes_per_s: float  # to CPU memory, one way
    per_node: int = field(default=8, kw_only=True)
    inter_node_latency_s: float = INTER_NODE_LATENCY_S

    def __post_init__(self) -> None:
        for figure in ("hbm_bytes", "hbm_bytes_per_s", "bf16_flops", "nvlink_bytes_per_s", "nic_bytes_per_s"):
            if not getattr(self, figure) > 0:
                raise ValueError(f"{figure} must be > 0, got {getattr(self, figure)}")

    def multiplies(self, weight_bits: float) -> bool:
        """Return whether `weight_bits` is below 16 and the GPU has tensor cores that multiply weights and activations
        of this width."""
        peak = self.fp4_flops if weight_bits < 8 else self.fp8_flops
        return weight_bits < 16 and peak > 0

    def flops_per_s(self, weight_bits: float) -> float:
        """Return the peak rate, in FLOPS, for weights of `weight_bits` bits. If the GPU has no tensor cores for such
        weights, return the 16-bit rate."""
        if not self.multiplies(weight_bits):
            return self.bf16_flops
        return self.fp4_flops if weight_bits < 8 else self.fp8_flops


# In GB, TB/s, TFLOPS of bf16, fp8 and fp4, GB/s of NVLink, Gbit/s of the NIC, GB/s of PCIe.
_UNITS = (GB, 1e12, TFLOPS, TFLOPS, TFLOPS, GB, GB / 8, GB)
_DATA_SHEETS = {
    "a100": (80, 2.039, 312, 0, 0, 300, 200, 26),
    "h20": (96, 4.0, 148, 296, 0, 450, 400, 55),
    "h100": (80, 3.35, 989.5, 1979, 0, 450, 400, 55),
    "h200": (141, 4.8, 989.5, 1979, 0, 450, 400, 55),
    "h800": (80, 3.35, 989.5, 1979, 0, 200, 200, 55),
    "b200": (180, 7.7, 2250, 4500, 9000, 900, 400, 55),
    "b300": (268, 7.7, 2250, 4500, 13500, 900, 800, 55),
}
GPUS: dict[str, GpuModel] = {
    name: GpuModel(name, *(figure * unit for figure, unit in zip(sheet, _UNITS, strict=True)))
    for name, sheet in _DATA_SHEETS.items()
}


class UnknownGpu(ValueError):
    """Raised for an unknown GPU; the message lists the known GPUs."""


def gpu_of_product(name: str) -> GpuModel:
    """Look up a GPU by a product name as reported by drivers, such as `NVIDIA A100-SXM4-80GB`.

    Raises UnknownGpu if the product name does not contain a known GPU's name as a whole word. For example, GH200 does
    not match H200.
    """
    for word in re.split(r"[^a-z0-9]+", name.lower()):
        if word in GPUS:
            return GPUS[word]
    raise UnknownGpu(f"unknown GPU {name!r}; known GPUs: {', '.join(sorted(GPUS))}")


def gpu_named(name: str) -> GpuModel:
    """Look up a GPU by its name, regardless of case, with or without a form factor (`h100_sxm`).

    Raises UnknownGpu if the name is not in `GPUS`.
    """
    plain = name.strip().lower().replace("-", "_").removeprefix("nvidia_").split("_")[0]
    if plain not in GPUS:
        raise UnknownGpu(f"unknown GPU {name!r}; known GPUs: {', '.join(sorted(GPUS))}")
    return GPUS[plain]
