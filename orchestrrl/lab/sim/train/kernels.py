"""How long a kernel takes: matrix products, attention, and what only moves memory. Pure."""

import math
from dataclasses import dataclass

from orchestrrl.lab.sim.train.constants import SMS, SMS_OF_OTHERS, TrainConstants
from planner.cost.hardware import GpuModel

# What thread blocks compute of the product, rows by columns. Libraries choose among many; smaller ones than these read
# their operands too often to be worth their better fit.
TILES = ((128, 256), (256, 128), (128, 128), (64, 128), (128, 64))


@dataclass(frozen=True, slots=True)
class Kernels:
    """Of one GPU."""

    gpu: GpuModel
    constants: TrainConstants

    @property
    def hbm_bytes_per_s(self) -> float:
        return self.gpu.hbm_bytes_per_s * self.constants.hbm_efficiency

    def gemm_s(self, m: float, n: float, k: float, *, groups: int = 1, accumulates: bool = False) -> float:
        """A product of m by k with k by n, `groups` of them in one kernel. `accumulates`: added to 32-bit gradients."""
        if min(m, n, k) <= 0:
            return 0.0
        flops = 2.0 * m * n * k * groups
        compute_s = flops * self._waves_over_work(m, n, groups) / (self.gpu.bf16_flops * self.constants.gemm_efficiency)
        moved = 2.0 * (m * k + k * n) + (8.0 if accumulates else 2.0) * m * n
        return max(compute_s, groups * moved / self.hbm_bytes_per_s) + self.constants.kernel_s

    def _waves_over_work(self, m: float, n: float, groups: int) -> float:
        """Time of full waves over that of the work alone: thread blocks at the edge and the last wave are not full."""
        sms = SMS.get(self.gpu.name, SMS_OF_OTHERS)
        return min(
            math.ceil(groups * math.ceil(m / rows) * math.ceil(n / columns) / sms) * sms * rows * columns
            for rows, columns in TILES
        ) / (m * n * groups)

    def attention_s(self, flops: float, tokens: float, *, backward: bool = False) -> float:
        """Fused, causal, of sequences of so many tokens. `flops` as the mask leaves them. Where lengths differ, their
        mean of squares over their mean: with this curve that is what they take together."""
        constants = self.constants
        best = constants.attention_backward_efficiency if backward else constants.attention_forward_efficiency
        share = best * tokens / (tokens + constants.attention_half_tokens)
        return flops / (self.gpu.bf16_flops * share) + constants.kernel_s

    def moves_s(self, moved_bytes: float) -> float:
        """Reading and writing so many bytes in all."""
        return moved_bytes / self.hbm_bytes_per_s
