"""What training makes of its hardware: efficiencies of kernels and how Megatron overlaps, each with its source.

Nothing here is fitted to a training throughput: kernels were measured by themselves, by others.
"""

from dataclasses import dataclass

# Streaming multiprocessors, from the vendor's architecture white papers: thread blocks of a matrix product come in
# waves of that many.
SMS = {"a100": 108, "h20": 78, "h100": 132, "h200": 132, "h800": 132, "b200": 148, "b300": 148}
SMS_OF_OTHERS = 132


@dataclass(frozen=True, slots=True)
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

    gemm_efficiency: float = 0.74
    kernel_s: float = 4e-6
    attention_forward_efficiency: float = 0.55
    attention_backward_efficiency: float = 0.46
    attention_half_tokens: float = 340.0
    hbm_efficiency: float = 0.85
    expert_imbalance: float = 1.0  # tokens of the busiest rank over the mean; 1: balanced, as benchmarks force it

    # Megatron's mixed precision: gradients are summed and reduced in 32 bits, parameters gathered in 16. Its optimizer
    # keeps a master copy and two moments of 32 bits each, split over data parallel ranks ("distributed optimizer").
    gradient_bytes: float = 4.0
    parameter_bytes: float = 2.0
    optimizer_bytes: float = 30.0  # of each parameter of the shard: gradient 4, master and moments 3 x 8, 16-bit copy 2
    bucket_parameters: float = 40e6  # a bucket is sent once it is complete (Megatron: the larger of this and 1e6 * dp)
    overlap_gradients: bool = True  # --overlap-grad-reduce: with the last micro-batch's backward
    overlap_parameters: bool = True  # --overlap-param-gather: with the first micro-batch's forward
    # Of tensor parallelism's collectives in a backward pass. Megatron reduces beside the product for weights'
    # gradients, half of them, where CUDA_DEVICE_MAX_CONNECTIONS=1 keeps their order; a forward pass has nothing to
    # hide them behind. (--tp-comm-overlap, which cuts products into pieces, is not modelled.)
    tp_hidden_share: float = 0.0
    ep_hidden_share: float = 0.0  # of the experts' all-to-all (--overlap-moe-expert-parallel-comm)
    within_layers: bool = (
        False  # circuits follow attention and experts of each layer, where every window is long enough
    )

    def __post_init__(self) -> None:
        found = [
            f"{name} must be within 0..1, got {getattr(self, name)}"
            for name in ("tp_hidden_share", "ep_hidden_share")
            if not 0 <= getattr(self, name) <= 1
        ]
        found += [
            f"{name} must be > 0, got {getattr(self, name)}"
            for name in (
                "gemm_efficiency",
                "attention_forward_efficiency",
                "attention_backward_efficiency",
                "hbm_efficiency",
                "bucket_parameters",
            )
            if not getattr(self, name) > 0
        ]
        if self.expert_imbalance < 1:
            found.append(f"expert_imbalance must be >= 1, got {self.expert_imbalance}")
        if found:
            raise ValueError("; ".join(found))


MEGATRON = TrainConstants()
