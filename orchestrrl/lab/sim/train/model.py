"""Types of the training simulator, and the constants of its hardware, each with its source.

No constant is fitted to a training throughput. All constants come from published measurements of single kernels.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass as checked

from planner.cost.hardware import GpuModel
from planner.cost.models import Model

# Streaming multiprocessors, from the vendor's architecture white papers: a matrix product runs its thread blocks in
# waves of this size.
SMS = {"a100": 108, "h20": 78, "h100": 132, "h200": 132, "h800": 132, "b200": 148, "b300": 148}
SMS_OF_OTHERS = 132


Share = Annotated[float, Field(ge=0, le=1)]
Efficiency = Annotated[float, Field(gt=0)]


@checked(frozen=True, slots=True)
class TrainConstants:
    """Constants of the training model. Efficiencies are fractions of the data sheet's rate.

    Matrix products: an H100 reaches about 720 of 989 TFLOPS in the shapes of Llama 70B's training (SemiAnalysis,
    "MI300X vs H100 vs H200 Benchmark Part 1: Training", December 2024), and 792 in its best shape (table "Maximum
    Achievable Matmul FLOPS" of github.com/stas00/ml-engineering). Other shapes lose time to partial waves and to
    `kernel_s`, the start and drain of a kernel. With both losses, the model matches XLA's measured table of an H100
    (openxla/xla, service/gpu/model/matmul_interpolator_data.h) within a third for inner sizes of at least 512, and
    within a tenth for large sizes.

    Attention: cuDNN's fused causal attention on an H100 with head size 128 (FlashAttention-3, arXiv 2407.08608, figures
    5 and 6) reaches 410, 484, 518, 539 TFLOPS in the forward pass at 1k, 2k, 4k, 16k tokens. The backward pass reaches
    408, 465, 499, 516 TFLOPS without a mask. With a mask it is assumed to reach 0.85 of these values, as the forward
    pass does. The curve efficiency * s / (s + half_tokens), where s is the sequence length, passes through these
    points.

    GPU memory: a copy on an H100 SXM reaches 3.0 of 3.35 TB/s. Kernels that also compute reach slightly less.
    """

    gemm_efficiency: Efficiency = 0.74
    kernel_s: float = 4e-6
    attention_forward_efficiency: Efficiency = 0.55
    attention_backward_efficiency: Efficiency = 0.46
    attention_half_tokens: float = 340.0
    hbm_efficiency: Efficiency = 0.85
    # Tokens of the busiest rank over the mean; 1 is the balanced routing that benchmarks enforce.
    expert_imbalance: Annotated[float, Field(ge=1)] = 1.0

    # Megatron's mixed precision: gradients are summed and reduced in 32 bits, parameters are gathered in 16. The
    # optimizer keeps a master copy and two moments of 32 bits each, sharded over data parallel ranks ("distributed
    # optimizer").
    gradient_bytes: float = 4.0
    parameter_bytes: float = 2.0
    optimizer_bytes: float = 30.0  # per parameter of the shard: gradient 4, master and moments 3 x 8, 16-bit copy 2
    # A bucket of gradients is sent once it is complete, during the last micro-batch's backward pass
    # (--overlap-grad-reduce). Parameters are gathered during the first micro-batch's forward (--overlap-param-gather).
    bucket_parameters: Annotated[float, Field(gt=0)] = 40e6  # Megatron: the larger of this and 1e6 * dp
    # Hidden fraction of tensor parallelism's collectives in a backward pass. Megatron overlaps half of them with the
    # product for weight gradients, if CUDA_DEVICE_MAX_CONNECTIONS=1 keeps their order. A forward pass has no work to
    # overlap. (--tp-comm-overlap, which splits products into pieces, is not modelled.)
    tp_hidden_share: Share = 0.0
    ep_hidden_share: Share = 0.0  # hidden fraction of the experts' all-to-all (--overlap-moe-expert-parallel-comm)


MEGATRON = TrainConstants()


@dataclass(frozen=True, slots=True)
class TrainLayout:
    """Megatron's degrees of parallelism. Ranks are numbered tensor first, then context, data and pipeline. Experts are
    spread over `ep` ranks of the tensor, context and data dimensions together. `gpus` is tp * cp * dp * pp. Each
    pipeline rank has `vpp` stages, which are interleaved if `vpp` > 1."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    vpp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "cp", "dp", "pp", "ep", "vpp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if (self.tp * self.cp * self.dp) % self.ep:
            raise ValueError(f"ep must divide tp * cp * dp ({self.tp * self.cp * self.dp}), got {self.ep}")
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"vpp must be 1 if pp is 1, got {self.vpp}")

    @property
    def gpus(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def stages(self) -> int:
        """The number of pipeline stages over all ranks."""
        return self.pp * self.vpp


@dataclass(frozen=True, slots=True)
class TrainJob:
    """An optimiser step on `sequences` sequences of `tokens` tokens on average, in micro-batches of `micro_sequences`
    sequences per data-parallel rank. Micro-batches are equal, as in frameworks that pack sequences by length. The time
    of attention depends on the squares of the lengths, and therefore on `length_cv`."""

    model: Model
    gpu: GpuModel
    layout: TrainLayout
    sequences: int
    tokens: float
    micro_sequences: int = 1
    first_gpu: int = 0  # the job's first GPU
    recompute: bool = False  # activations are recomputed in the backward pass
    length_cv: float = 0.0  # coefficient of variation of the sequences' lengths; 0: equal lengths
    constants: TrainConstants = MEGATRON

    def __post_init__(self) -> None:
        if faults := self._faults():
            raise ValueError("; ".join(faults))

    def _faults(self) -> list[str]:
        layout, found = self.layout, []
        for name in ("sequences", "tokens", "micro_sequences"):
            if not getattr(self, name) > 0:
                found.append(f"{name} must be > 0, got {getattr(self, name)}")
        if not self.length_cv >= 0:
            found.append(f"length_cv must be >= 0, got {self.length_cv}")
        if layout.stages > self.model.layers:
            found.append(f"pp * vpp must be <= {self.model.layers} ({self.model.name}'s layers), got {layout.stages}")
        if layout.ep > 1 and (not self.model.moe or self.model.experts % layout.ep):
            found.append(f"ep must divide the experts of {self.model.name} ({self.model.experts}), got {layout.ep}")
        if self.model.q_heads % layout.tp:
            found.append(f"tp must divide the {self.model.q_heads} heads of {self.model.name}, got {layout.tp}")
        if not found and layout.vpp > 1 and self.micro_batches % layout.pp:
            found.append(f"vpp > 1 needs micro-batches in multiples of pp ({layout.pp}), got {self.micro_batches}")
        return found

    @property
    def micro_batches(self) -> int:
        return max(1, -(-self.sequences // (self.layout.dp * self.micro_sequences)))

    @property
    def micro_tokens(self) -> float:
        """The number of tokens of a micro-batch on each context-parallel rank."""
        return self.micro_sequences * self.tokens / self.layout.cp

    @property
    def square_tokens(self) -> float:
        """The mean of the squared sequence lengths, in squared tokens."""
        return self.tokens**2 * (1 + self.length_cv**2)

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """The number of layers of each pipeline stage, indexed by stage. The first stages take the remainder of an
        uneven division."""
        each, more = divmod(self.model.layers, self.layout.stages)
        return tuple(each + (stage < more) for stage in range(self.layout.stages))


@dataclass(frozen=True, slots=True)
class CollectiveBoundary:
    """The times at which one rank's collective over the network begins and ends, in seconds from the iteration's
    beginning."""

    group: str  # e.g. "dp", "ep", "pp", "cp"
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class OverlapWindow:
    """A time window between two collectives in which a rank has no collective on the network."""

    begin_s: float
    end_s: float
    before: str  # group of the preceding collective
    after: str  # group of the following collective

    @property
    def length_s(self) -> float:
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True)
class TrainingIteration:
    """A simulated training iteration. `parts_s` contains the times of compute, bubbles and each group's exposed
    communication, which add up to `seconds`. `boundaries` and `windows` are those of the busiest pipeline rank."""

    seconds: float
    mfu: float
    parts_s: Mapping[str, float]
    boundaries: tuple[CollectiveBoundary, ...]
    windows: tuple[OverlapWindow, ...]
