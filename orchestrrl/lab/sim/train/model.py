"""Values of the training simulator, and the constants of its hardware, each with its source.

Nothing here is fitted to a training throughput: kernels were measured by themselves, by others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass as checked

from planner.cost.hardware import GpuModel
from planner.cost.models import Model

# Streaming multiprocessors, from the vendor's architecture white papers: thread blocks of a matrix product come in
# waves of that many.
SMS = {"a100": 108, "h20": 78, "h100": 132, "h200": 132, "h800": 132, "b200": 148, "b300": 148}
SMS_OF_OTHERS = 132


Share = Annotated[float, Field(ge=0, le=1)]
Efficiency = Annotated[float, Field(gt=0)]


@checked(frozen=True, slots=True)
class TrainConstants:
    """Efficiencies are shares of the data sheet's rate.

    gemm: an H100 reaches about 720 of 989 TFLOPS in the shapes of Llama 70B's training (SemiAnalysis, "MI300X vs H100
    vs H200 Benchmark Part 1: Training", December 2024); its best shape 792 (table "Maximum Achievable Matmul FLOPS" of
    github.com/stas00/ml-engineering). Other shapes lose to waves that are not full and to `kernel_s`, in which a
    kernel starts and drains: with both, XLA's measured table of an H100 (openxla/xla,
    service/gpu/model/matmul_interpolator_data.h) is met within a third from inner sizes of 512 on, large ones within a
    tenth.
    attention: cuDNN's fused attention on an H100, head size 128, causal (FlashAttention-3, arXiv 2407.08608, figures 5
    and 6): 410, 484, 518, 539 TFLOPS forward at 1k, 2k, 4k, 16k tokens; backward 408, 465, 499, 516 without a mask,
    0.85 of that with one, as forward. A curve efficiency * s / (s + half_tokens) passes through them.
    hbm: 3.0 of 3.35 TB/s copying on an H100 SXM; kernels that change what they copy reach a little less.
    """

    gemm_efficiency: Efficiency = 0.74
    kernel_s: float = 4e-6
    attention_forward_efficiency: Efficiency = 0.55
    attention_backward_efficiency: Efficiency = 0.46
    attention_half_tokens: float = 340.0
    hbm_efficiency: Efficiency = 0.85
    # Tokens of the busiest rank over the mean; 1: balanced, as benchmarks force it.
    expert_imbalance: Annotated[float, Field(ge=1)] = 1.0

    # Megatron's mixed precision: gradients are summed and reduced in 32 bits, parameters gathered in 16. Its optimizer
    # keeps a master copy and two moments of 32 bits each, split over data parallel ranks ("distributed optimizer").
    gradient_bytes: float = 4.0
    parameter_bytes: float = 2.0
    optimizer_bytes: float = 30.0  # of each parameter of the shard: gradient 4, master and moments 3 x 8, 16-bit copy 2
    # A bucket of gradients is sent once it is complete, with the last micro-batch's backward (--overlap-grad-reduce);
    # parameters are gathered with the first micro-batch's forward (--overlap-param-gather).
    bucket_parameters: Annotated[float, Field(gt=0)] = 40e6  # Megatron: the larger of this and 1e6 * dp
    # Of tensor parallelism's collectives in a backward pass. Megatron reduces beside the product for weights'
    # gradients, half of them, where CUDA_DEVICE_MAX_CONNECTIONS=1 keeps their order; a forward pass has nothing to
    # hide them behind. (--tp-comm-overlap, which cuts products into pieces, is not modelled.)
    tp_hidden_share: Share = 0.0
    ep_hidden_share: Share = 0.0  # of the experts' all-to-all (--overlap-moe-expert-parallel-comm)


MEGATRON = TrainConstants()


@dataclass(frozen=True, slots=True)
class TrainLayout:
    """Degrees of parallelism as Megatron has them: ranks are numbered tensor first, then context, data and pipeline;
    experts are spread over `ep` ranks of tensor, context and data together. `gpus` = tp * cp * dp * pp. `vpp` > 1 gives
    each pipeline rank that many stages, interleaved."""

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
            raise ValueError(f"vpp needs pp > 1, got vpp {self.vpp}")

    @property
    def gpus(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def stages(self) -> int:
        """Of the pipeline, over all its ranks."""
        return self.pp * self.vpp


@dataclass(frozen=True, slots=True)
class TrainJob:
    """An optimiser step: `sequences` of `tokens` each (mean), in micro-batches of `micro_sequences` per data-parallel
    rank. Micro-batches are alike, as frameworks that pack sequences by their lengths make them; what attention takes
    goes by the lengths' squares."""

    model: Model
    gpu: GpuModel
    layout: TrainLayout
    sequences: int
    tokens: float
    micro_sequences: int = 1
    first_gpu: int = 0  # its GPUs are numbered from here on
    recompute: bool = False  # activations are computed again in the backward pass
    length_cv: float = 0.0  # standard deviation of the sequences' lengths over their mean; 0: all are as long
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
            found.append(f"{self.model.name} has {self.model.layers} layers, fewer than {layout.stages} stages")
        if layout.ep > 1 and (not self.model.moe or self.model.experts % layout.ep):
            found.append(f"ep must divide the experts of {self.model.name} ({self.model.experts}), got {layout.ep}")
        if self.model.q_heads % layout.tp:
            found.append(f"tp must divide the {self.model.q_heads} heads of {self.model.name}, got {layout.tp}")
        if not found and layout.vpp > 1 and self.micro_batches % layout.pp:
            found.append(f"interleaved, micro-batches ({self.micro_batches}) must be a multiple of pp, {layout.pp}")
        return found

    @property
    def micro_batches(self) -> int:
        return max(1, -(-self.sequences // (self.layout.dp * self.micro_sequences)))

    @property
    def micro_tokens(self) -> float:
        """Of a micro-batch, on each context-parallel rank."""
        return self.micro_sequences * self.tokens / self.layout.cp

    @property
    def square_tokens(self) -> float:
        """Mean of the squares of the sequences' lengths."""
        return self.tokens**2 * (1 + self.length_cv**2)

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """[stage]: as even as they can be, the first ones take what is left over."""
        each, more = divmod(self.model.layers, self.layout.stages)
        return tuple(each + (stage < more) for stage in range(self.layout.stages))


@dataclass(frozen=True, slots=True)
class CollectiveBoundary:
    """A collective over the network as one rank sees it; seconds from the iteration's beginning."""

    group: str  # e.g. "dp", "ep", "pp", "cp"
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class OverlapWindow:
    """Without a collective over the network, between two of them."""

    begin_s: float
    end_s: float
    before: str  # group of the collective before, and after
    after: str

    @property
    def length_s(self) -> float:
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True)
class TrainingIteration:
    """`parts_s` adds up to `seconds`: compute, bubble, and what of each group's communication is not hidden."""

    seconds: float
    mfu: float
    parts_s: Mapping[str, float]
    boundaries: tuple[CollectiveBoundary, ...]
    windows: tuple[OverlapWindow, ...]
