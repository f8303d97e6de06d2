"""Compute the time of a micro-batch on one rank (kernels, a layer, the head), the time of the optimizer, and the GPU
memory of a job. The functions have no side effects.

Tensor parallelism includes sequence parallelism: norms and residuals process 1/tp of the tokens.

The computed memory is a lower bound on Megatron's memory, so that a job reported as too large is indeed too large.
Logits and the buffers of collectives and of the allocator are not counted. All sequences are assumed to have the mean
length, and cheap operations to be recomputed.
"""

import math
from dataclasses import dataclass, replace

from orchestrrl.lab.sim.train.model import SMS, SMS_OF_OTHERS, TrainConstants, TrainJob
from planner.cost.hardware import GpuModel
from planner.cost.models import Model


def attended_pairs(model: Model, tokens: float, square_tokens: float | None = None) -> float:
    """Return the number of query-key pairs that a causal mask keeps in one sequence, over all layers. `square_tokens`
    is the mean of the squared lengths, if lengths differ. In a layer with a sliding window, all sequences are treated
    as longer than the window if their mean length exceeds it. Otherwise, all sequences are treated as shorter than the
    window."""
    full = (tokens * tokens if square_tokens is None else square_tokens) / 2
    if not 0 < model.window_tokens < tokens:
        return model.layers * full
    window = model.window_tokens
    return model.layers / 2 * (full + tokens * window - window * window / 2)  # every second layer slides


def forward_flops(model: Model, tokens: float, square_tokens: float | None = None) -> float:
    """Return the FLOPs of a sequence's forward pass: the multiplications and additions of matrix products, and of
    attention under the causal mask. `square_tokens` is as in `attended_pairs`."""
    attention = 4.0 * model.q_heads * model.head_dim * attended_pairs(model, tokens, square_tokens)
    return 2.0 * model.active_params * tokens + attention


def step_flops(model: Model, sequences: int, tokens: float, square_tokens: float | None = None) -> float:
    """Return the FLOPs of an optimiser step on `sequences` sequences. A backward pass needs twice the FLOPs of a
    forward pass."""
    return 3.0 * sequences * forward_flops(model, tokens, square_tokens)


# Tiles of the product that a thread block computes, rows by columns. Libraries choose among many. Smaller tiles than
# these read their operands too often, in spite of their better fit.
TILES = ((128, 256), (256, 128), (128, 128), (64, 128), (128, 64))


@dataclass(frozen=True, slots=True)
class Kernels:
    """A model of the kernel times of one GPU type."""

    gpu: GpuModel
    constants: TrainConstants

    @property
    def hbm_bytes_per_s(self) -> float:
        return self.gpu.hbm_bytes_per_s * self.constants.hbm_efficiency

    def gemm_s(self, m: float, n: float, k: float, *, groups: int = 1, accumulates: bool = False) -> float:
        """Return the duration in seconds of a kernel that computes `groups` products of an m x k matrix and a k x n
        matrix. If `accumulates` is true, the result is added to 32-bit gradients."""
        if min(m, n, k) <= 0:
            return 0.0
        flops = 2.0 * m * n * k * groups
        compute_s = flops * self._waves_over_work(m, n, groups) / (self.gpu.bf16_flops * self.constants.gemm_efficiency)
        moved = 2.0 * (m * k + k * n) + (8.0 if accumulates else 2.0) * m * n
        return max(compute_s, groups * moved / self.hbm_bytes_per_s) + self.constants.kernel_s

    def _waves_over_work(self, m: float, n: float, groups: int) -> float:
        """Return the factor by which partly filled tiles and waves lengthen matrix products, for the best tile size.
        The factor is 1 if all tiles and waves are full."""
        sms = SMS.get(self.gpu.name, SMS_OF_OTHERS)
        return min(
            math.ceil(groups * math.ceil(m / rows) * math.ceil(n / columns) / sms) * sms * rows * columns
            for rows, columns in TILES
        ) / (m * n * groups)

    def attention_s(self, flops: float, tokens: float, *, backward: bool = False) -> float:
        """Return the time, in seconds, of fused causal attention over sequences of `tokens` tokens. `flops` counts
        unmasked pairs only. If lengths differ, `tokens` must be the mean of the squared lengths divided by the mean
        length. With this value, the result is the exact sum of the times of all sequences under the efficiency curve.
        """
        constants = self.constants
        best = constants.attention_backward_efficiency if backward else constants.attention_forward_efficiency
        share = best * tokens / (tokens + constants.attention_half_tokens)
        return flops / (self.gpu.bf16_flops * share) + constants.kernel_s

    def moves_s(self, moved_bytes: float) -> float:
        """Return the time, in seconds, to transfer `moved_bytes`, the total of bytes read from and written to GPU
        memory."""
        return moved_bytes / self.hbm_bytes_per_s


ACTIVATION_BYTES = 2.0
ATTENTION_BACKWARD = 2.5  # times the forward's operations: scores are recomputed (FlashAttention-2, arXiv 2307.08691)
LOSS_FORWARD_BYTES = 30.0  # per logit: conversion to 32 bits, maximum, difference, exponential, sum
LOSS_BACKWARD_BYTES = 14.0


@dataclass(frozen=True, slots=True)
class PassCompute:
    """The compute times, in seconds, of a forward or backward pass: the times of a layer's parts, in the order of the
    forward pass, and the time of the head. A backward pass runs the parts in reverse order."""

    before_s: float  # norm, projections of queries, keys and values
    attention_s: float
    between_s: float  # output projection, norm, dense feed-forward part, routing
    experts_s: float
    after_s: float  # restoring the token order of experts' outputs, residual
    head_s: float  # on the last stage, including the loss

    @property
    def layer_s(self) -> float:
        return self.before_s + self.attention_s + self.between_s + self.experts_s + self.after_s


def compute_of(job: TrainJob) -> tuple[PassCompute, PassCompute]:
    """Return the compute times of the forward pass and of the backward pass of one micro-batch."""
    kernels = Kernels(job.gpu, job.constants)
    return _pass(job, kernels, backward=False), _pass(job, kernels, backward=True)


def _product_s(kernels: Kernels, m: float, n: float, k: float, *, backward: bool, groups: int = 1) -> float:
    if not backward:
        return kernels.gemm_s(m, n, k, groups=groups)
    return kernels.gemm_s(m, k, n, groups=groups) + kernels.gemm_s(k, n, m, groups=groups, accumulates=True)


def _pass(job: TrainJob, kernels: Kernels, *, backward: bool) -> PassCompute:
    model, tp, tokens = job.model, job.layout.tp, job.micro_tokens
    twice = 2.0 if backward else 1.0
    heads, kv_heads = model.q_heads / tp, max(1.0, model.kv_heads / tp)
    split = tokens / tp * model.hidden * ACTIVATION_BYTES * twice  # bytes of activations split by sequence parallelism
    rope = 2 * tokens * (heads + kv_heads) * model.head_dim * ACTIVATION_BYTES * twice

    def product_s(n: float, k: float) -> float:
        return _product_s(kernels, tokens, n, k, backward=backward)

    before_s = product_s((heads + 2 * kv_heads) * model.head_dim, model.hidden) + kernels.moves_s(2 * split + rope)
    flops = 4.0 * heads * model.head_dim * attended_pairs(model, job.tokens, job.square_tokens) / model.layers
    flops *= job.micro_sequences / job.layout.cp * (ATTENTION_BACKWARD if backward else 1.0)
    between_s = product_s(model.hidden, heads * model.head_dim) + kernels.moves_s(5 * split)  # residual, norm
    if model.ffn:
        between_s += product_s(2 * model.ffn / tp, model.hidden) + product_s(model.hidden, model.ffn / tp)
        between_s += kernels.moves_s(3 * tokens * model.ffn / tp * ACTIVATION_BYTES * twice)
    experts_s, sorted_s = _experts(job, kernels, backward=backward)
    return PassCompute(
        before_s=before_s,
        attention_s=kernels.attention_s(flops, job.square_tokens / job.tokens, backward=backward),
        between_s=between_s + sorted_s,
        experts_s=experts_s,
        after_s=sorted_s + kernels.moves_s(3 * split),
        head_s=_head_s(job, kernels, backward=backward),
    )


def _experts(job: TrainJob, kernels: Kernels, *, backward: bool) -> tuple[float, float]:
    """Return two times in seconds: the time of the experts, and the time to reorder the tokens once, including half of
    the router's time."""
    model, layout = job.model, job.layout
    if not model.moe:
        return 0.0, 0.0
    twice, held = (2.0 if backward else 1.0), model.experts // layout.ep
    own = job.micro_tokens / layout.tp
    copies = own * model.experts_per_token
    received = copies * kernels.constants.expert_imbalance
    router_s = _product_s(kernels, own, model.experts, model.hidden, backward=backward)
    m = received / held
    seconds = _product_s(kernels, m, 2 * model.expert_ffn, model.hidden, backward=backward, groups=held)
    seconds += _product_s(kernels, m, model.hidden, model.expert_ffn, backward=backward, groups=held)
    moved = 3 * received * model.expert_ffn + 4 * received * model.hidden  # activation; reordering by expert and back
    order_s = kernels.moves_s(2 * copies * model.hidden * ACTIVATION_BYTES * twice)
    return seconds + kernels.moves_s(moved * ACTIVATION_BYTES * twice), order_s + router_s / 2


def _head_s(job: TrainJob, kernels: Kernels, *, backward: bool) -> float:
    model, vocab = job.model, job.model.vocab / job.layout.tp
    bytes_each = LOSS_BACKWARD_BYTES if backward else LOSS_FORWARD_BYTES
    product_s = _product_s(kernels, job.micro_tokens, vocab, model.hidden, backward=backward)
    return product_s + kernels.moves_s(bytes_each * job.micro_tokens * vocab)


def rank_parameters(job: TrainJob) -> list[tuple[float, float]]:
    """Return the numbers of dense parameters and of experts' parameters of each pipeline rank, before data-parallel
    sharding."""
    model, layout = job.model, job.layout
    by_rank = [sum(job.stage_layers[rank :: layout.pp]) for rank in range(layout.pp)]
    ends = [0.0] * layout.pp
    ends[0] += model.head_params / layout.tp  # the embedding is as large as the head
    ends[-1] += 0.0 if model.tied_embeddings and layout.pp == 1 else model.head_params / layout.tp
    router = model.hidden * model.experts
    dense = (model.attention_params + model.dense_ffn_params) / layout.tp + router
    experts = model.experts * model.expert_params / layout.ep
    return [(layers * dense + end, layers * experts) for layers, end in zip(by_rank, ends, strict=True)]


def stage_parameters(job: TrainJob) -> tuple[float, float]:
    """Return the largest number of dense parameters, and of experts' parameters, on any pipeline rank."""
    dense, experts = zip(*rank_parameters(job), strict=True)
    return max(dense), max(experts)


def optimizer_s(job: TrainJob) -> float:
    """Return the time, in seconds, of the distributed optimizer's step, in which each rank updates its shard and clears
    its gradients."""
    dense, experts = stage_parameters(job)
    layout, constants, kernels = job.layout, job.constants, Kernels(job.gpu, job.constants)
    shard = dense / (layout.dp * layout.cp) + experts * layout.ep / (layout.tp * layout.cp * layout.dp)
    moved = shard * (constants.optimizer_bytes + constants.gradient_bytes)  # read once more for the norm
    return kernels.moves_s(moved + (dense + experts) * constants.gradient_bytes)


# Bytes per parameter with the distributed optimizer (Megatron Core's user guide, "Distributed Optimizer", with bf16
# parameters and fp32 gradients): 6 on every rank; master copy and two moments are sharded over data parallel ranks.
HELD_BYTES = 6.0
DIVIDED_BYTES = 12.0
# A layout is rejected only if it needs more than this multiple of a GPU's memory: gradients of 16 bits, partial
# offload of optimizer state to the CPU, or recomputed products may save some of it.
MARGIN = 1.25
GB = 1e9


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory that training needs on one GPU."""

    state_bytes: float  # weights, gradients and optimizer state
    activation_bytes: float

    @property
    def bytes(self) -> float:
        return self.state_bytes + self.activation_bytes


def memory_of(job: TrainJob) -> Memory:
    """Return the memory of the pipeline rank that needs the most memory."""
    found = (
        Memory(_state_bytes(job, dense, experts), _activation_bytes(job, rank))
        for rank, (dense, experts) in enumerate(rank_parameters(job))
    )
    return max(found, key=lambda each: each.bytes)


def fault_of(job: TrainJob) -> str | None:
    """Return an error message if the job needs more than MARGIN times the memory of a GPU. Return None if the job may
    fit."""
    need, has_bytes = memory_of(job), job.gpu.hbm_bytes
    if need.bytes <= MARGIN * has_bytes:
        return None
    ways = ["tp", "pp"] + ["ep"] * job.model.moe + ["cp"] * (need.activation_bytes > need.state_bytes)
    change = f"raise {' or '.join(ways)}"
    if not job.recompute and memory_of(replace(job, recompute=True)).bytes < need.bytes - 0.1 * has_bytes:
        change += ", or recompute"
    return (
        f"needs at least {need.bytes / GB:.0f} GB per GPU ({need.state_bytes / GB:.0f} for weights, gradients and"
        f" optimizer, {need.activation_bytes / GB:.0f} for activations), but {job.gpu.name} has {has_bytes / GB:.0f}:"
        f" {change}"
    )


def _state_bytes(job: TrainJob, dense: float, experts: float) -> float:
    layout = job.layout
    ranks = layout.cp * layout.dp
    of_experts = layout.tp * ranks / layout.ep
    return dense * (HELD_BYTES + DIVIDED_BYTES / ranks) + experts * (HELD_BYTES + DIVIDED_BYTES / of_experts)


def _activation_bytes(job: TrainJob, rank: int) -> float:
    """Return the number of bytes of activations of all in-flight micro-batches on a pipeline rank (Korthikanti et al.,
    arXiv 2205.05198, sections 4.2 and 4.4). The number of in-flight micro-batches is the number of pipeline ranks from
    `rank` to the last, and is larger if stages are interleaved."""
    layout = job.layout
    own = sum(job.stage_layers[rank :: layout.pp])
    under_way = float(layout.pp - rank)
    if layout.vpp > 1:  # on the first rank, 1 + (pp - 1) / (pp * vpp) times as many
        under_way = layout.pp + (layout.pp - 1 - 2 * rank) / layout.vpp
    layers = own * min(under_way, float(job.micro_batches))
    if not job.recompute:
        return layers * layer_bytes(job)
    return layers * job.micro_tokens / layout.tp * job.model.hidden * ACTIVATION_BYTES + layer_bytes(job)


def layer_bytes(job: TrainJob) -> float:
    """Return the number of bytes that a layer keeps per micro-batch for its backward pass, counted as by Korthikanti et
    al. and divided by tensor parallelism with sequence parallelism. The layer keeps the inputs of both norms, queries,
    keys, values, the output of attention, gate and up projections, and the inputs of experts. It does not keep
    attention scores (FlashAttention). There is no dropout. Outputs of norms and of the activation are recomputed
    (Megatron Core, --recompute-modules layernorm moe_act)."""
    model = job.model
    attention = 2 * model.hidden + 2 * (model.q_heads + model.kv_heads) * model.head_dim
    experts = model.experts_per_token * (model.hidden + 2 * model.expert_ffn)
    return job.micro_tokens / job.layout.tp * ACTIVATION_BYTES * (attention + 2 * model.ffn + experts)
